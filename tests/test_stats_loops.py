"""Statistics in trainings of odd kinds: what plain hooks and plain arithmetic say, or nothing."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from hookkit.stats import ActivationStats, ParamStats
from hookkit.watching import watch


class Growing(torch.optim.SGD):
    """Gives `layer` other weights, `to` rows of them, in its step number `at`."""

    def grow(self, layer: nn.Linear, at: int, to: int) -> "Growing":
        self.layer, self.at, self.to = layer, at, to
        return self

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.at -= 1
        if not self.at:
            self.layer.weight.data = torch.ones(self.to, self.layer.in_features)
            self.layer.bias.data = torch.ones(self.to)
            self.layer.weight.grad = self.layer.bias.grad = None


@pytest.mark.parametrize("to", [3, 11])
@pytest.mark.parametrize("every_layer", [False, True])
def test_a_parameter_that_a_step_gives_another_shape_has_no_update(
    to: int, every_layer: bool
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = model[2:] if every_layer else model
    opt = Growing(model.parameters(), lr=0.1).grow(model[-1], at=2, to=to)
    stats = ParamStats()

    with watch(model, opt, stats):
        for _ in range(4):
            model(torch.ones(4, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    record = stats.record()
    for name in record.names:
        grown = every_layer or name.startswith("2")
        known = [math.isfinite(u) for u in record.value("update_norm", name)]
        assert known == [True, not grown, True, True]
    assert record.value("weight_norm", record.names[-1])[2] == pytest.approx(math.sqrt(to))


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if len(x) > 4:
            raise MemoryError
        return self.b(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_fails_and_is_tried_in_parts_leaves_nothing(training: bool) -> None:
    model, stats = Narrow(), ActivationStats(with_hist=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    with watch(model, opt, stats):
        for _ in range(2):
            model.train(training)
            x = torch.randn(8, 8)
            try:
                model(x)
            except MemoryError:
                for part in x.split(4):
                    model(part).square().mean().backward()
            model.train()
            if not training:
                model(x[:4]).sum().backward()
            opt.step()
            opt.zero_grad()

    record, n = stats.record(), 64 if training else 32
    assert record.value("count", "a").tolist() == [n, n]
    assert record.hist is not None
    assert record.hist[record.layer("a")].sum() == 2 * n


def test_a_parameter_that_is_called_otherwise_goes_on_under_its_new_name() -> None:
    model, stats = nn.Sequential(nn.Linear(8, 2)), ParamStats()
    prune.random_unstructured(model[0], "weight", 0.5)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    with watch(model, opt, stats):
        for i in range(4):
            if i == 2:
                prune.remove(model[0], "weight")
            model(torch.ones(4, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    norms = {name: stats.record().value("weight_norm", name) for name in stats.record().names}
    assert [math.isfinite(n) for n in norms["0.weight_orig"]] == [True, True, False, False]
    assert [math.isfinite(n) for n in norms["0.weight"]] == [False, False, True, True]


class BodyAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Again(torch.autograd.Function):
    """Runs `layer` again in the backward, as reversible nets do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), grads)
        return x.grad, None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo
@pytest.mark.parametrize("compiled", [False, True])
def test_a_head_that_runs_after_the_model_is_recorded(compiled: bool) -> None:
    model, stats = BodyAndHead(), ActivationStats()
    head = torch.compile(model.head, backend="eager", fullgraph=True) if compiled else model.head
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    want = []

    with watch(model, opt, stats):
        for _ in range(3):
            out = head(model(torch.randn(4, 8)).relu())
            with torch.no_grad():
                model.head(torch.ones(50, 8))  # a probe
            want.append(out.mean().item())
            out.square().mean().backward()
            opt.step()
            opt.zero_grad()

    record = stats.record()
    assert record.value("mean", "head") == pytest.approx(want, abs=1e-7)
    assert record.value("count", "head").tolist() == [8, 8, 8]
    assert record.value("count", "body").tolist() == [32, 32, 32]


def test_what_runs_again_within_the_backward_is_recorded_once() -> None:
    class Reversible(BodyAndHead):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(Again.apply(x.requires_grad_(), self.body))

    model, stats = Reversible(), ActivationStats()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    with watch(model, opt, stats):
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    assert stats.record().value("count", "body").tolist() == [32, 32, 32]


class Ragged(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout, self.layer = layout, nn.Linear(8, 4)

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        x = torch.nested.nested_tensor(parts, layout=self.layout)
        return torch.cat(self.layer(x).unbind())
