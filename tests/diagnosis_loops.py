"""A training for each rule of the diagnosis: with its mistake, or the same without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookkit import ActivationStats, ParamStats, Run, Watcher, watch

LOOPS: dict[str, Callable[[bool], Run]] = {}
"""By the name of the rule: `LOOPS["dropout"](True)` is the run with the mistake."""


def loop(f: Callable[[bool], Any], name: str = "") -> Callable[[bool], Any]:
    """Registers a training under the rule's name; it returns a Watcher or a Run."""

    def run(wrong: bool) -> Run:
        torch.manual_seed(0)
        made = f(wrong)
        return made.run_record() if isinstance(made, Watcher) else made

    LOOPS[name or f.__name__] = run
    return f


def net(n_out: int = 3, *, act: type[nn.Module] = nn.ReLU, width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, width), act(), nn.Linear(width, width), act(), nn.Linear(width, n_out)
    )


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def blobs(n: int = 32) -> tuple[Tensor, Tensor]:
    """(n, 8) standardised floats of three classes, and those."""
    y = torch.randint(3, (n,))
    return torch.eye(3, 8)[y] * 2 + 0.7 * torch.randn(n, 8), y


def train(
    model: Any,
    loss_of: Callable[[int], Tensor],
    opt: Any = None,
    *,
    n: int = 40,
    lr: float = 3e-3,
    after_backward: Callable[[], object] = lambda: None,
    zero: bool = True,
    step: bool = True,
    recorders: Any = None,
) -> Watcher:
    """The usual loop of `n` steps of `loss_of(i)`."""
    opt = opt or torch.optim.Adam(model.parameters(), lr)
    if recorders is None:
        recorders = ActivationStats(include_paramless=True, units=True), ParamStats()
    with watch(model, opt, *recorders) as w:
        for i in range(n):
            loss = loss_of(i)
            if zero:
                opt.zero_grad()
            loss.backward()
            after_backward()
            if step:
                opt.step()
            w.loss(loss)
    return w


def fit(
    model: Any,
    make_opt: Callable[[nn.Module], Any] = lambda model: None,
    batch: Callable[[int], tuple[Tensor, Tensor]] = lambda i: blobs(),
    loss_func: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    inputs: Callable[[Tensor], Tensor] = lambda x: x,
    **how: Any,
) -> Watcher:
    """`train` with `loss_func(model(inputs(x)), y)` of batches."""

    def loss(i: int) -> Tensor:
        x, y = batch(i)
        return loss_func(model(inputs(x)), y)

    return train(model, loss, make_opt(model), **how)


