"""Norms of the last batches, one number each, on the device; and the incident that they show.

A norm is one read of the tensor and is not finite if any value is not. When one is not, the norms
of that batch and of those before say where it began.
"""

from __future__ import annotations

import math
from collections.abc import Container
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit.hooks.snapshot import is_transforming, outside, unwrapped
from hookkit.moments.graph_op import enlist, new_token, show_traced
from hookkit.moments.moments import plain
from hookkit.records import Incident
from hookkit.stats.param_norms import grad_norms_by_id, local_values
from hookkit.stats.parameters import Named

LOSS, INPUT, FIRST = 0, 1, 2
"""Rows of the norms: the loss, the model's input, the first layer."""

_SPOILED = "Its own weights were not finite: the step before has spoiled them."
_SPOILED_BY_NOW = "Its own weights are not finite now: this step or the one before spoiled them."


class NormHistory:
    """Norms of the last batches: of the loss, the input, what layers gave, and of gradients.

    Attributes:
        types: name of each layer → its class, in the order of rows.
        norms: (n_batches, rows) float32 on the device, with rows to spare.
        sizes: (n_batches, rows) how many values that were, 0 where a layer did not run.
        order: (n_batches, rows) the place of a layer among those that ran, -1 where it did not.
        places: of each batch its step, epoch and iteration.
        grads: batch → parameter → (class of its module, norm of its gradient on its own device).
        at: the slot of this batch.
        thread: whose compiled graphs are recorded: that which made it.
    """

    def __init__(self, n_batches: int, device: torch.device, rows: int = 64) -> None:
        self.at, self.seen, self.device, self.thread = 0, 0, device, get_ident()
        self.types: dict[str, str] = {}
        self.sizes = np.zeros((n_batches, rows))
        self.order = np.full((n_batches, rows), -1)
        self.places: list[tuple[int, int, int]] = [(-1, 0, 0)] * n_batches
        self.grads: dict[int, dict[str, tuple[str, Tensor]]] = {}
        self._of_parts: set[str] = set()  # whose gradients may be gone at the end of the step
        with torch.inference_mode(False):
            self.norms = torch.zeros(n_batches, rows, dtype=torch.float32, device=device)
        self._cells: dict[int, list[Tensor]] = {}  # by slot, the norms as a tensor each
        self.token, self.id = new_token(), enlist(self)  # for compiled graphs

    def row(self, name: str, kind: str) -> int:
        """The row of a layer. That of one that has left the model keeps its past."""
        types, n = {**self.types, name: kind}, self.norms.shape[1]
        if FIRST + len(types) > n:
            self.sizes = np.pad(self.sizes, ((0, 0), (0, n)))
            self.order = np.pad(self.order, ((0, 0), (0, n)), constant_values=-1)
            with outside(), torch.inference_mode(False), torch.no_grad():
                self.norms = nn.functional.pad(self.norms, (0, n))
            self._cells = {}
        self.types = types
        return FIRST + list(types).index(name)

    def advance(self, step: int, epoch: int, iteration: int) -> None:
        """Begins the next batch."""
        self.at, self.seen = (self.at + 1) % len(self.places), 0
        self.places[self.at] = step, epoch, iteration
        self.sizes[self.at], self.order[self.at] = 0, -1
        self.grads.pop(self.at, None)
        self._of_parts.clear()
        with outside():  # a forward inside of torch.func.grad begins a batch, too
            self.norms[self.at].zero_()
            if self.at not in self._cells:
                self._cells[self.at] = list(self.norms[self.at].unbind())

    # --- taking norms

    def see(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Adds the tensor `t` to the norm of `row` in this batch."""
        if torch.compiler.is_compiling():
            show_traced(self, row, leaf, path, t)
        elif is_transforming():
            inner = unwrapped(t)
            with outside():
                self._see(row, inner)
        else:
            self._see(row, t)

    def _see(self, row: int, t: Tensor) -> None:
        x = plain(t)
        if x is None or not x.is_floating_point() or not x.numel():
            return
        x = x.float() if x.dtype.itemsize < 2 else x  # float8 knows no arithmetic
        cell, first = self._cells[self.at][row], self.sizes[self.at, row] == 0
        dtype = torch.promote_types(x.dtype, torch.float32)
        if first and x.device == self.device and dtype is cell.dtype:
            torch.linalg.vector_norm(x, dtype=dtype, out=cell)
        else:
            norm = torch.linalg.vector_norm(x, dtype=dtype).to(cell)
            cell.copy_(norm if first else torch.hypot(cell, norm))
        if first:
            self.order[self.at, row], self.seen = self.seen, self.seen + 1
        self.sizes[self.at, row] += x.numel()

    def see_grads(self, parameters: list[Named], only: Container[int] | None = None) -> None:
        """Takes the norms of the gradients as they are now.

        Args:
            parameters: of the model, by name.
            only: ids of those that an optimizer has stepped; later calls leave them as they were.
        """
        chosen = [
            one
            for one in parameters
            if (one[0] not in self._of_parts if only is None else id(one[2]) in only)
        ]
        norms = grad_norms_by_id(p for _, _, p in chosen)
        found = {name: (kind, norms[id(p)]) for name, kind, p in chosen if id(p) in norms}
        self.grads.setdefault(self.at, {}).update(found)
        if only is not None:
            self._of_parts.update(found)

    def finite(self) -> Tensor:
        """0-d bool on the device: no norm of this batch is NaN or Inf."""
        fine = torch.isfinite(self.norms[self.at]).all()
        norms = [norm for _, norm in self.grads.get(self.at, {}).values()]
        for device in {norm.device for norm in norms}:
            some = torch.stack([norm for norm in norms if norm.device == device])
            fine = fine & torch.isfinite(some).all().to(fine.device)
        return fine

    # --- what was not finite

    def incident(self, at: int, parameters: list[Named], late: bool) -> Incident:
        """What was not finite in slot `at`; `late`: its step may have been made meanwhile."""
        order, rms = np.argsort(self.order[at], kind="stable"), self._rms([at])[0]
        bad = [int(r) for r in order if self.sizes[at, r] > 0 and not math.isfinite(rms[r])]
        layers = [row for row in bad if row >= FIRST]
        if layers:
            first, *others = (list(self.types)[row - FIRST] for row in layers)
            past = self._rms(self._before(at))
            history = {name: past[:, row] for row, name in enumerate(self.types, FIRST)}
            weights = [p for name, _, p in parameters if _owner(name) == first]
            note = self._why(at, layers[0], INPUT in bad, weights, late)
            return self._made(at, "activation", first, self.types[first], others, history, note)
        grads = [(m, k) for m, (k, g) in self.grads.get(at, {}).items() if not _is_finite(g)]
        if grads and LOSS not in bad:
            return self._of_gradients(at, grads)
        return self._made(at, "loss", "", "", [], {}, "The layers' outputs are finite.")

    def _why(
        self, at: int, row: int, bad_input: bool, weights: list[nn.Parameter], late: bool
    ) -> str:
        """What may have made the output of the layer in `row` not finite, in a sentence."""
        if bad_input:
            return "The model's input was not finite: look at the data."
        if not all(_is_finite(p) for p in weights):
            return _SPOILED_BY_NOW if late else _SPOILED
        order = self.order[at]
        before = np.flatnonzero(order[FIRST:] == order[row] - 1)
        if not len(before) or order[row] <= 0:
            return ""
        head, previous = "Its weights are finite: if" if weights else "If", list(self.types)
        return f"{head} its input was not, look at what runs between {previous[before[0]]} and it."

    def _of_gradients(self, at: int, found: list[tuple[str, str]]) -> Incident:
        """The backward pass begins at the end: of the bad ones, the module that ran last."""
        ran = dict(zip(self.types, self.order[at][FIRST:], strict=False))
        kinds = dict(reversed([(_owner(name), kind) for name, kind in found]))
        first, *others = modules = sorted(kinds, key=lambda m: -ran.get(m, -1))
        past = [self._grad_norms(i, modules) for i in self._before(at)]
        history = {m: np.array([norms[m] for norms in past]) for m in modules}
        note = "The history is of gradient norms."
        return self._made(at, "gradient", first, kinds[first], others, history, note)

    def _grad_norms(self, at: int, modules: list[str]) -> dict[str, float]:
        """The norm of the gradients of each module's parameters together, in slot `at`."""
        norms = dict.fromkeys(modules, 0.0)
        for name, (_, norm) in self.grads.get(at, {}).items():
            if (owner := _owner(name)) in norms:
                norms[owner] = math.hypot(norms[owner], float(norm))  # sync: after an incident
        return norms

    def _made(
        self, at: int, kind: str, name: str, type_: str, others: Any, history: Any, note: str
    ) -> Incident:
        steps = np.array([self.places[i][0] for i in self._before(at)], dtype=np.int64)
        return Incident(kind, name, type_, *self.places[at], tuple(others), steps, history, note)

    def _before(self, at: int) -> list[int]:
        """The slots of the batches before the one in slot `at`, oldest first."""
        n = len(self.places)
        slots = [(at - i) % n for i in range((at - self.at - 1) % n, 0, -1)]
        return [i for i in slots if self.places[i][0] >= 0]

    def _rms(self, slots: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """(len(slots), rows) float64 RMS; NaN also where a module did not run."""
        norms = self.norms.cpu().numpy().astype(np.float64)[slots]  # sync: after an incident
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(norms / np.sqrt(self.sizes[slots]))


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _is_finite(t: Tensor) -> bool:
    return bool(torch.isfinite(local_values(t)).all())  # sync: after an incident
