"""Activation data sets: what layers give for every sample of a loader, on disk or accumulated.

collecting    `collect`: runs a model over a loader.
batches       A batch of a loader: the model's inputs, and the rows that count, with their ids.
settings      What rows depend on, to be compared when a run goes on.
files         The rows of one process on disk.
activations   `Activations`: reading them.
accumulators  `Mean`, `Covariance`, `TopK`: statistics in place of rows.
"""

from hookkit.collecting.accumulators import Covariance, Mean, TopK
from hookkit.collecting.activations import Activations
from hookkit.collecting.collecting import collect

__all__ = ["Activations", "Covariance", "Mean", "TopK", "collect"]
