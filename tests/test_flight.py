"""The flight recorder names the module that made the first NaN or Inf, in any loop."""

import functools
import math
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn

from hookkit._core import distributed as ranks
from hookkit.errors import HookkitWarning, NonFiniteError, OptionError
from hookkit.recorders import ActivationStats, FlightRecorder, ParamStats, replay
from hookkit.records import Incident
from hookkit.testing import synth_learner
from hookkit.training import watch


class Breaks(nn.Module):
    """Passes its input on, but makes it NaN at one call."""

    def __init__(self, at: int, value: float = math.nan) -> None:
        super().__init__()
        self.at, self.value, self.calls = at, value, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.value if self.calls == self.at + 1 else x


class SqrtOfZero(nn.Module):
    """Finite forward, not finite backward."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).abs().sqrt() + x


def broken(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), middle, nn.Linear(6, 2))


def train(
    model: nn.Module,
    action: str = "report",
    n: int = 10,
    bad_input: int = -1,
    **how: Any,
) -> FlightRecorder:
    """A plain loop, beside a recorder of that action."""
    torch.manual_seed(0)
    recorder = FlightRecorder(action, **how)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, opt, recorder):
        for i in range(n):
            model(torch.randn(4, 8) * (math.inf if i == bad_input else 1)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
    return recorder


# --- what is found


def test_the_first_module_is_named_with_its_past() -> None:
    recorder = train(broken(Breaks(5)))  # from then on the weights are NaN

    (incident,) = recorder.incidents
    assert (incident.kind, incident.name, incident.type) == ("activation", "2", "Breaks")
    assert (incident.step, incident.iter, incident.others) == (5, 5, ("3",))
    assert incident.steps.tolist() == [0, 1, 2, 3, 4]
    assert (incident.history["2"] > 0).all()
    assert set(incident.history) == {"0", "1", "2", "3"}

    assert train(broken(Breaks(5)), n_batches=3).incidents[0].steps.tolist() == [3, 4]
    again = pickle.loads(pickle.dumps(recorder))
    assert isinstance(again.incidents[0], Incident)
    assert str(again.incidents[0]) == str(incident)


def test_a_gradient_names_the_module_nearest_to_the_loss() -> None:
    model = nn.Sequential(nn.Linear(8, 6), SqrtOfZero(), nn.Linear(6, 6), SqrtOfZero())

    first = train(model.append(nn.Linear(6, 2)), n=2).incidents[0]

    assert (first.kind, first.name, first.others) == ("gradient", "2", ("0",))


def test_a_bad_input_and_spoiled_weights_are_named() -> None:
    spoiled = broken(nn.Identity())
    with torch.no_grad():
        spoiled[3].weight[0, 0] = math.nan

    of_data, of_weights = train(broken(nn.Identity()), bad_input=2), train(spoiled, n=1)

    assert "look at the data" in of_data.incidents[0].note
    assert of_data.incidents[0].step == 2
    assert of_weights.incidents[0].name == "3"
    assert "weights are not finite" in of_weights.incidents[0].note


def test_a_loss_alone_is_reported() -> None:
    learn = synth_learner(n_trn=3, cbs=FlightRecorder("report"))
    learn.loss_func = lambda pred, y: (pred - y).pow(2).mean() * math.inf

    with learn.no_logging():
        learn.fit(1)

    assert learn.flight_recorder.incidents[0].kind == "loss"


def test_structures_and_reused_modules_are_watched() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = nn.LSTM(8, 4), nn.Linear(4, 4)
            self.breaks = Breaks(3)  # the second call of the second batch

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.lstm(x)
            return self.breaks(self.fc(self.breaks(self.fc(out))))  # type: ignore[no-any-return]

    first = train(Odd(), n=3).incidents[0]

    assert (first.name, first.step) == ("breaks", 1)


@pytest.mark.traces_gradients
def test_a_compiled_model_is_watched() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    assert [(i.name, i.step) for i in train(compiled, bad_input=1).incidents] == [("0", 1)]


# --- what is none


def test_a_healthy_run_has_no_incident() -> None:
    assert train(broken(nn.Identity()), "raise", n=30).incidents == ()


def test_overflow_under_a_scaler_is_no_incident() -> None:
    model, recorder = broken(nn.Identity()), FlightRecorder("report")
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)

    with watch(model, opt, recorder):
        for _ in range(3):
            scaler.scale(model(torch.randn(4, 8)).pow(2).mean() * 1e10).backward()
            scaler.step(opt)
            scaler.update(2.0)
            opt.zero_grad()

    assert recorder.incidents == ()


def test_only_the_selected_part_of_an_output_is_watched() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.detach() * math.nan

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.two = nn.Linear(8, 8), Two()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.fc(x))[0]  # type: ignore[no-any-return]

    found = [train(Net(), n=1, modules=part).incidents for part in ("two[0]", "two")]

    assert [len(incidents) for incidents in found] == [0, 1]


@pytest.mark.parametrize("none", [[], iter([]), {}, nn.ModuleList()])
def test_a_recorder_of_no_module_is_refused(none: object) -> None:
    with pytest.raises(OptionError, match=r"modules=.*that selects no module.*None for all"):
        train(broken(nn.Identity()), modules=none)


# --- raising and skipping


def test_it_raises_before_the_weights_are_spoiled() -> None:
    model = broken(Breaks(3))

    with pytest.raises(NonFiniteError, match=r"step 3 .*non-finite activation of 2 \(Breaks\)"):
        train(model, "raise")

    assert all(p.isfinite().all() for p in model.parameters())
    assert n_hooks(model) == 0


def test_it_skips_the_step_in_a_plain_loop_and_in_a_learner() -> None:
    plain = broken(Breaks(3, math.inf))
    assert [i.step for i in train(plain, "skip").incidents] == [3]
    assert all(p.isfinite().all() for p in plain.parameters())

    model = nn.Sequential(nn.Linear(1, 1), Breaks(2))
    learn = synth_learner(n_trn=5, model=model, cbs=FlightRecorder("skip"))

    with learn.no_logging():
        learn.fit(1)

    assert learn.n_steps == 4
    assert [i.name for i in learn.flight_recorder.incidents] == ["1"]
    assert learn.run_record().incidents == learn.flight_recorder.incidents


def test_of_several_processes_none_skips_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookkit._core.distributed.is_distributed", lambda: True)

    with pytest.raises(OptionError, match="one process alone would skip"):
        train(broken(nn.Identity()), "skip")


# --- closures


def train_by_closure(
    middle: nn.Module,
    action: str = "report",
    n: int = 4,
    n_calls: int = 1,
    make_opt: Any = torch.optim.SGD,
) -> Any:
    """The model, its recorder and the watcher of steps that call their closure `n_calls` times."""
    model, recorder = broken(middle), FlightRecorder(action)
    opt = make_opt(model.parameters(), lr=0.01)

    def closure() -> Tensor:
        for _ in range(n_calls):
            opt.zero_grad()
            loss: Tensor = model(torch.ones(4, 8)).pow(2).mean()
            loss.backward()
        return loss

    with watch(model, opt, recorder) as w:
        for _ in range(n):
            opt.step(closure)
    return model, recorder, w


@pytest.mark.parametrize(("n_calls", "bad_call"), [(1, 2), (3, 6), (3, 8)])
def test_what_a_closure_makes_is_seen(n_calls: int, bad_call: int) -> None:
    _, recorder, _ = train_by_closure(Breaks(bad_call), n_calls=n_calls)

    assert [(i.kind, i.name, i.step) for i in recorder.incidents] == [("activation", "2", 2)]


@pytest.mark.parametrize(("make_middle", "n_bad"), [(lambda: Breaks(2), 1), (SqrtOfZero, 3)])
@pytest.mark.parametrize(
    "make_opt", [torch.optim.AdamW, functools.partial(torch.optim.LBFGS, max_iter=1)]
)
def test_a_step_with_a_closure_is_skipped(make_opt: Any, make_middle: Any, n_bad: int) -> None:
    model, recorder, w = train_by_closure(make_middle(), "skip", n=3, make_opt=make_opt)

    assert len(recorder.incidents) == 1
    assert recorder.incidents[0].kind == ("gradient" if n_bad == 3 else "activation")
    assert w.loop.n_cancelled_steps == n_bad
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_closure_that_is_evaluated_again_is_refused_by_skip() -> None:
    with pytest.raises(OptionError, match=r"\"skip\".*closure.*\"raise\" or \"report\""):
        train_by_closure(nn.Identity(), "skip", n_calls=2)


def test_a_closure_that_was_evaluated_before_hides_nothing() -> None:
    model, recorder, params = broken(Breaks(2)), FlightRecorder("skip"), ParamStats()
    opt, acts = torch.optim.SGD(model.parameters(), lr=0.01), ActivationStats()

    with watch(model, opt, recorder, params, acts) as w:
        for _ in range(4):
            loss = model(torch.ones(4, 8)).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step(lambda loss=loss: loss)

    assert [i.step for i in recorder.incidents] == [2]
    assert (w.n_steps, w.loop.n_cancelled_steps) == (3, 1)
    assert (params.record().value("update_norm") > 0).all()
    assert acts.record().value("nonfinite", "3").tolist() == [0, 0, 0]
    assert acts.record().value("count", "3").tolist() == [8, 8, 8]


# --- steps that cannot be skipped


@pytest.mark.parametrize("action", ["report", "skip"])
def test_steps_within_the_backward_hide_no_gradient_and_are_not_skipped(action: str) -> None:
    model, recorder = broken(SqrtOfZero()), FlightRecorder(action)
    opts = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    for p in opts:  # an optimizer for each parameter, stepped as its gradient is there
        p.register_post_accumulate_grad_hook(lambda p: opts[p].step())

    refused = pytest.raises(OptionError, match=r"within the backward.*\"report\"")
    with nullcontext() if action == "report" else refused, watch(model, [*opts.values()], recorder):
        for _ in range(3):
            model(torch.ones(4, 8)).pow(2).mean().backward()
            model.zero_grad()

    found = [(i.kind, i.name, i.step) for i in recorder.incidents]
    assert found == ([("gradient", "0", 0)] if action == "report" else [])


# --- ranks


def test_incidents_of_ranks_are_joined_by_step_the_first_ranks_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Incident("activation", "fc1", "Linear", 7), Incident("loss", "", "", 9)
    theirs = Incident("activation", "fc1", "Linear", 7), Incident("activation", "fc2", "Linear", 7)
    flight = FlightRecorder("report")
    monkeypatch.setattr(ranks, "gather_object", lambda x: [own, theirs])

    flight._gather()

    assert [(i.step, i.name) for i in flight.incidents] == [(7, "fc1"), (7, "fc2"), (9, "")]
    assert flight.incidents[0] is own[0]


# --- evidence


def slow_loop(
    recorder: FlightRecorder,
    model: nn.Module | None = None,
    at: int = -1,
    n: int = 40,
    n_batches: int = 1,
    late: bool = False,
    factor: float = 1e4,
) -> nn.Module:
    """A plain loop whose batch number `at` is larger by `factor`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)) if model is None else model
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    with watch(model, opt, recorder) as w:
        for i in range(n):
            x, y = torch.randn(4, 8), torch.randn(4, 2)
            x, y = (x * factor, y * factor) if i == at else (x, y)
            loss = (model(x) - y).pow(2).mean()
            if not late:
                w.loss(loss)
            loss.backward()
            if (i + 1) % n_batches == 0:
                opt.step()
                opt.zero_grad()
            if late:
                w.loss(loss)
    return model


