"""What every layer gives, and its gradients, while the model trains.

`ActivationStats`, `GradientStats` and the checks of their options; `ParamStats` is in `params`.
They are callbacks for the Learner, and unchanged for `watch(model, opt, ActivationStats(), …)`
around any loop. Recorded on the device, exact, in bounded memory, without a host read before
`record()`; read as fastai's statistics, as fastai v1's tensor, as plain arrays (`record()`) or as
pictures.

The file is longer than 300 lines, a third of them docstrings, since both callbacks share the checks
of their options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from hookkit.autograd_graph import users_of
from hookkit.checks import check_choice, check_flag, check_number, kind_of, shown
from hookkit.errors import OptionError
from hookkit.hooks.entries import graph_task
from hookkit.moments.buffers import Options
from hookkit.moments.histograms import Bins, edge_bins, log_bins, range_bins
from hookkit.records import Record
from hookkit.stats.functions import RecordedFunctions, checked_functions
from hookkit.stats.graph import consumers, predecessors, unregistered
from hookkit.stats.parameters import idle_parameters, named_parameters
from hookkit.stats.reading import LayerStats
from hookkit.stats.settings import dropouts, least_samples
from hookkit.stats.softmaxes import wrong_softmaxes


class ActivationStats(LayerStats):
    """Mean, std, rms, min, max, shares near and at zero, non-finite counts of every layer's output.

    Exact, over all values; in a Learner or in `watch`. One record for each optimizer step (of
    those that `every` selects): batches of one step under gradient accumulation are merged,
    cancelled batches and skipped steps record nothing, recomputation in activation checkpointing is
    not counted twice. A second fit appends; validation is recorded with `on_valid=True` only. (In
    `watch` a batch whose step a GradScaler skipped is merged into the next: the weights are the
    same.)

    Memory is bounded (about 10 MB): when full, neighbouring records merge exactly, and
    `record().spans` has the number of steps in each.

    Args:
        with_hist: whether to keep a histogram of each layer too, from `sample` of its values.
        modules: which, as for `select`; None takes every module without children that has
            parameters.
        every: records every n-th optimizer step, beginning with the first of each fit.
        remove_end: takes the hooks off at the end of the fit.
        is_forward: False records the gradients of the outputs, as `GradientStats`.
        detach, cpu: as in fastai, without effect: values are always detached, and on the CPU when
            they are read.
        include_paramless: with `modules=None`, takes modules without parameters too.
        hook: `hook(module, inputs, output)` gives what to record in place of the output (with
            `is_forward=False`: of gradients of inputs and of outputs); a subclass's method of that
            name does too.
        on_train: whether training is recorded.
        on_valid: records each validation as one record, apart: `record(valid=True)`.
        units: counts dead, dormant and saturated units (channels) over the last `window` records,
            at least half of them. A unit is dead if it gives nothing but 0; in a layer that only a
            ReLU reads (as the graph of the first batch shows), if it is never above 0. Dead units
            are judged by all values, dormant ones on a CPU by about 32,768 of each layer and
            record, others each time.
        eps: a value of at most this size is near zero.
        bins: of the histogram: `(low, high)`, `(low, high, n)`, edges, or `log_bins(…)`; None:
            signed logarithmic, two per octave from 2**-12 to 2**12.
        sample: how many values per layer and step the histogram counts. With 4096 the distribution
            function is within 0.021 of the true one (95 %, Dvoretzky-Kiefer-Wolfowitz).
        exact_hist: counts every value instead.
        window: of `units`, in records.
        functions: torch functions whose calls are recorded too, for activations that are no module:
            `[F.relu, F.softmax]`, see `hook_function`; a row for each call in a module's forward,
            as `blocks.0.mlp/relu:0`. Of `F.scaled_dot_product_attention` the logits are recorded,
            0 where a mask forbids, which costs their computation. PyTorch calls Python at every
            torch function of a recorded forward, and compiled models run eagerly in it: combine it
            with `every`. Not seen is a second forward of the model in the same batch.

    Raises:
        ArgumentError: PyTorch reports no calls of one of `functions`.
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
        on_train: bool = True,
        on_valid: bool = False,
        units: bool = False,
        eps: float = 0.05,
        bins: Any = None,
        sample: int = 4096,
        exact_hist: bool = False,
        window: int = 50,
        functions: Iterable[Callable[..., Any]] = (),
    ) -> None:
        who = type(self).__name__
        self.functions = checked_functions(who, functions, is_forward)
        with_hist = check_flag(who, "with_hist", with_hist, _BY_NAME)
        units = check_flag(who, "units", units)
        is_forward = check_flag(who, "is_forward", is_forward)
        given = {"bins": bins, "sample": sample, "exact_hist": exact_hist}
        given |= {"units": units, "eps": eps, "window": window}
        default = log_bins() if is_forward else log_bins(-40, 8, 1)
        super().__init__(
            checked_options(who, with_hist, default, **given),
            modules=modules,
            every=every,
            remove_end=remove_end,
            is_forward=is_forward,
            detach=detach,
            cpu=cpu,
            include_paramless=include_paramless,
            hook=hook,
            on_train=on_train,
            on_valid=on_valid,
        )

    _saved: ClassVar[tuple[str, ...]] = (*LayerStats._saved, "_n_asked")
    _calls: RecordedFunctions | None = None

    def _clear_fit(self) -> None:
        super()._clear_fit()
        self._n_asked = 0

    def _hook_all(self, model: nn.Module) -> None:
        super()._hook_all(model)
        if self._calls is not None:  # the model has changed since
            self._calls.stop()
        if self.functions:
            given = self._switch, self.accumulator.rows, self._function
            self._calls = RecordedFunctions(self.functions, model, *given)
            self._calls.hook_modules()

    def _remove(self) -> None:
        super()._remove()
        if self._calls is not None:
            self._calls.stop()
            self._calls = None

    def before_batch(self) -> None:
        """Decides whether this batch is recorded, and sees calls of functions from now on."""
        super().before_batch()
        if self._calls is not None and self.recording:
            self._calls.turn_on()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_calls": None}

    def _end_forward(self) -> None:
        if self._calls is not None:
            self._calls.turn_off()

    def after_cancel_batch(self) -> None:
        """A cancelled batch records nothing."""
        self._end_forward()
        super().after_cancel_batch()

    def after_batch(self) -> None:
        """Closes the record of the step, or keeps this batch for it."""
        self._end_forward()
        super().after_batch()

    def after_pred(self) -> None:
        """The model has returned: a layer called on its own now counts if it makes the loss."""
        self._end_forward()
        if self.is_forward:
            self._switch.late = True
            if self.recording and self.learn.training and self._n_asked < 2:
                self._ask(self.learn, self.learn.pred)

    def _note_graph(self, root: Tensor) -> None:
        """The first backward pass begins at `root`: all there is of a model called in parts."""
        if self.is_forward and self.recording and not self._n_asked:
            self._ask(self.learn, root)

    def _ask(self, learn: Any, output: Any) -> None:
        """Reads which activation consumes each layer, the order of the weights, hidden weights.

        From the autograd graphs of a fit's first two batches: a model may change between fits.
        """
        facts, users = self.accumulator.facts, users_of(output)
        if not (self._n_asked or self._function):
            found = self.accumulator.consumers = consumers(learn.model, users)
            self.valid_accumulator.consumers = found
            facts["predecessors"] = predecessors(learn.model, users)
            facts["softmax_dim"] = wrong_softmaxes(users)
            facts["dropout"] = dropouts(learn.model)
            facts |= least_samples(users)
        if self._n_asked and learn.n_steps:  # only then the optimizers that step are known
            facts["unregistered"] = unregistered(learn.model, learn.opts, users)
        self._n_asked += bool(learn.n_steps or not self._n_asked)


