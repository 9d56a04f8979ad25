"""The norms of the last batches, and the incident that they show: what a FlightRecorder keeps."""

from __future__ import annotations

import math
from collections import deque
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit.devices import sent
from hookkit.moments.graph_op import enlist, new_token, show_traced
from hookkit.moments.rows import plain
from hookkit.records import Incident
from hookkit.stats.parameters import named_parameters

LOSS, INPUT, FIRST = 0, 1, 2
"""Rows of the norms: the loss, the model's input, the first layer."""

NAMES = ["(loss)", "(input)"]

_SPOILED = "Its own weights were not finite: the step before has spoiled them."
_SPOILED_BY_NOW = "Its own weights are not finite now: this step or the one before spoiled them."


class Batch:
    """The norms of one batch.

    Attributes:
        place: step, epoch and iteration.
        outputs: row → its norm and number of values, in execution order.
        grads: name of each parameter → the norm of its gradient.
    """

    def __init__(self, *place: int) -> None:
        self.place: Any = place
        self.outputs: dict[int, tuple[Tensor, int]] = {}
        self.grads: dict[str, Tensor] = {}
        self._answer: tuple[Tensor, torch.Event | None] | None = None

    def ask(self) -> None:
        """Has the device answer whether all norms are finite, and send it."""
        norms = [norm for norm, _ in self.outputs.values()] + [*self.grads.values()]
        if norms:
            together = torch.stack([x.to(norms[0].device, torch.float32) for x in norms])
            self._answer = sent(together.isfinite().all())

    @property
    def finite(self) -> bool:
        """The answer."""
        if self._answer is None:
            return True
        answer, arrived = self._answer
        if arrived is not None:
            arrived.synchronize()  # sync: with "skip", or for the batch before this one
        return bool(answer)

    def rms(self, row: int) -> float:
        """Of the outputs of a layer; NaN if it did not run."""
        norm, n = self.outputs.get(row, (math.nan, 1))
        return float(norm) / math.sqrt(n)  # sync: after an incident

    def grad_norm(self, module: str) -> float:
        """The norm of the gradients of a module's parameters together."""
        return math.hypot(*(float(g) for name, g in self.grads.items() if _owner(name) == module))


class Memory:
    """The last batches, and the `see` that hooks and compiled graphs call."""

    def __init__(self, n_batches: int) -> None:
        self.batches: deque[Batch] = deque(maxlen=n_batches)
        self.names, self.types = [*NAMES], ["", ""]
        self.thread, self.id, self.token = get_ident(), enlist(self), new_token()

    def row(self, name: str, kind: str) -> int:
        """The row of a layer. That of one that has left the model keeps its past."""
        if name not in self.names[FIRST:]:
            self.names.append(name)
            self.types.append(kind)
        row = self.names.index(name, FIRST)
        self.types[row] = kind
        return row

    def see(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Adds a tensor to the norm of a layer, which may run several times in a batch."""
        if torch.compiler.is_compiling():
            show_traced(self, row, leaf, path, t)
        elif t.is_floating_point() and (values := plain(t)) is not None and values.numel():
            t = values
            wide = t.dtype if t.itemsize > 2 else torch.float32
            norm = torch.linalg.vector_norm(t.to(wide) if t.itemsize < 2 else t, dtype=wide)
            outputs = self.batches[-1].outputs
            before, n = outputs.get(row, (None, 0))
            if before is not None:
                norm = torch.hypot(before.to(norm), norm)
            outputs[row] = norm, n + t.numel()

    def incident(self, batch: Batch, model: nn.Module, late: bool) -> Incident:
        """What was not finite in `batch`; `late`: its step may have been made meanwhile."""
        past = [b for b in self.batches if b.place[2] < batch.place[2]]
        bad = [row for row in batch.outputs if not math.isfinite(batch.rms(row))]
        rows = [row for row in bad if row >= FIRST]
        names, history = [self.names[row] for row in rows], dict[str, Any]()
        if rows:
            kind, note = "activation", self._why(batch, rows[0], INPUT in bad, model, late)
            for row, layer in enumerate(self.names[FIRST:], FIRST):
                history[layer] = np.array([b.rms(row) for b in past])
        elif LOSS in bad:
            kind, note = "loss", "The layers' outputs are finite."
        else:
            kind, note = "gradient", "The history is of gradient norms."
            names = self._owners(batch)
            history = {name: np.array([b.grad_norm(name) for b in past]) for name in names}
        name, *others = names or [""]
        types = {_owner(key): type_ for key, type_, _ in named_parameters(model)}
        types |= zip(self.names[FIRST:], self.types[FIRST:], strict=True)
        steps = np.array([b.place[0] for b in past], np.int64)
        at = dict(zip(("step", "epoch", "iter"), batch.place, strict=True))
        past_of: Any = {"others": tuple(others), "steps": steps, "history": history}
        return Incident(kind, name, types.get(name, ""), **at, **past_of, note=note)

    def _owners(self, batch: Batch) -> list[str]:
        """Modules with a bad gradient. The backward begins at the end: the last to run is first."""
        ran = {self.names[row]: i for i, row in enumerate(batch.outputs)}
        owners = {_owner(n) for n, norm in batch.grads.items() if not math.isfinite(float(norm))}
        return sorted(owners, key=lambda name: (-ran.get(name, -1), name))

    def _why(self, batch: Batch, row: int, bad_input: bool, model: nn.Module, late: bool) -> str:
        """What may have made the output of the layer in `row` not finite, in a sentence."""
        if bad_input:
            return "The model's input was not finite: look at the data."
        own = [p for n, _, p in named_parameters(model) if _owner(n) == self.names[row]]
        if not all(bool(p.isfinite().all()) for p in own):  # sync: after an incident
            return _SPOILED_BY_NOW if late else _SPOILED
        order = [r for r in batch.outputs if r >= FIRST]
        if not (at := order.index(row)):
            return ""
        head = "Its weights are finite: if" if own else "If"
        before = self.names[order[at - 1]]
        return f"{head} its input was not, look at what runs between {before} and it."


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]
