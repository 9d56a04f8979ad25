"""What every layer gives, and its gradients, while the model trains.

`ActivationStats`, `GradientStats` and the checks of their options. They are callbacks for the
Learner, and unchanged for `watch(model, opt, ActivationStats(), …)` around any loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from hookkit.autograd_graph import users_of
from hookkit.checks import check_choice, check_flag, check_number, kind_of, shown
from hookkit.errors import OptionError
from hookkit.hooks.attach import graph_task
from hookkit.recorders.bins import LogBins, RangeBins
from hookkit.recorders.layer_graph import consumers, dropouts, predecessors, unregistered
from hookkit.recorders.parameters import idle_parameters, named_parameters
from hookkit.recorders.running_stats import Options
from hookkit.recorders.stats_list import LayerStats
from hookkit.records import Record

_BY_NAME = "Layers to record are given by name: modules=…."


class ActivationStats(LayerStats):
    """Mean, std, rms, min, max, shares near and at zero, non-finite counts of every layer's output.

    Exact, over all values; in a Learner or in `watch`. One record for each optimizer step (of
    those that `every` selects): batches of one step under gradient accumulation are merged,
    cancelled batches and skipped steps record nothing, recomputation in activation checkpointing is
    not counted twice. A second fit appends; validation is not recorded. (In `watch` a batch whose
    step a GradScaler skipped is merged into the next: the weights are the same.)

    Memory is bounded (about 10 MB): when full, neighbouring records merge exactly, and
    `record().spans` has the number of steps in each.

    Args:
        with_hist: whether to keep a histogram of each layer too, from 4096 or more of its values:
            its distribution function is within 0.021 of the true one (95 %).
        modules: which, as for `select`; None takes every module without children that has
            parameters.
        every: records every n-th optimizer step, beginning with the first of each fit.
        remove_end: takes the hooks off at the end of the fit.
        is_forward, detach, cpu: fastai's. Values are always detached, and on the CPU when they are
            read; gradients are recorded by `GradientStats`.
        include_paramless: with `modules=None`, takes modules without parameters too.
        hook: `hook(module, inputs, output)` gives what to record in place of the output; a
            subclass's method of that name does too.
        units: records which units (channels) are dead: never above 0 over the last 25 to 50
            records, in a ReLU or in a layer that a ReLU alone reads, as the graph of the first
            batch shows; and the share of a Tanh's or Sigmoid's values at the ends of their range.
        eps: a value of at most this size is near zero.
        bins: of the histogram, `(low, high, n)` as in fastai; None: signed logarithmic bins, two
            per octave from 2**-12 to 2**12.

    Raises:
        OptionError: an option that cannot work.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=ActivationStats(modules=""))
    >>> with learn.no_logging(): learn.fit(1)
    >>> len(learn.activation_stats.stats), sorted(learn.activation_stats.stats[0][0])[:3]
    (10, ['count', 'max', 'mean'])
    """

    def __init__(
        self,
        with_hist: bool = False,
        modules: Any = None,
        every: int | None = None,
        remove_end: bool = True,
        is_forward: bool = True,
        detach: bool = True,
        cpu: bool = True,
        include_paramless: bool = False,
        *,
        hook: Callable[[nn.Module, Any, Any], Any] | None = None,
        units: bool = False,
        eps: float = 0.05,
        bins: tuple[float, float, int] | None = None,
    ) -> None:
        who = type(self).__name__
        if not check_flag(who, "is_forward", is_forward):
            raise OptionError(
                f"{who}(is_forward=False): this records outputs. Use GradientStats() for gradients."
            )
        super().__init__(
            checked_options(who, with_hist, bins, eps, LogBins(), check_flag(who, "units", units)),
            modules=modules,
            every=every,
            remove_end=remove_end,
            detach=detach,
            cpu=cpu,
            include_paramless=include_paramless,
            hook=hook,
        )

    def _clear_fit(self) -> None:
        super()._clear_fit()
        self._n_asked = 0

    def after_pred(self) -> None:
        """The model has returned: a layer called on its own now counts if it makes the loss."""
        self._switch.late = True
        if self.recording and self.learn.training and self._n_asked < 2:
            self._ask(self.learn, self.learn.pred)

    def _ask(self, learn: Any, output: Any) -> None:
        """Reads which activation consumes each layer, the order of the weights, hidden weights.

        From the autograd graphs of a fit's first two batches: a model may change between fits.
        """
        facts, users = self.tally.facts, users_of(output)
        if not (self._n_asked or self._function):
            self.tally.consumers = consumers(learn.model, users)
            facts["predecessors"] = predecessors(learn.model, users)
            facts["dropout"] = dropouts(learn.model)
        if self._n_asked and learn.n_steps:  # only then the optimizers that step are known
            facts["unregistered"] = unregistered(learn.model, learn.opts, users)
        self._n_asked += bool(learn.n_steps or not self._n_asked)


class GradientStats(LayerStats):
    """The statistics of `ActivationStats` for gradients: of outputs, or of parameters.

    Gradients of outputs are seen as they are computed, by tensor hooks: right after in-place
    operations, for dicts and nested tuples. Those of parameters are read after the optimizer's
    step, as it used them (accumulated, clipped, reduced over ranks). One record per optimizer step.
    What `torch.autograd.grad` computes within a loss (a gradient penalty, a derivative in a PINN)
    is left out.

    Under a GradScaler they are recorded unscaled. In a loop whose scaler becomes known at its first
    step, that step has no record; a step that a scaler skips leaves nothing.

    Args:
        with_hist: whether to keep a histogram of each row too, from 4096 or more of its values.
        modules: which, as for `select`; None takes every module without children that has
            parameters.
        every: records every n-th optimizer step, beginning with the first of each fit.
        remove_end: takes the hooks off at the end of the fit.
        include_paramless: with `modules=None`, takes modules without parameters too.
        of: `"outputs"` or `"params"`; parameters are rows called by their own names.
        scaler: the GradScaler, needed where it makes no steps: where it only unscales, as fastai's
            MixedPrecision has it, gradients of outputs are recorded scaled without it.
        eps: a value of at most this size is near zero.
        bins: of the histogram, `(low, high, n)`; None: signed octaves from 2**-40 to 2**8.

    Raises:
        OptionError: an option that cannot work.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=GradientStats(of="params"))
    >>> with learn.no_logging(): learn.fit(1)
    >>> learn.gradient_stats.record().names
    ('a', 'b')
    """

    def __init__(
        self,
        with_hist: bool = False,
        modules: Any = None,
        every: int | None = None,
        remove_end: bool = True,
        include_paramless: bool = False,
        *,
        of: str = "outputs",
        scaler: Any = None,
        eps: float = 1e-7,
        bins: tuple[float, float, int] | None = None,
    ) -> None:
        who = "GradientStats"
        check_choice(who, "of", of, ("outputs", "params"))
        check_scaler(who, scaler)
        self.of, self.scaler = of, scaler
        super().__init__(
            checked_options(who, with_hist, bins, eps, LogBins(-40, 8, 1)),
            modules=[] if of == "params" else modules,
            every=every,
            remove_end=remove_end,
            is_forward=False,
            include_paramless=include_paramless,
        )
        self._noted: set[int] = set()  # ids of parameters whose gradients of this step were read

    def before_batch(self) -> None:
        """Decides whether this batch is recorded."""
        super().before_batch()
        self._noted = set()

    def after_step(self) -> None:
        """Reads the gradients of the parameters, as the step used them."""
        if self.recording and self.learn.stepped:
            idle = idle_parameters(self.learn, self.learn.model.parameters())
            self._note(lambda p: id(p) not in idle)

    def _note_part(self, owned: list[nn.Parameter]) -> None:
        """Reads the gradients that one optimizer of several has used, before they are reset."""
        if self.recording:
            ids = {id(p) for p in owned}
            self._note(lambda p: id(p) in ids)

    def _note(self, counts: Callable[[nn.Parameter], bool]) -> None:
        if self.of != "params":
            return
        self.tally.unscale = None  # what the step uses is not scaled
        within = graph_task() != -1  # the gradients of other parameters come later
        for name, kind, p in named_parameters(self.learn.model):
            if p.grad is None and not (within and p.requires_grad):
                continue
            row = self.tally.row(name, kind)  # in the order of the model
            if p.grad is not None and id(p) not in self._noted and counts(p):
                self._noted.add(id(p))
                self.tally.see(row, 0, "", p.grad)

    def _rows(self, record: Record) -> list[int]:
        return super()._rows(record) if self.of == "outputs" else list(range(len(record.names)))


def checked_options(
    who: str, with_hist: bool, bins: Any, eps: float, default: LogBins, units: bool = False
) -> Options:
    """Options from what the user gave, each checked."""
    what = "the size up to which a value is near zero"
    eps = check_number(who, "eps", eps, 0, below=math.inf, what=what)
    if not check_flag(who, "with_hist", with_hist, _BY_NAME):
        if bins is not None:
            raise OptionError(f"{who} was given bins, and no histogram. Add with_hist=True.")
        return Options(eps, None, units)
    return Options(eps, default if bins is None else checked_bins(who, bins), units)


def checked_bins(who: str, bins: Any) -> RangeBins:
    """The bins that `(low, high, n)` means."""
    ok = isinstance(bins, tuple) and len(bins) == 3
    try:
        low, high, n = (float(bins[0]), float(bins[1]), bins[2]) if ok else (0.0, 0.0, 0)
    except (TypeError, ValueError):
        ok, low, high, n = False, 0.0, 0.0, 0
    if not (ok and math.isfinite(low) and math.isfinite(high) and low < high):
        raise OptionError(
            f"{who}(bins={shown(bins)}): give (low, high, n), finite and low < high, such as "
            f"(0, 10, 40); or None for logarithmic bins, which need no range."
        )
    n = check_number(who, "bins[2]", n, 1, 4096, whole=True, what="how many")
    return RangeBins(low, high, int(n))


def check_scaler(who: str, scaler: Any) -> None:
    """Raises an `OptionError` if `scaler` is neither None nor a GradScaler."""
    is_class = isinstance(scaler, type)
    if scaler is None or (not is_class and callable(getattr(scaler, "is_enabled", None))):
        return
    raise OptionError(
        f"{who}(scaler={shown(scaler)}): expected a GradScaler, found {kind_of(scaler)}. Give the "
        f"torch.amp.GradScaler whose scale(loss) is called, or None if the loss is not scaled."
    )
