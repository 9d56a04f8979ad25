"""Activation data sets: what layers give for every sample of a loader, on disk or accumulated.

collecting    `collect`: to a folder, or into an accumulator.
rows          A model run batch by batch, and what layers give, as rows.
batches       A batch of a loader: the model's inputs, and the rows that count, with their ids.
files         The rows of one process on disk.
activations   `Activations`: reading them.
stream        `activation_stream`: rows in shuffled batches, from memory.
accumulators  `Mean`, `Covariance`, `TopK`: statistics in place of rows.
"""

from hookkit.collecting.accumulators import Covariance, Mean, TopK
from hookkit.collecting.activations import Activations
from hookkit.collecting.collecting import collect
from hookkit.collecting.stream import activation_stream

__all__ = ["Activations", "Covariance", "Mean", "TopK", "activation_stream", "collect"]
