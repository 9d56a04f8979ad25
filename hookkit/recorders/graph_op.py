"""`hookkit::observe`: the one operation by which a compiled graph shows a tensor to a recorder.

Its implementation calls the recorder's `update` as the graph runs, with the tensor that an eager
hook would have got. Graphs outlive recorders, so they know them by a number and hold them weakly.
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


def show_traced(receiver: Any, row: int, leaf: int, path: str, t: Tensor) -> None:
    """Add the operation to the graph that is traced; nothing while a model is exported."""
    if call_kind() != "exported":
        torch.ops.hookkit.observe(t.detach(), receiver.token, receiver.id, row, leaf, path)


def enlist(receiver: Any) -> tuple[int, Tensor]:
    """Return what a compiled graph knows `receiver` by, which is held weakly.

    Returns:
        A number, under which graphs find it; and a tensor that they write as they show it another.
    """
    number = next(_ids)
    _receivers[number] = receiver
    return number, torch.zeros(1, dtype=torch.float32, device="cpu")


# `token` is written, so no compiler pass drops the call or moves it past another one.
_library: Any = torch.library.Library("hookkit", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "observe(Tensor t, Tensor(a!) token, int receiver, int row, int leaf, str path) -> ()"
)


def _observe(t: Tensor, token: Tensor, receiver: int, row: int, leaf: int, path: str) -> None:
    known = _receivers.get(receiver)
    if known is not None and call_kind(known.thread) != "other thread":
        known.update(row, leaf, path, t)


_library.impl("observe", _observe, "CompositeExplicitAutograd")
torch.library.register_fake("hookkit::observe", lambda *args: None, lib=_library)
