"""Activation data sets: what layers give for every sample of a loader, on disk or accumulated."""

from hookkit.collecting.accumulators import Covariance, Mean, TopK
from hookkit.collecting.activations import Activations
from hookkit.collecting.collecting import activation_stream, collect

__all__ = ["Activations", "Covariance", "Mean", "TopK", "activation_stream", "collect"]
