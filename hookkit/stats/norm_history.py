"""Norms of what layers gave in the last batches, and of gradients: one number each, on the device.

A norm is one read of the tensor and is not finite if any value is not.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit.hooks.entries import called, counts_for
from hookkit.hooks.snapshot import is_transforming, outside, unwrapped
from hookkit.moments import plain
from hookkit.moments.graph_op import enlist, new_token, show_traced
from hookkit.nested import Inputs, named_leaves, tmap
from hookkit.recording import RecordSwitch
from hookkit.records import Incident
from hookkit.stats.parameters import Named, batched_norms, local_values


class NormHistory:
    """Norms of the last batches: (n_batches, rows) float32 on the device, sizes on the host.

    Attributes:
        thread: whose compiled graphs are recorded: that which made it.
    """

    def __init__(self, n_batches: int, device: torch.device, rows: int = 64) -> None:
        self.at, self.device, self.thread = 0, device, get_ident()
        self.sizes = np.zeros((n_batches, rows))
        self.order = np.full((n_batches, rows), -1)
        self.places: list[tuple[int, int, int]] = [(-1, 0, 0)] * n_batches
        with torch.inference_mode(False):
            self.norms = torch.zeros(n_batches, rows, dtype=torch.float32, device=device)
        self._cells: dict[int, list[Tensor]] = {}  # by slot, the norms as a tensor each
        self.token, self.id = new_token(), enlist(self)  # for compiled graphs

    def grow(self, rows: int) -> None:
        """Have at least `rows` rows; the new ones have no past."""
        if rows <= self.norms.shape[1]:
            return
        n = max(rows, 2 * self.norms.shape[1]) - self.norms.shape[1]
        self.sizes = np.pad(self.sizes, ((0, 0), (0, n)))
        self.order = np.pad(self.order, ((0, 0), (0, n)), constant_values=-1)
        with outside(), torch.inference_mode(False), torch.no_grad():
            self.norms = nn.functional.pad(self.norms, (0, n))
        self._cells = {}

    def advance(self, step: int, epoch: int, iteration: int) -> None:
        """Begins the next batch."""
        self.at = (self.at + 1) % len(self.places)
        self.places[self.at] = step, epoch, iteration
        self.sizes[self.at], self.order[self.at] = 0, -1
        with outside():  # a forward inside of torch.func.grad begins a batch, too
            self.norms[self.at].zero_()
            if self.at not in self._cells:
                self._cells[self.at] = list(self.norms[self.at].unbind())
        self.seen = 0

    def see(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Add the tensor `t` to the norm of `row` in this batch."""
        if torch.compiler.is_compiling():
            show_traced(self, row, leaf, path, t)
            return
        if is_transforming():
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

    def rms(self, columns: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """(len(columns), rows) float64 RMS; NaN also where a module did not run."""
        norms = self.norms.cpu().numpy().astype(np.float64)[columns]  # sync: after an incident
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(norms / np.sqrt(self.sizes[columns]))

    def past(self, at: int) -> list[int]:
        """The slots of the batches before the one in slot `at`, oldest first."""
        n = len(self.places)
        slots = [(at - i) % n for i in range((at - self.at - 1) % n, 0, -1)]
        return [i for i in slots if self.places[i][0] >= 0]


class GradNormHistory:
    """Norms of the parameters' gradients in the last batches, each on its own device.

    Attributes:
        norms: slot of the `NormHistory` → parameter → (class of its module, norm of its gradient).
        at: the slot of this batch.
    """

    def __init__(self) -> None:
        self.norms: dict[int, dict[str, tuple[str, Tensor]]] = {}
        self.at = 0
        self._of_parts: set[str] = set()  # whose gradients may be gone at the end of the step

    def advance(self, at: int) -> None:
        """Begins the next batch, in slot `at`."""
        self.at = at
        self.norms.pop(at, None)
        self._of_parts.clear()

    def note(self, parameters: list[Named], only: Container[int] | None = None) -> None:
        """The gradients as they are now.

        Args:
            parameters: of the model, by name.
            only: ids of those that an optimizer has stepped; later calls leave them as they were.
        """
        found = [
            (name, kind, local_values(p.grad))
            for name, kind, p in parameters
            if (name not in self._of_parts if only is None else id(p) in only)
            and p.grad is not None
            and (p.grad.is_floating_point() or p.grad.is_complex())
            and p.grad.numel()
        ]
        with torch.no_grad():
            norms = batched_norms([grad for _, _, grad in found])
        noted = self.norms.setdefault(self.at, {})
        for (name, kind, _), norm in zip(found, norms, strict=True):
            noted[name] = kind, norm
        if only is not None:
            self._of_parts.update(name for name, _, _ in found)

    def now(self) -> list[Tensor]:
        """The norms of this batch, those of one device together."""
        norms = [norm.float() for _, norm in self.norms.get(self.at, {}).values()]
        devices = {norm.device for norm in norms}
        return [torch.stack([n for n in norms if n.device == device]) for device in devices]


def norm_hook(switch: RecordSwitch, row: int, function: Any = None) -> Any:
    """A forward hook that shows the switch's target the tensors of the output, or of what the
    user's `function(m, i, o)` makes of it.
    """

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if switch.late or not counts_for(switch.thread, module):
            return
        seen = output
        if function is not None:
            inputs = tmap(Tensor.detach, Inputs(args, kwargs))
            seen = called(function, module, inputs, tmap(Tensor.detach, output))
        for leaf, (path, t) in enumerate(named_leaves(seen)):
            switch.target.see(row, leaf, path, t)

    return hook


def input_hook(switch: RecordSwitch, row: int) -> Any:
    """A forward-pre hook that shows the switch's target the tensors of the input."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if switch.late or not counts_for(switch.thread, module):
            return
        for leaf, (path, t) in enumerate(named_leaves((args, kwargs))):
            switch.target.see(row, leaf, path, t)

    return hook


# --- what was not finite

LOSS, INPUT, FIRST = 0, 1, 2
"""Rows of the norms: the loss, the model's input, the first layer."""

_SPOILED = "Its own weights were not finite: the step before has spoiled them."
_SPOILED_BY_NOW = "Its own weights are not finite now: this step or the one before spoiled them."


@dataclass(frozen=True)
class Memory:
    """What the flight recorder remembers of the last batches.

    Args:
        norms: norms of the loss, the input and the layers.
        types: name of each layer that was hooked → its class, in the order of rows.
        grads: slot of thenorms → parameter → (class of its module, norm of its gradient).
        parameters: (name, class of its module, parameter).
    """

    norms: NormHistory
    types: dict[str, str]
    grads: dict[int, dict[str, tuple[str, Tensor]]]
    parameters: list[tuple[str, str, nn.Parameter]]

    def incident(self, at: int, late: bool) -> Incident:
        """What was not finite in slot `at`; `late`: its step may have been made meanwhile."""
        norms = self.norms
        rms = norms.rms([at])[0]
        bad = [
            int(r) for r in np.argsort(norms.order[at], kind="stable") if _is_bad(norms, at, r, rms)
        ]
        if layers := [row for row in bad if row >= FIRST]:
            return self._of_layers(at, layers, INPUT in bad, late)
        grads = [(m, k) for m, (k, g) in self.grads.get(at, {}).items() if not _is_finite(g)]
        if grads and LOSS not in bad:
            return self._of_gradients(at, grads)
        return self._made(at, "loss", "", "", (), {}, "The layers' outputs are finite.")

    def _of_layers(self, at: int, rows: list[int], bad_input: bool, late: bool) -> Incident:
        past, names = self.norms.rms(self.norms.past(at)), list(self.types)
        history = {name: past[:, row] for row, name in enumerate(names, FIRST)}
        first, *others = (names[row - FIRST] for row in rows)
        name, note = first, ""
        weights = [p for p_name, _, p in self.parameters if _owner(p_name) == name]
        if bad_input:
            note = "The model's input was not finite: look at the data."
        elif not all(_is_finite(p) for p in weights):
            note = _SPOILED_BY_NOW if late else _SPOILED
        elif previous := self._ran_before(at, rows[0]):
            head = "Its weights are finite: if" if weights else "If"
            note = f"{head} its input was not, look at what runs between {previous} and it."
        return self._made(at, "activation", name, self.types[name], tuple(others), history, note)

    def _ran_before(self, at: int, row: int) -> str:
        """The name of the layer that ran just before the one in `row`, "" if none did."""
        order = self.norms.order[at]
        found = np.flatnonzero(order[FIRST:] == order[row] - 1)
        return list(self.types)[found[0]] if len(found) and order[row] > 0 else ""

    def _of_gradients(self, at: int, found: list[tuple[str, str]]) -> Incident:
        """The backward pass begins at the end: of the bad ones, the module that ran last."""
        norms = self.norms
        ran = dict(zip(self.types, norms.order[at][FIRST:], strict=False))  # rows to spare
        kinds = dict(reversed([(_owner(name), kind) for name, kind in found]))
        modules = sorted(kinds, key=lambda m: -ran.get(m, -1))
        history = {m: np.zeros(0) for m in modules}
        for slot in norms.past(at):
            squares = dict.fromkeys(modules, 0.0)
            for name, (_, norm) in self.grads.get(slot, {}).items():
                if _owner(name) in squares:
                    squares[_owner(name)] += float(norm) ** 2  # sync: after an incident
            history = {m: np.append(h, math.sqrt(squares[m])) for m, h in history.items()}
        first, *others = modules
        note = "The history is of gradient norms."
        return self._made(at, "gradient", first, kinds[first], tuple(others), history, note)

    def _made(
        self, at: int, kind: str, name: str, type_: str, others: Any, history: Any, note: str
    ) -> Incident:
        norms = self.norms
        steps = np.array([norms.places[i][0] for i in norms.past(at)], dtype=np.int64)
        return Incident(kind, name, type_, *norms.places[at], others, steps, history, note)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _is_finite(t: Tensor) -> bool:
    return bool(torch.isfinite(local_values(t)).all())  # sync: after an incident


def _is_bad(norms: NormHistory, at: int, row: Any, rms: Any) -> bool:
    return bool(norms.sizes[at, row] > 0 and not math.isfinite(rms[row]))
