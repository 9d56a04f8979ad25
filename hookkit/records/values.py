"""What all records share: equality of plain values, and the ways out to other tools."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hookkit.health import Diagnosis

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are equal in every part; NaN equals NaN.

    >>> same({"x": (np.ones(2), np.nan)}, {"x": (np.ones(2), np.nan)}), same([1, 2], [1, 3])
    (True, False)
    """
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        floats = all(np.asarray(x).dtype.kind in "fc" for x in (a, b))
        return np.array_equal(a, b, equal_nan=floats)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


class Plain:
    """Equal to another of its class if all its parts are: arrays too, and NaN equals NaN."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and same(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]  # it holds arrays


class Views:
    """A whole run looked at: what is wrong with it, its picture, its page."""

    def diagnose(self) -> Diagnosis:
        """What is wrong with the run, if anything: see `hookkit.health.diagnose`."""
        from hookkit.health import diagnose

        return diagnose(self)

    def plot(self, **options: Any) -> Any:
        """The whole run at a glance, a Figure: see `hookkit.plotting.plot_run`."""
        from hookkit.plotting import plot_run

        return plot_run(self, **options)

    def report(self, path: str | Path | None = None, **options: Any) -> Path:
        """Writes one HTML page of the run, and returns its path: see `hookkit.report`."""
        from hookkit.pages import report

        return report(self, path, **options)


class Tables:
    """What can be read as records goes to other tools: see `hookkit.records`."""

    def to_df(self) -> Any:
        """A tidy pandas DataFrame: step, epoch, layer, kind, statistic, value."""
        from hookkit.records import frames

        return frames.to_df(self)

    def to_csv(self, path: str | Path) -> Path:
        """Writes the tidy table as CSV; the path."""
        from hookkit.records import frames

        return frames.to_csv(self, path)

    def log_to(self, writer: Any, *, statistics: Iterable[str] | None = None) -> None:
        """Sends scalars and histograms to a TensorBoard `SummaryWriter`: what it has not got yet.

        So it can be called after each epoch; see `records.log_to`.
        """
        from hookkit.records import loggers

        loggers.log_to(writer, self, statistics=statistics)

    def compare(self, other: Any, statistic: str = "rms") -> Any:
        """This run and another side by side, a DataFrame by layer: see `records.compare`."""
        from hookkit.records import frames

        return frames.compare(self, other, statistic)


class Exports(Tables):
    """… and to a file that comes back. Not a Learner: its `save` writes the weights."""

    def save(self, path: str | Path) -> Path:
        """Writes what was recorded to one `.npz` file, for `Run.load`; the path."""
        from hookkit.records import files

        return files.save(self, path)
