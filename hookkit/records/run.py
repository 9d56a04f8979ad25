"""`Record`: the data of one recorder. `Run`: all data of a training. `Incident`: its first NaN.

`as_run` returns the Run of any source: a Run, a Record, or an object with a method `run_record()`
(a Learner, a Watcher) or `record()` (a recorder). All sources inherit methods from `Reportable`.
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
"""Statistics of activations and gradients: `near_zero` and `zero` are fractions of all values;
`count` and `nonfinite` are numbers of values."""

UNIT_STATISTICS = ("dead", "saturated")
"""Recorded with `units=True`. `dead`: the fraction of a layer's units (channels) that were never
above 0 in a window of records; of a ReLU, or of a layer that only a ReLU reads. `saturated`: the
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
    """Base of all sources of records: methods that export, save, diagnose and draw them.

    The files that do the work import this one, so each method imports its file when called.
    """

    def to_df(self) -> DataFrame:
        """Return a pandas DataFrame with one value per row.

        Its columns are step, epoch, layer, kind, statistic and value.

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
        """Write the DataFrame of `to_df` as CSV, make missing parent folders, return the path."""
        path = check_path("to_csv", path)
        table = self.to_df()  # before the file is opened, so an error leaves no file
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
        """Send everything recorded to a tracker or a file: losses, and a few scalars per layer.

        Each call sends everything; the callback `LogTo` sends new values during training. Names are
        `loss`, `grad_norm`, `lr`, `epoch/valid_loss`, `activation/mean/layer1.0`.

        Args:
            writer: a SummaryWriter of torch or tensorboardX; an object with `log_metrics(dict,
                step=)` (mlflow, Lightning's loggers) or `log(dict, step=)` (wandb, trackio); or the
                path of a `.jsonl` file, which gets a line for each step. It is not closed.
            statistics: which scalars of layers, one name or several; None takes about five, []
                none.
            layers: which layers and parameters, names or globs, as for `select`: `"encoder"`
                takes the layers inside it too; None takes all.

        Raises:
            ArgumentError: `writer` is none of these.
            OptionError: a name in `statistics` or `layers` was not recorded; a path has another
                ending.
        """
        send(writer, as_run(self), {}, statistics, layers)

    def save(self, path: str | Path) -> Path:
        """Write everything recorded to a compressed `.npz` file, without pickles; return the path.

        `Run.load` reads it. A Run, a Watcher or a Learner also saves losses, epochs, incidents and
        facts. Missing parent folders are made.
        """
        from hookkit.records.npz import save

        return save(as_run(self), path)

    def diagnose(self) -> Diagnosis:
        """Return what is wrong with the run, a `Diagnosis`: see `hookkit.diagnosis.diagnose`."""
        from hookkit.diagnosis import diagnose

        return diagnose(self)

    def plot(self, **options: Any) -> Figure:
        """Draw the whole run in one Figure, and return it: see `hookkit.plotting.plot_run`."""
        from hookkit.plotting import plot_run

        return plot_run(self, **options)

    def report(self, path: str | Path | None = None, **options: Any) -> Path:
        """Write one HTML page of the run, and return its path: see `hookkit.report`."""
        from hookkit.diagnosis.report_page import report

        return report(self, path, **options)


@dataclass(frozen=True, repr=False, eq=False)
class Record(PlainValue, Reportable):
    """Hold the data of one recorder: one row per layer, one column per recorded step.

    Its arrays are read-only views of the arguments; to change one, `.copy()` it.

    Args:
        kind: `"activation"`, `"gradient"` (of outputs) or `"param"` (weights, grads, updates).
        names: per row the qualified name of a module or parameter. If a module returns several
            tensors, the further ones have rows with a path: `"lstm[1][0]"`.
        types: per row the module's class name; for a parameter, the class of its module.
        steps: (n,) int64, optimizer step of each record, 0-based and increasing; the first step
            if several are merged.
        epochs: (n,) int64.
        iters: (n,) int64, index of the training batch.
        spans: (n,) int64, how many recorded steps each record merges; 1 until memory is full.
        values: statistic → (n_layers, n) float64, NaN where the layer did not run.
        hist: (n_layers, n_bins, n) int64 counts, or None.
        edges: (n_bins + 1,) float64, increasing, may begin and end with −inf and inf. Values that
            no bin can hold (NaN, Inf) are in `values["nonfinite"]`.
        meta: facts about the rows and the options (eps, numel of parameters, …).

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
        """Return the number of records (columns): recorded steps, or groups of merged ones."""
        return len(self.steps)

    @property
    def records(self) -> tuple[Record, ...]:
        """Return `(self,)`, so that a Record can be read like a Run."""
        return (self,)

    def layer(self, layer: int | str) -> int:
        """Return the row of `layer`, a name or an index (negative: from the end).

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
                f"Use an index from {-n} to {n - 1}, or a name: {_quoted(self.names)}."
            )
        return int(layer) % n

    @property
    def labels(self) -> tuple[str, ...]:
        """Return for each row its name and class, such as `"0 Conv2d"`."""
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
                f'statistic "{statistic}" was not recorded; {_quoted(self.values)} were. {cure}'
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
    """Describe the first NaN or Inf of a run: where and when it began, and the steps before it.

    Args:
        kind: what was not finite: `"activation"`, `"gradient"`, `"parameter"` or `"loss"`.
        name: the first module in execution order that made it; `""` if only the loss did.
        type: that module's class name.
        step: optimizer step, 0-based.
        epoch: 0-based.
        iter: index of the training batch.
        others: further modules that were not finite in the same step, in execution order.
        steps: (k,) int64, the optimizer steps before it, oldest first.
        history: module name → (k,) float64 RMS of its outputs (gradients) in `steps`.
        note: an explanation in one line.
        origin: its cause: `"data"`, `"param"`, `"function"`, `"gradient"`, `"loss"`, or "" if it is
            not known.
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
    """Hold all data of one training: the input of the diagnosis, the pictures and the report.

    Its arrays are read-only views of the arguments; to change one, `.copy()` it.

    Args:
        activations: the Record of module outputs.
        gradients: the Record of the gradients of module outputs.
        params: the Record of weights, their gradients and updates.
        losses: (n_steps,) float64 training loss by optimizer step, NaN where unknown.
        valid: a dict per epoch, such as `{"epoch": 0, "step": 99, "valid_loss": …}`: its number,
            its last step if that is known, `train_loss`, and the values that the loop reported. An
            epoch with several validations has a dict for each.
        grad_norms: (n_steps,) float64 global gradient norm, NaN where unknown. If a long record
            merged steps, their first step has the norm of the parameters' mean norms.
        incidents: the incidents of the flight recorder.
        info: model name, number of classes, optimizer, learning rates, versions, …

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
            OptionError: `save` did not write the file, or it is damaged.
        """
        from hookkit.records.npz import load

        return load(path)

    @property
    def records(self) -> tuple[Record, ...]:
        """Return activations, gradients and params, in this order, without those that are None."""
        return tuple(r for r in (self.activations, self.gradients, self.params) if r is not None)

    @property
    def n_steps(self) -> int:
        """Return the number of optimizer steps from step 0 on, as far as it is known."""
        known = [len(values) for values in (self.losses, self.grad_norms) if values is not None]
        known += [int(r.steps[-1]) + 1 for r in self.records if len(r)]
        return max([int(self.info.get("n_steps", 0)), *known])

    def __add__(self, later: Any) -> Run:
        """Return this run joined with a later run of the same model, or with what `as_run` takes.

        If `later` starts at step 0, its steps, epochs and batches are renumbered to continue this
        run's; if its epochs do not start at 0 (`fit(…, start_epoch=n)`), they keep their numbers.
        If it starts at the step after this run's last (`info["first_step"]`, set by a library that
        resumed the training), its steps and epochs keep their numbers.

        Raises:
            OptionError: the two have other options or layers; or `later` starts at another step,
                such as at a checkpoint before the end of this run.
        """
        from hookkit.records.joining import join

        return join(self, as_run(later))

    @property
    def n_epochs(self) -> int:
        """Return the number of the last epoch that was begun, plus one."""
        known = [int(row["epoch"]) for row in self.valid if "epoch" in row]
        known += [int(r.epochs[-1]) for r in self.records if len(r)]
        return max(known, default=-1) + 1

    def __repr__(self) -> str:
        kinds = ", ".join(f"{len(r.names)} {r.kind}s" for r in self.records)
        alone = f"; {self.info['rank']} alone" if "rank" in self.info else ""
        return f"Run({self.n_steps} steps; {kinds or 'nothing recorded'}{alone})"


def as_run(source: Any) -> Run:
    """Return the `Run` of `source`: a Run, Records (one of a kind), a recorder, Watcher or Learner.

    Raises:
        ArgumentError: `source` holds no records.
    """
    if isinstance(source, Run):
        return source
    records = source if isinstance(source, (list, tuple)) else [source]
    slots: Any = {SLOTS[r.kind]: r for r in records if isinstance(r, Record)}
    if slots and len(slots) == len(records):
        return Run(**slots)
    for name in () if isinstance(source, type) else ("run_record", "record"):
        # Looked up without `__getattr__`: a recorder would find its learner's `run_record`, the run
        # of all callbacks.
        if callable(getattr_static(source, name, None)):
            return as_run(getattr(source, name)())
    kind = f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__
    raise ArgumentError(
        f"{kind} was given, and it holds no records. "
        "Give a Run, Records (one of each kind), a Watcher, a Learner, or a recorder such as "
        "ActivationStats; a saved run is read by Run.load(path)."
    )


def as_record(source: Any, *kinds: str) -> Record:
    """Return the first Record of one of `kinds` (default: any) in what `as_run` takes.

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
    """Return (n_steps,) float64: the norm of all gradients by step.

    It is NaN for a step that was not recorded, or had a value that is not finite.

    If steps were merged, their first step has the norm of the parameters' mean norms.
    """
    table = params.value("grad_norm")
    last = int(params.steps[-1]) + 1 if len(params) else 0
    norms = np.full(max(last, n_steps or 0), np.nan)
    squares, seen = np.nansum(table**2, axis=0), np.isfinite(table).any(axis=0)
    if "nonfinite" in params.values:  # a NaN in the table may also be a parameter without gradient
        seen &= ~(np.nan_to_num(params.value("nonfinite")) > 0).any(axis=0)
    norms[params.steps] = np.where(seen, np.sqrt(squares), np.nan)
    return norms[:n_steps]


def _quoted(names: Any) -> str:
    """Return up to 12 names in quotes; if there are more, also their number."""
    listed = [f'"{name}"' for name in names]
    more = f" … ({len(listed)})" if len(listed) > 12 else ""
    return ", ".join(listed[:12]) + more
