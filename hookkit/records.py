"""What was recorded, as plain values: `Record` (layers × records), `Run`, `Incident`.

Numpy arrays, strings and dicts only: no tensor, no module, no device. So a record can be built by
hand, pickled, saved, compared, drawn and judged, long after the model is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hookkit.errors import ArgumentError, OptionError, SelectionError, nearest

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KINDS = ("activation", "gradient", "param")

STATISTICS = ("count", "mean", "std", "rms", "min", "max", "near_zero", "zero", "nonfinite")
"""Of activations and gradients: `near_zero`, `zero` are fractions, `count`, `nonfinite` numbers."""

UNIT_STATISTICS = ("dead", "dormant", "saturated")
"""Fractions of a layer's units, recorded with `units=True`."""

PARAM_STATISTICS = (
    "weight_norm",
    "grad_norm",
    "update_norm",
    "update_ratio",
    "grad_rms",
    "weight_rms",
    "nonfinite",
)


class Exports:
    """What can be read as records goes to other tools: see `hookkit.exports`."""

    def to_df(self) -> Any:
        """A tidy pandas DataFrame: step, epoch, layer, kind, statistic, value."""
        from hookkit import exports

        return exports.to_df(self)

    def to_csv(self, path: str | Path) -> Path:
        """Writes the tidy table as CSV; the path."""
        from hookkit import exports

        return exports.to_csv(self, path)

    def save(self, path: str | Path) -> Path:
        """Writes the records to one `.npz` file, which `exports.load` reads; the path."""
        from hookkit import exports

        return exports.save(self, path)

    def log_to(self, writer: Any, *, statistics: Iterable[str] | None = None) -> None:
        """Sends the records to a TensorBoard `SummaryWriter`: scalars, and the histograms."""
        from hookkit import exports

        exports.log_to(writer, self, statistics=statistics)

    def compare(self, other: Any, statistic: str = "rms") -> list[dict[str, Any]]:
        """This run and another side by side, per layer of both: see `exports.compare`."""
        from hookkit import exports

        return exports.compare(self, other, statistic)


@dataclass(frozen=True, repr=False)
class Record(Exports):
    """What one recorder saw: one row per layer, one column per record.

    Args:
        kind: `"activation"`, `"gradient"` (of outputs) or `"param"` (weights, grads, updates).
        names: per row the qualified module (or parameter) name, followed by the leaf's path for
            further leaves of a structured output (`"lstm[1][0]"`).
        types: per row the module's class name; for a parameter, that of the owning module.
        steps: (n,) int64, optimizer step of each record, 0-based and increasing; the first one
            when several are merged.
        epochs: (n,) int64.
        iters: (n,) int64, index of the training batch.
        spans: (n,) int64, how many recorded steps each record merges (1 until the ring halves).
        values: statistic → (n_layers, n) float64, NaN where the layer did not run.
        hist: (n_layers, n_bins, n) int64 counts, or None.
        edges: (n_bins + 1,) float64, increasing, may begin and end with −inf and inf. Values that
            no bin can hold (NaN, Inf) are in `values["nonfinite"]`.
        meta: what else is needed to read it (sample size, eps, numel of parameters, …).

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
        if self.kind not in KINDS:
            raise ArgumentError(
                f"Record(kind={self.kind!r}) was asked for. Use {', '.join(map(repr, KINDS))}."
            )
        rows, n = len(self.names), len(self.steps)
        for what, found, wanted in self._sizes(rows, n):
            if found != wanted:
                raise ArgumentError(
                    f"a Record of {rows} names and {n} steps was to be made, with {what} of shape "
                    f"{found}. Give it the shape {wanted}."
                )

    def _sizes(self, rows: int, n: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """What has to fit together: its name, its shape, and the shape it should have."""
        yield "types", (len(self.types),), (rows,)
        for name in ("epochs", "iters", "spans"):
            yield name, np.shape(getattr(self, name)), (n,)
        for name, table in self.values.items():
            yield f"values[{name!r}]", np.shape(table), (rows, n)
        if self.hist is not None:
            bins = np.size(self.edges) - 1 if self.edges is not None else np.shape(self.hist)[1]
            yield "hist", np.shape(self.hist), (rows, bins, n)

    def __len__(self) -> int:
        """How many records there are."""
        return len(self.steps)

    def layer(self, layer: int | str) -> int:
        """The row of `layer`, an index (negative ones count from the end) or a name.

        Raises:
            SelectionError: there is no such row; the message has the nearest names.
        """
        if not self.names:
            raise SelectionError(
                f"layer {layer!r} was asked for; nothing was recorded yet. Train first: "
                f"learn.fit(1)."
            )
        if isinstance(layer, str):
            return self._named(layer)
        n = len(self.names)
        whole = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
        if not whole or not -n <= layer < n:
            raise SelectionError(
                f"layer {layer} was asked for, {n} were recorded. "
                f"Use an index from {-n} to {n - 1}, or a name: {_some(self.names)}."
            )
        return int(layer) % n

    def _named(self, name: str) -> int:
        if name in self.names:
            return self.names.index(name)
        near = nearest(name, self.names) or list(self.names[:3])
        raise SelectionError(
            f'no recorded layer is called "{name}". Nearest: {_some(near)}. '
            f"`.names` lists all {len(self.names)}."
        )

    def value(self, statistic: str, layer: int | str | None = None) -> Floats:
        """One statistic: (n,) float64 of one layer, or (n_layers, n) of all.

        Raises:
            SelectionError: the statistic or the layer was not recorded.
        """
        if statistic not in self.values:
            raise SelectionError(
                f'the statistic "{statistic}" was asked for; recorded are {_some(self.values)}. '
                + _CURES.get(statistic, "Use one of these.")
            )
        table = self.values[statistic]
        return table if layer is None else table[self.layer(layer)]

    def rows(self) -> Iterator[tuple[int, int, str, str, str, float]]:
        """The tidy form, one value at a time: (step, epoch, layer, kind, statistic, value)."""
        for statistic, table in self.values.items():
            for name, row in zip(self.names, table, strict=True):
                for step, epoch, value in zip(self.steps, self.epochs, row, strict=True):
                    yield int(step), int(epoch), name, self.kind, statistic, float(value)

    def __repr__(self) -> str:
        layers = f"{len(self.names)} layer{'s' * (len(self.names) != 1)}"
        steps = f", steps {self.steps[0]}–{self.steps[-1]}" if len(self) else ""
        hist = ", hist" if self.hist is not None else ""
        records = f"{len(self)} record{'s' * (len(self) != 1)}"
        return f"Record({self.kind}: {layers} × {records}{steps}, {' '.join(self.values)}{hist})"


_CURES = {
    **dict.fromkeys(UNIT_STATISTICS, "Record with `units=True` to have it."),
    **dict.fromkeys(PARAM_STATISTICS[:4], "`ParamStats` records it."),
}


def _some(names: Any, n: int = 12) -> str:
    listed = [f'"{name}"' for name in names]
    more = f" … ({len(listed)})" if len(listed) > n else ""
    return ", ".join(listed[:n]) + more


@dataclass(frozen=True)
class Incident:
    """The first NaN or Inf of a run: where it began, when, and what the steps before looked like.

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

    def __str__(self) -> str:
        where = f" of {self.name} ({self.type})" if self.name else ""
        head = f"step {self.step} (epoch {self.epoch}): first non-finite {self.kind}{where}"
        past = self.history.get(self.name)
        lines = [head]
        if past is not None and len(past):
            shown = " ".join(f"{v:.3g}" for v in past[-6:])
            lines.append(f"  its RMS in the steps before: {shown}")
        if self.others:
            more = f" and {len(self.others) - 4} more" if len(self.others) > 4 else ""
            lines.append(f"  then: {', '.join(self.others[:4])}{more}")
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


