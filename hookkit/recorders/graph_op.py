"""`hookkit::observe`: the operation with which a compiled graph passes a tensor to a recorder.

When the graph runs, the operation calls the recorder's `update` with the tensor that an eager hook
would have got. Graphs outlive recorders, so a graph has the recorder's number, and `_receivers` has
a weak reference to the recorder.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from hookkit.hooks.calls import call_kind

_ids = itertools.count()
_receivers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def show_traced(receiver: Any, row: int, number: int, path: str, t: Tensor) -> None:
    """Add the operation to the graph being traced; do nothing while a model is exported."""
    if call_kind() != "exported":
        torch.ops.hookkit.observe(t.detach(), receiver.token, receiver.id, row, number, path)


def enlist(receiver: Any) -> tuple[int, Tensor]:
    """Register `receiver`, weakly referenced, for compiled graphs.

    Returns:
        Its number, with which graphs find it; and its token, which each operation writes.
    """
    number = next(_ids)
    _receivers[number] = receiver
    return number, torch.zeros(1, dtype=torch.float32, device="cpu")


# `token` is written, so no compiler pass drops the call or moves it past another one.
_library: Any = torch.library.Library("hookkit", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "observe(Tensor t, Tensor(a!) token, int receiver, int row, int number, str path) -> ()"
)


def _observe(t: Tensor, token: Tensor, receiver: int, row: int, number: int, path: str) -> None:
    known = _receivers.get(receiver)
    if known is not None and call_kind(known.thread) != "other thread":
        known.update(row, number, path, t)


_library.impl("observe", _observe, "CompositeExplicitAutograd")
torch.library.register_fake("hookkit::observe", lambda *args: None, lib=_library)
