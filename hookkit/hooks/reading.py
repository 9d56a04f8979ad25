"""Reading what hooks have stored: each value as it is here, or joined over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastcore.foundation import L
from torch import Tensor

from hookkit import ranks
from hookkit.errors import OptionError, OverwrittenWarning
from hookkit.hooks.block import warn_if_compiled
from hookkit.hooks.calls import Grads
from hookkit.hooks.references import warning_of
from hookkit.hooks.snapshot import Kind, StoredValue
from hookkit.nested import tmap

if TYPE_CHECKING:
    from hookkit.hooks.capture import Capture

Stored = tuple["Capture", StoredValue | None, str]  # the last is which call, in words


class Values(L, list[Any]):  # type: ignore[misc]
    """An `L` that is a list: PyTorch takes no other sequence of tensors (`torch.stack`).

    The values are the list's own; `items`, which all methods of `L` read, is a copy.
    """

    def __init__(self, items: Any = (), **_: Any) -> None:
        list.__init__(self, items)

    def __getitem__(self, at: Any) -> Any:
        found = L.__getitem__(self, at)
        return Values(found) if type(found) is L else found  # a slice, in fastcore up to 2.1

    @property
    def items(self) -> list[Any]:
        """The values as a plain list."""
        return list.copy(self)

    __len__, __iter__ = list.__len__, list.__iter__
    __setitem__, __delitem__ = list.__setitem__, list.__delitem__


_WHAT: dict[Kind, str] = {
    "forward": "the output",
    "pre": "the inputs",
    "grad": "the gradient",
    "pre_grad": "the gradient of the inputs",
    "backward": "what the backward hook gave",
    "both": "what the backward hook gave",
    "recorder": "what is recorded",
}


def stored(captures: Sequence[Capture]) -> list[Any]:
    """What each stored at its last call. First the fast path: tensors that can be given as is."""
    o = captures[0].options if captures else None
    if o is None or o.gather or not o.plain:
        return read([_last(c) for c in captures], o is not None and o.gather)
    if o.live:
        for c in captures:
            c.settle()
    bare = [c.last for c in captures if type(c.last) is Tensor and not c.traced]
    if len(bare) < len(captures) or (
        o.live and any([c.last._version != c.version for c in captures])  # noqa: C419
    ):
        return read([_last(c) for c in captures], False)
    return bare


def gradient(c: Capture) -> Any:
    """The gradient of what `c` stored at its last call, in the same structure; None for none."""
    if not c.options.retain_grad:
        raise OptionError(
            f"{c.options.who}: .grad of {c.label()} is not kept. Make the hook with "
            "retain_grad=True, or with grad=True, which stores gradients alone, in `stored`."
        )
    grads = c.grads
    if grads is None or (isinstance(grads.last, Grads) and grads.last.index < grads.count):
        return None  # the gradient is an earlier call's, and `stored` the last one's
    found = stored([grads])[0]
    if found is None:
        return None
    each = iter(found)
    return tmap(lambda t: next(each), stored([c])[0])


def _last(c: Capture) -> Stored:
    """The last call's value, for `read`."""
    if c.last is None:
        warn_if_compiled(c)
    elif not isinstance(c.last, StoredValue):
        live = c.options.live and type(c.last) is Tensor and c.version >= 0
        c.last = StoredValue(c.last, [(c.last, c.version)] if live else None)
    return c, c.last, ""


def read(stored: Sequence[Stored], gather: bool) -> list[Any]:
    """The values of `stored`; with `gather`, over all ranks, which have to read the same."""
    values = list(map(_own, stored))
    todo = [i for i, (_, kept, _) in enumerate(stored) if kept is None or not kept.whole]
    if gather and todo:
        names = [_over_ranks(stored[i][0]) + stored[i][2] for i in todo]
        for i, value in zip(todo, ranks.gather([values[i] for i in todo], names), strict=True):
            values[i], kept = value, stored[i][1]
            if kept is not None:
                kept.value, kept.whole = value, True
    return values


def _own(stored: Stored) -> Any:
    """What this rank stored."""
    c, kept, _ = stored
    if kept is None:
        return None
    if kept.references and "reference" not in c.switch.warned:
        text = warning_of(c.label(), c.options, kept.references)
        if text:
            c.switch.warned += ("reference",)
            warnings.warn(text, OverwrittenWarning, stacklevel=4)
    return kept.read(c.options.who, c.label)


def _over_ranks(c: Capture) -> str:
    """What the hook stores, in words that are the same on all ranks."""
    name = type(c.module()).__name__ if c.name is None else f"'{c.name}'"
    return f"{_WHAT[c.options.kind]} of {name}{c.leaf}"
