"""HookCallback on every odd model of the zoo: training with it is training without it.

Backward hooks are PyTorch's own, which refuse in-place layers and change the order in which
gradients are summed: with them training is as with the same hooks registered by hand.
"""

import warnings
from typing import Any

import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn
from zoo import ZOO, Entry

from hookkit.callbacks import Callback
from hookkit.nested import leaves
from hookkit.recording import HookCallback
from hookkit.selecting import leaf_modules
from hookkit.testing import synth_learner


class ByHand(Callback):
    """PyTorch's full backward hooks on the modules that HookCallback hooks, without hookkit."""

    def before_fit(self) -> None:
        self.handles = [
            m.register_full_backward_hook(lambda m, i, o: None)
            for m in leaf_modules(self.learn.model).values()
            if not isinstance(m, torch.jit.ScriptModule)
        ]

    def cleanup_fit(self) -> None:
        for handle in self.handles:
            handle.remove()


class Whole(nn.Module):
    """The entry's model with the entry's own inputs, whatever batch comes."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry, self.model = entry, entry.build()

    def forward(self, _: Tensor) -> Any:
        return self.entry.run(self.model)


def total(out: Any, _: Tensor) -> Tensor:
    """A loss of every floating point number that has a gradient."""
    parts = [t for t in leaves(out) if t.requires_grad and not t.is_sparse and not t.is_nested]
    sums = [(t.abs() if t.is_complex() else t).float().pow(2).mean() for t in parts if t.numel()]
    return torch.stack(sums).sum() if sums else torch.zeros((), requires_grad=True)


def trained(entry: Entry, guests: list[Any]) -> tuple[str, int, dict[str, Any]]:
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


def lazy(p: Tensor) -> bool:
    return torch.nn.parameter.is_lazy(p)


def plain_params(m: nn.Module) -> list[nn.Parameter]:
    return [p for p in m.parameters() if p.requires_grad and not lazy(p) and not p.is_meta]


@pytest.mark.parametrize("is_forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_training_is_the_same_with_hooks_on_every_module(entry: Entry, is_forward: bool) -> None:
    def keep(m: nn.Module, i: Any, o: Any) -> Any:
        return o

    if {"scripted", "compiled", "cyclic"} & entry.tags:
        pytest.skip("modules that run no Python hooks, or are no tree")
    expected, before, weights = trained(entry, [] if is_forward else [ByHand()])

    cb = HookCallback(include_paramless=True, is_forward=is_forward, hook=keep)
    ended, after, watched = trained(entry, [cb])

    assert (ended, after) == (expected, before)
    assert watched.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(watched[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
