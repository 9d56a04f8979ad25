"""`ParamStats`: how large weights, gradients and updates are, for any optimizer.

The true update, not learning rate times gradient: the weights are copied before a recorded step and
subtracted after it (`param_norms.WeightCopies`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit import ranks
from hookkit.callbacks.callback import Callback
from hookkit.checks import check_number
from hookkit.recorders.param_norms import WeightCopies, arriving, grad_norms_by_id, local_values
from hookkit.recorders.parameters import Turns, idle_parameters, named_parameters
from hookkit.recorders.step_recorder import from_all_ranks
from hookkit.recorders.step_table import Numbers, StepTable, sums
from hookkit.records import Record, Reportable, grad_norms

_FIELDS = ("weight", "grad", "update", "ratio", "bad", "n", "n_grad", "lr", "n_lr")
_OF_TENSOR = ("ndim", "numel", "shape", "requires_grad", "dtype")
_FACTS = (*_OF_TENSOR, "in_optimizer", "optimizer", "group", "weight_decay")


class ParamStats(Reportable, Callback):
    """Weight norm, gradient norm, update norm and the update:weight ratio of every parameter.

    `update_ratio` is `|w_after − w_before| / |w_before|`, whatever the optimizer; about 1e-3 is
    healthy for matrices (cs231n, Karpathy). `grad_norm` is of the gradient that the step used: NaN
    where the parameter's optimizer did not step (a GAN's other player; one not seen yet). `lr` is
    the learning rate of its group at that step. A parameter has moved if a recorded step changed
    it. One record per recorded step, merged to means when the memory (10 MB) is full.

    Costs a copy of the weights, and about three reads of them in each recorded step.

    Args:
        every: records every n-th optimizer step, beginning with the first of each fit.

    Raises:
        OptionError: `every` is below 1.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=ParamStats(every=2))
    >>> with learn.no_logging(): learn.fit(1)
    >>> record = learn.param_stats.record()
    >>> record.names, len(record), bool((record.value("update_ratio") > 0).all())
    (('a', 'b'), 5, True)
    """

    order = -20
    run_valid = False

    def __init__(self, every: int | None = None) -> None:
        if every is not None:
            every = check_number("ParamStats", "every", every, 1, whole=True)
        self.every, self.table = every, StepTable(params=sums(len(_FIELDS)))
        self._n = 0  # records so far
        self._facts: dict[str, dict[str, Any]] = {}  # by name, in the order of rows
        self._constant: dict[str, Any] = {}
        self._never: set[str] | None = None  # names whose optimizer has made no step so far
        self._written: set[str] = set()  # names that were written to, in fits that are over
        # with the number of records that they are of
        self._own: tuple[int, Record] | None = None
        self._whole: tuple[int, Record] | None = None
        self._clear()

    def _clear(self) -> None:
        self._first_step, self._n_copied = 0, -1  # of the fit; and whose weights were copied early
        self._turns = Turns()
        self._live: dict[str, nn.Parameter] = {}  # of the step under way, if it is recorded
        self._parts: dict[int, Tensor] = {}  # norms of gradients that may be gone at the end
        self._copies = WeightCopies()
        self._held: list[Any] = []  # the parameters of the model, and their names and classes
        self._named: list[Any] = []
        self._trained: Any = None  # by whom and which, when the facts were learnt
        self._versions: dict[str, int] = {}  # how often each had been written when first seen

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return list(self._facts)

    @property
    def types(self) -> list[str]:
        """Class names of the modules that own them."""
        return [facts["type"] for facts in self._facts.values()]

    def before_fit(self) -> None:
        """Begins to count steps; what was recorded before stays."""
        if self.learn.fitting:
            self._clear()
            self._first_step = self.learn.n_steps

    def before_step(self) -> None:
        """Copies the weights, if this step is recorded."""
        if not (self.learn.in_closure and self._n_copied == self.learn.n_steps):
            self._copy()

    def _before_closure(self) -> None:
        """Copies the weights before a step that evaluates a closure: SAM has changed them there."""
        self._copy()
        self._n_copied = self.learn.n_steps

    def _copy(self) -> None:
        self._live, self._parts = {}, {}
        if (self.learn.n_steps - self._first_step) % (self.every or 1):
            return
        held = [(name, id(p)) for name, p in self.learn.model.named_parameters()]
        if held != self._held:  # walking modules for their classes takes longer
            self._held, self._named = held, list(named_parameters(self.learn.model))
        live = {name: p for name, _, p in self._named}
        for name, p in live.items():
            # Private: `_version`, the counter by which autograd knows of changes in place (since
            # 0.4). Without it a parameter that moves between the records alone seems to stay.
            self._versions.setdefault(name, p._version)
        # layers are thawed, groups added; a loop's optimizers become known one by one
        n_groups = [len(opt.param_groups) for opt in self.learn.opts]
        trained = [*self.learn.opts], n_groups, [p.requires_grad for p in live.values()]
        if self._copies.take(live) or self._trained != trained:
            self._learn_facts()
            self._trained = trained
        if not self._n:
            many = {name: t for name, p in live.items() if (t := local_values(p)).numel() > 1}
            self._constant = {name: (t == t.flatten()[0]).all() for name, t in many.items()}
        self._live = live

    def _learn_facts(self) -> None:
        groups = [(opt, g) for opt in self.learn.opts for g in opt.param_groups]
        owned = {id(p): i for i, (_, g) in enumerate(groups) for p in g["params"]}
        facts = {**self._facts}
        for name, kind, p in self._named:
            at = owned.get(id(p))
            opt, group = (None, {}) if at is None else groups[at]
            facts[name] = {
                "type": kind,
                "shape": (p.numel(),) if p.is_nested else tuple(p.shape),
                "ndim": p.ndim,
                "numel": p.numel(),
                "requires_grad": p.requires_grad,
                "in_optimizer": at is not None,
                "optimizer": "" if opt is None else type(opt).__name__,
                "group": at,
                "weight_decay": float(group.get("weight_decay") or 0.0),
                "dtype": str(p.dtype),
                "sharded": any(s.is_shard() for s in getattr(p, "placements", ())),
            }
        self._facts = facts

    def after_step(self) -> None:
        """Measures the step."""
        live, self._live = self._live, {}
        if not self.learn.stepped:
            return
        self._turns.see(self, bool(live))
        if live:
            moved, grads = arriving(self._copies.moved(live)), arriving(self._grads_of(live))
            rates = self._rates(live)
            place = self.learn.n_steps - 1, self.learn.epoch, self.learn.train_iter
            finds = self.learn.finds_opts and not self._n
            self._n += 1
            names = self.names
            # without `self`, which holds the table
            self.table.later(place, lambda: _numbers(names, moved(), grads(), rates, finds))

    def _grads_of(self, live: dict[str, nn.Parameter]) -> list[tuple[list[str], Tensor]]:
        """Names, and (1, names) norms of the gradients that the step used, for each device."""
        parts, self._parts = self._parts, {}
        idle = idle_parameters(self.learn, live.values())
        rest = {name for name, p in live.items() if id(p) in idle}
        self._never = rest if self._never is None else self._never & rest
        known = {name: p for name, p in live.items() if name not in rest}
        norms = grad_norms_by_id(p for p in known.values() if id(p) not in parts) | parts
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, p in known.items():
            if (norm := norms.get(id(p))) is not None:
                by_device.setdefault(norm.device, {})[name] = norm
        return [(list(some), torch.stack([*some.values()])[None]) for some in by_device.values()]

    def _read_gradients(self, owned: list[nn.Parameter]) -> None:
        """Measures the gradients that one optimizer of several has used, before they are reset."""
        if self._live:
            self._parts |= grad_norms_by_id(owned)

    def _rates(self, live: dict[str, nn.Parameter]) -> dict[str, Any]:
        """The learning rate of each parameter's group, in the last step that its optimizer made."""
        rates = [rate for opt in self.learn.opts for rate in self.learn.rates_of(opt)]
        rates = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]
        groups = {name: self._facts[name]["group"] for name in live}
        found = {name: rates[at] for name, at in groups.items() if at is not None}
        return {name: rate for name, rate in found.items() if rate is not None}

    # --- reading

    def record(self) -> Record:
        """Everything recorded so far, as plain numbers. The host waits for the device here.

        Of a sharded model: norms of whole parameters, if the ranks were gathered since the last
        record; else of this rank's shards, and `meta["rank"]` names it.
        """
        if self._whole is not None and self._whole[0] == self._n:
            return self._whole[1]
        if self._own is None or self._own[0] != self._n:
            self._own = self._n, self._read(self._table())
        return self._own[1]

    def _since(self, step: int) -> Record:
        """What was recorded after `step`, and at least the last record."""
        if self._whole is not None and self._whole[0] == self._n:
            return self._whole[1]
        first = self.table.since(step)
        return self._read(self._table(first), first)

    def _table(self, first: int = 0) -> Any:
        """(columns, rows, fields) sums over the steps of each column, from column `first` on."""
        return self.table.read("params", len(self.names), first)

    def _gather(self) -> None:
        """Puts the shards of all ranks together, for `record()`: each of them has to call.

        Raises:
            HookError: on every rank, if they recorded different steps or parameters.
        """
        if not ranks.is_distributed():
            return
        own = self._table()
        places = [tuple(place) for place in self.table.places().tolist()]
        facts = {"steps": places, "options": self.names, "table": own}
        parts = from_all_ranks("params", facts)
        sharded = np.array([facts["sharded"] for facts in self._facts.values()], bool)
        count = np.maximum(own[:, sharded, 5:6], 1)
        shards = np.stack([part["table"][:, sharded] for part in parts])
        table = own.copy()
        if sharded.any():  # shards add in squares, replicas are alike on all ranks
            norms = np.sqrt(((shards[..., :3] / count) ** 2).sum(0)) * count
            table[:, sharded, :3] = norms
            ratio = norms[..., 2] / np.maximum(norms[..., 0], 1e-300)
            table[:, sharded, 3], table[:, sharded, 4] = (
                ratio * count[..., 0],
                shards[..., 4].sum(0),
            )
        self._whole = self._n, self._read(table, whole=True)

    def _read(self, table: Any, first: int = 0, *, whole: bool = False) -> Record:
        names = tuple(self.names)
        meta: dict[str, Any] = {key: [f[key] for f in self._facts.values()] for key in _FACTS}
        held, never = meta["in_optimizer"], self._never or ()
        meta["in_optimizer"] = [x and n not in never for x, n in zip(held, names, strict=True)]
        meta["constant"] = [bool(self._constant.get(name, False)) for name in names]
        # in a recorded step; or between those, where none had its gradient: a rate of 0 writes too
        moved, with_grad = ((table[..., i] > 0).any(0).tolist() for i in (2, 6))
        between = self._written | self._writes()
        rows = zip(names, moved, with_grad, strict=True)
        meta["moved"] = [here or (name in between and not grad) for name, here, grad in rows]
        if ranks.is_distributed() and not whole:
            meta["rank"] = ranks.this_rank()
        values = _values(np.moveaxis(table, 1, 0), np.array(meta["numel"]))
        steps, epochs, iters, spans = self.table.places(first).T
        axes = steps, epochs, iters, spans
        return Record("param", names, tuple(self.types), *axes, values, meta=meta)

    def grad_norms(self, n_steps: int | None = None) -> Any:
        """(n_steps,) float64: norm of all gradients together by optimizer step, NaN elsewhere.

        Where steps were merged it is the norm of the parameters' mean norms, at the first step.
        """
        return grad_norms(self.record(), n_steps)

    def _writes(self) -> set[str]:
        """Names of those that were written to since this fit first saw them."""
        first = self._versions
        return {name for name, _, p in self._named if p._version > first.get(name, p._version)}

    def cleanup_fit(self) -> None:
        """Gives back the copy of the weights."""
        self._written |= self._writes()
        self._own = None
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        constant = {name: bool(flag) for name, flag in self._constant.items()}
        gone: dict[str, Any] = {"_live": {}, "_parts": {}, "_held": [], "_named": []}
        gone |= {"_trained": None, "_copies": WeightCopies(), "_constant": constant}
        return {**super().__getstate__(), **gone}

    def __repr__(self) -> str:
        return f"ParamStats({len(self.names)} parameters × {len(self.table)})"


