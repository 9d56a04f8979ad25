"""Activation data sets: what layers give for every sample of a loader, on disk or accumulated.

collecting    `collect`: runs a model over a loader.
batches       A batch of a loader: the model's inputs, ids and mask; what layers give, as rows.
parts         `Progress`: what one process has written, and how far it has come; files of rows.
shards        Rows on disk, of one process.
activations   `Activations`: reading them.
accumulators  `Mean`, `Covariance`, `TopK`: statistics in place of data.
"""

from hookkit.collecting.accumulators import Covariance, Mean, TopK
from hookkit.collecting.activations import Activations
from hookkit.collecting.collecting import collect

__all__ = ["Activations", "Covariance", "Mean", "TopK", "collect"]
