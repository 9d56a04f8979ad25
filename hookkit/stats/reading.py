"""How recorded layers are read: as fastai's statistics, as v1's tensor, as pictures.

`LayerStats` is the base of `ActivationStats` and `GradientStats`. All of it reads `record()`.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor

from hookkit.errors import HookkitWarning, OptionError, SelectionError, nearest
from hookkit.records import Exports, Record, label
from hookkit.stats.showing import Table, number
from hookkit.stats.stats_callback import StatsCallback


class StatsList(L):  # type: ignore[misc]
    """`stats[batch][layer]["mean"]`: an `L` of records, each an `L` of dicts; and v1's tensor."""

    def tensor(self) -> Tensor:
        """(2, n_modules, n_batches) float32, mean and std on the first axis, as in fastai v1."""
        rows = [[[layer[s] for layer in batch] for batch in self] for s in ("mean", "std")]
        n = len(self[0]) if len(self) else 0
        table = torch.tensor(rows, dtype=torch.float32, device="cpu").reshape(2, len(self), n)
        return table.transpose(1, 2).contiguous()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # the list's own
        except AttributeError:
            if name.startswith("__") or not hasattr(Tensor, name):
                raise
            raise AttributeError(
                f"StatsList has no attribute {name!r}: it is a list of records, where fastai v1's "
                f"stats was a tensor. Use `stats.tensor().{name}`; it has the shape "
                f"(2, n_modules, n_records).",
                name=name,
                obj=self,
            ) from None

    def _table(self) -> Table | None:
        """Each layer's numbers in the first and the last record; None if these are no records."""
        if not len(self) or not all(map(_is_batch, (self[0], self[-1]))):
            return None
        first, last = self[0], self[-1]
        both = [first, last] if len(self) > 1 else [last]
        span = f"steps {first.step}–{last.step}, first → last" if len(self) > 1 else last._when()
        title = f"StatsList({_n(len(self), 'record')} of {_n(len(last), 'layer')}, {span})"
        return _table_of(title, both)

    def __repr__(self) -> str:
        if (table := self._table()) is not None:
            return table.text()
        if len(self):
            return str(super().__repr__())  # made from one, by map or itemgot
        return "StatsList(0 records)"

    def _repr_html_(self) -> str | None:
        table = self._table()
        return None if table is None else table.html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # L's writes out every number


class BatchStats(L):  # type: ignore[misc]
    """The layers of one record, by number or by name; and where it was made.

    Attributes:
        names: of the layers.
        types: the classes of their modules.
        step, epoch, iteration: optimizer step, epoch and training batch, 0-based.
    """

    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    step = epoch = iteration = -1

    def __getitem__(self, layer: Any) -> Any:
        if not isinstance(layer, str):
            return self._placed(super().__getitem__(layer), layer)
        if layer not in self.names:
            near = nearest(layer, self.names) or list(self.names[:3])
            listed = ", ".join(f'"{name}"' for name in near)
            raise SelectionError(f'no recorded layer is called "{layer}". Nearest: {listed}.')
        return self.items[self.names.index(layer)]

    def _placed(self, found: Any, index: Any) -> Any:
        """`found`, with names and place if it is some of these layers."""
        if isinstance(found, BatchStats):
            found.names = tuple(L(self.names)[index])
            found.types = tuple(L(self.types)[index])
            found.step, found.epoch, found.iteration = self.step, self.epoch, self.iteration
        return found

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.names)

    def _when(self) -> str:
        return f"step {self.step}, epoch {self.epoch}"

    def _table(self) -> Table | None:
        """Each layer's numbers; None if these are no layers of a record."""
        if not _is_batch(self):
            return None
        return _table_of(f"BatchStats({_n(len(self), 'layer')}, {self._when()})", [self])

    def __repr__(self) -> str:
        table = self._table()
        return str(super().__repr__()) if table is None else table.text()

    def _repr_html_(self) -> str | None:
        table = self._table()
        return None if table is None else table.html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


_SHOWN = ("mean", "std", "near_zero")


