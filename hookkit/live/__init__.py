"""A run while it trains: redrawn every few seconds, with its findings as they become clear.

show_health  `ShowHealth`: when to look, and which findings are clear.
screens      Where it is shown: in a notebook, in a terminal, or as lines in a file.
glance       A run in a few lines of text.
"""

from hookkit.live.show_health import ShowHealth

__all__ = ["ShowHealth"]
