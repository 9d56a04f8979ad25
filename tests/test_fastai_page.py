"""What fastai's own page on hooks promises and no other file tests: `hook_fn`, stats in a fit."""

import pytest
import torch
from learners import quiet
from torch import Tensor, nn
from torch.testing import assert_close

from hookkit import ActivationStats, Hook, HookCallback, Learner, hook_input, hook_output


def fitted(*cbs: object, n_trn: int = 5) -> Learner:
    torch.manual_seed(0)
    learn = quiet(n_trn=n_trn, cbs=[*cbs])
    learn.fit(1)
    return learn


@pytest.mark.parametrize("kind", [{}, {"is_forward": False}, {"cpu": True}, {"detach": False}])
def test_hook_fn_calls_the_function_and_stores(kind: dict[str, bool]) -> None:
    m, x = nn.Linear(5, 3), torch.randn(4, 5)
    seen = []

    hook = Hook(m, lambda m, i, o: seen.append((m, i, o)) or o * 2, **kind)
    hook.remove()
    given = m(x)
    assert hook.hook_fn(m, (x,), given) is None

    assert seen[0][0] is m
    assert torch.equal(seen[0][1][0], x)
    assert torch.equal(seen[0][2], given)
    assert seen[0][2].requires_grad == (not kind.get("detach", True))
    assert torch.equal(hook.stored, given * 2)


def test_hook_fn_of_other_hooks_stores_or_returns_what_they_are_for() -> None:
    m, x, y = nn.Linear(5, 3), (torch.randn(4, 5),), torch.randn(4, 3)
    output, grads = hook_output(m), hook_output(m, grad=True)
    inputs, into = hook_input(m), hook_input(m, grad=True)
    edit = Hook(m, lambda m, i, o: o * 2, edit=True)

    for hook in (output, grads, inputs, into):
        hook.hook_fn(m, x, (y,) if hook is grads else y)
        hook.remove()

    assert torch.equal(output.stored, y)
    assert torch.equal(grads.stored[0], y)
    assert torch.equal(inputs.stored[0], x[0])
    assert torch.equal(into.stored[0], x[0])
    assert torch.equal(edit.hook_fn(m, x, y), y * 2)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_a_backward_hook_callback_sees_the_gradient_of_the_loss() -> None:
    seen = []

    class TstCallback(HookCallback):
        def __init__(self, modules=None, remove_end=True, detach=True, cpu=False) -> None:
            super().__init__(modules, None, remove_end, False, detach, cpu)

        def hook(self, m: nn.Module, i: object, o: object) -> object:
            return o

        def after_batch(self) -> None:
            if self.training:
                expected = 2 * (self.pred - self.y) / self.pred.shape[0]
                assert_close(self.hooks.stored[0][0], expected.detach())
                seen.append(1)

    fitted(TstCallback())
    assert len(seen) == 5


def test_activation_stats_are_the_mean_and_std_of_the_prediction() -> None:
    class TstCallback(HookCallback):
        def before_fit(self) -> None:
            super().before_fit()
            self.means, self.stds = [], []

        def hook(self, m: nn.Module, i: object, o: Tensor) -> tuple[float, float]:
            return o.mean().item(), o.std().item()

        def after_batch(self) -> None:
            if self.training:
                self.means.append(self.hooks.stored[0][0])
                self.stds.append(self.hooks.stored[0][1])

    learn = fitted(TstCallback(), ActivationStats())
    stats = learn.activation_stats.stats.itemgot(0)
    assert list(stats.itemgot("mean")) == pytest.approx(learn.tst.means, abs=1e-4)
    assert list(stats.itemgot("std")) == pytest.approx(learn.tst.stds, abs=1e-4)