def _n(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _is_batch(batch: Any) -> bool:
    """Whether `batch` is a record's layers, and not what `map` or a slice without names gave."""
    if not isinstance(batch, BatchStats) or len(batch.names) != len(batch):
        return False
    return all(isinstance(layer, dict) and "mean" in layer for layer in batch.items)


def _table_of(title: str, batches: list[BatchStats]) -> Table:
    """fastai's three statistics of each layer, in each of `batches` with an arrow between."""
    last = batches[-1]
    shown = [s for s in _SHOWN if len(last) and s in last.items[0]]
    rest = [s for s in (last.items[0] if len(last) else ()) if s not in shown]
    rows = []
    for i, name in enumerate(last.names):
        kind = last.types[i] if i < len(last.types) else ""
        cells = [[number(batch.items[i][s]) for batch in batches] for s in shown]
        rows.append((label(name, kind), *map(" → ".join, cells)))
    return Table(title, ("layer", *shown), rows, f"also {' '.join(rest)}" if rest else "")


class LayerStats(Exports, StatsCallback):
    """How recorded layers are read; the base of `ActivationStats` and `GradientStats`."""

    _listed: tuple[Record, StatsList] | None = None

    @property
    def stats(self) -> StatsList:
        """Everything recorded, as fastai's: `stats[batch][layer]["mean" | "std" | "near_zero"]`.

        One entry per record and hooked module, in the order of `names`; NaN where a module did
        not run. All statistics of `record()` are there, and "hist", a (bins,) float tensor, if
        histograms were recorded. A module that gives several tensors shows the first here; the
        others are rows of their own in `record()`, called as `lstm[1][0]`.
        """
        record = self.record()
        if self._listed is None or self._listed[0] is not record:
            self._listed = record, _listed(record, self._rows(record))
        return self._listed[1]

    def _rows(self, record: Record) -> list[int]:
        return [record.layer(name) for name in self.names]

    def _row(self, layer: int | str) -> int:
        """The row of a module's number in `names`, or of a row's name."""
        record, n = self.record(), len(self.names)
        if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool) and -n <= layer < n:
            return record.layer(self.names[layer])
        return record.layer(layer)  # a name; or it raises

    def layer_stats(self, layer: int | str) -> L:
        """Means, stds and shares near zero of one layer over the records: an `L` of three `L`s."""
        record, row = self.record(), self._row(layer)
        return L(L(record.value(s, row).tolist()) for s in ("mean", "std", "near_zero"))

    def hist(self, layer: int | str) -> Tensor:
        """(bins, n_records) float32: log(1 + count) of the values of one layer in each bin.

        Raises:
            OptionError: no histogram was recorded.
        """
        record = self._with_hist()
        assert record.hist is not None
        return torch.from_numpy(np.log1p(record.hist[self._row(layer)])).float()

    def _with_hist(self) -> Record:
        record = self.record()
        if record.hist is None:
            raise OptionError(
                f"{type(self).__name__} recorded no histogram. "
                f"Make it with {type(self).__name__}(with_hist=True)."
            )
        return record

    def tensor(self) -> Tensor:
        """(2, n_modules, n_records) float32: means and stds, fastai v1's `stats`."""
        record = self.record()
        rows = self._rows(record)
        both = [record.value("mean")[rows], record.value("std")[rows]]
        return torch.from_numpy(np.stack(both)).float()

    def dead_units(self, layer: int | str) -> list[int]:
        """Indices of the units of one layer that are dead over the window.

        Of a ReLU, and of a layer that a ReLU alone reads: those that were never above 0. Of
        others: those that gave nothing but 0.

        Raises:
            OptionError: units were not recorded.
        """
        return self._units(layer, "dead")

    def dormant_units(self, layer: int | str) -> list[int]:
        """Indices of the units whose mean |x| is at most 0.025 of the layer's, over the window."""
        return self._units(layer, "dormant")

    def _units(self, layer: int | str, which: str) -> list[int]:
        if not self.options.window:
            who = type(self).__name__ if self.kind == "activation" else "ActivationStats"
            raise OptionError(
                f"{type(self).__name__} did not count dead and dormant units. "
                f"Make it with {who}(units=True)."
            )
        name = self.record().names[self._row(layer)]
        found = self.accumulator.units_now(name, which)
        if found is not None:
            return found.nonzero().flatten().tolist()  # sync: one per read-out
        warnings.warn(
            f'{which} units of "{name}" cannot be listed: it gave nothing to judge them by. It did '
            f"not run, or gives single numbers. Look at another layer: `.names` lists all.",
            HookkitWarning,
            stacklevel=3,
        )
        return []

    def color_dim(self, layer: int | str | None = None, figsize: Any = None, ax: Any = None) -> Any:
        """The colorful dimension of one layer, or of all: `plotting.color_dim`.

        Args:
            layer: a number in `names`, or a name; None draws every layer.
            figsize: width and height in inches; default (10, 5), or what all layers need.
            ax: where to draw the one layer.

        Returns:
            The Axes of one layer, or the Figure of all.

        Raises:
            OptionError: no histogram was recorded, or `ax` was given for every layer.
        """
        record = self._with_hist()  # before matplotlib is imported

        from hookkit import plotting
        from hookkit.plotting.figures import new_axes, new_figure

        if layer is None:
            figure = None if figsize is None or ax is not None else new_figure(None, *figsize)
            return plotting.color_dim(record, ax=ax, fig=figure)
        row = self._row(layer)  # before a figure is made
        if ax is None:
            ax = new_axes(None, *(figsize or (10, 5)))
        return plotting.color_dim(record, layer=row, ax=ax)

    def plot_layer_stats(self, layer: int | str) -> Any:
        """Mean, std and share near zero of one layer over steps: `plotting.plot_layer_stats`."""
        from hookkit import plotting

        return plotting.plot_layer_stats(self.record(), self._row(layer))

    def __repr__(self) -> str:
        stats = self.accumulator
        n = len(stats.history)
        return f"{type(self).__name__}({len(stats.names)} layers × {n})"


def _listed(record: Record, rows: list[int]) -> StatsList:
    tables = {name: table[rows].T.tolist() for name, table in record.values.items()}
    batches, names = [], tuple(record.names[row] for row in rows)
    types = tuple(record.types[row] for row in rows)
    for i in range(len(record)):
        layers = []
        for j, row in enumerate(rows):
            layer: dict[str, Any] = {name: table[i][j] for name, table in tables.items()}
            if record.hist is not None:
                layer["hist"] = torch.from_numpy(record.hist[row, :, i]).float()
            layers.append(layer)
        batch = BatchStats(layers)
        batch.names, batch.types, batch.step = names, types, int(record.steps[i])
        batch.epoch, batch.iteration = int(record.epochs[i]), int(record.iters[i])
        batches.append(batch)
    return StatsList(batches)
