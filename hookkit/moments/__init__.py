"""The numbers that sum up a tensor: exact, in one read, merged without loss.

More than eight files, since each kind of machine code stays in a file of its own, which imports it.

moments         Rows of moments: their fields, how they merge, and the way to one on any device.
cpu             Rows of moments of CPU tensors by numpy, and norms.
numba_kernels   The same by compiled loops, with the `fast` extra.
numba_loader    Loads those, once in a process, when a watch or a fit begins.
triton_kernels  The same on CUDA.
histograms      Signed logarithmic bins, which need no range in advance, and bounded samples.
unit_layouts    Units (channels) of one tensor, and how their values are read.
units           Dead, dormant and saturated units, judged over a window of records.
variation       How much of what layers give differs from sample to sample, now and then.
buffers         Preallocated tables of the current batch, on one device.
history         The past in bounded memory: its resolution halves when it is full.
accumulator     `StatsAccumulator`: takes tensors from hooks, closes records at steps.
graph_op        The operation by which a compiled graph shows a tensor to a recorder.
reading         From its tables to a `Record`, of this process or of all ranks.
"""

from hookkit.moments.histograms import edge_bins, log_bins

__all__ = ["edge_bins", "log_bins"]
