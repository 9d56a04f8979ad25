"""`ActivationStats` and `GradientStats`: statistics of every layer's outputs and gradients.

Both are callbacks for the Learner, and for `watch(model, opt, ActivationStats(), …)` around any
other loop. Their base `LayerStats` joins three parts: `HookCallback` finds the modules,
`LayerHooks` pass their tensors to a `RunningStats`, and `StepRecorder` chooses the steps.
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
    """How far the batch is: IDLE → OPEN → TRIED (a step was tried) or CANCELLED → IDLE."""

    IDLE, OPEN, TRIED, CANCELLED = range(4)


class LayerStats(StepRecorder, HookCallback):
    """Base of `ActivationStats` and `GradientStats`: records tensors of layers, and reads records.

    During a fit the hooks stay registered, and do nothing while their switch is off, so a compiled
    model is not compiled again. The batches of a step are merged. A cancelled batch, or one whose
    step was skipped, records nothing.

    Attributes:
        running: the `RunningStats` with everything recorded, over all fits.
    """

    _batch = _Batch.IDLE
    _iteration = -1  # the number of the training batch
    _listed: tuple[Record, StatsList] | None = None  # cache of `stats`, with the record it lists

    def __init__(self, options: Options, every: Any, **hooking: Any) -> None:
        HookCallback.__init__(self, on_valid=False, **hooking)
        StepRecorder.__init__(self, every)
        self.running = RunningStats("activation" if self.is_forward else "gradient", options)
        self.table = self.running.table
        self.hooks = self._switch = LayerHooks(type(self).__name__)

    # --- events

    def before_fit(self) -> None:
        """Register the hooks; records of earlier fits stay, and this fit appends to them."""
        if self.learn.fitting:  # not for a validation outside a fit
            self._begin_fit()
            self._batch = _Batch.IDLE
            self.running.discard_step()
            super().before_fit()

    def _register(self, named: Any) -> None:
        hooks, running = self.hooks, self.running
        hooks.thread, hooks.target = get_ident(), running
        # compiled graphs check the thread as they run; autograd may have threads of its own
        running.thread = hooks.thread if self.is_forward else None
        attach = hooks.attach_output_stats if self.is_forward else hooks.attach_gradient_stats
        for name, module, path in named:
            attach(module, running.row(name, class_name(module)), path, self._function)

    def before_batch(self) -> None:
        """Decide whether this batch is recorded: all batches of an optimizer step are, or none."""
        learn, hooks = self.learn, self.hooks
        if self._batch is not _Batch.IDLE:  # the last batch had no `after_batch`: cancelled, Ctrl-C
            self._discard(stepped=learn.n_steps != self._asked_step)
        hooks.on, hooks.late = self._is_due(learn.n_steps), False
        self._batch, self._iteration = _Batch.OPEN, learn.train_iter

    def before_step(self) -> None:
        """Note that a step was tried. If no `after_step` follows, AMP or a callback skipped it.

        With a closure the batch stays OPEN: the closure may run many forwards before the step.
        """
        self._batch = _Batch.OPEN if self.learn.in_closure else _Batch.TRIED

    def after_cancel_step(self) -> None:
        """Note that a callback skipped the step, so `after_batch` discards it, closure or not."""
        self._batch = _Batch.TRIED

    def after_cancel_batch(self) -> None:
        """Discard a cancelled batch. In `watch` no `after_batch` follows."""
        self._batch = _Batch.CANCELLED
        if self.hooks.on:
            self.running.discard_batch()

    def after_batch(self) -> None:
        """End the step if it was made, discard it if it was skipped, or keep the batch for it."""
        learn, running, on, batch = self.learn, self.running, self.hooks.on, self._batch
        self.hooks.on = False
        if batch is _Batch.CANCELLED:
            self._discard(learn.stepped)
        elif learn.stepped:
            if not on:  # gradients of an earlier, recorded forward: their step is over
                running.discard_batch()
            elif self._scale_is_known(learn):
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
        # Last, because of Ctrl-C in the lines above: the next batch then discards this one.
        self._batch = _Batch.IDLE

    def _discard(self, stepped: bool) -> None:
        """Discard a batch that was cut short; if its step was made, all batches of the step."""
        (self.running.discard_step if stepped else self.running.discard_batch)()

    def _scale_is_known(self, learn: Any) -> bool:
        """Return whether the scale of this step's values was known while they were recorded."""
        return True

    def cleanup_fit(self) -> None:
        """Remove the hooks, and discard a batch that was under way."""
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
        """Return everything recorded as nested lists, fastai's `stats[batch][layer]["mean"]`.

        There is one entry per record and hooked module, in the order of `names`, with NaN where a
        module did not run. An entry has all statistics of `record()` and, if histograms were
        recorded, "hist", a (bins,) float tensor. If a module returns several tensors, only the
        first is here; in `record()` each has its own row, such as `lstm[1][0]`.
        """
        record = self._since(-1)
        if self._listed is None or self._listed[0] is not record:
            # GradientStats(of="params") hooks no module, so `names` is empty: list all rows
            rows = [record.layer(name) for name in self.names]
            self._listed = record, list_stats(record, rows or list(range(len(record.names))))
        return self._listed[1]

    def _row_of(self, layer: int | str) -> int:
        """Return the record's row of `layer`: an index into `names`, or the name of a row."""
        record, n = self.record(), len(self.names)
        if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool) and -n <= layer < n:
            layer = self.names[layer]
        return record.layer(layer)

    def layer_stats(self, layer: int | str) -> L:
        """Return an `L` of three: means, stds and fractions near zero of a layer, by record."""
        record, row = self.record(), self._row_of(layer)
        return L(L(record.value(s, row).tolist()) for s in ("mean", "std", "near_zero"))

    def hist(self, layer: int | str) -> Tensor:
        """Return (n_bins, n_records) float32: log(1 + count) of a layer's values in each bin.

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
        """Return the indices of a layer's units that were never above 0 in the last 25–50 records.

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
        """Draw mean, std and fraction near zero of a layer: see `plotting.plot_layer_stats`."""
        from hookkit import plotting

        return plotting.plot_layer_stats(self.record(), self._row_of(layer))

    def __repr__(self) -> str:
        n = len(self.running.names)
        return f"{type(self).__name__}({n} layers × {len(self.table)})"


