"""Which modules of a model: one way to ask, for every function that hooks, edits or swaps.

globbing   Globs over module names, matched part by part along the model's tree.
resolving  From what the user asks for to modules: the selectors behind `select`, and what they
           answer if
"""

from hookkit.selecting.selecting import (
    Selection,
    Selector,
    leaf_modules,
    select,
    unwrap,
)

__all__ = [
    "Selection",
    "Selector",
    "leaf_modules",
    "select",
    "unwrap",
]
