"""Answers that differ between devices: the widest float, copies to the host, the accelerator."""

from collections.abc import Callable

import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset(("mps",))


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64; or float32 where a device has no float64, as Apple's MPS.

    >>> widest_float(torch.device("mps")), widest_float(torch.device("cpu"))
    (torch.float32, torch.float64)
    """
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_widest_float(t: Tensor) -> Tensor:
    """Return `t` in the widest float of its device; `t` itself if it is that already.

    >>> to_widest_float(torch.ones(2)).dtype
    torch.float64
    """
    return t.to(widest_float(t.device))


def to_host_async(t: Tensor) -> Callable[[], Tensor]:
    """Begin to copy `t` to the CPU; return a function that waits for the copy and returns it.

    A tensor on the CPU is not copied: give one that nobody writes to.

    Args:
        t: strided, of any dtype, without gradient.

    >>> to_host_async(torch.ones(2))()
    tensor([1., 1.])
    """
    if t.is_cpu:
        return lambda: t
    # In PyTorch 2.11 to 2.13, copies from MPS that are not waited for can give other values. For a
    # meta tensor PyTorch's own error says that it has no values.
    if t.device.type in ("meta", "mps"):
        there = t.to("cpu")
        return lambda: there
    host = begin_copy_to_host(t)
    event = torch.Event(t.device)
    event.record(torch.accelerator.current_stream(t.device))

    def wait() -> Tensor:
        event.synchronize()  # sync: for what was sent some steps ago, so it has arrived
        return host

    return wait


def begin_copy_to_host(t: Tensor) -> Tensor:
    """Return a copy of `t` in pinned memory, which is complete after the next synchronization."""
    host = torch.empty_like(t, device="cpu", pin_memory=True)
    return host.copy_(t, non_blocking=True)


def accelerator() -> str:
    """Return the type of this machine's accelerator for `torch.device`, as "cuda"; or "cpu".

    >>> accelerator() in ("cpu", "cuda", "mps", "xpu")
    True
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type
