"""Every odd model of the zoo trains with callbacks, recorders and `watch` as it does without."""

import copy
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hooked import n_hooks
from reference import once
from torch import Tensor, nn
from zoo import ZOO, Entry

from hookkit._core.modules import can_run
from hookkit._core.pytree import tree_leaves
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.errors import HookError, HookkitWarning
from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.records import as_run
from hookkit.testing import synth_learner
from hookkit.training import watch

NO_HOOKS = {"scripted", "compiled", "cyclic"}  # they run no Python hooks, or are no tree


class Whole(nn.Module):
    """The entry's model with the entry's own inputs, whatever batch comes."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry, self.model = entry, entry.build()

    def forward(self, _: Tensor) -> Any:
        return self.entry.run(self.model)


def total(out: Any, _: Tensor) -> Tensor:
    """A loss of every floating point number that has a gradient."""
    parts = [t for t in tree_leaves(out) if t.requires_grad and not t.is_sparse and not t.is_nested]
    sums = [(t.abs() if t.is_complex() else t).float().pow(2).mean() for t in parts if t.numel()]
    return torch.stack(sums).sum() if sums else torch.zeros((), requires_grad=True)


def trained(entry: Entry, guests: list[Any]) -> tuple[str, int, dict[str, Tensor]]:
    """How two steps ended (an exception's type and message), hooks that remain, and the weights."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Whole(entry)
        torch.manual_seed(1)
        learn = synth_learner(
            data=([(torch.ones(1), torch.ones(1))] * 2, None),
            model=model,
            loss_func=total,
            splitter=lambda m: [nn.Parameter(torch.ones(1)), *plain_params(m)],
            opt_func=torch.optim.SGD,
            lr=1e-3,
            cbs=guests,
        )
        learn.logger = lambda row: None
        ended = "well"
        try:
            learn.fit(1)
        except Exception as error:
            ended = f"{type(error).__name__}: {str(error)[:60]}"
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if not lazy(p)}
    return ended, n_hooks(model), weights


@once
def trained_alone(entry: Entry) -> tuple[str, int, dict[str, Tensor]]:
    return trained(entry, [])


def lazy(p: Tensor) -> bool:
    return torch.nn.parameter.is_lazy(p)


def plain_params(m: nn.Module) -> list[nn.Parameter]:
    return [p for p in m.parameters() if p.requires_grad and not lazy(p) and not p.is_meta]


def assert_same_training(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0], "another end"
    assert found[1] == wanted[1], "other hooks"
    assert found[2].keys() == wanted[2].keys()
    for name, value in wanted[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=0, atol=0, equal_nan=True, msg=name)


def keep(m: nn.Module, i: Any, o: Any) -> Any:
    return o


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_a_learner_trains_as_without_recorders_and_everything_reads(entry: Entry) -> None:
    if "compiled" in entry.tags and torch.__version__ < (2, 13):
        pytest.skip("torch < 2.13 cannot trace these tensor hooks")
    stats = ActivationStats(with_hist=True, units=True, include_paramless=True)
    recorders = [stats, GradientStats(True), GradientStats(of="params"), ParamStats()]
    others = [FlightRecorder("report")]
    if not entry.tags & NO_HOOKS:
        others.append(HookCallback(include_paramless=True, hook=keep))

    assert_same_training(trained(entry, [*recorders, *others]), trained_alone(entry))

    for recorder in recorders:
        assert len(recorder.record()) == len(recorder.record().spans)
    assert len(stats.stats) == len(stats.record())
    for i, name in enumerate(stats.names):
        stats.layer_stats(i)
        stats.hist(i)
        dead = stats.record().value("dead", name)
        if np.isfinite(dead).any():
            assert isinstance(stats.dead_units(i), list)
        elif len(dead):  # it gave nothing: that is warned about
            with pytest.warns(HookkitWarning, match=re.escape(name)):
                assert stats.dead_units(i) == []
    assert repr(as_run([r.record() for r in (stats, recorders[1], recorders[3])]).diagnose())


# what no loop can train here (of a cyclic one, train() itself does not end)
UNFIT = {"raises", "meta", "compiled", "lazy", "cyclic"}
LEARN = [e for e in ZOO if not e.tags & UNFIT and e.n_trainable > 0]


def two_steps(entry: Entry, model: nn.Module, opt: torch.optim.Optimizer) -> list[Tensor]:
    seen = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs = [t for t in tree_leaves(entry.run(model)) if t.requires_grad]
        loss = sum(t.float().abs().mean() for t in outputs if not t.is_nested and t.numel())
        if isinstance(loss, Tensor):
            loss.backward()
            seen.append(loss.detach())
        opt.step()
        opt.zero_grad()
    return seen


def state(model: nn.Module) -> list[Tensor]:
    found = (t.detach().clone() for t in (*model.parameters(), *model.buffers()))
    return [t.to_dense() if t.layout is not torch.strided else t for t in found]


@pytest.mark.parametrize("entry", LEARN, ids=lambda e: e.name)
def test_a_watched_loop_trains_as_without(entry: Entry) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = entry.build().train()
        twin = entry.build().train()
        twin.load_state_dict(copy.deepcopy(plain.state_dict()))
        opts = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (plain, twin)]
        before = n_hooks(twin, opts[1])
        w = watch(twin, opts[1], ActivationStats(), ParamStats())

        truth, random = two_steps(entry, plain, opts[0]), torch.get_rng_state()
        if isinstance(twin, torch.jit.ScriptModule) and not can_run(twin):
            with pytest.raises(HookError, match="scripted"):
                w.start()
            return
        with w:
            own = two_steps(entry, twin, opts[1])

    assert w.n_steps == len(w.param_stats.record()) == 2
    assert all(map(torch.equal, truth, own)), "other losses"
    assert torch.equal(torch.get_rng_state(), random), "other random numbers"
    assert all(torch.equal(a, b) for a, b in zip(state(plain), state(twin), strict=True))
    assert n_hooks(twin, opts[1]) == before, "hooks are left"
