"""Torch optimizers: out of a library's wrapper, their settings, who makes their steps.

PyTorch keeps no list of GradScalers, nor has it hooks for them. A scaler is known while it makes a
step: its `step` is then a caller of the optimizer's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

_STEP = getattr(GradScaler.step, "__code__", None)
_CALLERS = 24  # frames: from a scaler's step to the optimizer's there are less than ten


def unwrap_optimizer(opt: Any) -> Any:
    """Return the innermost optimizer in `opt`, whose step hooks run; `opt` if it wraps none.

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
    """Return the enabled GradScaler that makes the optimizer's current step, or None.

    For an optimizer's step hook. It looks for `GradScaler.step` among the nearest callers (the
    loops of libraries call it too), since neither refers to the other. Cost: 2 µs.
    """
    frame: Any = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame is None:
            break
        if frame.f_code is _STEP:
            scaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None  # disabled, it scales nothing
        frame = frame.f_back
    return None


def skips_step(opt: Any) -> bool:
    """Return whether the step of `opt` that is under way changes nothing, for its step hooks.

    GradScaler calls `step()` of a fused optimizer also when gradients are not finite. The kernel
    then leaves the weights alone. Sync: one, only if a scaler makes the step of such an optimizer.
    """
    # Set by GradScaler.step on the optimizer while it steps (torch 1.12, documented there for
    # optimizers with `_step_supports_amp_scaling`). Without it such steps count as made.
    found = getattr(opt, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.count_nonzero())


def ids_of(opts: Iterable[Any]) -> set[int]:
    """Return the ids of all parameters that these optimizers hold."""
    return {id(p) for opt in opts for group in opt.param_groups for p in group["params"]}


def settings_of(opt: Any) -> list[dict[str, Any]]:
    """Return the settings of each parameter group: all that it holds besides its parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]


def restore_settings(opt: Any, settings: list[dict[str, Any]], but: Iterable[str] = ()) -> None:
    """Put the settings that `settings_of` returned back, except the values of the keys `but`."""
    for group, before in zip(opt.param_groups, settings, strict=False):
        for key in group.keys() - before.keys() - {"params"}:
            del group[key]  # the next schedule would begin with this one's `initial_lr`
        group.update({k: v for k, v in before.items() if k not in but})
