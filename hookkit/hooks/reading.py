"""Reading what hooks have stored: each value as it is here, or joined over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hookkit import ranks
from hookkit.hooks.block import warn_of_references
from hookkit.hooks.calls import Grads
from hookkit.hooks.snapshot import Kept

if TYPE_CHECKING:
    from hookkit.hooks.hook import Hook

Stored = tuple["Hook", Kept | Grads | None, str]  # the last is which call, in words


def read(stored: Sequence[Stored], gather: bool) -> list[Any]:
    """The values of `stored`; with `gather`, over all ranks, which have to read the same."""
    values = list(map(_own, stored))
    todo = [i for i, (_, kept, _) in enumerate(stored) if kept is None or not kept.whole]
    if gather and todo:
        names = [stored[i][0]._over_ranks() + stored[i][2] for i in todo]
        for i, value in zip(todo, ranks.gather([values[i] for i in todo], names), strict=True):
            values[i], kept = value, stored[i][1]
            if isinstance(kept, Kept):
                kept.value, kept.whole = value, True
            elif kept is not None:
                kept.whole = value
    return values


def _own(stored: Stored) -> Any:
    """What this rank stored."""
    hook, kept, _ = stored
    if isinstance(kept, Grads):
        return kept.whole or tuple(k and k.read(hook._options.who, hook) for k in kept.kept)
    if kept is None:
        return None
    if kept.references and "reference" not in hook._block.warned:
        warn_of_references(hook, kept.references)
    return kept.read(hook._options.who, hook)
