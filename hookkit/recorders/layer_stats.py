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

from hookkit._core.checks import check_choice, check_flag, check_number, kind_of, short_repr
from hookkit._core.devices import to_widest_float
from hookkit._core.graph import users_of
from hookkit._core.messages import warn
from hookkit._core.modules import class_name
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.errors import OptionError
from hookkit.hooks.calls import graph_task
from hookkit.recorders.bins import LogBins, RangeBins
from hookkit.recorders.layer_graph import consumers, dropouts, predecessors, unregistered
from hookkit.recorders.layer_hooks import LayerHooks
from hookkit.recorders.parameters import named_parameters, used_parameters
from hookkit.recorders.running_stats import Options, RunningStats
from hookkit.recorders.stats_list import StatsList, list_stats
from hookkit.recorders.step_recorder import StepRecorder, clock
from hookkit.recorders.unit_stats import is_clamped
from hookkit.records import Record


class _Batch(Enum):
    """How far the batch is: IDLE → OPEN → TRIED (to make a step) or CANCELLED → IDLE."""

    IDLE, OPEN, TRIED, CANCELLED = range(4)


class LayerStats(StepRecorder, HookCallback):
    """Base of `ActivationStats` and `GradientStats`: from a layer's hook to a record, and reading.

    The hooks stay registered and do nothing while their switch is off, so that a compiled model
    need not be compiled again. The batches of a step are merged. A batch that was cancelled, or
    whose step was skipped, records nothing.

    Attributes:
        running: what was recorded, over all fits, a `RunningStats`.
    """

    _batch = _Batch.IDLE
    _iteration = -1  # of the batch
    _listed: tuple[Record, StatsList] | None = None

    def __init__(self, options: Options, every: Any, **hooking: Any) -> None:
        HookCallback.__init__(self, on_valid=False, **hooking)
        StepRecorder.__init__(self, every)
        self.running = RunningStats("activation" if self.is_forward else "gradient", options)
        self.table = self.running.table
        self.hooks = self._switch = LayerHooks(type(self).__name__)

    # --- events

    def before_fit(self) -> None:
        """Hook the modules; what was recorded before stays, and is added to."""
        if self.learn.fitting:  # a validation must not change what was recorded
            self._begin_fit()
            self._batch = _Batch.IDLE
            self.running.discard_step()
            super().before_fit()

    def _register(self, named: Any) -> None:
        hooks, running = self.hooks, self.running
        hooks.thread, hooks.target = get_ident(), running
        # compiled graphs check it as they run; gradients may come in a thread of autograd's
        running.thread = hooks.thread if self.is_forward else None
        attach = hooks.attach_output_stats if self.is_forward else hooks.attach_gradient_stats
        for name, module, path in named:
            attach(module, running.row(name, class_name(module)), path, self._function)

    def before_batch(self) -> None:
        """Decide whether this batch is recorded: all batches of one optimizer step, or none."""
        learn, hooks = self.learn, self.hooks
        if self._batch is not _Batch.IDLE:  # the batch before never ended, maybe after its step
            self._discard(stepped=learn.n_steps != self._asked)
        hooks.on, hooks.late = self._is_due(learn.n_steps), False
        self._batch, self._iteration = _Batch.OPEN, learn.train_iter

    def before_step(self) -> None:
        """Note that a step was tried: if none follows, AMP or a callback has skipped it.

        A closure may evaluate many batches before its step is made.
        """
        self._batch = _Batch.OPEN if self.learn.in_closure else _Batch.TRIED

    def after_cancel_step(self) -> None:
        """Note a step that a callback skips: it records nothing, with a closure or without."""
        self._batch = _Batch.TRIED

    def after_cancel_batch(self) -> None:
        """Forget a cancelled batch; in `watch` it is over with this."""
        self._batch = _Batch.CANCELLED
        if self.hooks.on:
            self.running.discard_batch()

    def after_batch(self) -> None:
        """End the step, or keep this batch for it."""
        learn, running, on, batch = self.learn, self.running, self.hooks.on, self._batch
        self.hooks.on = False
        if batch is _Batch.CANCELLED:
            self._discard(learn.stepped)
        elif learn.stepped:
            if not on:  # late gradients of a recorded forward: they belong to no step of ours
                running.discard_batch()
            elif self._is_known(learn):
                began = clock()
                running.end_step(learn.n_steps - 1, learn.epoch, self._iteration)
                self._spent, running.spent = running.spent + clock() - began, 0.0
                self.hooks.on_inputs = None
            else:
                running.discard_step()
            if self.every != 1:
                self._end_step(learn, on)
        elif batch is _Batch.TRIED:
            running.discard_step()
        elif on:
            running.end_batch()
        # last: after Ctrl-C in these lines the next batch discards what was left of this one
        self._batch = _Batch.IDLE

    def _discard(self, stepped: bool) -> None:
        """Forget a batch that was cut short, and its step too if that was made."""
        (self.running.discard_step if stepped else self.running.discard_batch)()

    def _is_known(self, learn: Any) -> bool:
        """Return whether what was recorded of the step under way has a meaning."""
        return True

    def cleanup_fit(self) -> None:
        """Take the hooks off; a batch that was under way is forgotten."""
        super().cleanup_fit()
        self.hooks.on = False
        self.running.discard_step()

    def __getstate__(self) -> dict[str, Any]:
        hooks = LayerHooks(type(self).__name__)
        return {**super().__getstate__(), "hooks": hooks, "_switch": hooks}

    # --- reading

    def _read(self, since: int) -> Record:
        return self.running.record(since)

    def _read_ranks(self) -> Record:
        return self.running.record_of_ranks()

    @property
    def stats(self) -> StatsList:
        """Return everything recorded, as in fastai, such as `stats[batch][layer]["mean"]`.

        One entry per record and hooked module, in the order of `names`; NaN where a module did
        not run. All statistics of `record()` are there, and "hist", a (bins,) float tensor, if
        histograms were recorded. A module that gives several tensors shows the first here; the
        others are rows of their own in `record()`, called as `lstm[1][0]`.
        """
        record = self._since(-1)
        if self._listed is None or self._listed[0] is not record:
            rows = [record.layer(name) for name in self.names]  # none is hooked for parameters
            self._listed = record, list_stats(record, rows or list(range(len(record.names))))
        return self._listed[1]

    def _row_of(self, layer: int | str) -> int:
        """Return the row of a module's number in `names`, or of a row's name."""
        record, n = self.record(), len(self.names)
        if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool) and -n <= layer < n:
            layer = self.names[layer]
        return record.layer(layer)

    def layer_stats(self, layer: int | str) -> L:
        """Return an `L` of one layer's means, stds and shares near zero over the records."""
        record, row = self.record(), self._row_of(layer)
        return L(L(record.value(s, row).tolist()) for s in ("mean", "std", "near_zero"))

    def hist(self, layer: int | str) -> Tensor:
        """Return (bins, n_records) float32: log(1 + count) of a layer's values in each bin.

        Raises:
            OptionError: no histogram was recorded.
        """
        hist, who = self.record().hist, type(self).__name__
        if hist is None:
            raise OptionError(f"{who} recorded no histogram. Make it with {who}(with_hist=True).")
        return torch.from_numpy(np.log1p(hist[self._row_of(layer)])).float()

    def tensor(self) -> Tensor:
        """Return (2, n_modules, n_records) float32: means and stds, fastai v1's `stats`."""
        return self.stats.tensor()

    def dead_units(self, layer: int | str) -> list[int]:
        """Return the indices of a layer's units that were never above 0 over the last records.

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

    def color_dim(self, layer: int | str | None = None, figsize: Any = None, ax: Any = None) -> Any:
        """Draw the colorful dimension of one layer, or of all: `plotting.color_dim`.

        Args:
            layer: a number in `names`, or a name; None draws the first 24 layers.
            figsize: width and height in inches; default (10, 5), or what the grid needs.
            ax: where to draw the one layer.

        Returns:
            The Axes of one layer, or the Figure of all.

        Raises:
            OptionError: no histogram was recorded, or `ax` was given for all layers.
        """
        from hookkit import plotting

        row = None if layer is None else self._row_of(layer)
        drawn = plotting.color_dim(self.record(), row, ax=ax)
        if ax is None and (figsize is not None or row is not None):
            drawn.figure.set_size_inches(figsize or (10, 5))
        return drawn

    def plot_layer_stats(self, layer: int | str) -> Any:
        """Draw mean, std and share near zero of a layer over steps: `plotting.plot_layer_stats`."""
        from hookkit import plotting

        return plotting.plot_layer_stats(self.record(), self._row_of(layer))

    def __repr__(self) -> str:
        n = len(self.running.names)
        return f"{type(self).__name__}({n} layers × {len(self.table)})"


class ActivationStats(LayerStats):
    """Records mean, std, rms, min, max, near-zero and zero shares, NaN and Inf of layers' outputs.

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
        every: records every n-th optimizer step, beginning with the first of each fit; None is 1.
            `"auto"` records as often as takes at most 5 % of the time, for small nets.
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
        units = check_flag(who, "units", units)
        super().__init__(
            _options(who, with_hist, bins, eps, LogBins(), units),
            every,
            modules=modules,
            remove_end=remove_end,
            detach=detach,
            cpu=cpu,
            include_paramless=include_paramless,
            hook=hook,
        )

        self._n_asked = 0  # batches of the fit whose graph was read

    def _register(self, named: Any) -> None:
        self._n_asked = 0  # a model may change between fits
        super()._register(named)
        self.hooks.on_inputs = None if self.table.n_steps else self.running.update_inputs

    def after_pred(self) -> None:
        """Read the graphs of two batches: who reads each layer, the order of weights, hidden ones.

        The model has returned: a layer that is called on its own now counts if it makes the loss.
        """
        self.hooks.late = True
        if self._n_asked > 1 or not self.hooks.on:
            return
        learn, facts = self.learn, self.running.facts
        users = users_of(learn.pred)
        if not (self._n_asked or self._function):
            self.running.consumers = consumers(learn.model, users)
            facts["predecessors"] = predecessors(learn.model, users)
            facts["dropout"] = dropouts(learn.model)
        if self._n_asked and learn.n_steps:  # only then the optimizers that step are known
            facts["unregistered"] = unregistered(learn.model, learn.opts, users)
        self._n_asked += bool(learn.n_steps or not self._n_asked)