class BadAbove(nn.Module):
    """Has a gradient of NaN if all its inputs are ±1, what a tanh of large values is."""

    def forward(self, x: Tensor) -> Tensor:
        off = float(x.detach().abs().min() > 0.99)
        return x + (x * 0 + 1 - off).sqrt() * 0


def test_the_report_names_the_function_and_the_line() -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x + 100)

    model = broken(nn.Sequential(nn.Linear(6, 6), Log()))
    with torch.no_grad():
        model[2][0].bias[0] = -200.0  # type: ignore[index,union-attr]

    with pytest.raises(
        NonFiniteError, match=r"first non-finite: log \(test_flight.py:\d+\) in 2.1"
    ):
        train(model, "raise")


def test_what_a_second_run_does_not_repeat_is_said() -> None:
    assert "does not repeat it" in train(broken(Breaks(5))).incidents[0].note


def test_a_batch_that_was_overwritten_is_not_used(tmp_path: Path) -> None:
    model, recorder = broken(Breaks(1)), FlightRecorder("report", save=tmp_path)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)

    with watch(model, opt, recorder):
        for _ in range(2):
            x = torch.randn(4, 8)
            model(x).sum().backward()
            x.zero_()
            opt.step()

    assert "inputs were overwritten" in recorder.incidents[0].note
    assert recorder.saved == ()


