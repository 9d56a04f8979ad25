"""The zoo: odd models with hand-derived truth, which every feature must pass.

    from zoo import ZOO, entry

`ZOO` lists all `Entry`s; `entry("lstm")` finds one; `select_zoo(without={"raises"})` filters by
tag. The entries live by theme: `zoo_nets` (ordinary architectures), `zoo_flow` (inputs, outputs
and control flow), `zoo_params` (what parameters can be), `zoo_odd` (wrappers, state, attributes).
"""

import zoo_flow
import zoo_nets
import zoo_odd
import zoo_params
from zoo_base import ENTRIES, Entry

__all__ = ["ZOO", "Entry", "entry", "select_zoo"]
_FILES = (zoo_nets, zoo_flow, zoo_params, zoo_odd)

ZOO: list[Entry] = ENTRIES


def entry(name: str) -> Entry:
    """The entry of that name."""
    return next(e for e in ZOO if e.name == name)


def select_zoo(having: set[str] = frozenset(), without: set[str] = frozenset()) -> list[Entry]:
    """Entries that have all the tags `having` and none of `without`."""
    return [e for e in ZOO if having <= e.tags and not (without & e.tags)]