def _numbers(names: list[str], moved: Any, grads: Any, rates: Any, finds: bool) -> Numbers:
    """The (rows, fields) table of a step; its fields add up over steps.

    In the first step of optimizers that are found as they step (`finds`), a parameter that has
    not moved may belong to one that steps after this: nothing is known of it.
    """
    table, known = np.zeros((len(names), len(_FIELDS))), dict[int, float]()
    for i, name in enumerate(names):
        if name in moved and not (finds and name not in rates and not moved[name][1]):
            weight, update = moved[name]
            grad = float(grads[name][0]) if name in grads else 0.0
            ratio = update / weight if weight else math.inf * update if update else 0.0
            bad = not math.isfinite(weight + update + grad)
            table[i, :7] = weight, grad, update, ratio, bad, 1.0, name in grads
        if name in rates:
            rate = rates[name]
            if id(rate) not in known:
                known[id(rate)] = float(rate)  # sync: a tensor's, up to 8 steps later
            table[i, 7:] = known[id(rate)], 1.0
    return {"params": table}


def _values(table: Any, numel: Any) -> dict[str, Any]:
    """Means over merged steps, from (rows, n, fields) sums; NaN where there was nothing."""
    n, n_grad, n_lr = (np.where(table[..., i] > 0, table[..., i], math.nan) for i in (5, 6, 8))
    root = np.sqrt(np.maximum(numel, 1))[:, None]
    with np.errstate(all="ignore"):
        values = {
            "weight_norm": table[..., 0] / n,
            "grad_norm": table[..., 1] / n_grad,
            "update_norm": table[..., 2] / n,
            "update_ratio": table[..., 3] / n,
        }
    values |= {"grad_rms": values["grad_norm"] / root, "weight_rms": values["weight_norm"] / root}
    values["nonfinite"] = np.where(np.isnan(n), math.nan, table[..., 4])
    values["lr"] = table[..., 7] / n_lr
    return values
