"""`ParamStats`: how large weights, gradients and updates are, for any optimizer.

The update is the true one, not learning rate times gradient: `_Followed` copies the weights before
a recorded step and subtracts them after it. Names, classes and groups are looked up only when the
parameters or the optimizers have changed. On a CPU numpy computes the norms of all small parameters
together; on a device PyTorch's batched operations do, and a step does not wait for its own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit._core.devices import to_host_async
from hookkit.recorders.parameters import (
    grad_norms,
    is_plain,
    local_values,
    named_parameters,
    norms_of,
    used_parameters,
)
from hookkit.recorders.step_recorder import StepRecorder, clock, from_all_ranks
from hookkit.recorders.step_table import Numbers, StepTable, sums
from hookkit.records import Record, grad_norms as norms_by_step

_FIELDS = ("weight", "update", "grad", "ratio", "bad", "n", "n_grad", "lr", "n_lr")
_WEIGHT, _UPDATE, _GRAD, _RATIO, _BAD, _N, _N_GRAD, _LR, _N_LR = range(len(_FIELDS))
_FACTS = (
    *("ndim", "numel", "shape", "requires_grad", "dtype"),
    *("in_optimizer", "optimizer", "group", "weight_decay"),
)
_KIND = attrgetter("shape", "device", "dtype")

_SMALL = 20_000  # up to so many values, a float64 copy is faster than separate calls of PyTorch

Coming = tuple[Any, slice, Callable[[], Tensor]]
"""Rows of a table, a slice of its fields, and a function that waits for (fields, rows) numbers."""


class ParamStats(StepRecorder):
    """Records weight norm, gradient norm, update norm and update:weight ratio of every parameter.

    `update_ratio` is `|w_after − w_before| / |w_before|`, whatever the optimizer; about 1e-3 is
    healthy for matrices (cs231n, Karpathy). `grad_norm` is of the gradient that the step used: NaN
    where the parameter's optimizer did not step (a GAN's other player; one not seen yet). `lr` is
    the learning rate of its group at that step. A parameter has moved if a recorded step changed
    it. One record per recorded step, merged to means when the memory (10 MB) is full.

    Costs a copy of the weights, and about three reads of them in each recorded step. On a CPU, 24
    bytes for each value of parameters that have up to 20,000.

    Args:
        every: records every n-th optimizer step, beginning with the first of each fit; None is 1.
            `"auto"` records as often as possible in at most 5 % of the time.

    Raises:
        OptionError: `every` is below 1.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=ParamStats(every=2))
    >>> with learn.no_logging(): learn.fit(1)
    >>> record = learn.param_stats.record()
    >>> record.names, len(record), bool((record.value("update_ratio") > 0).all())
    (('a', 'b'), 5, True)
    """

    def __init__(self, every: int | str | None = None) -> None:
        super().__init__(every)
        self.table = StepTable(params=sums(len(_FIELDS)))
        self._facts: dict[str, dict[str, Any]] = {}  # by name, in the order of rows
        self._constant: dict[str, Any] = {}  # name → whether all its first values were equal
        self._never: set[str] | None = None  # names whose optimizer has made no step so far
        self._written: set[str] = set()  # names that earlier fits have written to
        self._clear()

    def _clear(self) -> None:
        self._followed: _Followed | None = None
        self._copied_at = -1  # the step before which the weights were copied
        self._versions: dict[str, int] = {}  # name → `_version` when it was first seen

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters, in the order of rows."""
        return list(self._facts)

    # --- events

    def before_fit(self) -> None:
        """Count steps from the current one; earlier records stay."""
        if self.learn.fitting:
            self._clear()
            self._begin_fit()

    def before_step(self) -> None:
        """Copy the weights, if this step is recorded."""
        learn = self.learn
        n_steps = learn.n_steps
        if (learn.in_closure and self._copied_at == n_steps) or not self._is_due(n_steps):
            return
        began = clock()
        # look up again if layers were thawed, optimizers were found, or groups were added
        held = dict(learn.model.named_parameters())
        params, opts = held.values(), learn.opts
        key = [*held, *map(id, params), *map(type, params)]
        key += [*map(attrgetter("requires_grad"), params)]
        key += [*opts, *map(len, map(attrgetter("param_groups"), opts))]
        if self._followed is None or self._followed.key != key or not self._followed.copy():
            self._follow(learn, key)
        self._copied_at = n_steps
        self._spent += clock() - began

    # with a closure, copy before it runs: SAM changes the weights in it
    _before_closure = before_step

    def _follow(self, learn: Any, key: list[Any]) -> None:
        """Look up names, classes and groups, and copy the weights."""
        groups = [(opt, g) for opt in learn.opts for g in opt.param_groups]
        owned = {id(p): i for i, (_, g) in enumerate(groups) for p in g["params"]}
        named, facts = list(named_parameters(learn.model)), {**self._facts}
        for name, kind, p in named:
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
            # Private: `_version`, which counts in-place changes for autograd (since 0.4). Without
            # it, a parameter that moves only in steps between records would seem not to move.
            self._versions.setdefault(name, p._version)
            if not self.table.n_steps and (values := local_values(p)).numel() > 1:
                self._constant[name] = (values == values.flatten()[0]).all()
        self._facts, self._followed = facts, _Followed(key, named, facts)

    def after_step(self) -> None:
        """Measure the step."""
        learn, followed = self.learn, self._followed
        if not learn.stepped:
            return
        if followed is None or self._copied_at != learn.n_steps - 1:
            self._end_step(learn, recorded=False)
            return
        began = clock()
        used = used_parameters(learn, followed.ids)
        rest = followed.ids - used
        idle = {name for name, p in followed.named if id(p) in rest} if rest else set[str]()
        self._never = idle if self._never is None else self._never & idle
        followed.read_gradients(used)
        table, coming = followed.measure()
        rates = [rate for opt in learn.opts for rate in learn.rates_of(opt)]
        rates = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]
        # `read` must reference neither the parameters nor `self`, which holds the table
        finds = learn.finds_opts and not self.table.n_steps
        read = partial(_numbers, table, coming, followed.groups, rates, finds)
        self.table.later((learn.n_steps - 1, learn.epoch, learn.train_iter), read)
        self._spent += clock() - began
        self._end_step(learn, recorded=True)

    def _read_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._followed is not None and self._copied_at == self.learn.n_steps:
            self._followed.read_gradients({id(p) for p in parameters})

    def cleanup_fit(self) -> None:
        """Free the copy of the weights."""
        self._written = self._writes()
        self._clear()

    # --- reading

    def _read(self, since: int) -> Record:
        first = self.table.since(since)
        return self._as_record(self._sums(first), first)

    def _sums(self, first: int = 0) -> Any:
        """Return (columns, rows, fields) sums over the steps of each column, from `first` on."""
        return self.table.read("params", len(self._facts), first)

    def _read_ranks(self) -> Record:
        own, places = self._sums(), self.table.places().tolist()
        steps = [tuple(place) for place in places]
        facts = {"steps": steps, "options": self.names, "sums": own}
        parts = from_all_ranks("params", facts)
        # squared norms of shards add up; replicated parameters are equal on all ranks
        sharded = np.array([facts["sharded"] for facts in self._facts.values()], bool)
        shards = np.stack([part["sums"][:, sharded] for part in parts])
        n = np.maximum(own[:, sharded, _N : _N + 1], 1)
        norms = np.sqrt(((shards[..., : _GRAD + 1] / n) ** 2).sum(0)) * n
        ratio = norms[..., _UPDATE] / np.maximum(norms[..., _WEIGHT], 1e-300)
        own[:, sharded, : _GRAD + 1], own[:, sharded, _RATIO] = norms, ratio * n[..., 0]
        own[:, sharded, _BAD] = shards[..., _BAD].sum(0)
        return self._as_record(own)

    def _as_record(self, table: Any, first: int = 0) -> Record:
        names = tuple(self._facts)
        meta: dict[str, Any] = {key: [f[key] for f in self._facts.values()] for key in _FACTS}
        held, never = meta["in_optimizer"], self._never or ()
        meta["in_optimizer"] = [x and n not in never for x, n in zip(held, names, strict=True)]
        meta["constant"] = [bool(self._constant.get(name, False)) for name in names]
        # A parameter has moved if a recorded step changed it; or if it was written to and had no
        # gradient in any recorded step (an optimizer with lr=0 writes too).
        moved, with_grad = ((table[..., i] > 0).any(0).tolist() for i in (_UPDATE, _N_GRAD))
        between = self._writes()
        rows = zip(names, moved, with_grad, strict=True)
        meta["moved"] = [here or (name in between and not grad) for name, here, grad in rows]
        values = _values(np.moveaxis(table, 1, 0), np.array(meta["numel"]))
        steps, epochs, iters, spans = self.table.places(first).T
        types = tuple(facts["type"] for facts in self._facts.values())
        return Record("param", names, types, steps, epochs, iters, spans, values, meta=meta)

    def grad_norms(self, n_steps: int | None = None) -> Any:
        """Return (n_steps,) float64: the norm of all gradients by optimizer step.

        NaN where no step was recorded. If steps were merged, the first of them has the norm of the
        parameters' mean norms.
        """
        return norms_by_step(self.record(), n_steps)

    def _version(self) -> Any:
        return self.table.n_steps, self._writes()

    def _writes(self) -> set[str]:
        """Return the names of the parameters that were changed since they were first seen."""
        named = [] if self._followed is None else self._followed.named
        written = {name for name, p in named if p._version > self._versions[name]}
        return self._written | written

    def __getstate__(self) -> dict[str, Any]:
        constant = {name: bool(flag) for name, flag in self._constant.items()}
        now = {"_followed": None, "_constant": constant, "_written": self._writes()}
        return {**super().__getstate__(), **now}

    def __repr__(self) -> str:
        return f"ParamStats({len(self.names)} parameters × {len(self.table)})"


