"""A recorder's `hook`: a subclass's method, or the function it was given, says what is recorded."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookkit.callbacks import Callback
from hookkit.recording import HookCallback
from hookkit.stats import ActivationStats, FlightRecorder, GradientStats
from hookkit.testing import synth_learner
from hookkit.watching import watch


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def train(model: nn.Module, *cbs: Any, n: int = 3, call: Any = None) -> Any:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, *cbs) as w:
        for i in range(n):
            opt.zero_grad()
            (call or model)(torch.full((5, 3), float(i + 1))).pow(2).mean().backward()
            opt.step()
    return w


class Twice(ActivationStats):
    def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
        return torch.cat([o, o + 1])


def test_what_a_subclass_s_hook_returns_is_recorded() -> None:
    plain, twice = ActivationStats(), Twice()

    train(net(), plain, twice)

    want, got = plain.record(), twice.record()
    assert got.names == want.names
    np.testing.assert_array_equal(got.value("count"), 2 * want.value("count"))
    np.testing.assert_allclose(got.value("mean"), want.value("mean") + 0.5, rtol=1e-5)
    np.testing.assert_array_equal(got.value("min"), want.value("min"))


def test_it_is_called_in_a_learner_too_and_its_error_has_a_note() -> None:
    class Bad(ActivationStats):
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            raise RuntimeError("called")

    learn = synth_learner(cbs=Bad(modules=""))

    with pytest.raises(RuntimeError, match="called") as e, learn.no_logging():
        learn.fit(1)
    assert any("Bad.hook" in note for note in e.value.__notes__)


def test_it_gets_the_module_detached_inputs_by_name_and_the_detached_output() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            out: Tensor = self.fc(x) * scale
            return out

    class Mine(ActivationStats):
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            seen.append((type(m).__name__, i["scale"].tolist(), o.requires_grad))
            return i[0]

    seen: list[Any] = []
    model, stats = Block(), Mine(modules="")

    train(model, stats, n=1, call=lambda x: model(x, scale=torch.tensor([2.0])))

    assert seen == [("Block", [2.0], False)]
    assert stats.record().value("mean", "") == 1.0


def test_a_call_for_which_it_returns_none_is_not_recorded() -> None:
    class Mine(ActivationStats):
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            return o if m.out_features == 4 else None

    stats = Mine()

    train(net(), stats)

    assert np.isfinite(stats.record().value("mean", "0")).all()
    assert np.isnan(stats.record().value("mean", "2")).all()


def test_super_s_hook_is_the_output() -> None:
    class Mine(ActivationStats):
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            return super().hook(m, i, o)

    mine, plain = Mine(), ActivationStats()

    train(net(), mine, plain)

    np.testing.assert_array_equal(mine.record().value("mean"), plain.record().value("mean"))


def test_it_sees_the_part_of_the_output_that_was_selected() -> None:
    class Mine(ActivationStats):
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            shapes.append(tuple(o.shape))
            return o

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]  # type: ignore[no-any-return]

    shapes: list[Any] = []

    train(Last(), Mine(modules="lstm[1][0]"), n=1)

    assert shapes == [(1, 2)]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_a_recorder_of_gradients_gives_it_the_gradients_of_inputs_and_outputs() -> None:
    plain = GradientStats()

    class Mine(GradientStats):
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            seen.append((len(i), len(o), type(m).__name__))
            return 2 * o[0]

    seen: list[Any] = []
    mine = Mine()

    train(net(), plain, mine)

    assert set(seen) == {(1, 1, "Linear")}
    assert len(seen) == 6
    want, got = plain.record(), mine.record()
    np.testing.assert_allclose(got.value("rms"), 2 * want.value("rms"), rtol=1e-5)
    np.testing.assert_array_equal(got.value("count"), want.value("count"))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("every", [1, 2])
def test_a_hook_for_gradients_is_called_in_recorded_steps_only(every: int) -> None:
    calls: list[int] = []

    class Mine(GradientStats):
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            calls.append(1)
            return o

    stats = Mine(every=every)

    train(net(), stats, n=4)

    assert len(calls) == 8 / every
    assert len(stats.record()) == 4 / every


def test_the_flight_recorder_watches_what_its_hook_returns() -> None:
    class Mine(FlightRecorder):
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            return o / 0 if isinstance(m, nn.ReLU) else None

    recorder = Mine("report")

    train(net(), recorder)

    assert recorder.incidents[0].name == "1"


@pytest.mark.parametrize("kind", [HookCallback, ActivationStats])
def test_the_function_that_was_given_goes_before_the_class_s_method(kind: Any) -> None:
    class Mine(kind):  # type: ignore[misc]
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            called.append("method")
            return o

    called: list[str] = []

    train(net(), Mine(hook=lambda m, i, o: called.append("given") or o))

    assert set(called) == {"given"}


def test_what_a_hook_makes_of_it_leaves_the_training_as_it_was() -> None:
    class Mine(ActivationStats):
        def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
            return o.mean(0)

    plain, watched = net(), net()
    train(plain)

    train(watched, Mine(), GradientStats())

    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [ActivationStats, GradientStats, FlightRecorder])
def test_hooks_are_the_hooks_while_they_are_on(kind: Any) -> None:
    recorder = kind()
    model, seen = net(), []
    call = lambda x: seen.append((recorder.hooks, recorder.hooks.removed)) or model(x)  # noqa: E731

    train(model, recorder, n=1, call=call)

    ((hooks, removed),) = seen
    assert hooks is recorder.hooks
    assert recorder.modules[recorder.names.index("2")] is model[2]
    assert (removed, hooks.removed) == (False, True)


@pytest.mark.parametrize("kind", [ActivationStats, GradientStats, FlightRecorder])
def test_recorders_hooks_can_be_removed(kind: Any) -> None:
    recorder = kind()
    model = net()
    look = Callback(after_batch=lambda self: recorder.hooks.remove())

    train(model, recorder, look, n=2)

    assert recorder.hooks.removed
    if kind is ActivationStats:
        assert np.isfinite(recorder.record().value("mean", "2")).tolist() == [True, False]
