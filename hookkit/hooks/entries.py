# Until the other rooms use attach: see `fronts`.
"""Names that are in `attach`, `parts`, `hook` and `fronts`."""

from hookkit.hooks.attach import (
    Handle,
    HookEntry,
    Switch,
    attach,
    brief,
    called,
    check_hookable,
    graph_task,
    is_compiling,
    note,
    recomputing,
)
from hookkit.hooks.calls import is_exporting
from hookkit.hooks.fronts import Placed, counts_for, in_jit_trace, in_thread, is_tracing
from hookkit.hooks.parts import check_same, part_at, positional

__all__ = [
    "Handle",
    "HookEntry",
    "Placed",
    "Switch",
    "attach",
    "brief",
    "called",
    "check_hookable",
    "check_same",
    "counts_for",
    "graph_task",
    "in_jit_trace",
    "in_thread",
    "is_compiling",
    "is_exporting",
    "is_tracing",
    "note",
    "part_at",
    "positional",
    "recomputing",
]
