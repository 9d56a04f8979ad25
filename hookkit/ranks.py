"""Several processes as one: gather, compare, reduce. Only this file imports torch.distributed.

Alone (no process group) every function is the identity, so callers need no `if`. Nothing here is
ever called inside a hook: a collective that only some ranks reach blocks all of them. So ranks meet
only where the loop or the user calls on each of them, `together` around it says who is waited for,
and reading what was recorded never waits. Builds on `nested`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Timer
from traceback import walk_tb
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hookkit.devices import accelerator
from hookkit.errors import HookError
from hookkit.interrupts import block
from hookkit.nested import describe, leaves, named_leaves, tmap

T = TypeVar("T")


def is_distributed() -> bool:
    """True inside a process group of at least two ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """The number of this process, 0 when alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """The number of processes, 1 when alone."""
    return dist.get_world_size() if is_distributed() else 1


def this_rank() -> str:
    """This process in words; "" when alone."""
    return f"rank {rank()} of {world_size()}" if is_distributed() else ""


@block
def together(doing: str, *, after_s: float = 10.0) -> Iterator[None]:
    """Around collectives: says on stderr that it waits, and who failed to come if one fails.

    Args:
        doing: what every rank has to do, and where this one is: "read `stored` of 'fc'".
        after_s: how long it waits before it says so.

    Raises:
        HookError: another rank has ended, or did not come before the process group's time-out.
    """
    if not is_distributed():
        yield
        return
    timer = Timer(after_s, _say, [f"hookkit: {this_rank()} waits: every rank has to {doing}.\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HookError) or not _of_collective(error):
            raise
        raise HookError(
            f"{this_rank()} waited for the other ranks: every rank has to {doing}. One of them has "
            f"ended or did not come in time. Look for the first error of the other ranks."
        ) from error
    finally:
        timer.cancel()


def _of_collective(error: RuntimeError) -> bool:
    """Whether it was raised in a collective, and not by other code around it."""
    modules = (f.f_globals.get("__name__", "") for f, _ in walk_tb(error.__traceback__))
    return any(name.startswith("torch.distributed") for name in modules)


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def gather(x: Any, names: Sequence[str] | None = None) -> Any:
    """`x` of all ranks, joined along dimension 0 in rank order; every rank gets the whole.

    `x` is a tensor or any structure of tensors, whose batch sizes may differ from rank to rank;
    scalars (0-d) become a vector with one entry for each rank. The result is detached, of the
    dtype and on the device of `x`. Alone: `x` itself. Cost: two exchanges of names, structures,
    dtypes and shapes, then one collective per tensor.

    Args:
        x: what to join; a list as long as `names`, where they are given.
        names: of the parts of `x`. They must be the same on all ranks: values are joined by
            position, and two ranks may list the same layers in another order.

    Raises:
        HookError: on every rank, if the names, structures, dtypes or inner shapes differ.

    >>> gather(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    if not is_distributed():
        return x
    parts, named = ([x], ["the value"]) if names is None else (x, list(names))
    more = f" and {len(named) - 1} more" if len(named) > 1 else ""
    with together(f"read {named[0] if named else 'nothing'}{more}, gathered", after_s=1.0):
        check_alike(
            list(zip(named, map(_joinable, parts), strict=True)),
            [f"{name}, {describe(part)}" for name, part in zip(named, parts, strict=True)],
            problem="gather: the ranks hold different values",
            cure="Values are joined by position, and only their first dimension may differ: give "
            "all ranks the same layers in the same order and read them on all ranks, or pass "
            "gather=False and join them yourself (ranks.gather_object).",
        )
        lengths = gather_object([t.shape[0] if t.ndim else 1 for t in leaves(x)])
        each = iter(zip(*lengths, strict=True))
        return tmap(lambda t: _gather_one(t, next(each)), x)


def _joinable(x: Any) -> list[Any]:
    """What has to be the same of two structures whose tensors are joined."""
    return [(path, str(t.dtype), t.ndim, tuple(t.shape[1:])) for path, t in named_leaves(x)]


def alike(own: Any) -> bool:
    """Whether `own` has the same `repr` on all ranks: one reduction of two numbers.

    >>> alike(["fc", 3])
    True
    """
    code = hashlib.blake2b(repr(own).encode(), digest_size=7).digest()
    number = int.from_bytes(code, "big")
    low, high = greatest(torch.tensor([-number, number], device="cpu")).tolist()
    return bool(-low == high)


def check_alike(own: Sequence[Any], texts: Sequence[str], *, problem: str, cure: str) -> None:
    """Raises on every rank, or on none: `own` has to be the same on all of them.

    Called before collectives that join by position or need one shape: gloo ends the process where
    shapes differ, and joins the wrong rows where names do. Cost: one reduction of two numbers;
    where it finds a difference, all ranks' `own` and `texts`.

    Args:
        own: this rank's names, shapes, dtypes, steps: picklable objects, compared by `==`, whose
            `repr` shows all of them.
        texts: each of `own` in a few words.
        problem: the operation and what is wrong; begins the message.
        cure: what to do; ends the message.

    Raises:
        HookError: `own` differs between ranks; shows the first item that does, for each rank.

    >>> check_alike([("fc", 3)], ["fc"], problem="merge: other layers", cure="Name the same.")
    """
    if alike(list(own)):
        return
    everyone = gather_object((list(own), list(texts)))
    for i in range(max(len(items) for items, _ in everyone)):
        if any(items[i : i + 1] != everyone[0][0][i : i + 1] for items, _ in everyone):
            words = [found[i] if i < len(found) else "nothing" for _, found in everyone]
            each = "; ".join(f"rank {r}: {text}" for r, text in enumerate(words))
            raise HookError(f"{problem} ({each}). {cure}")


def gather_object(x: Any, group: Any = None) -> list[Any]:
    """`x` of every rank as a list in rank order; any picklable object. Alone: `[x]`.

    Of the ranks of a process `group` if one is given, which alone have to call.

    >>> gather_object("loss")
    ['loss']
    """
    if not is_distributed():
        return [x]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, x, group)
    return everyone


