# Until the other rooms use attach: see `fronts`.
"""Names that are in `fronts`."""

from hookkit.hooks.fronts import GradHooks, keeps_output

__all__ = ["GradHooks", "keeps_output"]