@dataclass(frozen=True, repr=False)
class Run(Exports):
    """Everything known of one training run: what a diagnosis, a picture or a report reads.

    Args:
        activations: of module outputs.
        gradients: of module outputs' gradients.
        params: of weights, their gradients and updates.
        losses: (n_steps,) float64 training loss by optimizer step, NaN where unknown.
        valid: per epoch a dict such as `{"epoch": 0, "step": 99, "valid_loss": …}`: its number,
            its last step where that is known, `train_loss`, and what was told of it.
        grad_norms: (n_steps,) float64 global gradient norm, NaN where unknown.
        incidents: from the flight recorder.
        info: model name, number of classes, optimizer, learning rates, versions, output facts, …
    """

    activations: Record | None = None
    gradients: Record | None = None
    params: Record | None = None
    losses: Floats | None = None
    valid: Sequence[dict[str, Any]] = ()
    grad_norms: Floats | None = None
    incidents: tuple[Incident, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def records(self) -> tuple[Record, ...]:
        """The records that are there: activations, gradients, params, in this order."""
        return tuple(r for r in (self.activations, self.gradients, self.params) if r is not None)

    @property
    def n_steps(self) -> int:
        """Optimizer steps covered: by the losses where they are known, else by the records."""
        ends = [int(r.steps[-1]) + 1 for r in self.records if len(r)]
        return max([0 if self.losses is None else len(self.losses), *ends])

    def __repr__(self) -> str:
        kinds = ", ".join(f"{len(r.names)} {r.kind}s" for r in self.records)
        return f"Run({self.n_steps} steps; {kinds or 'nothing recorded'})"


_SLOTS = {"activation": "activations", "gradient": "gradients", "param": "params"}


def as_run(source: Any) -> Run:
    """The `Run` of a Run, a Record (alone in it), a recorder, a Watcher or a Learner.

    Raises:
        ArgumentError: nothing of this kind can be read from `source`.
    """
    if isinstance(source, Run):
        return source
    if isinstance(source, Record):
        return Run(**{_SLOTS[source.kind]: source})  # type: ignore[arg-type]
    for name in ("run_record", "run", "record"):
        if callable(method := getattr(source, name, None)):
            return as_run(method())
    raise ArgumentError(
        f"a run was asked for, {type(source).__name__} was given. "
        "Give a Run, a Record, a Watcher, a Learner, or a recorder such as ActivationStats."
    )


def as_record(source: Any, *kinds: str) -> Record:
    """The first Record of one of `kinds` (default: any) in a Record, Run, recorder or driver.

    Raises:
        ArgumentError: `source` is none of these.
        OptionError: it holds no record of these kinds.
    """
    run = as_run(source)
    for kind in kinds or tuple(_SLOTS):
        if (record := getattr(run, _SLOTS[kind])) is not None:
            return record  # type: ignore[no-any-return]
    found = ", ".join(r.kind for r in run.records) or "none"
    recorders = {
        "activation": "ActivationStats",
        "gradient": "GradientStats",
        "param": "ParamStats",
    }
    wanted = kinds or tuple(_SLOTS)
    raise OptionError(
        f"a record of kind {' or '.join(wanted)} is needed, recorded are: {found}. "
        f"Train with {' or '.join(f'{recorders[k]}()' for k in wanted)}."
    )
