"""`MixedPrecision`: forward passes in half precision, on torch's autocast and GradScaler.

The loop runs the model and the loss within `learn.autocast()`, and makes its steps by
`learn.scaler` if there is one: it scales the loss, unscales the gradients before `before_step`, so
that clipping sees their true size, and leaves out a step whose gradients overflow. This callback
sets the two for the time of a fit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.amp import GradScaler

from hookkit.callbacks.callback import Callback
from hookkit.checks import check_choice
from hookkit.errors import OptionError
from hookkit.nested import tmap

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class MixedPrecision(Callback):
    """Trains in mixed precision: float16 with a scaled loss, or bfloat16, as in fastai.

    Weights, gradients and the optimizer's state stay as they are, float32 as a rule. Operations
    run in the precision that torch.autocast chooses for them; predictions become float32. A step
    whose gradients overflow is left out: it does not count, and schedulers and records do not move.

    Args:
        amp_mode: `"fp16"`, or `"bf16"`, which needs no scaled loss and works on CPUs too.
        scaler_options: of `torch.amp.GradScaler`: `init_scale`, `growth_interval`, ….

    Raises:
        OptionError: there is no such mode, or options of a scaler for `"bf16"`, which has none; as
            a fit begins: accelerate trains, which has mixed precision of its own, or your own loop.
        TypeError: GradScaler has no such option.

    Attributes:
        learn.scaler: the GradScaler of the fit; None outside of fits, and with `"bf16"`.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=MixedPrecision("bf16"))
    >>> with learn.no_logging(): learn.fit(1)
    >>> learn.pred is None, learn.model.a.dtype
    (True, torch.float32)
    """

    order = 10

    def __init__(self, amp_mode: str = "fp16", **scaler_options: Any) -> None:
        self.amp_mode = check_choice("MixedPrecision", "amp_mode", amp_mode, _DTYPES)
        self.scaler_options = scaler_options
        if scaler_options and amp_mode != "fp16":
            raise OptionError(
                f'MixedPrecision("{amp_mode}", {", ".join(scaler_options)}=…): only the gradients '
                f'of float16 are scaled. Omit the options, or use "fp16".'
            )
        GradScaler("cpu", **scaler_options)  # raises where an option is not one of its own

    def before_fit(self) -> None:
        """Gives the loop its autocast, and the fit its scaler."""
        learn = self.learn
        if not hasattr(type(learn), "_forget_precision"):
            raise OptionError(
                "MixedPrecision() in watch: your own loop runs the model there. Use "
                "torch.autocast and torch.amp.GradScaler in it: records and steps are right."
            )
        if learn.accelerator is not None:
            raise OptionError(
                f"MixedPrecision() within distrib_ctx: accelerate has mixed precision of its own. "
                f'Use learn.distrib_ctx(mixed_precision="{self.amp_mode}") without this callback.'
            )
        kind = "cpu" if learn.device is None else learn.device.type
        learn.autocast = partial(torch.autocast, kind, dtype=_DTYPES[self.amp_mode])
        if learn.fitting and self.amp_mode == "fp16":
            learn.scaler = GradScaler(kind, **self.scaler_options)

    def after_pred(self) -> None:
        """The prediction in float32, also for losses and metrics that autocast does not know."""
        learn, halves = self.learn, _DTYPES.values()
        learn.pred = tmap(lambda t: t.float() if t.dtype in halves else t, learn.pred)

    def cleanup_fit(self) -> None:
        """Full precision again."""
        if hasattr(type(self.learn), "_forget_precision"):
            self.learn._forget_precision()
