"""The zoo: odd models with hand-derived truth, which every feature must pass.

    from zoo import ZOO, entry

`ZOO` lists all `Entry`s; `entry("mlp")` finds one. The entries live by theme in `zoo_*.py`;
`zoo_base` says what an entry holds.
"""

import zoo_control
import zoo_conv
import zoo_dtypes
import zoo_odd
import zoo_params
import zoo_reuse
import zoo_sequence
import zoo_structures
import zoo_wrapped
from zoo_base import ENTRIES, Entry

__all__ = ["ZOO", "Entry", "entry"]
_FILES = (
    zoo_conv,
    zoo_sequence,
    zoo_reuse,
    zoo_structures,
    zoo_control,
    zoo_params,
    zoo_dtypes,
    zoo_wrapped,
    zoo_odd,
)

ZOO: list[Entry] = ENTRIES


def entry(name: str) -> Entry:
    """The entry of that name."""
    return next(e for e in ZOO if e.name == name)
