"""How recorded layers are read: as fastai's statistics, as v1's tensor, as pictures.

`LayerStats` is the base of `ActivationStats` and `GradientStats`. All of it reads `record()`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor

from hookkit.errors import OptionError, SelectionError, nearest, warn
from hookkit.recorders.step_recorder import StatsCallback
from hookkit.recorders.to_record import is_clamped
from hookkit.records import Record, Reportable


class StatsList(L):  # type: ignore[misc]
    """`stats[record][layer]["mean"]`: a list of records, each a list of dicts, by number or name.

    Attributes:
        names: of the layers, in one record.
    """

    names: tuple[str, ...] = ()

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, str):
            if i not in self.names:
                some = ", ".join(nearest(i, list(self.names)) or self.names[:5])
                there = f"Its layers: {some}" if some else "It is a list of records"
                raise SelectionError(
                    f"stats has no layer {i!r}. {there}. Write stats[record][layer], such as "
                    f"stats[-1][0]."
                )
            i = self.names.index(i)
        if isinstance(i, (int, np.integer)) and not -len(self) <= i < len(self):
            raise IndexError(
                f"stats[…] has {len(self)} entries, and {i} is none of them."
                + " Nothing was recorded: a recorder records while its model trains, in learn.fit "
                "or inside `with watch(model, opt, recorder) as w:`." * (not len(self))
            )
        return super().__getitem__(i)

    def tensor(self) -> Tensor:
        """(2, n_modules, n_records) float32: means and stds, fastai v1's `stats`."""
        rows = [[[layer[s] for layer in record] for record in self] for s in ("mean", "std")]
        n = len(self[0]) if len(self) else 0
        table = torch.tensor(rows, dtype=torch.float32, device="cpu").reshape(2, len(self), n)
        return table.transpose(1, 2).contiguous()

    def __repr__(self) -> str:
        if len(self) and isinstance(self[0], StatsList):  # L's writes out every number
            return f"StatsList({len(self)} records of {len(self[0])} layers)"
        return str(super().__repr__())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


class LayerStats(Reportable, StatsCallback):
    """How recorded layers are read; the base of `ActivationStats` and `GradientStats`."""

    _listed: tuple[Record, StatsList] | None = None

    @property
    def stats(self) -> StatsList:
        """Everything recorded, as in fastai, such as `stats[batch][layer]["mean"]`.

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
        """Return an `L` of one layer's means, stds and shares near zero over the records."""
        record, row = self.record(), self._row(layer)
        return L(L(record.value(s, row).tolist()) for s in ("mean", "std", "near_zero"))

    def hist(self, layer: int | str) -> Tensor:
        """(bins, n_records) float32: log(1 + count) of the values of one layer in each bin.

        Raises:
            OptionError: no histogram was recorded.
        """
        hist = self._with_hist().hist
        assert hist is not None
        return torch.from_numpy(np.log1p(hist[self._row(layer)])).float()

    def _with_hist(self) -> Record:
        record = self.record()
        if record.hist is None:
            who = type(self).__name__
            raise OptionError(f"{who} recorded no histogram. Make it with {who}(with_hist=True).")
        return record

    def tensor(self) -> Tensor:
        """(2, n_modules, n_records) float32: means and stds, fastai v1's `stats`."""
        return self.stats.tensor()

    def dead_units(self, layer: int | str) -> list[int]:
        """Indices of the units of one layer that were never above 0 over the last records.

        Raises:
            OptionError: units were not recorded.
        """
        if not self.tally.options.units:
            who = type(self).__name__ if self.is_forward else "ActivationStats"
            raise OptionError(
                f"{type(self).__name__} did not count dead units. Make it with {who}(units=True)."
            )
        row = self._row(layer)
        name, kind = self.record().names[row], self.record().types[row]
        dead = self.tally.dead(name)
        if dead is None or not is_clamped(self.tally.consumers, name, kind):
            warn(
                f'dead units of "{name}" cannot be listed: it did not run; or it is no ReLU, and '
                f"none alone reads it; or PyTorch does not show which layer is before it. Record "
                f"that layer too, or look at another one: `.names` lists all.",
            )
            return []
        units: list[int] = np.flatnonzero(dead).tolist()
        return units

    def color_dim(
        self,
        layer: int | str | None = None,
        figsize: Any = None,
        ax: Any = None,
    ) -> Any:
        """The colorful dimension of one layer, or of all: `plotting.color_dim`.

        Args:
            layer: a number in `names`, or a name; None draws the first 24 layers.
            figsize: width and height in inches; default (10, 5), or what the grid needs.
            ax: where to draw the one layer.

        Returns:
            The Axes of one layer, or the Figure of all.

        Raises:
            OptionError: no histogram was recorded, or `ax` was given for all layers.
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
        return f"{type(self).__name__}({len(self.tally.names)} layers × {len(self.tally.table)})"


def _listed(record: Record, rows: list[int]) -> StatsList:
    """`rows` of `record`, as a list of its steps."""
    tables = {name: table[rows].T.tolist() for name, table in record.values.items()}
    stats, names = StatsList(), tuple(record.names[row] for row in rows)
    for i in range(len(record)):
        each = ({name: table[i][j] for name, table in tables.items()} for j in range(len(rows)))
        layers = StatsList(each)
        layers.names = names
        if record.hist is not None:
            for layer, row in zip(layers, rows, strict=True):
                layer["hist"] = torch.from_numpy(record.hist[row, :, i].astype(np.float32))
        stats.append(layers)
    return stats
