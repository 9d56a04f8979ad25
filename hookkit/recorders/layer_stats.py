"""What every layer gives, and its gradients, while the model trains.

`ActivationStats` and `GradientStats` are callbacks for the Learner, and unchanged for `watch(model,
opt, ActivationStats(), …)` around any loop. Their base `LayerStats` follows a tensor from a layer's
hook to the record of its step: `HookCallback` registers the hooks, a `RunningStats` keeps the
numbers, and a `StepRecorder` chooses the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import Enum
from threading import get_ident
from typing import Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor, nn

from hookkit.autograd_graph import users_of
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.checks import check_choice, check_flag, check_number, kind_of, shown
from hookkit.devices import widened
from hookkit.errors import OptionError, warn
from hookkit.hooks.calls import graph_task
from hookkit.modules import class_name
from hookkit.recorders.bins import LogBins, RangeBins
from hookkit.recorders.layer_graph import consumers, dropouts, predecessors, unregistered
from hookkit.recorders.layer_hooks import LayerHooks
from hookkit.recorders.parameters import named_parameters, used_parameters
from hookkit.recorders.running_stats import Options, RunningStats
from hookkit.recorders.stats_list import StatsList, list_stats
from hookkit.recorders.step_recorder import StepRecorder, clock
from hookkit.recorders.unit_stats import is_clamped
from hookkit.records import Record

_BY_NAME = "Layers to record are given by name: modules=…."


class _State(Enum):
    """How far the batch is: IDLE → OPEN → TRIED (to make a step) or CANCELLED → IDLE."""

    IDLE, OPEN, TRIED, CANCELLED = range(4)


class _Now:
    """The fit and the batch under way; apart from the callback, whose attributes are slow to set.

    Attributes:
        n_asked: of how many batches the graph was read.
        state: how far the batch is.
        iteration: its number.
        scaler: the GradScaler of its loss.
    """

    def __init__(self) -> None:
        self.n_asked, self.iteration = 0, -1
        self.state, self.scaler = _State.IDLE, None


class LayerStats(StepRecorder, HookCallback):
    """Base of `ActivationStats` and `GradientStats`: from a layer's hook to a record, and reading.

    The hooks stay registered and do nothing while their switch is off, so that a compiled model
    need not be compiled again. The batches of a step are merged. A batch that was cancelled, or
    whose step was skipped, records nothing.

    Attributes:
        running: what was recorded, over all fits, a `RunningStats`.
        scaler: the GradScaler, where it cannot be found: the step is not a torch optimizer's.
    """

    of = "outputs"
    scaler: Any = None
    _warned = False
    _listed: tuple[Record, StatsList] | None = None

    def __init__(self, options: Options, every: Any, **hooking: Any) -> None:
        HookCallback.__init__(self, on_valid=False, **hooking)
        StepRecorder.__init__(self, every)
        self.running = RunningStats("activation" if self.is_forward else "gradient", options)
        self.table = self.running.table
        self._now = _Now()
        self.hooks = self._switch = LayerHooks(type(self).__name__)

    def _register(self, named: Any) -> None:
        hooks, function = self.hooks, self._function
        hooks.thread, hooks.target = get_ident(), self.running
        # compiled graphs check it as they run; gradients may come in a thread of autograd's
        self.running.thread = hooks.thread if self.is_forward else None
        attach = hooks.attach_output_stats if self.is_forward else hooks.attach_gradient_stats
        for name, module, path in named:
            attach(module, self.running.row(name, class_name(module)), path, function)

    # --- events

    def before_fit(self) -> None:
        """Hooks the modules; what was recorded before stays, and is added to."""
        if not self.learn.fitting:
            return  # a validation must not change what was recorded
        self._begin_fit()
        self._now = _Now()
        self.running.discard_step()
        super().before_fit()

    def before_batch(self) -> None:
        """Decides whether this batch is recorded: all batches of one optimizer step, or none."""
        learn, now, running, switch = self.learn, self._now, self.running, self._switch
        if now.state is not _State.IDLE:  # the batch before never ended
            running.discard_batch()
        switch.on = self._is_due(learn.n_steps)
        now.state, now.iteration, switch.late = _State.OPEN, learn.train_iter, False
        if self.is_forward:
            switch.on_inputs = None if self.table.n_steps else running.update_inputs
        elif switch.on:
            now.scaler = self.scaler or learn.step_scaler
            running.unscale = inverse_scale(now.scaler)

    def before_step(self) -> None:
        """Notes that a step was tried: if none follows, AMP or a callback has skipped it.

        A closure may evaluate many batches before its step is made.
        """
        self._now.state = _State.OPEN if self.learn.in_closure else _State.TRIED

    def after_cancel_step(self) -> None:
        """A step that a callback skips records nothing, with a closure or without."""
        self._now.state = _State.TRIED

    def after_cancel_batch(self) -> None:
        """A cancelled batch records nothing; in `watch` it is over with this."""
        self._now.state = _State.CANCELLED
        if self._switch.on:
            self.running.discard_batch()

    def after_batch(self) -> None:
        """Ends the step, or keeps this batch for it."""
        learn, now, running, on = self.learn, self._now, self.running, self._switch.on
        self._switch.on = False
        state, now.state = now.state, _State.IDLE
        if state is _State.CANCELLED:
            running.discard_batch()
        elif learn.stepped:
            if not on:  # gradients of a forward that was recorded, which another step has used
                running.discard_batch()
            elif self.is_forward or self.of == "params" or self._knew_scaler(learn):
                began = clock()
                running.end_step(learn.n_steps - 1, learn.epoch, now.iteration)
                self._progress.spent = running.spent + clock() - began
                running.spent = 0.0
            else:
                running.discard_step()
            if self.every is not None:
                self._end_step(learn, on)
        elif state is _State.TRIED:
            running.discard_step()
        elif on:  # a batch whose scaled gradients have Inf is one whose step AMP has skipped
            running.end_batch(finite_only=running.unscale is not None)

    def _knew_scaler(self, learn: Any) -> bool:
        """Return whether the scale of the gradients was known as they came; warns if not."""
        scaler = self.scaler or learn.step_scaler
        if scaler is self._now.scaler:
            return True
        if self.table.n_steps and not self._warned:  # only the first record is missing otherwise
            self._warned = True
            _warn_of_new_scaler(type(self).__name__, learn.n_steps - 1)
        return False

    def cleanup_fit(self) -> None:
        """Takes the hooks off; a batch that was under way is forgotten."""
        super().cleanup_fit()
        self._switch.on = False
        self.running.discard_step()
        self.running.unscale = self._now.scaler = None

    def __getstate__(self) -> dict[str, Any]:
        hooks = LayerHooks(type(self).__name__)
        return {**super().__getstate__(), "_now": _Now(), "hooks": hooks, "_switch": hooks}

    # --- reading

    @property
    def _version(self) -> Any:
        return self.table.n_steps, len(self.running.names)

    def _read(self, since: int) -> Record:
        return self.running.record(since)

    def _read_ranks(self) -> Record:
        return self.running.record_of_ranks()

    @property
    def stats(self) -> StatsList:
        """Everything recorded, as in fastai, such as `stats[batch][layer]["mean"]`.

        One entry per record and hooked module, in the order of `names`; NaN where a module did
        not run. All statistics of `record()` are there, and "hist", a (bins,) float tensor, if
        histograms were recorded. A module that gives several tensors shows the first here; the
        others are rows of their own in `record()`, called as `lstm[1][0]`.
        """
        record = self.record()
        if self._listed is None or self._listed[0] is not record:
            self._listed = record, list_stats(record, self._rows(record))
        return self._listed[1]

    def _rows(self, record: Record) -> list[int]:
        return [record.layer(name) for name in self.names]

    def _row_of(self, layer: int | str) -> int:
        """The row of a module's number in `names`, or of a row's name."""
        record, n = self.record(), len(self.names)
        if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool) and -n <= layer < n:
            return record.layer(self.names[layer])
        return record.layer(layer)  # a name; or it raises

    def layer_stats(self, layer: int | str) -> L:
        """Return an `L` of one layer's means, stds and shares near zero over the records."""
        record, row = self.record(), self._row_of(layer)
        return L(L(record.value(s, row).tolist()) for s in ("mean", "std", "near_zero"))

    def hist(self, layer: int | str) -> Tensor:
        """(bins, n_records) float32: log(1 + count) of the values of one layer in each bin.

        Raises:
            OptionError: no histogram was recorded.
        """
        hist = self._with_hist().hist
        assert hist is not None
        return torch.from_numpy(np.log1p(hist[self._row_of(layer)])).float()

    def _with_hist(self) -> Record:
        record = self.record()
        if record.hist is None:
            who = type(self).__name__
            raise OptionError(f"{who} recorded no histogram. Make it with {who}(with_hist=True).")
        return record

    def tensor(self) -> Tensor:
        """(2, n_modules, n_records) float32: means and stds, fastai v1's `stats`."""
        return self.stats.tensor()

    def dead_units(self, layer: int | str) -> list[int]:
        """Indices of the units of one layer that were never above 0 over the last records.

        Raises:
            OptionError: units were not recorded.
        """
        if not self.running.options.units:
            who = type(self).__name__ if self.is_forward else "ActivationStats"
            raise OptionError(
                f"{type(self).__name__} did not count dead units. Make it with {who}(units=True)."
            )
        row = self._row_of(layer)
        name, kind = self.record().names[row], self.record().types[row]
        dead = self.running.dead(name)
        if dead is None or not is_clamped(self.running.consumers, name, kind):
            warn(
                f'dead units of "{name}" cannot be listed: it did not run; or it is no ReLU, and '
                f"none alone reads it; or PyTorch does not show which layer is before it. Record "
                f"that layer too, or look at another one: `.names` lists all.",
            )
            return []
        units: list[int] = np.flatnonzero(dead).tolist()
        return units

    def color_dim(
        self,
        layer: int | str | None = None,
        figsize: Any = None,
        ax: Any = None,
    ) -> Any:
        """The colorful dimension of one layer, or of all: `plotting.color_dim`.

        Args:
            layer: a number in `names`, or a name; None draws the first 24 layers.
            figsize: width and height in inches; default (10, 5), or what the grid needs.
            ax: where to draw the one layer.

        Returns:
            The Axes of one layer, or the Figure of all.

        Raises:
            OptionError: no histogram was recorded, or `ax` was given for all layers.
        """
        record = self._with_hist()  # before matplotlib is imported

        from hookkit import plotting
        from hookkit.plotting.figures import new_axes, new_figure

        if layer is None:
            figure = None if figsize is None or ax is not None else new_figure(None, *figsize)
            return plotting.color_dim(record, ax=ax, fig=figure)
        row = self._row_of(layer)  # before a figure is made
        if ax is None:
            ax = new_axes(None, *(figsize or (10, 5)))
        return plotting.color_dim(record, layer=row, ax=ax)

    def plot_layer_stats(self, layer: int | str) -> Any:
        """Mean, std and share near zero of one layer over steps: `plotting.plot_layer_stats`."""
        from hookkit import plotting

        return plotting.plot_layer_stats(self.record(), self._row_of(layer))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.running.names)} layers × {len(self.running.table)})"
        )


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
        every: int | str | None = None,
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
            every,
            modules=modules,
            remove_end=remove_end,
            detach=detach,
            cpu=cpu,
            include_paramless=include_paramless,
            hook=hook,
        )

    def after_pred(self) -> None:
        """The model has returned: a layer called on its own now counts if it makes the loss."""
        self._switch.late = True
        if self.recording and self.learn.training and self._now.n_asked < 2:
            self._ask(self.learn, self.learn.pred)

    def _ask(self, learn: Any, output: Any) -> None:
        """Reads which activation consumes each layer, the order of the weights, hidden weights.

        From the autograd graphs of a fit's first two batches: a model may change between fits.
        """
        facts, users = self.running.facts, users_of(output)
        if not (self._now.n_asked or self._function):
            self.running.consumers = consumers(learn.model, users)
            facts["predecessors"] = predecessors(learn.model, users)
            facts["dropout"] = dropouts(learn.model)
        if self._now.n_asked and learn.n_steps:  # only then the optimizers that step are known
            facts["unregistered"] = unregistered(learn.model, learn.opts, users)
        self._now.n_asked += bool(learn.n_steps or not self._now.n_asked)


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
        every: int | str | None = None,
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
            every,
            modules=[] if of == "params" else modules,
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
        if self.of == "params" and self.recording and self.learn.stepped:
            params = list(self.learn.model.parameters())
            used = used_parameters(self.learn, {id(p) for p in params})
            self._read_gradients(p for p in params if id(p) in used)

    def _read_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reads gradients that an optimizer has used, each once in a step."""
        if self.of != "params" or not self.recording:
            return
        self.running.unscale = None  # what the step uses is not scaled
        within = graph_task() != -1  # the gradients of other parameters come later
        ids = {id(p) for p in parameters} - self._noted
        for name, kind, p in named_parameters(self.learn.model):
            if p.grad is None and not (within and p.requires_grad):
                continue
            row = self.running.row(name, kind)  # in the order of the model
            if p.grad is not None and id(p) in ids:
                self._noted.add(id(p))
                self.running.update(row, 0, "", p.grad)

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


def _warn_of_new_scaler(who: str, step: int) -> None:
    warn(
        f"{who} saw step {step} made with another GradScaler than the one before it: the scale of "
        f"its gradients was not known as they came, so it has no record. Use one GradScaler, and "
        f"give it: GradientStats(scaler=scaler).",
    )
