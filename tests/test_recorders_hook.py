"""A recorder's `hook`: a subclass's method, or the function it was given, says what is recorded."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats
from hookkit.training import watch


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def train(model: nn.Module, *cbs: Any, n: int = 3, call: Any = None) -> nn.Module:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, *cbs):
        for i in range(n):
            opt.zero_grad()
            (call or model)(torch.full((5, 3), float(i + 1))).pow(2).mean().backward()
            opt.step()
    return model


def subclass(kind: Any, hook: Any) -> Any:
    """A subclass of `kind` whose method is `hook(self, m, i, o)`."""
    return type("Mine", (kind,), {"hook": hook})


def test_what_a_subclass_s_hook_returns_is_recorded_and_the_training_stays_as_it_was() -> None:
    class Twice(ActivationStats):
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            o = super().hook(m, i, o)  # the output
            return torch.cat([o, o + 1])

    plain, twice = ActivationStats(), Twice()

    watched, alone = train(net(), plain, twice), train(net())

    want, got = plain.record(), twice.record()
    assert got.names == want.names
    np.testing.assert_array_equal(got.value("count"), 2 * want.value("count"))
    np.testing.assert_allclose(got.value("mean"), want.value("mean") + 0.5, rtol=1e-5)
    np.testing.assert_array_equal(got.value("min"), want.value("min"))
    for a, b in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_it_gets_the_module_detached_inputs_by_name_and_the_detached_output() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            out: Tensor = self.fc(x) * scale
            return out

    def hook(self: Any, m: nn.Module, i: Any, o: Any) -> Any:
        seen.append((type(m).__name__, i["scale"].tolist(), o.requires_grad))
        return i[0]

    seen: list[Any] = []
    model, stats = Block(), subclass(ActivationStats, hook)(modules="")

    train(model, stats, n=1, call=lambda x: model(x, scale=torch.tensor([2.0])))

    assert seen == [("Block", [2.0], False)]
    assert stats.record().value("mean", "") == 1.0


def test_a_call_for_which_it_returns_none_is_not_recorded() -> None:
    stats = ActivationStats(hook=lambda m, i, o: o if m.out_features == 4 else None)

    train(net(), stats)

    assert np.isfinite(stats.record().value("mean", "0")).all()
    assert np.isnan(stats.record().value("mean", "2")).all()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_of_inputs_and_outputs_are_given_in_recorded_steps_only(every: int) -> None:
    def hook(self: Any, m: nn.Module, i: Any, o: Any) -> Any:
        seen.append((len(i), len(o), type(m).__name__))
        return 2 * o[0]

    seen: list[Any] = []
    plain, mine = GradientStats(every=every), subclass(GradientStats, hook)(every=every)

    train(net(), plain, mine, n=4)

    assert seen == [(1, 1, "Linear")] * (8 // every)
    want, got = plain.record(), mine.record()
    assert len(got) == 4 / every
    np.testing.assert_allclose(got.value("rms"), 2 * want.value("rms"), rtol=1e-5)
    np.testing.assert_array_equal(got.value("count"), want.value("count"))


def test_the_flight_recorder_watches_what_its_hook_returns() -> None:
    def hook(self: Any, m: nn.Module, i: Any, o: Any) -> Any:
        return o / 0 if isinstance(m, nn.ReLU) else None

    recorder = subclass(FlightRecorder, hook)("report")

    train(net(), recorder)

    assert recorder.incidents[0].name == "1"
