"""The torch optimizer inside a library's wrapper, and the GradScaler that scaled a step's loss.

PyTorch keeps no list of GradScalers, nor has it hooks for them. A scaler is known while it makes a
step: its `step` is then a caller of the optimizer's.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.amp import GradScaler

_STEP = getattr(GradScaler.step, "__code__", None)


def bare_optimizer(opt: Any) -> Any:
    """The innermost optimizer in `opt`, whose step hooks run; `opt` itself if it wraps none.

    accelerate and Lightning keep it as `.optimizer`, fastai as `.opt`, SAM as `.base_optimizer`.
    """
    for _ in range(8):  # at most: a wrapper may contain itself
        inside = [getattr(opt, name, None) for name in ("optimizer", "opt", "base_optimizer")]
        inner = next((o for o in inside if hasattr(o, "param_groups")), None)
        if inner is None:
            break
        opt = inner
    return opt


def stepping_scaler() -> Any:
    """The enabled GradScaler that makes the optimizer's current step; None if none does.

    For an optimizer's step hook. It looks for `GradScaler.step` among the callers (the loops of
    libraries call it too), since neither refers to the other. Cost: 2 µs.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            scaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None  # disabled, it scales nothing
        frame = frame.f_back
    return None
