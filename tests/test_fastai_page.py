"""What fastai's own page on hooks promises holds here, cell by cell: names, calls, numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
from fastcore.test import test_close as is_close, test_eq as equal, test_stdout as prints
from learners import conv_layer, quiet
from torch import nn

from hookkit import (
    ActivationStats,
    Hook,
    HookCallback,
    Hooks,
    Learner,
    dummy_eval,
    has_params,
    hook_input,
    hook_output,
    hook_outputs,
    layer_info,
    model_sizes,
    num_features_model,
    total_params,
)
from hookkit.testing import synth_learner


def is_equal(a: object, b: object) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        equal(a, b)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def layers_and_input() -> tuple[list[nn.Module], torch.Tensor]:
    return [nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3)], torch.randn(4, 5)


def fitted(*cbs: object, n_trn: int = 5) -> Learner:
    learn = quiet(n_trn=n_trn, cbs=[*cbs])
    learn.fit(1)
    return learn


def example_forward_hook(m: nn.Module, i: object, o: object) -> None:
    print(m, i, o)


@pytest.mark.parametrize("kind", [{}, {"is_forward": False}, {"cpu": True}, {"detach": False}])
def test_hook_fn_calls_the_function_and_stores(kind: dict[str, bool]) -> None:
    m, x = nn.Linear(5, 3), torch.randn(4, 5)
    seen = []

    hook = Hook(m, lambda m, i, o: seen.append((m, i, o)) or o * 2, **kind)
    hook.remove()
    given = m(x)
    assert hook.hook_fn(m, (x,), given) is None

    assert seen[0][0] is m
    is_equal(seen[0][1][0], x)
    is_equal(seen[0][2], given)
    assert seen[0][2].requires_grad == (not kind.get("detach", True))
    is_equal(hook.stored, given * 2)


def test_hook_fn_of_other_hooks_stores_or_returns_what_they_are_for() -> None:
    m, x, y = nn.Linear(5, 3), (torch.randn(4, 5),), torch.randn(4, 3)
    output, grads = hook_output(m), hook_output(m, grad=True)
    inputs, into = hook_input(m), hook_input(m, grad=True)
    edit = Hook(m, lambda m, i, o: o * 2, edit=True)

    for hook in (output, grads, inputs, into):
        hook.hook_fn(m, x, (y,) if hook is grads else y)
        hook.remove()

    is_equal(output.stored, y)
    is_equal(grads.stored[0], y)
    is_equal(inputs.stored[0], x[0])
    is_equal(into.stored[0], x[0])
    is_equal(edit.hook_fn(m, x, y), y * 2)


def test_a_printing_hook_prints_exactly_while_it_is_registered() -> None:
    tst_model, x = nn.Linear(5, 10), torch.randn(4, 5)
    y = tst_model(x)
    expected = f"{tst_model} ({x},) {y.detach()}"

    hook = Hook(tst_model, example_forward_hook)
    prints(lambda: tst_model(x), expected)
    hook.remove()
    prints(lambda: tst_model(x), "")
    with Hook(tst_model, example_forward_hook):
        prints(lambda: tst_model(x), expected)
    prints(lambda: tst_model(x), "")


def test_a_hook_and_hooks_over_a_sequential_or_a_list_store_what_their_function_returns() -> None:
    layers, x = layers_and_input()
    tst_model = nn.Sequential(*layers)

    hook = Hook(tst_model, lambda m, i, o: o)
    hooks = Hooks(tst_model, lambda m, i, o: o)
    y = tst_model(x)
    hook.remove()
    hooks.remove()
    with Hooks(layers, lambda m, i, o: o) as h:
        tst_model(x)

    is_equal(hook.stored, y)
    for stored in (hooks.stored, h.stored):
        is_equal(stored[0], layers[0](x))
        is_equal(stored[1], F.relu(layers[0](x)))
        is_equal(stored[2], y)


def test_hook_output_hook_outputs_and_their_gradients() -> None:
    layers, x = layers_and_input()
    tst_model = nn.Sequential(*layers)

    with hook_output(tst_model) as one, hook_outputs(layers) as h:
        y = tst_model(x)
    with hook_output(tst_model, grad=True) as one_g, hook_outputs(layers, grad=True) as hg:
        y = tst_model(x)
        y.pow(2).mean().backward()

    is_equal(one.stored, y)
    is_equal(h.stored[2], y)
    assert not any(s.requires_grad for s in (one.stored, *h.stored))
    g = 2 * y / y.numel()
    is_close(g, one_g.stored[0])
    is_close(g, hg.stored[2][0])
    g = g @ layers[2].weight.data
    is_close(g, hg.stored[1][0])
    is_close(g * (layers[0](x) > 0).float(), hg.stored[0][0])


def test_sizes_and_features_of_a_body() -> None:
    m = nn.Sequential(conv_layer(3, 16), conv_layer(16, 32, stride=2), conv_layer(32, 32))

    is_equal(model_sizes(m), [[1, 16, 64, 64], [1, 32, 32, 32], [1, 32, 32, 32]])
    is_equal(num_features_model(m), 32)
    is_equal(num_features_model(nn.Sequential(nn.Conv2d(5, 4, 3), nn.Conv2d(4, 3, 3))), 3)
    is_equal(list(dummy_eval(m, (32, 32)).shape), [1, 32, 16, 16])


def test_parameters_are_found_and_counted() -> None:
    assert has_params(nn.Linear(3, 4))
    assert not has_params(nn.ReLU())
    for layer, counted in (
        (nn.Linear(10, 32), (352, True)),
        (nn.BatchNorm2d(20), (40, True)),
        (nn.BatchNorm2d(20, affine=False), (0, False)),
        (nn.Conv2d(16, 32, 3, bias=False), (16 * 32 * 3 * 3, True)),
        (nn.LSTM(20, 10, 2), (4 * (20 * 10 + 10) + 3 * 4 * (110), True)),
    ):
        is_equal(total_params(layer), counted)


def test_a_hook_callback_sees_the_prediction() -> None:
    seen = []

    class TstCallback(HookCallback):
        def hook(self, m: nn.Module, i: object, o: object) -> object:
            return o

        def after_batch(self) -> None:
            is_equal(self.hooks.stored[0], self.pred)
            seen.append(1)

    fitted(TstCallback())
    assert len(seen) == 7  # validation batches too


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
                is_close(self.hooks.stored[0][0], expected)
                seen.append(1)

    fitted(TstCallback())
    assert len(seen) == 5


def test_layer_info_of_the_page() -> None:
    model = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.BatchNorm1d(50), nn.Linear(50, 1))

    info = layer_info(synth_learner(model=model), torch.randn(16, 1))

    is_equal(
        info,
        [
            ("Linear", 100, True, [1, 50], False),
            ("ReLU", "", "", [1, 50], True),
            ("BatchNorm1d", 100, True, [1, 50], True),
            ("Linear", 51, True, [1, 1], False),
        ],
    )


@pytest.mark.parametrize("n_trn", [11, 12, 13])
@pytest.mark.parametrize("every", [4, 1])
def test_every_records_the_ceiling_of_the_share(n_trn: int, every: int) -> None:
    learn = fitted(ActivationStats(every=every), n_trn=n_trn)

    is_equal(len(learn.activation_stats.stats), math.ceil(n_trn / every))


def test_activation_stats_are_the_mean_and_std_of_the_prediction() -> None:
    class TstCallback(HookCallback):
        def before_fit(self) -> None:
            super().before_fit()
            self.means, self.stds = [], []

        def hook(self, m: nn.Module, i: object, o: torch.Tensor) -> tuple[float, float]:
            return o.mean().item(), o.std().item()

        def after_batch(self) -> None:
            if self.training:
                self.means.append(self.hooks.stored[0][0])
                self.stds.append(self.hooks.stored[0][1])

    learn = fitted(TstCallback(), ActivationStats())
    stats = learn.activation_stats.stats.itemgot(0)
    is_close(stats.itemgot("mean"), learn.tst.means, eps=1e-4)
    is_close(stats.itemgot("std"), learn.tst.stds, eps=1e-4)


def test_histograms_are_recorded_on_request() -> None:
    stats = fitted(ActivationStats(with_hist=True)).activation_stats
    assert set(stats.stats[0][0]) >= {"mean", "std", "near_zero", "hist"}
    assert stats.hist(0).shape[-1] == 5
    assert len(stats.layer_stats(0)) == 3
