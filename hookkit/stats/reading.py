"""`LayerStats`: how recorded layers are read: as fastai's statistics, as v1's tensor, as pictures.

The base of `ActivationStats` and `GradientStats`. All of it reads `record()`.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor

from hookkit.errors import HookkitWarning, OptionError
from hookkit.records import Exports, Record
from hookkit.stats.stats_callback import StatsCallback
from hookkit.stats.stats_list import StatsList, listed


class LayerStats(Exports, StatsCallback):
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
            self._listed = record, listed(record, self._rows(record))
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
        """Means, stds and shares near zero of one layer over the records: an `L` of three."""
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
        """Indices of the units whose mean size is at most 0.025 of the layer's, over the window."""
        return self._units(layer, "dormant")

    def _units(self, layer: int | str, which: str) -> list[int]:
        if not self.options.window:
            who = type(self).__name__ if self.is_forward else "ActivationStats"
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

    def color_dim(
        self,
        layer: int | str | None = None,
        figsize: Any = None,
        ax: Any = None,
        *,
        page: int = 1,
    ) -> Any:
        """The colorful dimension of one layer, or of all: `plotting.color_dim`.

        Args:
            layer: a number in `names`, or a name; None draws all, 24 on a page.
            figsize: width and height in inches; default (10, 5), or what the page needs.
            ax: where to draw the one layer.
            page: of all layers, which 24: 1 draws the first ones.

        Returns:
            The Axes of one layer, or the Figure of all.

        Raises:
            OptionError: no histogram was recorded, there is no such page, or `ax` was given for all
                layers.
        """
        record = self._with_hist()  # before matplotlib is imported

        from hookkit import plotting
        from hookkit.plotting.figures import new_axes, new_figure

        if layer is None:
            figure = None if figsize is None or ax is not None else new_figure(None, *figsize)
            return plotting.color_dim(record, page=page, ax=ax, fig=figure)
        row = self._row(layer)  # before a figure is made
        if ax is None:
            ax = new_axes(None, *(figsize or (10, 5)))
        return plotting.color_dim(record, layer=row, page=page, ax=ax)

    def plot_layer_stats(self, layer: int | str) -> Any:
        """Mean, std and share near zero of one layer over steps: `plotting.plot_layer_stats`."""
        from hookkit import plotting

        return plotting.plot_layer_stats(self.record(), self._row(layer))

    def __repr__(self) -> str:
        stats = self.accumulator
        n = len(stats.history)
        return f"{type(self).__name__}({len(stats.names)} layers × {n})"
