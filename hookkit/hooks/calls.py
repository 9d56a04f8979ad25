"""Tell which calls of a module count: `call_kind` names the kind, each caller states what it wants.

"first"         a forward that the user's code runs (also under torch.jit.trace)
"recomputed"    a forward inside a backward pass: activation checkpointing runs it a second time
"compiled"      torch.compile traces the forward into a graph, which later runs without Python
"exported"      torch.export traces the forward; hooks leave nothing in the exported program
"other thread"  a "first" call of another thread than the given one

A `Hook` that stores takes "first" and "compiled" calls, of every thread. An edit also takes
"recomputed" calls, because a checkpoint has to repeat the edits of its forward, and "exported"
ones. Hooks for gradients also take "recomputed" calls: under a checkpoint the gradients come from
that forward. Recorders take the calls of the thread that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Literal

import torch

CallKind = Literal["first", "recomputed", "compiled", "exported", "other thread"]

is_compiling = torch.compiler.is_dynamo_compiling  # a third of the cost of is_compiling
# Private: `torch._C._current_graph_task_id`, the number of the backward pass that this thread is
# running, -1 outside of any (since 2.0). Without it a checkpoint that runs a forward again would be
# counted as a second call.
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)

# Not a kind of `call_kind`: torch.jit.trace really runs the model, so its calls are stored. But it
# hooks no gradients and trains nothing, so those who care ask this too.
is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


def call_kind(thread: int | None = None) -> CallKind:
    """Return the kind of the call that this thread is making, as listed at the top of this file.

    A call in a backward pass is "recomputed" in every thread, because autograd has its own threads.

    Args:
        thread: the number of the thread whose calls are "first"; None means every thread.

    >>> call_kind(), call_kind(thread=-1)
    ('first', 'other thread')
    """
    # Private: `torch.compiler._is_exporting_flag`, True while torch.export traces. The public
    # `is_exporting()` is folded to True in any trace by torch 2.11, so edits would be left out of
    # compiled graphs. Without it, the public one is used.
    exporting = getattr(torch.compiler, "_is_exporting_flag", None)
    if exporting is None:
        exporting = torch.compiler.is_exporting()
    if is_compiling():
        return "exported" if exporting else "compiled"
    if graph_task() != -1:
        return "recomputed"
    if exporting:
        return "exported"
    return "first" if thread is None or thread == get_ident() else "other thread"


def recomputing() -> bool:
    """Return True while activation checkpointing runs a forward again, for its backward pass.

    Also true in any forward that a backward hook runs. False while compiling, where a checkpoint is
    traced once.

    >>> recomputing()
    False
    """
    return call_kind() == "recomputed"
