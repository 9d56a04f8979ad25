"""`Run`: everything known of one training; `Incident`: its first NaN or Inf; and how to get one.

`as_run` makes a Run of any source, `Run.load` of a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.errors import OptionError
from hookkit.records import npz
from hookkit.records.joining import SLOTS, joined_fields
from hookkit.records.record import Exports, Record
from hookkit.records.values import Floats, Ints, Plain, no_records, read_source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hookkit.diagnosis import Diagnosis


@dataclass(frozen=True, eq=False)
class Incident(Plain):
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


class Views:
    """Methods of whatever holds a whole run: what is wrong with it, its picture, its page.

    These packages stand above this one, and are imported when a method is called.
    """

    def diagnose(self) -> Diagnosis:
        """What is wrong with the run, if anything: see `hookkit.diagnosis.diagnose`."""
        from hookkit.diagnosis import diagnose

        return diagnose(self)

    def plot(self, **options: Any) -> Figure:
        """The whole run at a glance, a Figure: see `hookkit.plotting.plot_run`."""
        from hookkit.plotting import plot_run

        return plot_run(self, **options)

    def report(self, path: str | Path | None = None, **options: Any) -> Path:
        """Writes one HTML page of the run, and returns its path: see `hookkit.report`."""
        from hookkit.pages import report

        return report(self, path, **options)


@dataclass(frozen=True, repr=False, eq=False)
class Run(Plain, Exports, Views):
    """Everything known of one training run: what a diagnosis, a picture or a report reads.

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

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """The run that `save` wrote, equal in every value: to diagnose, draw, report or compare.

        Raises:
            OptionError: the file is not one of `save`'s, or is damaged.
        """
        with npz.opened(path) as (records, fields):
            slots: dict[str, Any] = {SLOTS[each["kind"]]: Record(**each) for each in records}
            incidents = tuple(Incident(**each) for each in fields.pop("incidents"))
            return cls(**slots, incidents=incidents, **fields)

    @property
    def records(self) -> tuple[Record, ...]:
        """Those of activations, gradients, params that are there, in this order."""
        return tuple(r for r in (self.activations, self.gradients, self.params) if r is not None)

    @property
    def n_steps(self) -> int:
        """Optimizer steps made, counted from step 0 of the training; as far as they are known."""
        series = [len(values) for values in (self.losses, self.grad_norms) if values is not None]
        lasts = [int(r.steps[-1]) + 1 for r in self.records if len(r)]
        return max([int(self.info.get("n_steps", 0)), *series, *lasts])

    def __add__(self, later: Any) -> Run:
        """Join this run and a later one of the same model (a Run, or what `as_run` takes).

        If `later` begins with step 0, its steps, epochs and batches are counted on from this run's;
        epochs that `fit(…, start_epoch=n)` has numbered keep their numbers. If it begins with the
        step after this run's last one (`info["first_step"]`), as a library that resumes numbers its
        steps, steps and epochs keep their numbers.

        Raises:
            OptionError: they were recorded with other options; or `later` begins anywhere else,
                such as at a checkpoint before the end of this run: read the two one by one.
        """
        return Run(**joined_fields(self, as_run(later)))

    @property
    def n_epochs(self) -> int:
        """Epochs that were begun, one more than the greatest number of one."""
        known = [int(row["epoch"]) for row in self.valid if "epoch" in row]
        return max([-1, *known, *(int(r.epochs[-1]) for r in self.records if len(r))]) + 1

    def __repr__(self) -> str:
        kinds = ", ".join(f"{len(r.names)} {r.kind}s" for r in self.records)
        alone = f"; {self.info['rank']} alone" if "rank" in self.info else ""
        return f"Run({self.n_steps} steps; {kinds or 'nothing recorded'}{alone})"


_RECORDERS = {"activation": "ActivationStats", "gradient": "GradientStats", "param": "ParamStats"}


def as_run(source: Any) -> Run:
    """The `Run` of a Run, Records (one of a kind), a recorder, a Watcher or a Learner.

    Raises:
        ArgumentError: nothing of this kind can be read from `source`.
    """
    if isinstance(source, (list, tuple)):
        by_kind = {SLOTS[r.kind]: r for r in source if isinstance(r, Record)}
        if not source or len(by_kind) < len(source):
            raise no_records(source)
        return Run(**by_kind)  # type: ignore[arg-type]
    found = read_source(source)
    return found if isinstance(found, Run) else as_run([found])


def by_module(record: Record) -> Record:
    """`record` with each further output of a module (`lstm[1][0]`) next to its first.

    As recorded they come last, as they were found when the modules ran.
    """
    owners = [name.partition("[")[0] for name in record.names]
    first = {owner: i for i, owner in reversed([*enumerate(owners)])}
    order = sorted(range(len(owners)), key=lambda i: first[owners[i]])
    if record.kind == "param" or order == sorted(order):
        return record
    by_row = {k: v for k, v in record.meta.items() if isinstance(v, list) and len(v) == len(order)}
    return replace(
        record,
        names=tuple(record.names[i] for i in order),
        types=tuple(record.types[i] for i in order),
        values={key: table[order] for key, table in record.values.items()},
        hist=None if record.hist is None else record.hist[order],
        meta={**record.meta, **{k: [v[i] for i in order] for k, v in by_row.items()}},
    )


def in_order(run: Run) -> Run:
    """`run` with the layers of each record as they follow each other in the model."""
    activations = None if run.activations is None else by_module(run.activations)
    gradients = None if run.gradients is None else by_module(run.gradients)
    return replace(run, activations=activations, gradients=gradients)


def as_record(source: Any, *kinds: str) -> Record:
    """The first Record of one of `kinds` (default: any) in a Record, Run, recorder or driver.

    Raises:
        ArgumentError: `source` is none of these.
        OptionError: it holds no record of these kinds.
    """
    run = as_run(source)
    for kind in kinds or SLOTS:
        if (record := getattr(run, SLOTS[kind])) is not None:
            return record  # type: ignore[no-any-return]
    found, wanted = ", ".join(r.kind for r in run.records) or "none", kinds or tuple(SLOTS)
    raise OptionError(
        f"a record of kind {' or '.join(wanted)} is needed; recorded: {found}. "
        f"Train with {' or '.join(f'{_RECORDERS[k]}()' for k in wanted)}."
    )
