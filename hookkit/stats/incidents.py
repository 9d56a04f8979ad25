"""How the flight recorder's memory is told: which module was the first, and what came before.

It builds on the norms in `tapes`. Nothing here is called before something was not finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit.records import Incident
from hookkit.stats.norm_history import NormHistory
from hookkit.stats.norms import local_values

LOSS, INPUT, FIRST = 0, 1, 2
"""Rows of the norms: the loss, the model's input, the first layer."""

_SPOILED = "Its own weights were not finite: the step before has spoiled them."
_SPOILED_BY_NOW = "Its own weights are not finite by now: this step or the one before spoiled them."


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
        ran = dict(zip(self.types, norms.order[at][FIRST:], strict=True))
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
