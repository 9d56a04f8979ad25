"""`ParamStats`: how large weights, gradients and updates are, for any optimizer.

The true update, not learning rate times gradient: the weights are copied before a recorded step and
subtracted after it (`param_norms.WeightCopies`). One class, on whose tables checkpoints,
ranks and readers have to agree, and therefore one file of more than 300 lines.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hookkit import ranks
from hookkit.callbacks.callback import Callback
from hookkit.callbacks.readout import across_ranks
from hookkit.checks import check_flag, check_number
from hookkit.devices import widest_float
from hookkit.moments.history import Key, StepHistory
from hookkit.moments.numba_loader import machine
from hookkit.records import Exports, Record
from hookkit.stats.param_norms import FIELDS, WeightCopies, grad_norms_by_id, local_values
from hookkit.stats.parameters import Bits, Named, Parameters, idle_parameters


class ParamStats(Exports, Callback):
    """Weight norm, gradient norm, update norm and the update:weight ratio of every parameter.

    `update_ratio` is `|w_after − w_before| / |w_before|`, whatever the optimizer; about 1e-3 is
    healthy for matrices (cs231n, Karpathy). `grad_norm` is of the gradient that the step used: NaN
    where the parameter's optimizer did not step (a GAN's other player; one not seen yet). `lr` is
    the learning rate of its group at that step.
    One record per recorded optimizer step, merged to means when the memory (10 MB) is full.

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
    _saved: ClassVar[tuple[str, ...]] = (
        "history",
        "_facts",
        "_groups",
        "_n_taken",
        "_constant",
        "_never",
        "_bits",
    )

    def __init__(self, every: int | None = None) -> None:
        if every is not None:
            every = check_number("ParamStats", "every", every, 1, whole=True)
        self.every = every
        self.history = StepHistory()
        self._facts: dict[str, dict[str, Any]] = {}  # by name, in the order of rows
        self._groups: list[int | None] = []  # of each row, among those of all optimizers
        self._live: dict[str, nn.Parameter] = {}  # of the step under way, if it is recorded
        self._parts: dict[int, Tensor] = {}  # norms of gradients that may be gone at the end
        self._copies = WeightCopies()
        self._n_taken = 0
        self._trained: Any = None  # by whom and which, when the facts were learnt
        self._constant: dict[str, Any] = {}
        self._known: Parameters | None = None
        self._never: set[str] | None = None  # names whose optimizer has made no step so far
        self._bits, self._compared = Bits(), list[Named]()
        # with the number of records that they are of
        self._own: tuple[int, Record] | None = None
        self._whole: tuple[int, Record] | None = None

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
            self._n_taken, self._live, self._compared = 0, {}, []
            self._bits.forget()
            machine.load()

    def before_step(self) -> None:
        """Copies the weights, if this step is recorded."""
        self._live, self._parts = {}, {}
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
        live = {name: p for name, _, p in parameters}
        # layers are thawed, groups added; a loop's optimizers become known one by one
        n_groups = [len(opt.param_groups) for opt in self.learn.opts]
        trained = n_groups, [p.requires_grad for p in live.values()]
        if self._copies.take(live) or self._trained != trained:
            self._learn_facts(parameters)
            self._trained = trained
        if not self.history.n:
            many = {name: t for name, p in live.items() if (t := local_values(p)).numel() > 1}
            self._constant = {name: (t == t.flatten()[0]).all() for name, t in many.items()}
        self._live = live

    def _learn_facts(self, parameters: list[Named]) -> None:
        groups = [(opt, g) for opt in self.learn.opts for g in opt.param_groups]
        owned = {id(p): i for i, (_, g) in enumerate(groups) for p in g["params"]}
        facts, held = {**self._facts}, dict[str, int | None].fromkeys(self._facts)
        for name, kind, p in parameters:
            at = owned.get(id(p))
            opt, group = (None, {}) if at is None else groups[at]
            held[name] = at
            facts[name] = {
                "type": kind,
                # strided nested tensors have no shape
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
        self._facts, self._groups = facts, list(held.values())

    def after_step(self) -> None:
        """Measures the step."""
        live, self._live = self._live, {}
        if not self.learn.stepped:
            return
        self._n_taken += 1
        if live:
            with torch.no_grad():
                tables = self._copies.tables(live, self._grads_of(live), self.names)
            place = self.learn.n_steps - 1, self.learn.epoch, self.learn.train_iter
            keyed: dict[Key, Tensor] = {("params", d): table[None] for d, table in tables.items()}
            rates = {("rates", d): table[None] for d, table in self._rates().items()}
            self.history = self.history.with_records([place], keyed | rates)

    def _rates(self) -> dict[torch.device, Tensor]:
        # read anew: fastai's own optimizers make other dicts each time
        groups = [group for opt in self.learn.opts for group in opt.param_groups]
        rates = [group.get("lr") for group in groups]
        return _by_device([None if at is None else rates[at] for at in self._groups])

    def _note_part(self, owned: list[nn.Parameter]) -> None:
        """Measures the gradients that one optimizer of several has used, before they are reset."""
        if self._live:
            self._parts |= grad_norms_by_id(owned)

    def _grads_of(self, live: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
        """The gradient that the step used for each parameter, or its norm, by name."""
        noted, self._parts = self._parts, {}
        idle = idle_parameters(self.learn, live.values())
        rest = {name for name, p in live.items() if id(p) in idle} if idle else set()
        self._never = rest if self._never is None else self._never & rest
        return {n: None if n in rest else noted.get(id(p), p.grad) for n, p in live.items()}

    def record(self, *, local: bool = False) -> Record:
        """Everything recorded so far, as plain numbers. The host reads the device here.

        Of a sharded model: norms of whole parameters, if the ranks were gathered since the last
        record and `local` is not set; else of this rank's shards, and `meta["rank"]` names it.
        """
        n = self.history.n
        if not local and self._whole is not None and self._whole[0] == n:
            return self._whole[1]
        if self._own is None or self._own[0] != n:
            self._own = n, self._read(False)
        return self._own[1]

    def _gather(self) -> None:
        """Puts the shards of all ranks together, for `record()`: each of them has to call.

        Raises:
            HookError: on every rank, if they recorded different steps or parameters.
        """
        if ranks.is_distributed():
            self._whole = self.history.n, self._read(True)

    def _read(self, whole: bool) -> Record:
        past = self.history
        n, rows = len(past), len(self.names)
        table = torch.zeros(n, rows, len(FIELDS), dtype=torch.float64, device="cpu")
        rates = torch.zeros(n, rows, 2, **_HOST)
        for key in past.tables:
            part = past.read(key)
            (rates if key[0] == "rates" else table)[:, : part.shape[1]] += part
        moved = self._moved((table[..., 2] > 0).any(0).tolist())
        if whole:
            table = self._over_ranks(table)
            moved = ranks.greatest(torch.tensor(moved, **_HOST)).bool().tolist()
        facts: dict[str, Any] = {
            key: [known[key] for known in self._facts.values()] for key in _FACTS
        }
        held, never = facts["in_optimizer"], self._never or ()
        facts["in_optimizer"] = [
            x and n not in never for x, n in zip(held, self.names, strict=True)
        ]
        same = self._constant
        facts["constant"] = [bool(same.get(name, False)) for name in self.names]
        facts["moved"] = moved
        if not whole and ranks.is_distributed():
            facts["rank"] = ranks.this_rank()
        values = _values(table.transpose(0, 1).numpy(), np.array(facts["numel"]))
        rate, n_rates = rates.transpose(0, 1).unbind(-1)
        values["lr"] = (rate / n_rates.where(n_rates > 0, math.nan)).numpy()
        steps, epochs, iters, spans = (np.array(past.column(i), dtype=np.int64) for i in range(4))
        names, types = tuple(self.names), tuple(self.types)
        return Record("param", names, types, steps, epochs, iters, spans, values, meta=facts)

    def _moved(self, by_norm: list[bool]) -> list[bool]:
        """Which parameters have moved: in a recorded step, or by their bits between those."""
        unsure = {name for name, known in zip(self.names, by_norm, strict=True) if not known}
        bits = self._bits.compared((name, p) for name, p in self._present() if name in unsure)
        pairs = zip(self.names, by_norm, strict=True)
        return [known or bool(bits.get(name, False)) for name, known in pairs]

    def _present(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of the model that is trained just now."""
        return [] if self._known is None else [(name, p) for name, _, p in self._known.now]

    def _over_ranks(self, table: Tensor) -> Tensor:
        """Norms of whole parameters: shards add in squares, replicas are alike on all ranks."""
        shards = [facts["sharded"] for facts in self._facts.values()]
        shapes = [(n, facts["shape"], facts["dtype"]) for n, facts in self._facts.items()]
        self.history.check_ranks("param", (shapes, shards), f"{_brief(self.names)}")
        if not any(shards):
            return table
        sharded = torch.tensor(shards, device="cpu")
        count = table[..., 5:6].clamp(min=1)
        parts = torch.cat([(table[..., :3] / count).square(), table[..., 4:5]], -1)
        norms, bad = ranks.total(parts).split([3, 1], -1)  # type: ignore[no-untyped-call]
        whole = table.clone()
        whole[..., :3] = torch.where(sharded[:, None], norms.sqrt() * count, table[..., :3])
        whole[..., 4] = torch.where(sharded, bad[..., 0], table[..., 4])
        ratio = whole[..., 2] / whole[..., 0].clamp(min=1e-300) * table[..., 5]
        whole[..., 3] = torch.where(sharded, ratio, table[..., 3])
        return whole

    def grad_norms(self, n_steps: int | None = None, *, local: bool = False) -> Any:
        """(n_steps,) float64: norm of all gradients together by optimizer step, NaN elsewhere."""
        record = self.record(local=check_flag("grad_norms", "local", local))
        squares = np.nansum(record.value("grad_norm") ** 2, axis=0)
        seen = np.isfinite(record.value("grad_norm")).any(axis=0) if record.names else squares > 0
        last = int(record.steps[-1]) + 1 if len(record) else 0
        norms = np.full(max(last, n_steps or 0), math.nan)
        norms[record.steps] = np.where(seen, np.sqrt(squares), math.nan)
        return norms[:n_steps]

    def cleanup_fit(self) -> None:
        """Gives back the copy of the weights, and sees which of them have moved."""
        trained = self._present()
        self._live, self._copies, self._known = {}, WeightCopies(), None
        self._compared, self._own = [], None
        self._trained, self._groups = None, [None] * len(self._groups)
        self._bits.again(trained)

    def state_dict(self) -> dict[str, Any]:
        """What was recorded, on the CPU; in `distrib_ctx` of whole parameters: all ranks call."""
        state = super().state_dict()
        if across_ranks(self.learn) and _NORMS in state["history"].tables:
            table = self._over_ranks(state["history"].read(_NORMS))
            state["history"] = state["history"].with_table(_NORMS, table)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        super().load_state_dict(state)
        if across_ranks(self.learn) and ranks.rank() and _NORMS in self.history.tables:
            table = self.history.read(_NORMS).clone()
            table[:, [f["sharded"] for f in self._facts.values()], :5] = 0.0  # rank 0 has it
            self.history = self.history.with_table(_NORMS, table)
        self._own = self._whole = None
        self._trained = None

    def __getstate__(self) -> dict[str, Any]:
        if self.learn is not None and self.learn.fitting:
            self.learn._remember_step(self)
        constant = {name: bool(flag) for name, flag in self._constant.items()}
        gone: dict[str, Any] = {"_live": {}, "_parts": {}, "_known": None, "_compared": []}
        gone |= {"_trained": None, "_copies": WeightCopies(), "_constant": constant}
        gone |= {"_groups": [None] * len(self._groups), "history": self.history.on_cpu()}
        return {**super().__getstate__(), **gone}

    def __repr__(self) -> str:
        return f"ParamStats({len(self.names)} parameters × {len(self.history)})"


def _brief(names: list[str]) -> str:
    some = ", ".join(names[:3]) + ", …" * (len(names) > 3)
    return f"{len(names)} parameter{'s' * (len(names) != 1)}" + (f": {some}" if names else "")


_HOST: Any = {"dtype": torch.float64, "device": torch.device("cpu")}
_OF_TENSOR = "ndim", "numel", "shape", "requires_grad", "dtype"
_FACTS = (*_OF_TENSOR, "in_optimizer", "optimizer", "group", "weight_decay")
_NORMS: Key = "params", torch.device("cpu")


def _by_device(rates: list[Any]) -> dict[torch.device, Tensor]:
    """By device (rows, 2): of each row the learning rate that is there, and 1; else zeros."""
    far = [rate if isinstance(rate, Tensor) and not rate.is_cpu else None for rate in rates]
    near = [
        (0.0, 0.0) if rate is None or rate is there else (float(rate), 1.0)
        for rate, there in zip(rates, far, strict=True)
    ]
    tables = {_HOST["device"]: torch.tensor(near, **_HOST).reshape(-1, 2)}
    for device in {rate.device for rate in far if rate is not None}:
        zero = torch.zeros((), dtype=widest_float(device), device=device)
        one, here = zero + 1, [rate is not None and rate.device == device for rate in far]
        pairs = zip(far, here, strict=True)
        value = [x.detach().to(zero).reshape(()) if x is not None and h else zero for x, h in pairs]
        known = torch.stack([one if h else zero for h in here])
        tables[device] = torch.stack([torch.stack(value), known], 1)
    return tables


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
