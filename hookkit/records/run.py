"""`Record`: what one recorder saw. `Run`: all that is known of a training. `Incident`: a first NaN.

`as_run` makes a Run of any source: a Run, a Record, or an object with a method `run_record()` (a
Learner, a Watcher) or `record()` (a recorder). `Reportable` has the methods of all sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from inspect import getattr_static
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit._core.checks import check_path
from hookkit._core.files import atomic_write
from hookkit._core.messages import import_pandas, no_such
from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.records.logs import send
from hookkit.records.plain import Floats, Ints, PlainValue, label

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from hookkit.diagnosis import Diagnosis

SLOTS = {"activation": "activations", "gradient": "gradients", "param": "params"}
"""Kind of a record → the field of a Run that holds it."""

KINDS = tuple(SLOTS)

STATISTICS = ("count", "mean", "std", "rms", "min", "max", "near_zero", "zero", "nonfinite")
"""What is recorded of activations and gradients: `near_zero`, `zero` are fractions, `count` and
`nonfinite` numbers."""

UNIT_STATISTICS = ("dead", "saturated")
"""Recorded with `units=True`. `dead`: the fraction of a layer's units (channels) that were never
above 0 over a window of records, of a ReLU and of a layer that a ReLU alone reads. `saturated`: the
fraction of the values of a bounded activation (Tanh, Sigmoid, …) at the flat ends of its range.
"""

PARAM_STATISTICS = (
    "weight_norm",
    "grad_norm",
    "update_norm",
    "update_ratio",
    "grad_rms",
    "weight_rms",
    "nonfinite",
    "lr",
)
"""Norms are 2-norms; `lr` is the learning rate of the parameter's group."""


