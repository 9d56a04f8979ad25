"""Norms of what layers gave in the last batches, and of gradients: one number each, on the device.

A norm is one read of the tensor and is not finite if any value is not.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit.hooks.entries import called, counts_for, is_exporting
from hookkit.hooks.snapshot import is_transforming, outside, unwrapped
from hookkit.moments import plain
from hookkit.moments.accumulator import enlist, new_token
from hookkit.nested import Inputs, named_leaves, tmap
from hookkit.recording.recording import RecordSwitch
from hookkit.stats.norms import local_values
from hookkit.stats.parameters import Named


class NormHistory:
    """Norms of the last batches: (n_batches, rows) float32 on the device, sizes on the host.

    Attributes:
        thread: whose forwards are recorded; None records every thread's.
    """

    thread: int | None = None

    def __init__(self, rows: int, n_batches: int, device: torch.device) -> None:
        self.at, self.device = 0, device
        self.sizes = np.zeros((n_batches, rows))
        self.order = np.full((n_batches, rows), -1)
        self.places: list[tuple[int, int, int]] = [(-1, 0, 0)] * n_batches
        with torch.inference_mode(False):
            self.norms = torch.zeros(n_batches, rows, dtype=torch.float32, device=device)
        self._cut()
        self.enlist()

    def _cut(self) -> None:
        self.cells = [list(row.unbind()) for row in self.norms.unbind()]

    def grow(self, rows: int) -> None:
        """Have `rows` rows, if there are fewer; the new ones have no past."""
        n = rows - self.norms.shape[1]
        if n <= 0:
            return
        self.sizes = np.pad(self.sizes, ((0, 0), (0, n)))
        self.order = np.pad(self.order, ((0, 0), (0, n)), constant_values=-1)
        with outside(), torch.inference_mode(False), torch.no_grad():
            self.norms = nn.functional.pad(self.norms, (0, n))
        self._cut()

    def enlist(self) -> None:
        """Make it known to compiled graphs."""
        self.token = new_token()
        self.id = enlist(self)

    def advance(self, step: int, epoch: int, iteration: int) -> None:
        """Begins the next batch."""
        self.at = (self.at + 1) % len(self.places)
        self.places[self.at] = step, epoch, iteration
        self.sizes[self.at], self.order[self.at] = 0, -1
        with outside():  # a forward inside of torch.func.grad begins a batch, too
            self.norms[self.at].zero_()
        self.seen = 0

    def see(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Add the tensor `t` to the norm of `row` in this batch."""
        if torch.compiler.is_compiling():
            if not is_exporting():
                torch.ops.hookkit.observe(t.detach(), self.token, self.id, row, leaf, path)
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
        cell, first = self.cells[self.at][row], self.sizes[self.at, row] == 0
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
        with torch.no_grad():  # in 16 bits the norm of finite gradients may be Inf
            wide = [g.float() if g.dtype.itemsize < 4 else g for _, _, g in found]
            norms = [n.real for n in torch._foreach_norm(wide)] if wide else []
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