class _Followed:
    """Measures a fixed set of parameters; a change of them or of their optimizers needs a new one.

    For each step call `copy()`, `read_gradients()` for each optimizer, and `measure()`. Small
    parameters on a CPU are copied into one float64 array: one call computes all their norms.

    Attributes:
        key: identifies the parameters and their optimizers; if it changes, make a new object.
        named: pairs of a name and a parameter.
        ids: the ids of the parameters.
        groups: (n_rows,) int64: for each row, the index of its parameter group among the groups of
            all optimizers; −1 for none.
    """

    def __init__(self, key: list[Any], named: list[Any], facts: dict[str, dict[str, Any]]) -> None:
        self.key, self.named = key, [(name, p) for name, _, p in named]
        self._params = [p for _, p in self.named]
        self.ids = {id(p) for p in self._params}
        places = [-1 if fact["group"] is None else fact["group"] for fact in facts.values()]
        rows = {name: row for row, name in enumerate(facts)}
        self._rows = np.array([rows[name] for name, _ in self.named], np.int64)
        self.groups = np.full(len(facts), -1)
        self.groups[self._rows] = np.array(places, np.int64)[self._rows]
        plain = [is_plain(p) for p in self._params]
        self._plain = None if all(plain) else plain
        now = self._now()
        self._kinds = [*map(_KIND, now)]
        small = [i for i, t in enumerate(now) if plain[i] and t.is_cpu]
        self._small = [i for i in small if 0 < now[i].numel() <= _SMALL]
        sizes = [now[i].numel() for i in self._small]
        self._starts = np.cumsum([0, *sizes])[:-1]
        self._together = np.zeros((3, sum(sizes)))  # values before the step, after it, gradients
        self._before, self._after, self._grads = (
            [part.view(now[i].shape) for i, part in zip(self._small, row.split(sizes), strict=True)]
            for row in torch.from_numpy(self._together)
        )
        self._grad_of = dict(zip(self._small, self._grads, strict=True))
        others: dict[torch.device, list[int]] = {}
        for i in sorted(set(range(len(now))) - {*self._small}):
            others.setdefault(now[i].device, []).append(i)
        empty = partial(torch.empty_like, requires_grad=False)
        self._others = [(at, [empty(now[i]) for i in at]) for at in others.values()]
        self.copy()

    def _now(self) -> list[Any]:
        if self._plain is None:
            return self._params
        pairs = zip(self._params, self._plain, strict=True)
        return [p if plain else local_values(p) for p, plain in pairs]

    @torch.no_grad()
    def copy(self) -> bool:
        """Begin a step: copy the values. Return False if a shape, device or dtype has changed."""
        now = self._now()
        if [*map(_KIND, now)] != self._kinds:
            return False
        self._read = set[int]()  # indices of the parameters whose gradient was read in this step
        self._coming: list[Coming] = []
        # Private: `torch._foreach_copy_`, and `_foreach_sub_` below (since 2.1), do one operation
        # on a list of tensors, in few GPU kernels. Without them, each tensor needs its own call.
        for at, copies in [(self._small, self._before), *self._others]:
            if at:
                torch._foreach_copy_(copies, [*map(now.__getitem__, at)])
        return True

    @torch.no_grad()
    def read_gradients(self, ids: set[int]) -> None:
        """Begin to compute the norms of the gradients of parameters with `ids`, once in a step."""
        copies: list[Tensor] = []
        small: list[Tensor] = []
        others: list[int] = []
        for i, p in enumerate(self._params):
            grad = p.grad
            if grad is None or i in self._read or id(p) not in ids:
                continue
            self._read.add(i)
            copy = self._grad_of.get(i)
            usual = type(grad) is Tensor and grad.layout is torch.strided
            if copy is not None and usual and grad.shape == copy.shape:
                copies.append(copy)
                small.append(grad)
            else:
                others.append(i)
        if small:
            torch._foreach_copy_(copies, small)
        for at, norms in grad_norms([self._params[i] for i in others]) if others else ():
            rows = self._rows[[others[i] for i in at]]
            self._coming.append((rows, slice(_GRAD, _GRAD + 1), to_host_async(norms[None])))

    @torch.no_grad()
    def measure(self) -> tuple[Any, list[Coming]]:
        """Return the (rows, fields) table of the step, and the parts that are still to be read.

        Overwrites the copies: call `copy()` before the next step.
        """
        table, now, rows = np.zeros((len(self.groups), len(_FIELDS))), self._now(), self._rows
        if [*map(_KIND, now)] != self._kinds:
            return table, []  # the step changed a parameter's shape or device: no update
        table[rows, _N], table[rows[[*self._read]], _N_GRAD] = 1, 1
        if self._small:
            torch._foreach_copy_(self._after, [*map(now.__getitem__, self._small)])
            values = self._together
            with np.errstate(all="ignore"):
                values[1] -= values[0]
                values *= values  # in place: allocating memory would take longer
                norms = np.sqrt(np.add.reduceat(values, self._starts, axis=1))
            table[rows[self._small], : _GRAD + 1] = norms.T
        coming = [*self._coming]
        for at, copies in self._others:
            weights = norms_of(copies)
            # subtract 16-bit tensors in float32, without rounding, and others in the copies
            update = [t.float() if t.dtype.itemsize < 4 else t for t in copies]
            torch._foreach_sub_(update, [*map(now.__getitem__, at)])
            both = to_host_async(torch.stack([weights, norms_of(update)]))
            coming.append((rows[at], slice(_WEIGHT, _GRAD), both))
        return table, coming