class Reportable:
    """Give whatever holds records its methods: send them to tools, save, judge and draw them.

    The files that do it build on this one; they are imported when a method is called.
    """

    def to_df(self) -> DataFrame:
        """Return a pandas DataFrame: step, epoch, layer, kind, statistic, value; a value a row.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        pd, frames = import_pandas(), []
        for r in as_run(self).records:
            rows, n = len(r.names), len(r)
            for statistic, table in r.values.items():
                columns = {
                    "step": np.tile(r.steps, rows),
                    "epoch": np.tile(r.epochs, rows),
                    "layer": np.repeat(np.array(r.names, dtype=object), n),
                    "kind": r.kind,
                    "statistic": statistic,
                    "value": table.ravel(),
                }
                frames.append(pd.DataFrame(columns))
        names = ["step", "epoch", "layer", "kind", "statistic", "value"]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=names)

    def to_csv(self, path: str | Path) -> Path:
        """Write that DataFrame as CSV; make missing parent folders; return the path."""
        path = check_path("to_csv", path)
        table = self.to_df()  # before the file is opened: an error here must leave no file
        with atomic_write(path, text=True) as file:
            table.to_csv(file, index=False, lineterminator="\n")
        return path

    def log_to(
        self,
        writer: Any,
        *,
        statistics: Iterable[str] | None = None,
        layers: Iterable[str] | None = None,
    ) -> None:
        """Send all that was recorded to a tracker or a file: losses, and a few scalars per layer.

        Each call sends everything. `LogTo` sends what is new, while a model trains. Names are
        `loss`, `grad_norm`, `lr`, `epoch/valid_loss`, `activation/mean/layer1.0`.

        Args:
            writer: a SummaryWriter of torch or tensorboardX; what has `log_metrics(dict, step=)`
                (mlflow, Lightning's loggers) or `log(dict, step=)` (wandb, trackio); or the path of
                a `.jsonl` file, to which a line for each step is added. It is not closed.
            statistics: which scalars of layers, one name or several; None takes about five, []
                none.
            layers: which layers and parameters, names or globs, as for `select`: `"encoder"`
                takes the layers inside it too; None takes all.

        Raises:
            ArgumentError: `writer` is none of these.
            OptionError: one of `statistics` or `layers` was recorded nowhere; a file has another
                ending.
        """
        send(writer, as_run(self), {}, statistics, layers)

    def save(self, path: str | Path) -> Path:
        """Write what was recorded to one compressed `.npz` file, without pickles; return the path.

        `Run.load` reads it. A Run, a Watcher or a Learner also saves losses, epochs, incidents and
        facts. Missing parent folders are made.
        """
        from hookkit.records.npz import save

        return save(as_run(self), path)

    def diagnose(self) -> Diagnosis:
        """Say what is wrong with the run, if anything: see `hookkit.diagnosis.diagnose`."""
        from hookkit.diagnosis import diagnose

        return diagnose(self)

    def plot(self, **options: Any) -> Figure:
        """Draw the whole run at a glance, a Figure: see `hookkit.plotting.plot_run`."""
        from hookkit.plotting import plot_run

        return plot_run(self, **options)

    def report(self, path: str | Path | None = None, **options: Any) -> Path:
        """Write one HTML page of the run, and return its path: see `hookkit.report`."""
        from hookkit.diagnosis.report_page import report

        return report(self, path, **options)


@dataclass(frozen=True, repr=False, eq=False)
class Record(PlainValue, Reportable):
    """Hold what one recorder saw: one row per layer, one column per recorded step.

    Arrays are read-only views of those given; to change one, `.copy()` it.

    Args:
        kind: `"activation"`, `"gradient"` (of outputs) or `"param"` (weights, grads, updates).
        names: per row the qualified module (or parameter) name, followed by the leaf's path for
            further leaves of a structured output (`"lstm[1][0]"`).
        types: per row the module's class name; for a parameter, that of the owning module.
        steps: (n,) int64, optimizer step of each record, 0-based and increasing; the first one
            when several are merged.
        epochs: (n,) int64.
        iters: (n,) int64, index of the training batch.
        spans: (n,) int64, how many recorded steps each record merges (1 until the history halves).
        values: statistic → (n_layers, n) float64, NaN where the layer did not run.
        hist: (n_layers, n_bins, n) int64 counts, or None.
        edges: (n_bins + 1,) float64, increasing, may begin and end with −inf and inf. Values that
            no bin can hold (NaN, Inf) are in `values["nonfinite"]`.
        meta: what else is needed to read it (eps, numel of parameters, …).

    Raises:
        ArgumentError: the parts do not fit together.

    >>> r = Record("activation", ("fc",), ("Linear",), *[np.arange(2)] * 3, np.ones(2, np.int64),
    ...            {"mean": np.array([[0.5, 1.5]])})
    >>> r
    Record(activation: 1 layer × 2 records, steps 0–1, mean)
    >>> r.value("mean", "fc")
    array([0.5, 1.5])
    """

    kind: str
    names: tuple[str, ...]
    types: tuple[str, ...]
    steps: Ints
    epochs: Ints
    iters: Ints
    spans: Ints
    values: dict[str, Floats]
    hist: Ints | None = None
    edges: Floats | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise ArgumentError(
                f"Record(kind={self.kind!r}) is not a kind of record. "
                f"Use {', '.join(map(repr, KINDS))}."
            )
        rows, n = len(self.names), len(self.steps)
        axes = ("epochs", "iters", "spans")
        fit: dict[str, tuple[Any, Any]] = {"types": (np.shape(self.types), (rows,))}
        fit |= {axis: (np.shape(getattr(self, axis)), (n,)) for axis in axes}
        fit |= {f"values[{k!r}]": (np.shape(table), (rows, n)) for k, table in self.values.items()}
        if self.hist is not None:
            bins = np.size(self.edges) - 1 if self.edges is not None else np.shape(self.hist)[1]
            fit["hist"] = np.shape(self.hist), (rows, bins, n)
        for what, (found, wanted) in fit.items():
            if found != wanted:
                raise ArgumentError(
                    f"Record of {rows} names and {n} steps: {what} has the shape {found}. "
                    f"Give it the shape {wanted}."
                )

    def __len__(self) -> int:
        """Return how many recorded steps, or groups of merged ones, there are."""
        return len(self.steps)

    @property
    def records(self) -> tuple[Record, ...]:
        """Return `(self,)`, as a Run of this record alone does."""
        return (self,)

    def layer(self, layer: int | str) -> int:
        """Return the row of `layer`, an index (negative ones count from the end) or a name.

        Raises:
            SelectionError: there is no such row; the message has the nearest names.
        """
        n = len(self.names)
        if not n:
            raise SelectionError(
                f"layer {layer!r}: nothing has been recorded yet. "
                f"Train first: learn.fit(1), or your loop inside `with watch(…)`."
            )
        if layer in self.names:
            return self.names.index(str(layer))
        if isinstance(layer, str):
            what = f'no recorded layer is called "{layer}"'
            raise no_such(what, layer, self.names, f"`.names` lists all {n}.")
        whole = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
        if not whole or not -n <= layer < n:
            raise SelectionError(
                f"layer {layer}: {n} layers were recorded. "
                f"Use an index from {-n} to {n - 1}, or a name: {_some(self.names)}."
            )
        return int(layer) % n

    @property
    def labels(self) -> tuple[str, ...]:
        """Return per row the name with the module's class, such as `"0 Conv2d"`."""
        return tuple(label(*row) for row in zip(self.names, self.types, strict=True))

    def value(self, statistic: str, layer: int | str | None = None) -> Floats:
        """Return one statistic: (n,) float64 of one layer, or (n_layers, n) of all; read-only.

        Raises:
            SelectionError: the statistic or the layer was not recorded.
        """
        if statistic not in self.values:
            cure = "Use one of these."
            if statistic in UNIT_STATISTICS:
                cure = "`ActivationStats(units=True)` records it."
            elif statistic in PARAM_STATISTICS:
                cure = "`ParamStats()` records it."
            raise SelectionError(
                f'statistic "{statistic}" was not recorded; {_some(self.values)} were. {cure}'
            )
        table = self.values[statistic]
        return table if layer is None else table[self.layer(layer)]

    def __repr__(self) -> str:
        layers = f"{len(self.names)} layer{'s' * (len(self.names) != 1)}"
        steps = f", steps {self.steps[0]}–{self.steps[-1]}" if len(self) else ""
        hist = ", hist" if self.hist is not None else ""
        records = f"{len(self)} record{'s' * (len(self) != 1)}"
        what = self.kind + (f", {self.meta['rank']} alone" if "rank" in self.meta else "")
        return f"Record({what}: {layers} × {records}{steps}, {' '.join(self.values)}{hist})"


@dataclass(frozen=True, eq=False)
class Incident(PlainValue):
    """Tell of the first NaN or Inf of a run: where it began, when, and the steps before it.

    Args:
        kind: `"activation"`, `"gradient"`, `"parameter"` or `"loss"`, what was not finite.
        name: the first module in execution order that made it (`""`: only the loss itself).
        type: that module's class name.
        step: optimizer step, 0-based.
        epoch: 0-based.
        iter: index of the training batch.
        others: further modules that were not finite in the same step, in execution order.
        steps: (k,) int64, the optimizer steps before it, oldest first.
        history: module name → (k,) float64 RMS of its outputs (gradients) in those steps.
        note: one line in words.
        origin: what made it: `"data"`, `"param"`, `"function"`, `"gradient"`, `"loss"`, or "" if it
            is not known.
    """

    kind: str
    name: str
    type: str = ""
    step: int = 0
    epoch: int = 0
    iter: int = 0
    others: tuple[str, ...] = ()
    steps: Ints = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    history: dict[str, Floats] = field(default_factory=dict, repr=False)
    note: str = ""
    origin: str = ""

    def __str__(self) -> str:
        where = f" of {self.name} ({self.type})" if self.name else ""
        head = f"step {self.step} (epoch {self.epoch}): first non-finite {self.kind}{where}"
        lines = [head]
        if past := " ".join(f"{rms:.3g}" for rms in self.history.get(self.name, ())[-6:]):
            lines.append(f"  its RMS in the steps before: {past}")
        if self.others:
            more = f" and {len(self.others) - 4} more" if len(self.others) > 4 else ""
            lines.append(f"  then: {', '.join(self.others[:4])}{more}")
        return "\n".join(lines + [f"  {self.note}"] * bool(self.note))


@dataclass(frozen=True, repr=False, eq=False)
class Run(PlainValue, Reportable):
    """Hold everything known of one training: what a diagnosis, a picture or a report reads.

    Arrays are read-only views of those given; to change one, `.copy()` it.

    Args:
        activations: of module outputs.
        gradients: of module outputs' gradients.
        params: of weights, their gradients and updates.
        losses: (n_steps,) float64 training loss by optimizer step, NaN where unknown.
        valid: per epoch a dict such as `{"epoch": 0, "step": 99, "valid_loss": …}`: its number,
            its last step where that is known, `train_loss`, and what the loop reported of it. An
            epoch with several validations has a dict for each.
        grad_norms: (n_steps,) float64 global gradient norm, NaN where unknown. Where a long record
            merged steps, the norm of the parameters' mean norms, at the first of these steps.
        incidents: from the flight recorder.
        info: model name, number of classes, optimizer, learning rates, versions, output facts, …

    >>> run = Run(losses=np.linspace(2.3, 0.1, 50))
    >>> run
    Run(50 steps; nothing recorded)
    >>> run.diagnose().healthy
    True
    """

    activations: Record | None = None
    gradients: Record | None = None
    params: Record | None = None
    losses: Floats | None = None
    valid: Sequence[dict[str, Any]] = ()
    grad_norms: Floats | None = None
    incidents: tuple[Incident, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def load(path: str | Path) -> Run:
        """Return the run that `save` wrote, equal in every value.

        Raises:
            OptionError: the file is not one of `save`'s, or is damaged.
        """
        from hookkit.records.npz import load

        return load(path)

    @property
    def records(self) -> tuple[Record, ...]:
        """Return those of activations, gradients, params that are there, in this order."""
        return tuple(r for r in (self.activations, self.gradients, self.params) if r is not None)

    @property
    def n_steps(self) -> int:
        """Count the optimizer steps from step 0 of the training, as far as they are known."""
        known = [len(values) for values in (self.losses, self.grad_norms) if values is not None]
        known += [int(r.steps[-1]) + 1 for r in self.records if len(r)]
        return max([int(self.info.get("n_steps", 0)), *known])

    def __add__(self, later: Any) -> Run:
        """Join this run and a later one of the same model (a Run, or what `as_run` takes).

        If `later` begins with step 0, its steps, epochs and batches are counted on from this run's;
        epochs that `fit(…, start_epoch=n)` has numbered keep their numbers. If it begins with the
        step after this run's last one (`info["first_step"]`), as a library that resumes numbers its
        steps, steps and epochs keep their numbers.

        Raises:
            OptionError: they were recorded with other options, or have other layers; or `later`
                begins anywhere else, such as at a checkpoint before the end of this run: read the
                two one by one.
        """
        from hookkit.records.joining import join

        return join(self, as_run(later))

    @property
    def n_epochs(self) -> int:
        """Return the number of epochs that were begun, one more than the last one's number."""
        known = [int(row["epoch"]) for row in self.valid if "epoch" in row]
        known += [int(r.epochs[-1]) for r in self.records if len(r)]
        return max(known, default=-1) + 1

    def __repr__(self) -> str:
        kinds = ", ".join(f"{len(r.names)} {r.kind}s" for r in self.records)
        alone = f"; {self.info['rank']} alone" if "rank" in self.info else ""
        return f"Run({self.n_steps} steps; {kinds or 'nothing recorded'}{alone})"


def as_run(source: Any) -> Run:
    """Return the `Run` of a Run, Records (one of a kind), a recorder, a Watcher or a Learner.

    Raises:
        ArgumentError: nothing of this kind can be read from `source`.
    """
    if isinstance(source, Run):
        return source
    records = source if isinstance(source, (list, tuple)) else [source]
    slots: Any = {SLOTS[r.kind]: r for r in records if isinstance(r, Record)}
    if slots and len(slots) == len(records):
        return Run(**slots)
    for name in () if isinstance(source, type) else ("run_record", "record"):
        # looked up without __getattr__: a callback also answers with what its learner has, and
        # would be read as the run of all callbacks
        if callable(getattr_static(source, name, None)):
            return as_run(getattr(source, name)())
    kind = f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__
    raise ArgumentError(
        f"{kind} was given, and it holds no records. "
        "Give a Run, Records (one of each kind), a Watcher, a Learner, or a recorder such as "
        "ActivationStats; a saved run is read by Run.load(path)."
    )


def as_record(source: Any, *kinds: str) -> Record:
    """Return the first Record of one of `kinds` (default: any) in a Run, recorder or driver.

    Raises:
        ArgumentError: `source` is none of these.
        OptionError: it holds no record of these kinds.
    """
    run = as_run(source)
    found = {r.kind: r for r in run.records}
    for kind in kinds or KINDS:
        if kind in found:
            return found[kind]
    recorders = dict(zip(KINDS, ("ActivationStats", "GradientStats", "ParamStats"), strict=True))
    raise OptionError(
        f"a record of kind {' or '.join(kinds or KINDS)} is needed; recorded: "
        f"{', '.join(found) or 'none'}. "
        f"Train with {' or '.join(f'{recorders[kind]}()' for kind in kinds or KINDS)}."
    )


def grad_norms(params: Record, n_steps: int | None = None) -> Floats:
    """Return (n_steps,) float64: the norm of all gradients together by step, NaN elsewhere.

    Where steps were merged it is the norm of the parameters' mean norms, at the first step.
    """
    table = params.value("grad_norm")
    last = int(params.steps[-1]) + 1 if len(params) else 0
    norms = np.full(max(last, n_steps or 0), np.nan)
    squares, seen = np.nansum(table**2, axis=0), np.isfinite(table).any(axis=0)
    norms[params.steps] = np.where(seen, np.sqrt(squares), np.nan)
    return norms[:n_steps]


def _some(names: Any) -> str:
    listed = [f'"{name}"' for name in names]
    more = f" … ({len(listed)})" if len(listed) > 12 else ""
    return ", ".join(listed[:12]) + more
