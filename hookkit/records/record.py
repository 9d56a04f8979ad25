"""`Record`: what one recorder saw, one row per layer and one column per record.

`Tables` and `Exports` are the ways out as methods: of a Record, a Run, and of whatever else holds
records (recorders, Watcher, Learner).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.errors import ArgumentError, SelectionError, nearest
from hookkit.records import frames, logs, npz
from hookkit.records.values import Floats, Ints, Plain, label, read_source

if TYPE_CHECKING:
    from pandas import DataFrame

KINDS = ("activation", "gradient", "param")
AXES = ("steps", "epochs", "iters", "spans")
"""What a Record has for each of its columns."""

STATISTICS = ("count", "mean", "std", "rms", "min", "max", "near_zero", "zero", "nonfinite")
"""Of activations and gradients: `near_zero`, `zero` are fractions, `count`, `nonfinite` numbers."""

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


class Tables:
    """Methods of whatever holds records, which send them to other tools."""

    def to_df(self) -> DataFrame:
        """A tidy pandas DataFrame: step, epoch, layer, kind, statistic, value; one value a row.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return frames.to_df(self)

    def to_csv(self, path: str | Path) -> Path:
        """Writes the tidy table as CSV, by pandas; the path. Missing parent folders are made."""
        return frames.to_csv(self, path)

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
            layers: which layers and parameters, one name or glob or several: `"encoder"` takes
                what is inside it too; None takes all.

        Raises:
            ArgumentError: `writer` is none of these.
            OptionError: one of `statistics` or `layers` was recorded nowhere; a file has another
                ending.
        """
        logs.send(writer, read_source(self), {}, statistics, layers)


class Exports(Tables):
    """`Tables` and `save`. Not for a Learner, whose `save` writes the weights."""

    def save(self, path: str | Path) -> Path:
        """Writes what was recorded to one compressed `.npz` file, without pickles; the path.

        Of a Run, a Watcher or a Learner also losses, epochs, incidents and facts: `Run.load` reads
        all of it. Missing parent folders are made.
        """
        return npz.save(self, path)


@dataclass(frozen=True, repr=False, eq=False)
class Record(Plain, Exports):
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
        spans: (n,) int64, how many recorded steps each record merges (1 until the history halves).
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
        super().__post_init__()
        if self.kind not in KINDS:
            raise ArgumentError(
                f"Record(kind={self.kind!r}) is not a kind of record. "
                f"Use {', '.join(map(repr, KINDS))}."
            )
        rows, n = len(self.names), len(self.steps)
        for what, found, wanted in self._sizes(rows, n):
            if found != wanted:
                raise ArgumentError(
                    f"Record of {rows} names and {n} steps: {what} has the shape {found}. "
                    f"Give it the shape {wanted}."
                )

    def _sizes(self, rows: int, n: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """What has to fit together: its name, its shape, and the shape it should have."""
        yield "types", (len(self.types),), (rows,)
        for name in AXES[1:]:
            yield name, np.shape(getattr(self, name)), (n,)
        for name, table in self.values.items():
            yield f"values[{name!r}]", np.shape(table), (rows, n)
        if self.hist is not None:
            bins = np.size(self.edges) - 1 if self.edges is not None else np.shape(self.hist)[1]
            yield "hist", np.shape(self.hist), (rows, bins, n)

    def __len__(self) -> int:
        """How many records there are."""
        return len(self.steps)

    @property
    def records(self) -> tuple[Record, ...]:
        """`(self,)`: read as a Run, it is one of a single kind."""
        return (self,)

    def layer(self, layer: int | str) -> int:
        """The row of `layer`, an index (negative ones count from the end) or a name.

        Raises:
            SelectionError: there is no such row; the message has the nearest names.
        """
        if not self.names:
            raise SelectionError(
                f"layer {layer!r}: nothing has been recorded yet. "
                f"Train first: learn.fit(1), or your loop inside `with watch(…)`."
            )
        if isinstance(layer, str):
            return self._named(layer)
        n = len(self.names)
        whole = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
        if not whole or not -n <= layer < n:
            raise SelectionError(
                f"layer {layer}: {n} layers were recorded. "
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

    @property
    def labels(self) -> tuple[str, ...]:
        """Per row the name with the module's class, such as `"0 Conv2d"`."""
        return tuple(label(*row) for row in zip(self.names, self.types, strict=True))

    def value(self, statistic: str, layer: int | str | None = None) -> Floats:
        """One statistic: (n,) float64 of one layer, or (n_layers, n) of all.

        Raises:
            SelectionError: the statistic or the layer was not recorded.
        """
        if statistic not in self.values:
            cure = _CURES.get(statistic, "Use one of these.")
            if statistic in UNIT_STATISTICS and self.kind != "activation":
                cure = "`ActivationStats(units=True)` records it."
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


def grad_norms(params: Record, n_steps: int | None = None) -> Floats:
    """(n_steps,) float64: norm of all gradients together by optimizer step, NaN elsewhere.

    Where steps were merged it is the norm of the parameters' mean norms, at the first step.
    """
    table = params.value("grad_norm")
    last = int(params.steps[-1]) + 1 if len(params) else 0
    norms = np.full(max(last, n_steps or 0), np.nan)
    squares, seen = np.nansum(table**2, axis=0), np.isfinite(table).any(axis=0)
    norms[params.steps] = np.where(seen, np.sqrt(squares), np.nan)
    return norms[:n_steps]


_CURES = {
    **dict.fromkeys(UNIT_STATISTICS, "Record with `units=True` to have it."),
    **dict.fromkeys(PARAM_STATISTICS[:4], "`ParamStats` records it."),
}


def _some(names: Any, n: int = 12) -> str:
    listed = [f'"{name}"' for name in names]
    more = f" … ({len(listed)})" if len(listed) > n else ""
    return ", ".join(listed[:n]) + more