def sgd(lr: float = 0.1, **how: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.optim.SGD(model.parameters(), lr, **how)


def adamw(**how: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.optim.AdamW(model.parameters(), 3e-3, **how)


def sums(i: int) -> tuple[Tensor, Tensor]:
    """A batch of (32, 8) floats and the sum of each row."""
    x = torch.randn(32, 8)
    return x, x.sum(1)


def begun(model: nn.Module, init: Callable[[Tensor], object], wrong: bool) -> nn.Module:
    """`model` with other first weights if that is the mistake."""
    for p in model.parameters() if wrong else ():
        init(p)
    return model


# --- a mistake in one argument

ONE_ARGUMENT: dict[str, Callable[[bool], Watcher]] = {
    "broadcast": lambda wrong: fit(
        net(1),
        batch=sums,
        loss_func=lambda x, y: ((x if wrong else x[:, 0]) - y).pow(2).mean(),
    ),
    "softmax_dim": lambda wrong: fit(
        net(), loss_func=lambda x, y: F.nll_loss(x.log_softmax(0 if wrong else 1), y)
    ),
    "probabilities": lambda wrong: fit(
        nn.Sequential(*net(), nn.Softmax(1) if wrong else nn.Identity())
    ),
    "no_step": lambda wrong: fit(net(), step=not wrong),
    "grads_pile_up": lambda wrong: fit(net(), sgd(0.02), zero=not wrong),
    "dropout": lambda wrong: fit(
        nn.Sequential(*net()[:4], nn.Dropout(0.95 if wrong else 0.1), net()[4])
    ),
    "input_scale": lambda wrong: fit(net(), inputs=lambda x: x * (255 if wrong else 1)),
    "no_gradient": lambda wrong: fit(Headed(cut=wrong)),
    "zero_init": lambda wrong: fit(begun(net(), nn.init.zeros_, wrong)),
    "constant_init": lambda wrong: fit(begun(net(), lambda p: p.data.fill_(0.1), wrong)),
    "bad_init": lambda wrong: fit(
        begun(net(), lambda p: p.ndim > 1 and nn.init.normal_(p, 0, 3), wrong)
    ),
    "weight_decay": lambda wrong: fit(net(), adamw(weight_decay=10.0 if wrong else 0.01)),
    "lr_too_high": lambda wrong: fit(net(), lr=5.0 if wrong else 3e-3, n=60),
    "lr_too_low": lambda wrong: fit(net(), sgd(1e-5 if wrong else 0.1), n=100),
}
for name, train_it in ONE_ARGUMENT.items():
    loop(train_it, name)


# --- facts: the loss


@loop
def below_zero(wrong: bool) -> Any:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        target = y.float() if wrong else (y > 0).float()  # 0 to 2, where 0 to 1 are meant
        return F.binary_cross_entropy_with_logits(out[:, 0], target)

    return fit(net(1), loss_func=loss, lr=0.02)


# --- facts: the loop


@loop
def eval_mode(wrong: bool) -> Any:
    model = normed()

    def batch(i: int) -> Any:
        if i == 20:
            model.train(not wrong)
        return blobs()

    return fit(model, batch=batch)


@loop
def schedule_over(wrong: bool) -> Any:
    model = net()
    opt = sgd(0.02)(model)
    decay = torch.optim.lr_scheduler.ExponentialLR(opt, 0.6 if wrong else 0.97)

    def batch(i: int) -> Any:
        if i:
            decay.step()
        return blobs()

    return fit(model, lambda model: opt, batch)


# --- facts: the data


@loop
def repeated_data(wrong: bool) -> Any:
    model, same = net(), blobs()
    return fit(model, batch=lambda i: same if wrong else blobs())


# --- facts: parameters


@loop
def not_in_optimizer(wrong: bool) -> Any:
    def make_opt(model: nn.Module) -> Any:
        return torch.optim.Adam((model[:4] if wrong else model).parameters(), 3e-3)

    return fit(net(), make_opt)


@loop
def unregistered(wrong: bool) -> Any:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [nn.Linear(8, 8), nn.Linear(8, 3)]
            if not wrong:
                self.parts = nn.ModuleList(self.parts)
            self.last = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return self.last(x)

    return fit(Listed(), lr=0.02)


class Headed(nn.Module):
    """A body and a head, and maybe one that is not used; the body may be cut off."""

    def __init__(self, cut: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.cut = nn.Linear(8, 32), nn.Linear(32, 3), cut
        self.unused = nn.Linear(32, 2) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        return self.head(h.detach() if self.cut else h)


@loop
def unmoved(wrong: bool) -> Any:
    def make_opt(model: nn.Module) -> Any:
        still = {"params": model[2].parameters(), "lr": 0.0 if wrong else 3e-3}
        rest = [*model[0].parameters(), *model[4].parameters()]
        return torch.optim.Adam([{"params": rest}, still], 3e-3)

    return fit(net(), make_opt)


@loop
def zero_gradient(wrong: bool) -> Any:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.a(x).relu() + self.b(x) * (0.0 if wrong else 1.0))

    return fit(Gated())


# --- facts: values


@loop
def non_finite(wrong: bool) -> Any:
    def batch(i: int) -> Any:
        x, y = blobs()
        if wrong and i == 30:
            x[0, 0] = math.nan
        return x, y

    return fit(net(), batch=batch)


@loop
def dead(wrong: bool) -> Any:
    model = net()
    if wrong:
        nn.init.constant_(model[2].bias[:-1], -20.0)
    return fit(model)


@loop
def saturated(wrong: bool) -> Any:
    model = net(act=nn.Tanh)
    model[0].weight.data.mul_(20 if wrong else 1)
    return fit(model)


# --- measures


@loop
def target_scale(wrong: bool) -> Any:
    def batch(i: int) -> Any:
        x = torch.randn(32, 8)
        return x, x[:, :1] * 300 + 2000 if wrong else x[:, :1]

    return fit(net(1), batch=batch, loss_func=F.mse_loss)


@loop
def clipping(wrong: bool) -> Any:
    model = net()

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-5 if wrong else 1.0)

    return fit(model, sgd(), after_backward=clip)


@loop
def fp16_underflow(wrong: bool) -> Any:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.float(), y) * (1e-5 if wrong else 1.0)

    return fit(net().half(), sgd(), loss_func=loss, inputs=Tensor.half)


# --- notes


@loop
def not_learning(wrong: bool) -> Any:
    def batch(i: int) -> Any:
        x, y = blobs(256)
        return x, torch.randint(3, (256,)) if wrong else y

    return fit(net(), batch=batch, n=60)


@loop
def initial_loss(wrong: bool) -> Any:
    model = net()
    if wrong:
        model[4].bias.data.copy_(torch.tensor([30.0, 0, 0]))
    return fit(model)


@loop
def vanishing(wrong: bool) -> Any:
    act = nn.Sigmoid if wrong else nn.ReLU
    layers = [part for _ in range(7) for part in (nn.Linear(8, 8), act())]
    return fit(nn.Sequential(*layers, nn.Linear(8, 3)))


@loop
def exploding(wrong: bool) -> Any:
    model = net()
    if wrong:  # what the first layer gives is small, and its gradient large
        for layer, times in zip(model[::2], (0.01, 1, 8), strict=True):
            layer.weight.data.mul_(times)
            nn.init.zeros_(layer.bias)
    return fit(model, lr=1e-4)


@loop
def overfit(wrong: bool) -> Any:
    valid = [0.5 + (0.1 * i if wrong else -0.05 * i) for i in range(6)]
    rows = [{"epoch": i, "train_loss": 1 / (i + 1), "valid_loss": x} for i, x in enumerate(valid)]
    return Run(losses=torch.linspace(1, 0.2, 60).double().numpy(), valid=rows)
