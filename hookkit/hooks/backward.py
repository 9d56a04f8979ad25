# Until the other rooms use attach: see `fronts`.
"""Names that are in `fronts`."""

from hookkit.hooks.fronts import BothGrads

__all__ = ["BothGrads"]