class ActivationStats(LayerStats):
    """Records statistics of layers' outputs: mean, std, rms, min, max, zeros, NaN and Inf.

    The statistics are exact, over all values. There is one record for each optimizer step that
    `every` selects. Batches of one step (gradient accumulation) are merged; cancelled batches and
    skipped steps record nothing; a forward that activation checkpointing repeats counts once. A
    second fit appends; validation is not recorded. (In `watch`, a batch whose step a GradScaler
    skipped is merged into the next step, since the weights are the same.)

    Memory is bounded (about 10 MB): when it is full, neighbouring records merge exactly, and
    `record().spans` has the number of steps in each.

    Args:
        with_hist: whether to keep a histogram of each layer too, from a sample of 4096 or more of
            its values: its distribution function is within 0.021 of the true one (95 %).
        modules: which modules, as for `select`; None takes every module without children that has
            parameters.
        every: records every n-th optimizer step, beginning with the first of each fit; None is 1.
            `"auto"` records as often as possible in at most 5 % of the time, for small nets.
        remove_end: removes the hooks at the end of the fit.
        is_forward, detach, cpu: for calls written for fastai. `is_forward=False` is an error, since
            `GradientStats` records gradients; the other two change nothing.
        include_paramless: with `modules=None`, takes modules without parameters too.
        hook: `hook(module, inputs, output)` returns what to record instead of the output; a
            subclass can define it as a method.
        units: records two more statistics. `dead`: the fraction of units (channels) that were never
            above 0 in the last 25 to 50 records, in a ReLU or in a layer that only a ReLU reads
            (found in the graph of the first batch). `saturated`: the fraction of a Tanh's or
            Sigmoid's values at the ends of their range.
        eps: a value is near zero if its absolute value is at most this.
        bins: `(low, high, n)` of the histogram, as in fastai; None takes signed logarithmic bins,
            two per octave from 2**-12 to 2**12.

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

        self._n_graphs_read = 0  # how many batches of this fit had their autograd graph read

    def _register(self, named: Any) -> None:
        self._n_graphs_read = 0  # a model may change between fits
        super()._register(named)
        self.hooks.on_inputs = None if self.table.n_steps else self.running.update_inputs

    def after_pred(self) -> None:
        """Read facts for the diagnosis from the autograd graphs of two batches.

        The first graph shows which activation reads each layer, and the order of the weights. A
        graph after the first step shows trained weights that are not registered as parameters.
        From now until the next batch, a layer's call is recorded only if it takes part in the loss.
        """
        self.hooks.late = True
        if self._n_graphs_read > 1 or not self.hooks.on:
            return
        learn, facts = self.learn, self.running.facts
        users = users_of(learn.pred)
        if not (self._n_graphs_read or self._function):
            self.running.consumers = consumers(learn.model, users)
            facts["predecessors"] = predecessors(learn.model, users)
            facts["dropout"] = dropouts(learn.model)
        if self._n_graphs_read and learn.n_steps:  # `opts` may be incomplete before the first step
            facts["unregistered"] = unregistered(learn.model, learn.opts, users)
        self._n_graphs_read += bool(learn.n_steps or not self._n_graphs_read)


class GradientStats(LayerStats):
    """Records the statistics of `ActivationStats` for gradients: of outputs, or of parameters.

    Tensor hooks see the gradients of outputs as they are computed, so they are right after in-place
    operations, and for dicts and nested tuples. Gradients of parameters are read after the
    optimizer's step, as the step used them (accumulated, clipped, reduced over ranks). There is one
    record per optimizer step. Gradients that `torch.autograd.grad` computes as part of a loss (a
    gradient penalty, a derivative in a PINN) are not recorded.

    With a GradScaler, gradients are recorded unscaled. If the loop's scaler is only found at its
    first step, that step has no record. A step that the scaler skips records nothing.

    Args:
        with_hist, modules, every, remove_end, include_paramless: as for `ActivationStats`.
        of: `"outputs"` or `"params"`; a parameter's row has the parameter's name.
        scaler: the GradScaler. Needed only if the loop never calls `scaler.step`, as in fastai's
            MixedPrecision: without it, gradients of outputs are then recorded scaled.
        eps: a value is near zero if its absolute value is at most this.
        bins: `(low, high, n)` of the histogram; None takes signed octaves from 2**-40 to 2**8.

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
        self._batch_scaler: Any = None  # the GradScaler whose scale unscales this batch
        self._scaler_states: Any = None  # its private dict by optimizer; `update()` makes a new one
        self._warned = False  # whether the warning of two GradScalers was shown
        self._read_ids: set[int] = set()  # ids of the parameters already read in this step

    def before_batch(self) -> None:
        """Decide whether this batch is recorded, and find the scale of its gradients."""
        super().before_batch()
        if self.hooks.on:
            self._read_ids = set()
            self._batch_scaler = self.scaler or self.learn.step_scaler
            self.running.unscale = inverse_scale(self._batch_scaler)
            # Private: `GradScaler._per_optimizer_states`, which `update()` replaces (since 1.6). A
            # new dict, and batches that no step has ended: the scaler skipped their step, so their
            # gradients are discarded. If PyTorch drops it, they are merged into the next step.
            states = getattr(self._batch_scaler, "_per_optimizer_states", None)
            if states is not self._scaler_states:
                self._scaler_states = states
                self.running.discard_step()

    def _scale_is_known(self, learn: Any) -> bool:
        if self.of == "params" or self._batch_scaler is (self.scaler or learn.step_scaler):
            return True
        if self.table.n_steps and not self._warned:  # a scaler found at the first step: no warning
            self._warned = True
            warn(
                f"GradientStats saw step {learn.n_steps - 1} made with another GradScaler than the "
                f"one before it: the scale of its gradients was not known as they came, so it has "
                f"no record. Use one GradScaler, and give it: GradientStats(scaler=scaler).",
            )
        return False

    def cleanup_fit(self) -> None:
        """Remove the hooks, discard a batch that was under way, and let go of the scaler."""
        super().cleanup_fit()
        self.running.unscale = self._batch_scaler = self._scaler_states = None

    def after_step(self) -> None:
        """Read the gradients of the parameters, as the step used them."""
        if self.of == "params" and self.recording and self.learn.stepped:
            params = list(self.learn.model.parameters())
            used = used_parameters(self.learn, {id(p) for p in params})
            self._read_gradients(p for p in params if id(p) in used)

    def _read_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record the gradients of `parameters`, each once in a step."""
        if self.of != "params" or not self.recording:
            return
        self.running.unscale = None  # the scaler has unscaled these gradients before the step
        within = graph_task() != -1  # the step is made inside backward: other gradients come later
        ids = {id(p) for p in parameters} - self._read_ids
        for name, kind, p in named_parameters(self.learn.model):
            if p.grad is None and not (within and p.requires_grad):
                continue
            row = self.running.row(name, kind)  # also for those to come: rows in the model's order
            if p.grad is not None and id(p) in ids:
                self._read_ids.add(id(p))
                self.running.update(row, 0, "", p.grad)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_batch_scaler": None, "_scaler_states": None}


def _options(
    who: str, with_hist: bool, bins: Any, eps: float, default: LogBins, units: bool = False
) -> Options:
    """Return the user's options as `Options`; raise an OptionError if one is wrong."""
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
    """Return 1 / (the scaler's scale), a new 0-d tensor; None without an enabled scaler.

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
