"""Other modules in the place of a model's own, for the time of a `with`.

wrapping  Modules that stand in the place of another and pass for it: put in by `swap`.
"""

from hookkit.swapping.swapped import (
    Catcher,
    GramWrapper,
    Wrapper,
    swap,
)

__all__ = [
    "Catcher",
    "GramWrapper",
    "Wrapper",
    "swap",
]
