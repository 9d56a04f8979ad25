"""Several processes as one: gather, compare, reduce. Only this file imports torch.distributed.

Alone (no process group) every function is the identity, so callers need no `if`. Nothing here is
ever called inside a hook: a collective that only some ranks reach blocks all of them. So ranks meet
only where the loop or the user calls on each of them, `together` around it says who is waited for,
and reading what was recorded never waits. Builds on `nested`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from threading import Timer
from traceback import walk_tb
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hookkit.devices import accelerator
from hookkit.errors import HookError
from hookkit.nested import describe, leaves, named_leaves, tmap

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether there is a process group of at least two ranks."""
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


@contextmanager
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
    text = f"hookkit: {this_rank()} waits: every rank has to {doing}.\n"
    timer = Timer(after_s, lambda: (sys.stderr.write(text), sys.stderr.flush()))
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        modules = [str(frame.f_globals.get("__name__")) for frame in frames]
        if isinstance(error, HookError) or not any("torch.distributed" in m for m in modules):
            raise
        raise HookError(
            f"{this_rank()} waited for the other ranks: every rank has to {doing}. One of them has "
            f"ended or did not come in time. Look for the first error of the other ranks."
        ) from error
    finally:
        timer.cancel()


def gather(x: Any, names: Sequence[str] | None = None) -> Any:
    """`x` of all ranks, joined along dimension 0 in rank order; every rank gets the whole.

    Args:
        x: a tensor or any structure of tensors, whose batch sizes may differ from rank to rank; a
            list as long as `names`, where they are given. Scalars become a vector of one a rank;
            what is no tensor, such as a cache object, stays this rank's own.
        names: of the parts of `x`, the same on all ranks: values are joined by position.

    Returns:
        `x` itself when alone; else detached, of the dtype and on the device of `x`.

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
            [
                (name, [(p, str(t.dtype), t.shape[1:], t.ndim) for p, t in named_leaves(part)])
                for name, part in zip(named, parts, strict=True)
            ],
            [f"{name}, {describe(part)}" for name, part in zip(named, parts, strict=True)],
            problem="gather: the ranks hold different values",
            cure="Values are joined by position, and only their first dimension may differ: give "
            "all ranks the same layers in the same order and read them on all ranks, or pass "
            "gather=False and join them yourself (ranks.gather_object).",
        )
        lengths = gather_object([t.shape[0] if t.ndim else 1 for t in leaves(x)])
        each = iter(zip(*lengths, strict=True))
        return tmap(lambda t: _on_wire(t.detach(), lambda w: _joined(w, next(each))), x)


def _joined(w: Tensor, sizes: Sequence[int]) -> Tensor:
    """`w` of all ranks; batches of unequal size are padded to the largest, sent, and cut again."""
    rows = w.contiguous().view(1) if w.ndim == 0 else w.contiguous()
    padded = torch.cat([rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])])
    parts = [torch.empty_like(padded) for _ in sizes]
    # as bytes, since gloo takes no int16 and no float8
    as_bytes = [t.view(-1).view(torch.uint8) for t in (padded, *parts)]
    dist.all_gather(as_bytes[1:], as_bytes[0])
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def check_alike(own: Sequence[Any], texts: Sequence[str], *, problem: str, cure: str) -> None:
    """A HookError on every rank that shows the first item of `own` that differs between ranks.

    Called before collectives that join by position or need one shape: gloo ends the process where
    shapes differ, and joins the wrong rows where names do.

    Args:
        own: this rank's names, shapes, dtypes, steps, whose `repr` shows all of them.
        texts: each of `own` in a few words.
        problem: the operation and what is wrong; begins the message.
        cure: what to do; ends the message.

    >>> check_alike([("fc", 3)], ["fc"], problem="merge: other layers", cure="Name the same.")
    """
    if len(set(gather_object(blake2b(repr(list(own)).encode()).digest()))) == 1:
        return
    everyone = gather_object((list(own), list(texts)))
    for i in range(max(len(items) for items, _ in everyone)):
        if any(items[i : i + 1] != everyone[0][0][i : i + 1] for items, _ in everyone):
            words = [known[i] if i < len(known) else "nothing" for _, known in everyone]
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
    """The entries of all ranks' mappings, in one order on each; of a key the first rank's.

    >>> union({"fc": "Linear"})
    {'fc': 'Linear'}
    """
    whole: dict[str, T] = {}
    for one in gather_object(dict(own)):
        whole |= {key: value for key, value in one.items() if key not in whole}
    return whole


def total(t: Tensor) -> Tensor:
    """The sum of `t` over the ranks, a new tensor like `t`. Alone: a copy of `t`.

    >>> total(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return _reduced(t, "SUM")


def greatest(t: Tensor) -> Tensor:
    """The greatest of the ranks' values for each element of `t`, a new tensor. Alone: a copy.

    >>> greatest(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return _reduced(t, "MAX")


def _reduced(t: Tensor, op: str) -> Tensor:
    def reduced(w: Tensor) -> Tensor:
        dist.all_reduce(w, getattr(dist.ReduceOp, op))
        return w

    own = t.detach().clone(memory_format=torch.contiguous_format)
    return _on_wire(own, reduced) if is_distributed() and t.numel() else own


def _on_wire(w: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """`f(w)` on the device that the group's backend can send from; the result where `w` was."""
    device = w.device
    if dist.get_backend() in ("nccl", "xccl") and w.is_cpu:
        w = w.to(torch.device(accelerator(), torch.accelerator.current_device_index()))
    elif dist.get_backend() == "gloo":
        w = w.cpu()
    return f(w).to(device)