class GradientStats(LayerStats):
    """Records the statistics of `ActivationStats` for gradients: of outputs, or of parameters.

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
        every: records every n-th optimizer step, beginning with the first of each fit; None is 1.
            `"auto"` records as often as takes at most 5 % of the time, for small nets.
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
        enabled = getattr(scaler, "is_enabled", None)
        if scaler is not None and (isinstance(scaler, type) or not callable(enabled)):
            raise OptionError(
                f"{who}(scaler={short_repr(scaler)}): expected a GradScaler, found "
                f"{kind_of(scaler)}. Give the torch.amp.GradScaler whose scale(loss) is called, or "
                "None if the loss is not scaled."
            )
        super().__init__(
            _options(who, with_hist, bins, eps, LogBins(-40, 8, 1)),
            every,
            modules=[] if of == "params" else modules,
            remove_end=remove_end,
            is_forward=False,
            include_paramless=include_paramless,
        )
        self.of, self.scaler = of, scaler
        self._found: Any = None  # the GradScaler of this batch's loss
        self._scaled: Any = None  # its states of optimizers, a new object after each `update()`
        self._warned = False  # of another one
        self._noted: set[int] = set()  # ids of parameters whose gradients of this step were read

    def before_batch(self) -> None:
        """Decide whether this batch is recorded, and find the scale of its gradients."""
        super().before_batch()
        if self.hooks.on:
            self._noted = set()
            self._found = self.scaler or self.learn.step_scaler
            self.running.unscale = inverse_scale(self._found)
            # Private: `GradScaler._per_optimizer_states`, which `update()` replaces (since 1.6). If
            # no step was made before `update()`, the scaler has skipped it, and the gradients of
            # its batches are zeroed. Without it they are counted with those of the next step.
            states = getattr(self._found, "_per_optimizer_states", None)
            if states is not self._scaled:
                self._scaled = states
                self.running.discard_step()

    def _is_known(self, learn: Any) -> bool:
        if self.of == "params" or self._found is (self.scaler or learn.step_scaler):
            return True
        if self.table.n_steps and not self._warned:  # only the first record is missing otherwise
            self._warned = True
            warn(
                f"GradientStats saw step {learn.n_steps - 1} made with another GradScaler than the "
                f"one before it: the scale of its gradients was not known as they came, so it has "
                f"no record. Use one GradScaler, and give it: GradientStats(scaler=scaler).",
            )
        return False

    def cleanup_fit(self) -> None:
        """Take the hooks off; a batch that was under way is forgotten."""
        super().cleanup_fit()
        self.running.unscale = self._found = self._scaled = None

    def after_step(self) -> None:
        """Read the gradients of the parameters, as the step used them."""
        if self.of == "params" and self.recording and self.learn.stepped:
            params = list(self.learn.model.parameters())
            used = used_parameters(self.learn, {id(p) for p in params})
            self._read_gradients(p for p in params if id(p) in used)

    def _read_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Read gradients that an optimizer has used, each once in a step."""
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

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_found": None, "_scaled": None}


