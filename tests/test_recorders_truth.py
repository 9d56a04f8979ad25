"""What recorders record of realistic trainings equals float64 truth, computed beside them."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookkit.recorders import ActivationStats, GradientStats, ParamStats
from hookkit.training import watch


def conv() -> nn.Module:
    body = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *body, nn.Flatten(), nn.Linear(128, 4))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.view(-1, 8, 8))).mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 12)
        for t in range(8):
            h = self.cell(x[:, 8 * t : 8 * t + 8], h)
        return self.head(h)  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 4))


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=1e-3)


def adam(params: Any) -> Any:
    return torch.optim.AdamW(params, 1e-2)


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], dict[str, Any]]] = {
    "mlp, AdamW, clipped": (mlp, adam, {"clip": 0.1}),
    "mlp, accumulated": (mlp, sgd, {"accumulate": 3}),
    "mlp, far from 0": (mlp, sgd, {"shift": 300.0}),
    "mlp, every=3": (mlp, adam, {"every": 3}),
    "mlp, float64": (lambda: mlp().double(), sgd, {"dtype": torch.float64}),
    "mlp, bfloat16": (lambda: mlp().bfloat16(), sgd, {"dtype": torch.bfloat16}),
    "mlp, SGD at 1e3": (mlp, lambda p: torch.optim.SGD(p, 1e3), {}),
    "conv, channels last": (lambda: conv().to(memory_format=torch.channels_last), adam, {}),
    "transformer, accumulated": (Attention, adam, {"accumulate": 2, "clip": 1.0}),
    "recurrent": (Recurrent, adam, {}),
}


STEPS = 12


class Truth:
    """All that layers gave, and parameters were, kept as float64 by plain PyTorch."""

    def __init__(self, model: nn.Module) -> None:
        self.now: dict[str, list[Tensor]] = defaultdict(list)
        self.steps: list[dict[str, Tensor]] = []
        self.model, self.params = model, list[dict[str, Any]]()
        for name, m in model.named_modules():
            m.register_forward_hook(lambda m, i, o, name=name: self.see(name, o))

    def see(self, name: str, o: Any) -> None:
        o = o[0] if isinstance(o, tuple) else o  # attention's weights are a row of their own
        self.now[name].append(o.detach().double().flatten())

    def end_step(self, before: dict[str, Tensor]) -> None:
        self.steps.append({name: torch.cat(parts) for name, parts in self.now.items()})
        self.now.clear()
        facts = {}
        for name, p in self.model.named_parameters():
            parts = before[name], p.detach().double() - before[name], p.grad.double()  # type: ignore[union-attr]
            facts[name] = [float(part.norm()) for part in parts]
        self.params.append(facts)


def train(name: str) -> tuple[Any, Any, Any, Truth]:
    make, make_opt, o = TRAININGS[name]
    torch.manual_seed(0)
    model, every, n = make(), o.get("every", 1), o.get("accumulate", 1)
    truth, opt = Truth(model), make_opt(model.parameters())
    acts, grads = ActivationStats(every=every), GradientStats(of="params", every=every)
    params = ParamStats(every=every)
    with watch(model, opt, acts, grads, params):
        for _ in range(STEPS):
            for _ in range(n):
                x = torch.randn(16, 64, dtype=o.get("dtype", torch.float32)) + o.get("shift", 0.0)
                loss = nn.functional.cross_entropy(model(x), torch.randint(4, (16,)))
                (loss / n).backward()
            if "clip" in o:
                nn.utils.clip_grad_norm_(model.parameters(), o["clip"])
            before = {k: p.detach().double().clone() for k, p in model.named_parameters()}
            opt.step()
            truth.end_step(before)
            opt.zero_grad()
    return acts.record(), grads.record(), params.record(), truth


@pytest.mark.parametrize("name", TRAININGS)
def test_recorded_numbers_equal_the_truth(name: str) -> None:
    acts, grads, params, truth = train(name)
    every = TRAININGS[name][2].get("every", 1)
    close: Any = lambda got, want, **o: np.testing.assert_allclose(got, want, **o)  # noqa: E731

    assert acts.steps.tolist() == params.steps.tolist() == list(range(0, STEPS, every))
    assert set(acts.names) <= set(truth.steps[0])
    for layer in acts.names:
        for i, step in enumerate(acts.steps):
            x = truth.steps[step][layer]
            y = x[x.isfinite()]
            got = {s: table[acts.layer(layer), i] for s, table in acts.values.items()}
            assert (got["count"], got["nonfinite"]) == (len(x), len(x) - len(y))
            if len(y):
                assert (got["min"], got["max"]) == (y.min(), y.max())
                assert got["zero"] * len(y) == pytest.approx(int((y == 0).sum()))
                assert got["near_zero"] * len(y) == pytest.approx(int((y.abs() <= 0.05).sum()))
                size = float(y.square().mean().sqrt())
                close(got["mean"], y.mean(), rtol=2e-6, atol=2e-7 * size)
                close(got["std"], y.std(), rtol=2e-5, atol=1e-7 * size)
                close(got["rms"], size, rtol=2e-6)
    for row, param in enumerate(params.names):
        facts = [truth.params[step][param] for step in params.steps]
        weight, update, grad = torch.tensor(facts, dtype=torch.float64).T
        root = np.sqrt(params.meta["numel"][row])
        for statistic, want in {
            "weight_norm": weight,
            "weight_rms": weight / root,
            "update_norm": update,
            "update_ratio": update / weight,
            "grad_norm": grad,
            "grad_rms": grad / root,
        }.items():
            got = params.value(statistic, param)
            close(got, want, rtol=2e-4, atol=1e-9, err_msg=f"{param} {statistic}")
        close(grads.value("rms", param) * root, grad, rtol=2e-4, atol=1e-9)
