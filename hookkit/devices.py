"""What differs between devices: which float is the widest, and which copies need no waiting.

By `torch.accelerator` and `torch.Event`, which are the same for CUDA, ROCm, XPU and others. CUDA is
what the tests ran on. Apple's MPS and Intel's XPU are served by the same lines, untested.
"""

import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset(("mps",))

# In PyTorch 2.11 to 2.13 pinned memory of MPS reports itself as on the device, and copies that are
# not waited for can give other values. The memory is shared, so that little is lost.
_COPIES_AT_ONCE = frozenset(("cpu", "meta", "mps"))


def widest_float(device: torch.device) -> torch.dtype:
    """float64, and float32 where a device has no float64.

    >>> widest_float(torch.device("mps")), widest_float(torch.device("cpu"))
    (torch.float32, torch.float64)
    """
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widened(t: Tensor) -> Tensor:
    """`t` in the widest float of its device; the same object if it is in it.

    >>> widened(torch.ones(2)).dtype
    torch.float64
    """
    return t.to(widest_float(t.device))


def sent(t: Tensor) -> tuple[Tensor, torch.Event | None]:
    """A copy of `t` on the CPU, and the event after which it is there; None if it is there already.

    Args:
        t: strided, of any dtype, without gradient.

    >>> sent(torch.ones(2))
    (tensor([1., 1.]), None)
    """
    if t.device.type in _COPIES_AT_ONCE:
        return t.to("cpu", copy=True), None
    host = torch.empty_like(t, device="cpu", pin_memory=True)
    host.copy_(t, non_blocking=True)
    event = torch.Event(t.device)
    event.record(torch.accelerator.current_stream(t.device))
    return host, event


def accelerator() -> str:
    """The type of this machine's accelerator, as in `torch.device`, such as "cuda"; or "cpu".

    >>> accelerator() in ("cpu", "cuda", "mps", "xpu")
    True
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type