def _options(
    who: str, with_hist: bool, bins: Any, eps: float, default: LogBins, units: bool = False
) -> Options:
    """Return `Options` of what the user gave, each checked."""
    what = "the size up to which a value is near zero"
    eps = check_number(who, "eps", eps, 0, below=math.inf, what=what)
    by_name = "Layers to record are given by name: modules=…."
    if not check_flag(who, "with_hist", with_hist, by_name):
        if bins is not None:
            raise OptionError(f"{who} was given bins, and no histogram. Add with_hist=True.")
        return Options(eps, None, units)
    if bins is None:
        return Options(eps, default, units)
    try:
        low, high, n = bins
        ok = isinstance(bins, tuple) and -math.inf < low < high < math.inf
    except (TypeError, ValueError):
        ok = False
    if not ok:
        raise OptionError(
            f"{who}(bins={short_repr(bins)}): give (low, high, n), finite and low < high, such as "
            f"(0, 10, 40); or None for logarithmic bins, which need no range."
        )
    n = check_number(who, "bins[2]", n, 1, 4096, whole=True, what="how many")
    return Options(eps, RangeBins(float(low), float(high), int(n)), units)


def inverse_scale(scaler: Any) -> Tensor | None:
    """Return 1 / its scale as a new 0-d tensor; None if there is no scaler or it is not in use.

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
    return to_widest_float(scale.detach()).reciprocal()