def test_of_accumulated_batches_the_one_that_spoiled_the_gradients_is_run_again() -> None:
    recorder = FlightRecorder("report")

    slow_loop(recorder, broken(nn.Sequential(nn.Identity(), BadAbove())), at=9, n=12, n_batches=4)

    (incident,) = recorder.incidents
    assert (incident.kind, incident.step, incident.iter) == ("gradient", 2, 9)
    assert "backward of sqrt" in incident.note


def test_overflow_under_a_scaler_that_accumulates_is_no_incident() -> None:
    model, recorder = broken(nn.Identity()), FlightRecorder("report")
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)

    with watch(model, opt, recorder):
        for i in range(8):
            scaler.scale(model(torch.randn(4, 8)).pow(2).mean() * 1e10).backward()
            if i % 2:
                scaler.step(opt)
                scaler.update(2.0**120 if i > 3 else 2.0)
                opt.zero_grad()

    assert recorder.incidents == ()


def test_a_spike_is_saved_and_is_no_incident(tmp_path: Path) -> None:
    recorder = FlightRecorder(save=tmp_path, spike=6, weights=True)

    model = slow_loop(recorder, at=30)

    assert recorder.incidents == ()
    assert [path.name for path in recorder.saved] == ["step30_spike.pt"]
    again = replay(recorder.saved[0], model)
    assert again.same
    assert again.incident.startswith("step 30 (epoch 0): a spike of the loss")


