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


def loop(f: Callable[[bool], Any]) -> Callable[[bool], Any]:
    """Registers a training under the rule's name; it returns a Watcher or a Run."""

    def run(wrong: bool) -> Run:
        torch.manual_seed(0)
        made = f(wrong)
        return made.run_record() if isinstance(made, Watcher) else made

    LOOPS[f.__name__] = run
    return f


def net(n_out: int = 3, *, act: type[nn.Module] = nn.ReLU, width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, width), act(), nn.Linear(width, width), act(), nn.Linear(width, n_out)
    )


def blobs(n: int = 32) -> tuple[Tensor, Tensor]:
    """(n, 8) standardised floats of three classes, and those."""
    y = torch.randint(3, (n,))
    return torch.eye(3, 8)[y] * 2 + 0.7 * torch.randn(n, 8), y


def recorders() -> list[Any]:
    return [ActivationStats(include_paramless=True, units=True), ParamStats()]


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
    **options: Any,
) -> Watcher:
    opt = opt or torch.optim.Adam(model.parameters(), lr)
    with watch(model, opt, *recorders(), **options) as w:
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


def classify(model: Any, opt: Any = None, **how: Any) -> Watcher:
    """The usual loop, by cross entropy."""

    def loss(i: int) -> Tensor:
        x, y = blobs()
        return F.cross_entropy(model(x), y)

    return train(model, loss, opt, **how)


def sgd(model: nn.Module, lr: float = 0.1, **how: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr, **how)


# --- facts: the loss


@loop
def broadcast(wrong: bool) -> Any:
    model = net(1)

    def loss(i: int) -> Tensor:
        x = torch.randn(32, 8)
        y = x.sum(1)
        out = model(x)
        return ((out if wrong else out[:, 0]) - y).pow(2).mean()

    return train(model, loss)


@loop
def softmax_dim(wrong: bool) -> Any:
    model = net()

    def loss(i: int) -> Tensor:
        x, y = blobs()
        return F.nll_loss(model(x).log_softmax(0 if wrong else 1), y)

    return train(model, loss)


@loop
def probabilities(wrong: bool) -> Any:
    model = nn.Sequential(*net(), nn.Softmax(1) if wrong else nn.Identity())
    return classify(model)


@loop
def ascent(wrong: bool) -> Any:
    model = net()
    return classify(model, sgd(model, 0.01, maximize=wrong))


@loop
def below_zero(wrong: bool) -> Any:
    model = net(1)

    def loss(i: int) -> Tensor:
        x, y = blobs()  # labels of 0 to 2, where 0 to 1 are meant
        target = y.float() if wrong else (y > 0).float()
        return F.binary_cross_entropy_with_logits(model(x)[:, 0], target)

    return train(model, loss, lr=0.02)


# --- facts: the loop


@loop
def no_step(wrong: bool) -> Any:
    return classify(net(), step=not wrong)


@loop
def grads_pile_up(wrong: bool) -> Any:
    model = net()
    return classify(model, sgd(model, 0.02), zero=not wrong)


@loop
def eval_mode(wrong: bool) -> Any:
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    def loss(i: int) -> Tensor:
        if i == 20:
            model.train(not wrong)
        x, y = blobs()
        return F.cross_entropy(model(x), y)

    return train(model, loss)


@loop
def schedule_over(wrong: bool) -> Any:
    model = net()
    opt = sgd(model, 0.02)
    decay = torch.optim.lr_scheduler.ExponentialLR(opt, 0.6 if wrong else 0.97)

    def loss(i: int) -> Tensor:
        if i:
            decay.step()
        x, y = blobs()
        return F.cross_entropy(model(x), y)

    return train(model, loss, opt)


# --- facts: the data


@loop
def constant_input(wrong: bool) -> Any:
    model = net()

    def loss(i: int) -> Tensor:
        x, y = blobs()
        return F.cross_entropy(model(x[:1].expand(32, 8) if wrong else x), y)

    return train(model, loss)


@loop
def repeated_data(wrong: bool) -> Any:
    model, same = net(), blobs()

    def loss(i: int) -> Tensor:
        x, y = same if wrong else blobs()
        return F.cross_entropy(model(x), y)

    return train(model, loss)


@loop
def small_batch(wrong: bool) -> Any:
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    def loss(i: int) -> Tensor:
        x, y = blobs(2 if wrong else 32)
        return F.cross_entropy(model(x), y)

    return train(model, loss)


@loop
def dropout(wrong: bool) -> Any:
    return classify(nn.Sequential(*net()[:4], nn.Dropout(0.95 if wrong else 0.1), net()[4]))


# --- facts: parameters


@loop
def not_in_optimizer(wrong: bool) -> Any:
    model = net()
    opt = torch.optim.Adam((model[:4] if wrong else model).parameters(), 3e-3)
    return classify(model, opt)


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

    return classify(Listed(), lr=0.02)


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
def no_gradient(wrong: bool) -> Any:
    return classify(Headed(cut=wrong))


