"""Which GradScaler has scaled the loss of a step: PyTorch keeps no list of them, nor hooks for one.

A scaler is known for certain while it makes a step: its `step` is then the caller of the
optimizer's. One that only unscales, before a step that others make, can be asked whether it has.
Before the first step all that can be known is which scalers there are.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

from torch.amp import GradScaler

_STEP = getattr(GradScaler.step, "__code__", None)


def stepping_scaler() -> Any:
    """The enabled GradScaler that makes the optimizer's step at hand; None if none does.

    For an optimizer's step hook. It looks for `GradScaler.step` among the callers, since neither
    the scaler nor the optimizer refers to the other. A library's own loop (accelerate, Lightning)
    and subclasses come by there too. Cost: 2 µs.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            return in_use(frame.f_locals["self"])
        frame = frame.f_back
    return None


def in_use(scaler: Any) -> Any:
    """`scaler`, or None if it is disabled: then it scales nothing."""
    return scaler if scaler is not None and scaler.is_enabled() else None


def live_scalers() -> list[Any]:
    """Every enabled GradScaler of the process. Cost: looks at all objects, about 50 ms."""
    kinds = [GradScaler]
    for kind in kinds:  # which grows meanwhile
        kinds += kind.__subclasses__()
    found = [x for x in gc.get_referrers(*kinds) if issubclass(type(x), GradScaler)]
    return [x for x in found if x.is_enabled()]


def unscaling(scalers: Sequence[Any]) -> Any:
    """Of `scalers` the first that has unscaled gradients since its last `update()`, or None.

    fastai's MixedPrecision makes the scaler step something else, and the optimizer after it.
    """
    # private: what a GradScaler notes of each optimizer, emptied by `update()`, the same since
    # torch 1.6. Without it such a loop's gradients are recorded scaled, as if it had no scaler.
    return next((s for s in scalers if getattr(s, "_per_optimizer_states", None)), None)
