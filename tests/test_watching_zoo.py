"""Every odd model trains under `watch` exactly as without it, and nothing stays on it."""

import copy
import warnings

import pytest
import torch
from hooked import n_hooks
from torch import nn
from zoo import ZOO, Entry

from hookkit.errors import HookError
from hookkit.modules import can_run
from hookkit.nested import leaves
from hookkit.stats import ActivationStats, ParamStats
from hookkit.watching import watch

# what cannot be trained here (of a cyclic one, train() itself does not end)
UNFIT = {"raises", "meta", "compiled", "lazy", "cyclic"}


def learns(entry: Entry) -> bool:
    return not entry.tags & UNFIT and entry.n_trainable > 0


def two_steps(entry: Entry, model: nn.Module, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    seen = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs = [t for t in leaves(entry.run(model)) if t.requires_grad]
        loss = sum(t.float().abs().mean() for t in outputs if not t.is_nested and t.numel())
        if isinstance(loss, torch.Tensor):
            loss.backward()
            seen.append(loss.detach())
        opt.step()
        opt.zero_grad()
    return seen


def state(model: nn.Module) -> list[torch.Tensor]:
    found = (t.detach().clone() for t in (*model.parameters(), *model.buffers()))
    return [t.to_dense() if t.layout is not torch.strided else t for t in found]


@pytest.mark.parametrize("entry", [e for e in ZOO if learns(e)], ids=lambda e: e.name)
def test_training_is_the_same_with_and_without(entry: Entry):
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

    assert w.n_steps == 2
    assert all(map(torch.equal, truth, own))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(state(plain), state(twin), strict=True))
    assert n_hooks(twin, opts[1]) == before
    assert len(w.param_stats.record()) == 2
