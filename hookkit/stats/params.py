"""`ParamStats`: how large weights, gradients and updates are, for any optimizer.

The file is longer than 300 lines: it is one callback, whose copies of the weights are made before a
step, read after it and dropped at the end of the fit.

The true update, not learning rate times gradient: the weights are copied before a recorded step
and subtracted after it. How the norms are taken is in `parameters`.
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
from hookkit.moments.cpu import norms
from hookkit.moments.history import StepHistory
from hookkit.moments.numba_loader import machine
from hookkit.records import Exports, Record
from hookkit.stats.parameters import (
    FEW,
    FIELDS,
    Bits,
    Named,
    Parameters,
    arrays_of,
    changes,
    grad_norms_by_id,
    idle_parameters,
    local_values,
    norms_of,
    rows_of,
    rows_swept,
    spread,
)


class ParamStats(Exports, Callback):
    """Weight norm, gradient norm, update norm and the update:weight ratio of every parameter.

    `update_ratio` is |w_after − w_before| / |w_before|, whatever the optimizer; about 1e-3 is
    healthy for matrices (cs231n, Karpathy). `grad_norm` is of the gradient that the step used: NaN
    where the parameter's optimizer did not step (a GAN's other player; one not seen yet).
    One record per recorded optimizer step, merged to means when the memory (10 MB) is full.

    Costs a copy of the weights, and about three reads of them in each recorded step.

    Args:
        every: records one optimizer step in so many, beginning with the first of each fit.

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
        self.every = every
        self.history = StepHistory()
        # names, types and facts by name: one tuple, so that they never differ in length
        self._layers: tuple[list[str], list[str], dict[str, dict[str, Any]]] = [], [], {}
        self._before: dict[str, Tensor] = {}
        self._live: dict[str, nn.Parameter] = {}
        self._weights: list[float] | None = None  # norms of the copies, where they are known
        self._copies: list[Any] | None = None  # `_before` as arrays, where numpy reads it
        self._parts: dict[int, Tensor] = {}  # norms of gradients that may be gone at the end
        self._n_taken, self._snapped, self._iter = 0, False, 0
        self._n_opts = -1
        self._constant: dict[str, Any] = {}
        self._known: Parameters | None = None
        self._never: set[str] | None = None  # names whose optimizer has made no step so far
        self._bits, self._compared = Bits(), list[Named]()
        self._cache: tuple[int, bool, Record] | None = None

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return self._layers[0]

    @property
    def types(self) -> list[str]:
        """Class names of the modules that own them."""
        return self._layers[1]

    @property
    def _n_records(self) -> int:
        return self.history.n

    def before_fit(self) -> None:
        """Begins to count steps; what was recorded before stays."""
        if self.learn.fitting:
            self._n_taken, self._snapped = 0, False
            self._compared = []
            self._bits.forget()
            machine.load()

    def before_batch(self) -> None:
        """Notes which batch it is."""
        self._iter = self.learn.train_iter

    def before_step(self) -> None:
        """Copies the weights, if this step is recorded."""
        if self._n_taken % (self.every or 1):
            return
        model = self.learn.model
        if self._known is None or self._known.model is not model:
            self._known = Parameters(model)
        parameters = self._known.now
        if not parameters:
            return
        if parameters is not self._compared:
            self._bits.first((name, p) for name, _, p in parameters)
            self._compared = parameters
        self._live, self._parts = {name: p for name, _, p in parameters}, {}
        self._snapped = True
        if self._same_again():
            return
        now = {name: local_values(p) for name, p in self._live.items()}
        if {n: (t.shape, t.device, t.dtype) for n, t in now.items()} != {
            n: (t.shape, t.device, t.dtype) for n, t in self._before.items()
        }:
            self._before = {name: torch.empty_like(t) for name, t in now.items()}
            self._n_opts = -1
        if self._n_opts != len(self.learn.opts):  # a loop's optimizers may become known one by one
            self._learn_facts(parameters)
        self._weights = self._copied(now)
        if not self._n_records:
            many = {name: t for name, t in now.items() if t.numel() > 1}
            self._constant = {name: (t == t.flatten()[0]).all() for name, t in many.items()}

    def _same_again(self) -> bool:
        """Copies the weights of a model that is as it was, in the fewest calls."""
        copies = self._copies
        if copies is None or self._n_opts != len(self.learn.opts) or not self._n_records:
            return False
        arrays = arrays_of(self._live.values()) if [*self._live] == [*self._before] else None
        if arrays is None or not _alike(arrays, copies):
            return False
        self._weights = norms(arrays, copies)
        return True

    def _copied(self, now: dict[str, Tensor]) -> list[float] | None:
        """Copies the weights; their norms too where numpy reads them anyway."""
        small = sum(t.numel() for t in now.values()) <= FEW
        arrays = arrays_of(now.values()) if small else None
        copies = self._copies = None if arrays is None else arrays_of(self._before.values())
        if arrays is None or copies is None:
            with torch.no_grad():
                # Private: see `parameters.batched_norms`.
                torch._foreach_copy_(list(self._before.values()), list(now.values()))
            return None
        return norms(arrays, copies)

    def _learn_facts(self, parameters: list[tuple[str, str, nn.Parameter]]) -> None:
        owned = {id(p) for opt in self.learn.opts for g in opt.param_groups for p in g["params"]}
        names, types, facts = [*self.names], [*self.types], {**self._layers[2]}
        for name, kind, p in parameters:
            if name not in facts:
                names.append(name)
                types.append(kind)
            facts[name] = {
                "shape": _shape(p),
                "ndim": p.ndim,
                "numel": p.numel(),
                "requires_grad": p.requires_grad,
                "in_optimizer": id(p) in owned,
                "dtype": str(p.dtype),
                "sharded": any(s.is_shard() for s in getattr(p, "placements", ())),
            }
        self._layers = names, types, facts
        self._n_opts = len(self.learn.opts)

    def after_step(self) -> None:
        """Measures the step."""
        snapped, self._snapped = self._snapped, False
        if not self.learn.stepped:
            return
        self._n_taken += 1
        if snapped and self.names:
            with torch.no_grad():
                self._measure()

    def _note_part(self, owned: list[nn.Parameter]) -> None:
        """Measures the gradients that one optimizer of several has used, before they are reset."""
        if self._snapped:
            self._parts |= grad_norms_by_id(owned)

    def _measure(self) -> None:
        place = self.learn.n_steps - 1, self.learn.epoch, self._iter
        tables = {("params", device): table[None] for device, table in self._tables().items()}
        self.history = self.history.with_records([place], tables)

    def _tables(self) -> dict[torch.device, Tensor]:
        """By device the (rows, fields) table of this step."""
        live, noted, self._live, self._parts = self._live, self._parts, {}, {}
        idle = idle_parameters(self.learn, live.values())
        rest = {name for name, p in live.items() if id(p) in idle} if idle else set()
        self._never = rest if self._never is None else self._never & rest
        grads_of = {n: None if n in rest else noted.get(id(p), p.grad) for n, p in live.items()}
        weights, copies = self._weights, self._copies
        arrays = None if weights is None else arrays_of(live.values())
        if weights is not None and copies and arrays and _alike(arrays, copies):
            table = rows_swept(weights, copies, arrays, list(grads_of.values()))
            return {torch.device("cpu"): spread(table, list(live), self.names)}
        tables = {}
        for device in {t.device for t in self._before.values()}:
            now = {name: local_values(p) for name, p in live.items()}
            names = [name for name in live if _fits(now[name], self._before[name], device)]
            if not names:
                continue
            before = [self._before[name] for name in names]
            sizes = norms_of(before)
            moved = changes(before, [now[name] for name in names])
            grads = [None if (g := grads_of[n]) is None else local_values(g) for n in names]
            table = rows_of(sizes, norms_of(moved), grads)
            tables[device] = spread(table, names, self.names)
        return tables

    def record(self, *, local: bool = False) -> Record:
        """Everything recorded so far, as plain numbers. The host reads the device here.

        Args:
            local: this rank's own. Otherwise shards of all ranks are put together, and each rank
                has to call this.

        Raises:
            HookError: on every rank, if they recorded different steps or parameters.
        """
        if self._cache is None or self._cache[:2] != (self._n_records, local):
            self._cache = self._n_records, local, self._read(local)
        return self._cache[2]

    def _read(self, local: bool) -> Record:
        self._bits.again(self._present())
        past = self.history
        n, rows = len(past), len(self.names)
        table = torch.zeros(n, rows, len(FIELDS), dtype=torch.float64, device="cpu")
        for key in past.tables:
            part = past.read(key)
            table[:, : part.shape[1]] += part
        moved = torch.tensor([float(self._bits.moved.get(n, False)) for n in self.names], **_HOST)
        moved[(table[..., 2] > 0).any(0)] = 1.0
        if not local and ranks.is_distributed():
            table = self._over_ranks(table)
            moved = ranks.stacked(moved).amax(0)
        known = self._layers[2]
        facts = {key: [known[name][key] for name in self.names] for key in _FACTS}
        held, never = facts["in_optimizer"], self._never or ()
        facts["in_optimizer"] = [
            x and n not in never for x, n in zip(held, self.names, strict=True)
        ]
        same = self._constant
        facts["constant"] = [bool(same.get(name, False)) for name in self.names]
        facts["moved"] = moved.numpy().astype(bool).tolist()
        values = _values(table.transpose(0, 1).numpy(), np.array(facts["numel"]))
        steps, epochs, iters, spans = (np.array(past.column(i), dtype=np.int64) for i in range(4))
        names, types = tuple(self.names), tuple(self.types)
        return Record("param", names, types, steps, epochs, iters, spans, values, meta=facts)

    def _present(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of the model that is trained just now."""
        return [] if self._known is None else [(name, p) for name, _, p in self._known.now]

    def _over_ranks(self, table: Tensor) -> Tensor:
        """Norms of whole parameters: shards add in squares, replicas are alike on all ranks."""
        facts = self._layers[2]
        shards = [bool(facts[n].get("sharded")) for n in self.names]
        shapes = [(n, facts[n]["shape"], facts[n]["dtype"]) for n in self.names]
        self.history.check_ranks("param", (shapes, shards), f"{_brief(self.names)}")
        sharded = torch.tensor(shards, device="cpu")
        count = table[..., 5:6].clamp(min=1)
        squares = ranks.total((table[..., :3] / count).square()).sqrt() * count
        whole = table.clone()
        whole[..., :3] = torch.where(sharded[None, :, None], squares, table[..., :3])
        ratio = whole[..., 2] / whole[..., 0].clamp(min=1e-300) * table[..., 5]
        whole[..., 3] = torch.where(sharded, ratio, table[..., 3])
        return whole

    def grad_norms(self, n_steps: int | None = None) -> Any:
        """(n_steps,) float64: norm of all gradients together by optimizer step, NaN elsewhere."""
        record = self.record()
        squares = np.nansum(record.value("grad_norm") ** 2, axis=0)
        seen = np.isfinite(record.value("grad_norm")).any(axis=0) if record.names else squares > 0
        last = int(record.steps[-1]) + 1 if len(record) else 0
        norms = np.full(max(last, n_steps or 0), math.nan)
        norms[record.steps] = np.where(seen, np.sqrt(squares), math.nan)
        return norms[:n_steps]

    def cleanup_fit(self) -> None:
        """Gives back the copy of the weights, and sees which of them have moved."""
        trained = self._present()
        self._before, self._live, self._copies, self._known = {}, {}, None, None
        self._snapped, self._compared, self._cache = False, [], None
        self._bits.again(trained)

    def __getstate__(self) -> dict[str, Any]:
        if self.learn is not None and self.learn.fitting:
            self.learn._remember_step(self)
        constant = {name: bool(flag) for name, flag in self._constant.items()}
        gone: dict[str, Any] = {"_before": {}, "_live": {}, "_copies": None}
        gone["_known"], gone["_compared"] = None, []
        gone["_parts"] = {}
        return {**super().__getstate__(), **gone, "_constant": constant}

    def __repr__(self) -> str:
        return f"ParamStats({len(self.names)} parameters × {len(self.history)})"


def _brief(names: list[str]) -> str:
    some = ", ".join(names[:3]) + ", …" * (len(names) > 3)
    return f"{len(names)} parameter{'s' * (len(names) != 1)}" + (f": {some}" if names else "")


def _alike(arrays: list[Any], copies: list[Any]) -> bool:
    return [len(x) for x in arrays] == [len(x) for x in copies]


def _fits(now: Tensor, before: Tensor, device: torch.device) -> bool:
    """Whether there is a difference to measure: a step may have given it another shape."""
    return before.device == device == now.device and before.shape == now.shape


_HOST: Any = {"dtype": torch.float64, "device": "cpu"}
_FACTS = ("ndim", "numel", "requires_grad", "in_optimizer", "dtype")


def _shape(p: nn.Parameter) -> tuple[int, ...]:
    """The parameter's shape; what is known of one that has none (strided nested tensors)."""
    return (p.numel(),) if p.is_nested else tuple(p.shape)


def _values(table: Any, numel: Any) -> dict[str, Any]:
    """Means over merged steps, from (rows, n, fields) sums; NaN where there was nothing."""
    n = np.where(table[..., 5] > 0, table[..., 5], math.nan)
    n_grad = np.where(table[..., 6] > 0, table[..., 6], math.nan)
    root = np.sqrt(np.maximum(numel, 1))[:, None]
    values = {name: table[..., i] / n for i, name in enumerate(FIELDS[:4])}
    values["grad_norm"] = table[..., 1] / n_grad
    values |= {"grad_rms": values["grad_norm"] / root, "weight_rms": values["weight_norm"] / root}
    values["nonfinite"] = np.where(np.isnan(n), math.nan, table[..., 4])
    return values