def union(own: Mapping[str, T]) -> dict[str, T]:
    """The entries of all ranks' mappings, in one order on each; of a key the first one found.

    A rank that has all keys sends them; then one that has others, until none has. So the bytes are
    those of one mapping if the ranks' are alike, however many ranks there are.

    >>> union({"fc": "Linear"})
    {'fc': 'Linear'}
    """
    if not is_distributed():
        return dict(own)
    found: dict[str, T] = {}
    while True:
        more = {key: value for key, value in own.items() if key not in found}
        behind = world_size() - 1 - rank()  # of equally many the first rank's
        most = int(greatest(torch.tensor(len(more) * world_size() + behind, device="cpu")))
        if most < world_size():
            return found
        sent = [more]
        dist.broadcast_object_list(sent, src=world_size() - 1 - most % world_size())
        found |= sent[0]


def total(t: Tensor) -> Tensor:
    """The sum of `t` over the ranks, a new tensor like `t`. Alone: a copy of `t`.

    >>> total(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return _reduced(t, "sum")


def greatest(t: Tensor) -> Tensor:
    """The greatest of the ranks' values for each element of `t`, a new tensor. Alone: a copy.

    >>> greatest(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return _reduced(t, "max")


def _reduced(t: Tensor, op: str) -> Tensor:
    if not is_distributed() or not t.numel():
        return t.detach().clone()

    def reduced(w: Tensor) -> Tensor:
        w = w.contiguous().clone()
        dist.all_reduce(w, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return w

    return _on_wire(t, reduced)


def _gather_one(t: Tensor, sizes: Sequence[int]) -> Tensor:
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
    # as bytes, since gloo takes no int16 and no float8
    dist.all_gather([_bytes(part) for part in parts], _bytes(w))
    return parts


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


def _on_wire(t: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """`f(t)` on the device that the group's backend can send from; the result where `t` was."""
    w = t.detach()
    if dist.get_backend() in ("nccl", "xccl") and w.is_cpu:
        w = w.to(torch.device(accelerator(), torch.accelerator.current_device_index()))
    elif dist.get_backend() == "gloo" and not w.is_cpu:
        w = w.cpu()
    return f(w).to(t.device)


def whole(x: Any) -> Any:
    """`x` with each sharded tensor (a DTensor, of FSDP2) whole, on the CPU: every rank has to call.

    Other tensors are as they are, and the same objects.

    >>> t = torch.ones(2)
    >>> whole({"w": t})["w"] is t
    True
    """
    return tmap(lambda t: t.full_tensor().cpu() if hasattr(t, "full_tensor") else t, x)


def sharded_as(t: Any, like: Any) -> Any:
    """`t`, sharded as `like` is if that has the same shape: every rank has to call.

    >>> t = torch.ones(2)
    >>> sharded_as(t, torch.zeros(2)) is t
    True
    """
    mesh = getattr(like, "device_mesh", None)
    if mesh is None or not isinstance(t, Tensor) or hasattr(t, "device_mesh"):
        return t
    if t.shape != like.shape:
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t.to(like.device), mesh, like.placements)