_BY_NAME = "Layers to record are given by name: modules=…."


class GradientStats(LayerStats):
    """The statistics of `ActivationStats` for gradients: of outputs, of parameters, or of both.

    Gradients of outputs are seen as they are computed, by tensor hooks: right after in-place
    operations, for dicts and nested tuples. Those of parameters are read after the optimizer's
    step, as it used them (accumulated, clipped, reduced over ranks). One record per optimizer step.

    Under a GradScaler all of them are recorded unscaled: the one that makes the optimizer's steps
    is found. A step that it skips leaves nothing.

    Args:
        with_hist: whether to keep a histogram of each row too, from `sample` of its values.
        modules: which, as for `select`; None takes every module without children that has
            parameters.
        every: records every n-th optimizer step, beginning with the first of each fit.
        remove_end: takes the hooks off at the end of the fit.
        include_paramless: with `modules=None`, takes modules without parameters too.
        of: `"outputs"`, `"params"` or `"both"`; parameters are rows called by their own names.
        scaler: the GradScaler, needed only where its `step` is not called around a torch
            optimizer's (`each_forward`), or where there is none before the first batch.
        eps: a value of at most this size is near zero.
        bins: as for `ActivationStats`; None: signed octaves from 2**-40 to 2**8.
        sample: values per row and step that the histogram counts.
        exact_hist: counts every value instead.

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
        bins: Any = None,
        sample: int = 4096,
        exact_hist: bool = False,
    ) -> None:
        check_choice("GradientStats", "of", of, ("outputs", "params", "both"))
        with_hist = check_flag("GradientStats", "with_hist", with_hist, _BY_NAME)
        check_scaler("GradientStats", scaler)
        self.of, self.scaler = of, scaler
        given = {"bins": bins, "sample": sample, "exact_hist": exact_hist}
        given |= {"units": False, "eps": eps, "window": 1}
        super().__init__(
            checked_options("GradientStats", with_hist, log_bins(-40, 8, 1), **given),
            modules=[] if of == "params" else modules,
            every=every,
            remove_end=remove_end,
            is_forward=False,
            include_paramless=include_paramless,
        )
        self._names: dict[int, tuple[str, str]] = {}
        self._seen: set[int] = set()

    def before_batch(self) -> None:
        """Notes by how much the loss of this batch may be scaled."""
        super().before_batch()
        self._names, self._seen = {}, set()

    def after_step(self) -> None:
        """Reads the gradients of the parameters, as the step used them."""
        if not (self.recording and self.learn.stepped) or self.of == "outputs":
            return
        named = list(named_parameters(self.learn.model))
        idle = idle_parameters(self.learn, (p for _, _, p in named))
        self._see_gradients(one for one in named if id(one[2]) not in idle)
        self._names, self._seen = {}, set()

    def _note_part(self, owned: list[nn.Parameter]) -> None:
        """Reads the gradients that one optimizer of several has used, before they are reset."""
        if not self.recording or self.of == "outputs":
            return
        if not self._names:
            within = graph_task() != -1  # the gradients of other parameters come later
            for name, kind, p in named_parameters(self.learn.model):
                self._names[id(p)] = name, kind
                if p.requires_grad if within else p.grad is not None:
                    self.accumulator.rows([name], [kind])  # in the order of the model
        self._see_gradients((*self._names[id(p)], p) for p in owned if id(p) in self._names)

    def _see_gradients(self, parameters: Iterable[tuple[str, str, nn.Parameter]]) -> None:
        scaled, self.accumulator.unscale = self.accumulator.unscale, None  # the step's are not
        for name, kind, p in parameters:
            if p.grad is not None and id(p) not in self._seen:
                (row,) = self.accumulator.rows([name], [kind])
                self.accumulator.see(row, 0, "", p.grad)
                self._seen.add(id(p))
        self.accumulator.unscale = scaled

    def _rows(self, record: Record) -> list[int]:
        return super()._rows(record) if self.of == "outputs" else list(range(len(record.names)))


MOST_BINS = 4096  # of each layer, in each record
MOST_SAMPLED = 2**20


def checked_options(who: str, with_hist: bool, default: Bins, **given: Any) -> Options:
    """Options from what the user gave, each checked."""
    what = "the size up to which a value is near zero"
    eps = check_number(who, "eps", given["eps"], 0, below=math.inf, what=what)
    what = "how many values a histogram samples; exact_hist=True counts all"
    sample = check_number(who, "sample", given["sample"], 1, MOST_SAMPLED, whole=True, what=what)
    window = check_number(who, "window", given["window"], 1, whole=True, what="in records")
    exact = check_flag(who, "exact_hist", given["exact_hist"])
    if not with_hist and (given["bins"] is not None or exact):
        raise OptionError(
            f"{who} was given {'bins' if given['bins'] is not None else 'exact_hist=True'}, but no "
            f"histogram is recorded. Add with_hist=True."
        )
    bins = checked_bins(who, given["bins"], default) if with_hist else None
    return Options(eps, bins, sample, exact, window if given["units"] else 0)


def check_scaler(who: str, scaler: Any) -> None:
    """Raises an `OptionError` if `scaler` is neither None nor a GradScaler."""
    is_class = isinstance(scaler, type)
    if scaler is None or (not is_class and callable(getattr(scaler, "is_enabled", None))):
        return
    raise OptionError(
        f"{who}(scaler={shown(scaler)}): expected a GradScaler, found {kind_of(scaler)}. Give the "
        f"torch.amp.GradScaler whose scale(loss) is called, or None if the loss is not scaled."
    )


def checked_bins(who: str, bins: Any, default: Bins) -> Bins:
    """The bins a user means: None, a `Bins`, `(low, high)`, `(low, high, n)` or edges."""
    if bins is None:
        return default
    ranged = isinstance(bins, tuple) and len(bins) in (2, 3)
    if ranged and len(bins) == 3:
        check_number(who, "bins[2]", bins[2], 1, MOST_BINS, whole=True, what="how many")
    try:
        made = bins if isinstance(bins, Bins) else None
        made = made or (range_bins(*bins) if ranged else edge_bins(bins))
    except (TypeError, ValueError) as e:
        if isinstance(e, OptionError):
            raise
        raise OptionError(
            f"{who}(bins={shown(bins)}): give (low, high), (low, high, n), a list of increasing "
            f"edges, or log_bins(…)."
        ) from None
    if made.n > MOST_BINS + 2:
        raise OptionError(
            f"{who} was given {made.n} bins, to be kept for each layer and record. "
            f"Give {MOST_BINS} or fewer."
        )
    return made
