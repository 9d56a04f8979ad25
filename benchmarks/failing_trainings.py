"""The failing trainings: each has one true cause, and the rules that would name it."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trainings import (
    IMAGE,
    ROWS,
    Recurrent,
    Residual,
    Setup,
    TokenModel,
    Transformer,
    adam,
    adamw,
    conv,
    curve,
    digits,
    failing,
    lm_loss,
    markov,
    mlp,
    raw_digits,
    rescale,
    resnet,
    sgd,
)

# learning rate


@failing("lr_too_high")
def lr_high_sgd_mlp() -> Setup:
    m = mlp(nn.Tanh)
    return Setup(m, sgd(m, 20.0), digits())


@failing("lr_too_high")
def lr_high_adam_conv() -> Setup:
    m = conv(norm=False)
    return Setup(m, adam(m, 0.5), digits(*IMAGE))


@failing("lr_too_high")
def lr_high_transformer() -> Setup:
    m = Transformer()
    return Setup(m, adamw(m, 0.1), digits(*ROWS))


@failing("lr_too_high")
def lr_high_gru() -> Setup:
    m = Recurrent(nn.GRU)
    return Setup(m, adam(m, 1.0), digits(*ROWS))


@failing("lr_too_low")
def lr_low_adam_mlp() -> Setup:
    m = mlp()
    return Setup(m, adam(m, 1e-7), digits())


@failing("lr_too_low")
def lr_low_sgd_conv() -> Setup:
    m = conv()
    return Setup(m, sgd(m, 1e-6), digits(*IMAGE))


@failing("lr_too_low")
def lr_low_lm() -> Setup:
    m = TokenModel()
    return Setup(m, sgd(m, 1e-6), markov(), lm_loss, n_classes=12)


@failing("unmoved")
def lr_zero() -> Setup:
    m = mlp()
    return Setup(m, sgd(m, 0.0), digits())


# units and initial weights


@failing("dead")
def dead_relus_by_bias() -> Setup:
    m = mlp()
    nn.init.constant_(m[2].bias, -8.0)
    return Setup(m, sgd(m, 0.02), digits())


@failing("dead")
def mostly_dead_conv() -> Setup:
    m = conv(norm=False)
    nn.init.constant_(m[2].bias[:13], -20.0)
    return Setup(m, adam(m, 3e-3), digits(*IMAGE))


@failing("saturated")
def saturated_tanh() -> Setup:
    m = rescale(mlp(nn.Tanh), 30.0)
    return Setup(m, sgd(m, 0.01), digits())


@failing("saturated")
def saturated_sigmoid() -> Setup:
    m = mlp(nn.Sigmoid, depth=2)
    rescale(m[:4], 40.0)
    return Setup(m, adam(m, 1e-3), digits())


@failing("vanishing")
def vanishing_sigmoid_stack() -> Setup:
    m = mlp(nn.Sigmoid, depth=8)
    return Setup(m, sgd(m, 0.05), digits())


@failing("vanishing", "bad_init")
def vanishing_small_init() -> Setup:
    m = rescale(mlp(nn.Tanh, depth=10), 0.2)
    return Setup(m, sgd(m, 0.05), digits())


@failing("bad_init", "exploding")
def exploding_init_relu() -> Setup:
    m = rescale(mlp(depth=12), 8.0)
    return Setup(m, adam(m, 1e-3), digits())


@failing("bad_init", "exploding")
def exploding_residual() -> Setup:
    def block() -> nn.Module:
        return Residual(nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48)))

    body = nn.Sequential(*(rescale(block(), 4.0) for _ in range(12)))
    m = nn.Sequential(nn.Linear(64, 48), body, nn.Linear(48, 10))
    return Setup(m, sgd(m, 0.001), digits())


@failing("zero_gradient")
def zero_init_everywhere() -> Setup:
    m = mlp()
    for p in m.parameters():
        nn.init.zeros_(p)
    return Setup(m, sgd(m, 0.05), digits())


# wiring


@failing("not_in_optimizer")
def layer_forgotten_by_optimizer() -> Setup:
    m = mlp()
    opt = torch.optim.Adam([*m[0].parameters(), *m[4].parameters(), *m[6].parameters()], 2e-3)
    return Setup(m, opt, digits())


@failing("not_in_optimizer")
def head_added_after_optimizer() -> Setup:
    m = conv()
    opt = adam(m, 3e-3)
    m[-1] = nn.Linear(32, 10)
    return Setup(m, opt, digits(*IMAGE))


class Detaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(out=32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).detach())


@failing("no_gradient")
def detached_body() -> Setup:
    m = Detaches()
    return Setup(m, adam(m, 2e-3), digits())


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux = mlp(), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@failing("no_gradient")
def unused_head() -> Setup:
    m = Unused()
    return Setup(m, adamw(m, 2e-3), digits())


class NoGradEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Transformer()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.net.inp(x) + self.net.pos
            for block in self.net.blocks:
                h = block(h)
        return self.net.head(self.net.norm(h).mean(1))


@failing("no_gradient")
def encoder_under_no_grad() -> Setup:
    m = NoGradEncoder()
    return Setup(m, adamw(m, 2e-3), digits(*ROWS))


@failing("grads_pile_up")
def zero_grad_forgotten_sgd() -> Setup:
    m = mlp()
    return Setup(m, sgd(m, 0.05), digits(), zero_grad=False)


@failing("grads_pile_up")
def zero_grad_forgotten_conv() -> Setup:
    m = conv()
    return Setup(m, sgd(m, 0.1), digits(*IMAGE), zero_grad=False)


@failing("weight_decay")
def weight_decay_too_big() -> Setup:
    m = mlp()
    return Setup(m, adamw(m, 1e-2, weight_decay=10.0), digits())


@failing("weight_decay")
def weight_decay_conv() -> Setup:
    m = conv(norm=False)
    return Setup(m, sgd(m, 0.05, weight_decay=0.5), digits(*IMAGE))


# loss and data


@failing("probabilities")
def softmax_module_before_loss() -> Setup:
    m = nn.Sequential(*mlp(), nn.Softmax(1))
    return Setup(m, adam(m, 2e-3), digits())


class SoftmaxInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = conv()

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.net(x), dim=1)


@failing("probabilities")
def softmax_function_before_loss() -> Setup:
    m = SoftmaxInside()
    return Setup(m, adam(m, 3e-3), digits(*IMAGE))


@failing("probabilities")
def sigmoid_before_cross_entropy() -> Setup:
    m = nn.Sequential(*mlp(nn.GELU), nn.Sigmoid())
    return Setup(m, adam(m, 2e-3), digits())


@failing("input_scale")
def unscaled_inputs() -> Setup:
    m = mlp()
    return Setup(m, sgd(m, 0.01), raw_digits())


def bad_batches(source: Iterator[Any], at: int, how: float) -> Iterator[Any]:
    for t, (x, y) in enumerate(source):
        yield (torch.where(torch.rand_like(x) < 0.01, how, x), y) if t == at else (x, y)


@failing("non_finite")
def nan_in_one_batch() -> Setup:
    m = conv()
    return Setup(m, adam(m, 3e-3), bad_batches(digits(*IMAGE), 80, float("nan")))


class LogLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


@failing("non_finite")
def log_of_zero() -> Setup:
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), LogLayer(), nn.Linear(32, 10))
    return Setup(m, adam(m), digits())


def mislabelled(source: Iterator[Any]) -> Iterator[Any]:
    """Every 13th batch comes from a shard whose labels are off."""
    for t, (x, y) in enumerate(source):
        yield (x, (y + 5) % 10) if t % 13 == 12 else (x, y)


@failing("spikes")
def one_bad_shard() -> Setup:
    m = mlp(nn.GELU)
    return Setup(m, sgd(m, 0.02), mislabelled(digits()))


def shuffled(source: Iterator[Any]) -> Iterator[Any]:
    for x, y in source:
        yield x, y[torch.randperm(len(y))]


@failing("not_learning")
def shuffled_labels() -> Setup:
    m = resnet()
    return Setup(m, sgd(m, 0.02), shuffled(digits(*IMAGE)))


@failing("not_learning", "zero_gradient")
def constant_input() -> Setup:
    m = mlp(nn.SiLU, i=4, out=1)
    data = ((torch.zeros_like(x), y) for x, y in curve())
    return Setup(m, adam(m, 3e-3), data, F.mse_loss, n_classes=None)
