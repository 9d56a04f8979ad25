"""Which modules of a model: names, globs, classes and other selectors, for every function.

selecting  `select`, `leaf_modules`, and what they return.
resolving  From a selector to modules, and the message if there are none.
patterns   Globs over module names, paths into outputs.
"""

from hookkit.modules import unwrap
from hookkit.selecting.resolving import Selector
from hookkit.selecting.selecting import Selection, leaf_modules, select

__all__ = ["Selection", "Selector", "leaf_modules", "select", "unwrap"]
