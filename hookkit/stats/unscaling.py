"""The GradScaler of a loop, by whose scale the gradients of outputs are divided as they come.

The scaler is known if it was given, if the loop has one, or from the last step that it made. In the
first batch of a loop that has its own it is not known, and the record of that step is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookkit.devices import widened


def known_scaler(driver: Any) -> Any:
    """The GradScaler of a Learner or a watched loop, if it has one; else None."""
    own = vars(driver).get("scaler")  # its own: the model may have one of another kind
    return getattr(driver.accelerator, "scaler", None) if own is None else own


def inverse_scale(scaler: Any) -> Tensor | None:
    """1 / its scale as a new 0-d tensor; None if there is no scaler or it is not in use.

    >>> inverse_scale(torch.amp.GradScaler("cpu", init_scale=4.0))
    tensor(0.2500, dtype=torch.float64)
    """
    if scaler is None or not scaler.is_enabled():
        return None
    # Private: `GradScaler._scale`, the scale as a tensor on the device, None before the first use,
    # and `_init_scale`, its first value (both since 1.6). `get_scale()` would wait for the device;
    # without these two, gradients are recorded as if the scale were 1.
    scale = getattr(scaler, "_scale", None)
    if scale is None:
        first = float(getattr(scaler, "_init_scale", 1.0))
        scale = torch.tensor(first, dtype=torch.float64, device="cpu")
    return widened(scale.detach()).reciprocal()