def _numbers(table: Any, coming: list[Coming], groups: Any, rates: Any, finds: bool) -> Numbers:
    """Complete the table of a step; its fields add up over steps.

    Args:
        table, coming: see `_Followed.measure`.
        groups: see `_Followed`.
        rates: the learning rate of each group; None if it has none.
        finds: whether this is the first step, and optimizers are found when they step. A parameter
            that has not moved may belong to an optimizer not found yet, so its row stays empty.
    """
    for rows, fields, norms in coming:
        table[rows, fields] = norms().double().numpy().T
    # sync, 8 to 16 steps later: rates may be tensors. Index −1, for no group, reads the last NaN
    lr = np.array([math.nan if rate is None else float(rate) for rate in (*rates, None)])[groups]
    weight, update, grad = table[:, : _GRAD + 1].T
    has_rate = ~np.isnan(lr)
    known = table[:, _N] > 0
    if finds:
        known &= has_rate | (update != 0)
    grad[table[:, _N_GRAD] == 0] = 0
    with np.errstate(all="ignore"):
        table[:, _RATIO] = np.where(update == 0, 0, update / weight)
        table[:, _BAD] = ~np.isfinite(weight + update + grad)
    table[~known] = 0
    table[:, _LR], table[:, _N_LR] = np.where(has_rate, lr, 0), has_rate
    return {"params": table}


def _values(table: Any, numel: Any) -> dict[str, Any]:
    """Return the statistics of (rows, n, fields) sums: means over merged steps, NaN if unknown."""
    counts = (table[..., i] for i in (_N, _N_GRAD, _N_LR))
    n, n_grad, n_lr = (np.where(count > 0, count, math.nan) for count in counts)
    root = np.sqrt(np.maximum(numel, 1))[:, None]
    with np.errstate(all="ignore"):
        values = {
            "weight_norm": table[..., _WEIGHT] / n,
            "grad_norm": table[..., _GRAD] / n_grad,
            "update_norm": table[..., _UPDATE] / n,
            "update_ratio": table[..., _RATIO] / n,
        }
    values |= {"grad_rms": values["grad_norm"] / root, "weight_rms": values["weight_norm"] / root}
    values["nonfinite"] = np.where(np.isnan(n), math.nan, table[..., _BAD])
    values["lr"] = table[..., _LR] / n_lr
    return values
