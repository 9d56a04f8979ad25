"""Which modules of a model: names, globs, classes and other selectors, for every function.

selecting    `select`, `leaf_modules`, and what they return.
resolving    From a selector to modules.
patterns     Globs over module names, paths into outputs, all names of one model.
suggestions  Messages if nothing matches: what is near.
"""

from hookkit.modules import unwrap
from hookkit.selecting.resolving import Selector
from hookkit.selecting.selecting import Selection, leaf_modules, select

__all__ = ["Selection", "Selector", "leaf_modules", "select", "unwrap"]