@loop
def unmoved(wrong: bool) -> Any:
    model = net()
    still = {"params": model[2].parameters(), "lr": 0.0 if wrong else 3e-3}
    rest = [*model[0].parameters(), *model[4].parameters()]
    return classify(model, torch.optim.Adam([{"params": rest}, still], 3e-3))


@loop
def zero_gradient(wrong: bool) -> Any:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.a(x).relu() + self.b(x) * (0.0 if wrong else 1.0))

    return classify(Gated())


@loop
def zero_init(wrong: bool) -> Any:
    model = net()
    for p in model.parameters() if wrong else ():
        nn.init.zeros_(p)
    return classify(model)


@loop
def constant_init(wrong: bool) -> Any:
    model = net()
    for p in model.parameters() if wrong else ():
        nn.init.constant_(p, 0.1)
    return classify(model)


# --- facts: values


@loop
def non_finite(wrong: bool) -> Any:
    model = net()

    def loss(i: int) -> Tensor:
        x, y = blobs()
        if wrong and i == 30:
            x[0, 0] = math.nan
        return F.cross_entropy(model(x), y)

    return train(model, loss)


@loop
def dead(wrong: bool) -> Any:
    model = net()
    if wrong:
        nn.init.constant_(model[2].bias[:-1], -20.0)
    return classify(model)


@loop
def saturated(wrong: bool) -> Any:
    model = net(act=nn.Tanh)
    if wrong:
        model[0].weight.data.mul_(20)
    return classify(model)


# --- measures


@loop
def input_scale(wrong: bool) -> Any:
    model = net()

    def loss(i: int) -> Tensor:
        x, y = blobs()
        return F.cross_entropy(model(x * (255 if wrong else 1)), y)

    return train(model, loss)


@loop
def target_scale(wrong: bool) -> Any:
    model = net(1)

    def loss(i: int) -> Tensor:
        x = torch.randn(32, 8)
        y = x[:, :1] * 300 + 2000
        return F.mse_loss(model(x), y if wrong else (y - 2000) / 300)

    return train(model, loss)


@loop
def bad_init(wrong: bool) -> Any:
    model = net()
    for layer in model[::2] if wrong else ():
        nn.init.normal_(layer.weight, 0, 3)
    return classify(model)


@loop
def weight_decay(wrong: bool) -> Any:
    model = net()
    decay = 10.0 if wrong else 0.01
    return classify(model, torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=decay))


@loop
def momentum(wrong: bool) -> Any:
    model = net()
    return classify(model, sgd(model, 0.01, momentum=0.999 if wrong else 0.9))


@loop
def clipping(wrong: bool) -> Any:
    model = net()

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-5 if wrong else 1.0)

    return classify(model, sgd(model), after_backward=clip)


@loop
def fp16_underflow(wrong: bool) -> Any:
    model = net().half()

    def loss(i: int) -> Tensor:
        x, y = blobs()
        return F.cross_entropy(model(x.half()).float(), y) * (1e-5 if wrong else 1.0)

    return train(model, loss, sgd(model))


@loop
def lr_too_high(wrong: bool) -> Any:
    model = net()
    return classify(model, lr=5.0 if wrong else 3e-3, n=60)


@loop
def lr_too_low(wrong: bool) -> Any:
    model = net()
    return classify(model, sgd(model, 1e-5 if wrong else 0.1), n=100)


# --- notes


@loop
def not_learning(wrong: bool) -> Any:
    model = net()

    def loss(i: int) -> Tensor:
        x, y = blobs(256)
        return F.cross_entropy(model(x), torch.randint(3, (256,)) if wrong else y)

    return train(model, loss, n=60)


@loop
def initial_loss(wrong: bool) -> Any:
    model = net()
    if wrong:
        model[4].bias.data.copy_(torch.tensor([30.0, 0, 0]))
    return classify(model)


@loop
def vanishing(wrong: bool) -> Any:
    act = nn.Sigmoid if wrong else nn.ReLU
    layers = [part for _ in range(7) for part in (nn.Linear(8, 8), act())]
    model = nn.Sequential(*layers, nn.Linear(8, 3))
    return classify(model)


@loop
def exploding(wrong: bool) -> Any:
    model = net()
    if wrong:  # what the first layer gives is small, and its gradient large
        for layer, times in zip(model[::2], (0.01, 1, 8), strict=True):
            layer.weight.data.mul_(times)
            nn.init.zeros_(layer.bias)
    return classify(model, lr=1e-4)


@loop
def overfit(wrong: bool) -> Any:
    valid = [0.5 + (0.1 * i if wrong else -0.05 * i) for i in range(6)]
    rows = [
        {"epoch": i, "train_loss": 1 / (i + 1), "valid_loss": loss} for i, loss in enumerate(valid)
    ]
    losses = torch.linspace(1, 0.2, 60).double().numpy()
    return Run(losses=losses, valid=rows)
