"""Two models side by side: what their layers give for the same inputs.

comparing   `compare_models`: runs two models, or reads what was saved of one.
comparison  `Comparison` and its rows: text and a frame.
isolating   A module of the second model called alone, on what the first one's received.
measures    The tensors in a result, and how far two are apart.
"""

from hookkit.comparing.comparing import compare_models
from hookkit.comparing.comparison import Comparison

__all__ = ["Comparison", "compare_models"]
