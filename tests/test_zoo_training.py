"""Every odd model of the zoo trains with `watch` and all recorders as it does without."""

import copy
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn
from zoo import ZOO, Entry

from hookkit._core.modules import can_run
from hookkit._core.pytree import tree_leaves
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.errors import HookError, HookkitWarning
from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.records import as_run
from hookkit.training import watch

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
def test_a_watched_loop_trains_as_without_and_everything_reads(entry: Entry) -> None:
    stats = ActivationStats(with_hist=True, units=True, include_paramless=True)
    recorders: list[Any] = [stats, GradientStats(True), GradientStats(of="params"), ParamStats()]
    hooked = [HookCallback(include_paramless=True)] * ("scripted" not in entry.tags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = entry.build().train()
        twin = entry.build().train()
        twin.load_state_dict(copy.deepcopy(plain.state_dict()))
        opts = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (plain, twin)]
        before = n_hooks(twin, opts[1])
        w = watch(twin, opts[1], *recorders, FlightRecorder("report"), *hooked)

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
    for recorder in recorders:
        assert len(recorder.record()) == len(recorder.record().spans)
    assert len(stats.stats) == len(stats.record())
    for i, name in enumerate(stats.names):
        stats.layer_stats(i)
        stats.hist(i)
        if np.isfinite(stats.record().value("dead", name)).any():
            assert isinstance(stats.dead_units(i), list)
        else:  # it gave nothing: that is warned about
            with pytest.warns(HookkitWarning, match=re.escape(name)):
                assert stats.dead_units(i) == []
    assert repr(as_run([r.record() for r in (stats, recorders[1], recorders[3])]).diagnose())
