"""Two models side by side: what their layers give for the same inputs.

comparison  `Comparison` and its rows, as values: text, HTML, a frame, a picture.
isolated    The second model run on the first one's values: each module's own error.
measures    How far two tensors are apart, in float64, by chunks.
names       Names of one model in another.
pairs       Values of the second model, beside the first one's.
running     `compare_models`.
saved       A capture in a safetensors file.
sides       One model of a comparison, and a run of it.
"""

from hookkit.comparing.comparison import Comparison
from hookkit.comparing.running import compare_models

__all__ = ["Comparison", "compare_models"]