def test_a_loss_that_comes_after_the_step_is_too_late_for_the_weights(tmp_path: Path) -> None:
    recorder = FlightRecorder(save=tmp_path, spike=6, weights=True)

    with pytest.warns(HookkitWarning, match="without weights, which the step has changed"):
        model = slow_loop(recorder, at=30, late=True)

    assert [path.name for path in recorder.saved] == ["step30_spike.pt"]
    assert not replay(recorder.saved[0], model).same


def test_the_last_place_is_not_for_a_spike(tmp_path: Path) -> None:
    recorder = FlightRecorder("report", save=tmp_path, spike=6, keep=1)
    slow_loop(recorder, broken(Breaks(35)), at=30)
    again = FlightRecorder("report", save=tmp_path, keep=1)
    slow_loop(again, broken(Breaks(35)))

    assert [path.name for path in recorder.saved] == ["step35_activation.pt"]
    assert [path.name for path in again.saved] == ["step35_activation_2.pt"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_part_that_is_called_alone_is_kept(tmp_path: Path) -> None:
    parts = nn.ModuleDict({"body": nn.Linear(8, 6), "head": nn.Linear(6, 2)})
    opt, recorder = torch.optim.SGD(parts.parameters(), 0.01), FlightRecorder("skip", save=tmp_path)

    with watch(parts, opt, recorder):
        for i in range(3):
            h = parts["body"](torch.randn(4, 8)) - 100 * (i == 2)
            parts["head"](torch.log(h + 50)).sum().backward()
            opt.step()
            opt.zero_grad()

    assert "first non-finite: the input [0] of head" in recorder.incidents[0].note
    assert replay(recorder.saved[0], parts).same


@pytest.mark.traces_gradients
def test_the_batch_of_a_compiled_model_is_run_again() -> None:
    torch._dynamo.reset()
    model = torch.compile(broken(SqrtOfZero()), fullgraph=True, backend="aot_eager")

    recorder = train(model, n=1)  # type: ignore[arg-type]

    assert "first non-finite: backward of sqrt" in recorder.incidents[0].note


def test_other_processes_are_not_held_up_by_a_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "is_distributed", lambda: True)
    monkeypatch.setattr(ranks, "rank", lambda: 3)

    recorder = train(broken(Breaks(2)), save=tmp_path)

    assert "not run again: other processes run beside it" in recorder.incidents[0].note
    assert [path.name for path in recorder.saved] == ["step2_activation_rank3.pt"]


@pytest.mark.parametrize("how", [{"spike": 6}, {"weights": True}])
def test_options_of_a_file_need_a_folder(how: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="save=folder"):
        FlightRecorder(**how)


def test_a_parameter_that_a_model_returns_keeps_no_hook() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.rows

    model = Table()

    train(model, n=3)

    assert not model.rows._backward_hooks
