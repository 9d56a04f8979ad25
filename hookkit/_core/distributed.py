"""Several processes as one: gather, compare, reduce. Only this file imports torch.distributed.

Alone (no process group) every function returns what it was given, so callers need no `if`. Nothing
here is ever called inside a hook: a collective operation that only some ranks reach blocks all of
them. So ranks meet only where every rank calls, `collective` around it says who is waited for, and
reading what was recorded never waits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hookkit._core.devices import accelerator
from hookkit._core.pytree import describe, tree_leaves, tree_leaves_with_path, tree_map
from hookkit.errors import HookError


def is_distributed() -> bool:
    """Return whether there is a process group of at least two ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return the number of this process, 0 when alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes, 1 when alone."""
    return dist.get_world_size() if is_distributed() else 1


def rank_label() -> str:
    """Return this process in words, such as "rank 0 of 2"; "" when alone."""
    return f"rank {rank()} of {world_size()}" if is_distributed() else ""


@contextmanager
def collective(doing: str, *, after_s: float = 10.0) -> Iterator[None]:
    """Open a block for collective operations: it says on stderr if it waits, and why one failed.

    Args:
        doing: names what every rank has to do: "read `stored` of 'fc'".
        after_s: how long it waits before it says so.

    Raises:
        HookError: another rank has ended, or did not come before the process group's time-out.
    """
    if not is_distributed():
        yield
        return
    text = f"hookkit: {rank_label()} waits: every rank has to {doing}.\n"
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
            f"{rank_label()} waited for the other ranks: every rank has to {doing}. One of them "
            "has ended or did not come in time. Look for the first error of the other ranks."
        ) from error
    finally:
        timer.cancel()


def gather(x: Any, names: Sequence[str] | None = None) -> Any:
    """Return `x` of all ranks, joined along dimension 0 in rank order, on every rank.

    Args:
        x: a tensor or any structure of tensors, whose batch sizes may differ from rank to rank; a
            list as long as `names`, where they are given. A scalar becomes a vector with one number
            for each rank. Any other object, such as a cache, stays this rank's own.
        names: of the parts of `x`, the same on all ranks: values are joined by position.

    Returns:
        `x` itself when alone; else detached, of the dtype and on the device of `x`. It is sent
        through the CPU, pickled.

    Raises:
        HookError: on every rank, if the names, structures, dtypes or inner shapes differ.

    >>> gather(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    if not is_distributed():
        return x
    parts, labels = ([x], ["the value"]) if names is None else (x, list(names))
    more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    forms = [
        (label, [(path, t.dtype, t.shape[1:], t.ndim) for path, t in tree_leaves_with_path(part)])
        for label, part in zip(labels, parts, strict=True)
    ]
    texts = [f"{label}, {describe(part)}" for label, part in zip(labels, parts, strict=True)]
    with collective(f"read {labels[0] if labels else 'nothing'}{more}, gathered", after_s=1.0):
        _check_alike(gather_object((forms, texts)))
        # after the check: what cannot be sent is an error on all ranks, and none waits for another
        rows = [(t if t.ndim else t.view(1)).detach().cpu().contiguous() for t in tree_leaves(x)]
        as_bytes = [t.view(torch.uint8) for t in rows]  # PyTorch pickles no float8
        everyone = iter(zip(*gather_object(as_bytes), strict=True))
    return tree_map(lambda t: torch.cat(next(everyone)).view(t.dtype).to(t.device), x)


def _check_alike(everyone: list[tuple[list[Any], list[str]]]) -> None:
    """Raise a HookError that shows the first value that has another form on some rank."""
    first = everyone[0][0]
    for i in range(max(len(forms) for forms, _ in everyone)):
        if any(forms[i : i + 1] != first[i : i + 1] for forms, _ in everyone):
            words = [texts[i] if i < len(texts) else "nothing" for _, texts in everyone]
            each = "; ".join(f"rank {r}: {text}" for r, text in enumerate(words))
            raise HookError(
                f"gather: the ranks hold different values ({each}). Values are joined by position, "
                "and only their first dimension may differ: give all ranks the same layers in the "
                "same order and read them on all ranks, or pass gather=False and join them with "
                "ranks.gather_object."
            )


def gather_object(x: Any, group: Any = None) -> list[Any]:
    """Return `x` of every rank, any picklable object, as a list in rank order; `[x]` when alone.

    With a process `group`, of its ranks, which alone have to call.

    >>> gather_object("loss")
    ['loss']
    """
    if not is_distributed():
        return [x]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, x, group)
    return everyone


def all_reduce_sum(t: Tensor) -> Tensor:
    """Return the sum of `t` over the ranks, a new tensor like `t`; a copy when alone.

    >>> all_reduce_sum(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return _reduced(t, "SUM")


def all_reduce_max(t: Tensor) -> Tensor:
    """Return the largest of the ranks' values for each element of `t`, a new tensor.

    >>> all_reduce_max(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return _reduced(t, "MAX")


def _reduced(t: Tensor, op: str) -> Tensor:
    own = t.detach().clone(memory_format=torch.contiguous_format)
    if not is_distributed() or not t.numel():
        return own
    # on the device that the group's backend can send from
    if dist.get_backend() in ("nccl", "xccl") and own.is_cpu:
        own = own.to(torch.device(accelerator(), torch.accelerator.current_device_index()))
    elif dist.get_backend() == "gloo":
        own = own.cpu()
    dist.all_reduce(own, getattr(dist.ReduceOp, op))
    return own.to(t.device)


def is_sharded(model: nn.Module) -> bool:
    """Return whether each rank has a part of some parameter of `model` (DTensors, as of FSDP2)."""
    return any(hasattr(t, "full_tensor") for t in (*model.parameters(), *model.buffers()))


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Gather the state dict of a sharded model on the CPU; each rank has to call."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with collective("save the sharded model"):
        return get_model_state_dict(model, options=options)


def load_whole_state(model: nn.Module, state: dict[str, Any], strict: bool) -> None:
    """Load a whole state dict into a sharded model: each rank takes its part."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(model, state, options=options)
