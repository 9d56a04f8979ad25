"""The numbers that sum up a tensor: exact, in one read, merged without loss.

rows         A row of nine numbers: by numpy on a CPU, by tensor operations elsewhere; merging.
triton_rows  The same on CUDA in one launch.
bins         Histograms of a bounded sample.
units        Dead units, judged over a window of records; which dimension counts units.
step_table   `StepTable`: numbers by step in bounded memory; halved when it is full.
tally        `Tally`: takes tensors from hooks, closes records at steps.
device       A step's numbers on their way from a device.
graph_op     The operation by which a compiled graph shows a tensor to a recorder.
reading      From a tally to a `Record`, of this process or of all ranks.
"""
