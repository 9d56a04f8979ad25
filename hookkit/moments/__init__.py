"""The numbers that sum up a tensor: exact, in one read, merged without loss.

moments     Rows of moments: their fields, how they merge, and the way to one on any device.
cpu         Moments of a CPU tensor in one read: in chunks that stay in the cache.
numba_kernels  Loops over a CPU tensor's values as machine code: numba's, with the `fast` extra.
numba_loader  Loads that machine code, once in a process, when a watch or a fit begins.
histograms  Histograms that need no range in advance: signed logarithmic bins, from a bounded
            sample.
history     Memory that never grows past a bound: a ring of records that halves its resolution
            when full.
units       Dead, dormant and saturated units (channels): judged over a window of steps, not one
            batch.
unitarrays  Units judged on a CPU, by numpy: there a record's hundred operations on small tables
            cost most.
unitplans   How the units of a CPU tensor are read by numpy: found once for each layer and shape.
banks       The tables of one device: what hooks handed in since the last step, and the ring of
            the past.
waiting     The tables of the CPU, where what is small waits until there is much of it.
accumulator  The tally: what hooks hand in, kept on the data's device until somebody reads.
triton_kernels  Moments on CUDA in one read: a Triton kernel, where Triton is (PyTorch for CUDA
            brings it).
"""

from hookkit.moments.moments import (
    empty_rows,
    flat,
    merge,
    merge_row,
    moments,
    plain,
    statistics,
    working_dtype,
)

__all__ = [
    "empty_rows",
    "flat",
    "merge",
    "merge_row",
    "moments",
    "plain",
    "statistics",
    "working_dtype",
]
