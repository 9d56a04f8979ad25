"""Several processes as one: who am I, gather, reduce. The only file that imports torch.distributed.

Alone (no process group) every function is the identity, so callers need no `if`. Nothing here is
ever called inside a hook: a collective that only some ranks reach blocks all of them, so gathering
happens where the user reads a value, and **every rank has to read it**.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hookkit.errors import HookError, OptionError
from hookkit.nested import describe, named_leaves, tmap

_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX"}


def is_distributed() -> bool:
    """True inside a process group of at least two ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    """The number of processes, 1 when alone."""
    return dist.get_world_size() if is_distributed() else 1


def gather(x: Any, names: Sequence[str] | None = None) -> Any:
    """`x` of all ranks, joined along dimension 0 in rank order; every rank gets the whole.

    `x` is a tensor or any structure of tensors, whose batch sizes may differ from rank to rank;
    scalars (0-d) become a vector with one entry for each rank. The result is detached, of the
    dtype and on the device of `x`. Alone: `x` itself. Cost: one exchange of names, structures,
    dtypes and shapes, then one collective per tensor.

    Args:
        x: what to join; a list as long as `names`, where they are given.
        names: what the parts of `x` are, which has to be the same on all ranks: values are joined
            by position, and two ranks may list the same layers in another order.

    Raises:
        HookError: on every rank, if the names, structures, dtypes or inner shapes differ.

    >>> gather(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    if not is_distributed():
        return x
    shapes = _check_alike(*(([x], ["the value"]) if names is None else (x, list(names))))
    each = iter(zip(*shapes, strict=True))
    return tmap(lambda t: _gather_one(t, [shape[0] if shape else 1 for shape in next(each)]), x)


def check_same(mine: Any, *, asked: str, found: str, cure: str) -> None:
    """Raises on every rank, or on none: `mine` has to be the same on all of them.

    Called before collectives that join by position or need one shape: there gloo ends the process
    where shapes differ, and mixes rows where names do. Costs one collective.

    Args:
        mine: names, shapes, dtypes, steps: any picklable object, compared by `==`.
        asked: the operation and what is wrong; begins the message.
        found: `mine` in a few words, which the message shows for each rank.
        cure: what to do; ends the message.

    Raises:
        HookError: `mine` differs between ranks.

    >>> check_same(("fc", 3), asked="merge: the layers differ", found="fc", cure="Name the same.")
    """
    everyone = gather_object((mine, found))
    if any(theirs != everyone[0][0] for theirs, _ in everyone):
        each = "; ".join(f"rank {r}: {text}" for r, (_, text) in enumerate(everyone))
        raise HookError(f"{asked} ({each}). {cure}")


def gather_object(x: Any) -> list[Any]:
    """`x` of every rank as a list in rank order; any picklable object. Alone: `[x]`.

    >>> gather_object("loss")
    ['loss']
    """
    if not is_distributed():
        return [x]
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, x)
    return everyone


def stacked(t: Tensor) -> Tensor:
    """`t` of every rank, `(world_size, *t.shape)`; the shape has to be the same on all ranks.

    One collective: the way to merge a table of sums, minima and maxima in one round. Alone:
    `t[None]`.

    >>> stacked(torch.zeros(4, 2, dtype=torch.float64)).shape
    torch.Size([1, 4, 2])
    """
    if not is_distributed():
        return t.detach()[None]
    return _on_wire(t, lambda w: torch.stack(_all_gather(w)))


def all_reduce(t: Tensor, op: str = "sum") -> Tensor:
    """A new tensor like `t`: the `"sum"`, `"min"` or `"max"` over the ranks. Alone: a copy of `t`.

    Raises:
        OptionError: `op` is none of the three.

    >>> all_reduce(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    if op not in _OPS:
        raise OptionError(f'all_reduce: op="{op}" is unknown. Use one of {", ".join(_OPS)}.')
    if not is_distributed():
        return t.detach().clone()

    def reduce(w: Tensor) -> Tensor:
        w = w.clone()
        dist.all_reduce(w, getattr(dist.ReduceOp, _OPS[op]))
        return w

    return _on_wire(t, reduce)


def _check_alike(parts: list[Any], names: list[str]) -> list[list[tuple[int, ...]]]:
    """The shapes of all tensors in `parts`, for each rank.

    Raises:
        HookError: the same one on all ranks, if what they hold does not fit.
    """
    specs = [[(p, str(t.dtype), tuple(t.shape)) for p, t in named_leaves(part)] for part in parts]
    everyone = gather_object((names, [describe(part) for part in parts], specs))
    if any(theirs != everyone[0][0] for theirs, _, _ in everyone):
        raise HookError(
            "gather: the ranks do not read the same layers in the same order. "
            f"{_difference([theirs for theirs, _, _ in everyone])}. Values are joined by their "
            "place: give all ranks the same layers in the same order, and read them on all ranks."
        )
    for i, name in enumerate(names):
        inner = [[(p, d, shape[1:], not shape) for p, d, shape in s[i]] for _, _, s in everyone]
        if any(spec != inner[0] for spec in inner):
            found = "; ".join(f"rank {r}: {texts[i]}" for r, (_, texts, _) in enumerate(everyone))
            raise HookError(
                f"gather: the ranks hold different structures for {name} ({found}). Only the "
                "first dimension may differ: pass gather=False and join them yourself "
                "(ranks.gather_object)."
            )
    return [[shape for spec in s for _, _, shape in spec] for _, _, s in everyone]


def _difference(names: list[list[str]]) -> str:
    """The first place at which the ranks' names differ, in words."""
    longest = max(map(len, names))
    at = next(i for i in range(longest) if len({tuple(n[i : i + 1]) for n in names}) > 1)
    each = (n[at] if at < len(n) else "nothing" for n in names)
    return f"At place {at} " + ", ".join(f"rank {r} has {n}" for r, n in enumerate(each))


def _gather_one(t: Tensor, sizes: list[int]) -> Tensor:
    """Batches of unequal size are padded to the largest, sent, and cut again."""
    t = t.detach()
    if t.ndim == 0:
        return _on_wire(t, lambda w: torch.stack(_all_gather(w)))

    def joined(w: Tensor) -> Tensor:
        if len(w) < max(sizes):
            w = torch.cat([w, w.new_zeros(max(sizes) - len(w), *w.shape[1:])])
        return torch.cat([part[:n] for part, n in zip(_all_gather(w), sizes, strict=True)])

    return _on_wire(t, joined)


def _all_gather(w: Tensor) -> list[Tensor]:
    w = w.contiguous()
    parts = [torch.empty_like(w) for _ in range(world_size())]
    # as bytes: gloo knows no int16 and no float8
    dist.all_gather([_bytes(part) for part in parts], _bytes(w))
    return parts


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


def _on_wire(t: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """`f(t)` on the device that the group's backend can send from; the result where `t` was."""
    w = t.detach()
    if dist.get_backend() == "nccl" and not w.is_cuda:
        w = w.to(f"cuda:{torch.cuda.current_device()}")
    elif dist.get_backend() == "gloo" and w.is_cuda:
        w = w.cpu()
    return f(w).to(t.device)
