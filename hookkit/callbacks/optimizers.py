"""Helpers for torch optimizers: unwrap them, find their GradScaler, keep their settings.

PyTorch has neither a list of GradScalers nor hooks for them. A scaler is found while it makes a
step, because `GradScaler.step` then is in the call stack of the optimizer's step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

_STEP = getattr(GradScaler.step, "__code__", None)
_CALLERS = 24  # how many frames to search: there are less than ten between the two steps


def unwrap_optimizer(opt: Any) -> Any:
    """Return the innermost optimizer in `opt`, whose step hooks run, or `opt` itself.

    accelerate and Lightning keep it as `.optimizer`, fastai as `.opt`, SAM as `.base_optimizer`.
    """
    for _ in range(8):  # bounded, because a wrapper may contain itself
        inside = [getattr(opt, name, None) for name in ("optimizer", "opt", "base_optimizer")]
        inner = next((o for o in inside if hasattr(o, "param_groups")), None)
        if inner is None:
            break
        opt = inner
    return opt


def stepping_scaler() -> Any:
    """Return the enabled GradScaler that makes the optimizer's current step, or None.

    Call it in a step hook. It searches the call stack for `GradScaler.step`, because the optimizer
    does not reference its scaler. Cost: 2 µs.
    """
    frame: Any = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame is None:
            break
        if frame.f_code is _STEP:
            scaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back
    return None


def skips_step(opt: Any) -> bool:
    """Return whether the current step of `opt` changes nothing. Call it in a step hook.

    GradScaler calls `step()` of a fused optimizer even if gradients are not finite, and the kernel
    then leaves the weights alone. Sync: one, only in a scaler's step of a fused optimizer.
    """
    # Set by GradScaler.step on the optimizer while it steps (torch 1.12, documented there for
    # optimizers with `_step_supports_amp_scaling`). Without it such steps count as made.
    found = getattr(opt, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.count_nonzero())


def ids_of(opts: Iterable[Any]) -> set[int]:
    """Return the ids of all parameters in these optimizers."""
    return {id(p) for opt in opts for group in opt.param_groups for p in group["params"]}


def settings_of(opt: Any) -> list[dict[str, Any]]:
    """Return the settings of each parameter group: everything except its parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]


def restore_settings(opt: Any, settings: list[dict[str, Any]], but: Iterable[str] = ()) -> None:
    """Restore the settings that `settings_of` returned, except the values of the keys `but`."""
    for group, before in zip(opt.param_groups, settings, strict=False):
        for key in group.keys() - before.keys() - {"params"}:
            del group[key]  # a schedule adds `initial_lr`, which would mislead the next schedule
        group.update({k: v for k, v in before.items() if k not in but})
