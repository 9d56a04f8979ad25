"""HookCallback: hooked once per fit, recording by a flag, always taken off."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hooked import n_hooks
from learners import quiet
from torch import nn

from hookkit.callbacks import Callback, GradientAccumulation
from hookkit.callbacks.events import CANCELS, EVENTS
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.testing import mlp, synth_dbunch
from hookkit.training.data import DataLoaders

FIRST_LAYER = "ignore:Full backward hook is firing:UserWarning"
"""What PyTorch says of a full backward hook on a layer whose inputs have no gradient."""


class Calls(HookCallback):
    """Writes down each call: whether training, and the batch's number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[bool, int]] = []

    def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
        self.calls.append((self.learn.training, self.learn.iter))
        return o


# --- every


@pytest.mark.parametrize("order", [-100, 0, 100])
@pytest.mark.parametrize("every", [1, 4, None])
def test_every_records_the_first_batch_of_so_many_at_any_order(
    every: int | None, order: int
) -> None:
    cb = Calls(every=every)
    cb.order = order

    quiet(n_trn=11, cbs=cb).fit(1)

    valid = [] if every else [(False, 0), (False, 1)]
    assert cb.calls == [(True, i) for i in range(0, 11, every or 1)] + valid


@pytest.mark.parametrize("make", [Calls, ActivationStats, GradientStats, ParamStats])
def test_every_counts_optimizer_steps_in_each_recorder(make: Any) -> None:
    recorder = make(every=2)
    acc = GradientAccumulation(2)

    quiet(n_trn=8, cbs=[acc, recorder]).fit(1)

    if isinstance(recorder, Calls):
        assert [i for _, i in recorder.calls] == [0, 1, 4, 5]  # both batches of steps 0 and 2
    else:
        assert recorder.record().steps.tolist() == [0, 2]


# --- train and valid


@pytest.mark.parametrize("on_train", [False, True])
@pytest.mark.parametrize("on_valid", [False, True])
def test_training_and_validation_are_recorded_as_chosen(on_train: bool, on_valid: bool) -> None:
    cb = Calls(on_train=on_train, on_valid=on_valid)

    quiet(cbs=cb).fit(1)

    assert [training for training, _ in cb.calls] == [True] * 3 * on_train + [False] * 2 * on_valid


# --- which modules


@pytest.mark.parametrize("make", [HookCallback, ActivationStats, GradientStats])
@pytest.mark.parametrize(("paramless", "n"), [(False, 3), (True, 5)])
def test_modules_are_those_that_are_hooked(make: Any, paramless: bool, n: int) -> None:
    cb, seen = make(include_paramless=paramless), list[Any]()
    look = Callback(before_batch=lambda self: seen.append(cb.modules))
    layers = nn.Linear(1, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Flatten()
    learn = quiet(model=nn.Sequential(*layers), cbs=[cb, look])

    before = cb.modules
    learn.fit(1)

    assert before is None
    assert [len(modules) for modules in seen] == [n] * 5
    assert cb.modules == [learn.model.get_submodule(name) for name in cb.names]
    assert isinstance(cb.modules, list)


@pytest.mark.parametrize("make", [HookCallback, ActivationStats, FlightRecorder])
def test_a_copy_has_the_selection_and_no_modules(make: Any) -> None:
    cb = make(modules="0")
    assert cb.modules == "0"
    quiet(model=mlp(1, 4, 1), cbs=cb).fit(1)
    cb.learn = None

    assert pickle.loads(pickle.dumps(cb)).modules == "0"
    assert copy.deepcopy(cb).modules == "0"


@pytest.mark.parametrize(("modules", "names"), [([], []), ((n for n in "02"), ["0", "2"])])
def test_no_modules_and_a_generator_of_modules_hold_in_every_fit(
    modules: Any, names: list[str]
) -> None:
    cb = HookCallback(modules, hook=lambda m, i, o: o.shape)
    learn = quiet(model=mlp(1, 4, 1), cbs=cb)

    learn.fit(1)
    learn.fit(1)

    assert cb.names == list(cb.hooks.names) == names


def test_modules_are_looked_up_anew_for_each_fit() -> None:
    cb = HookCallback(hook=lambda m, i, o: o.shape)
    quiet(model=mlp(1, 1), cbs=cb).fit(1)
    assert cb.names == ["0"]

    learn = quiet(model=mlp(1, 3, 1), cbs=cb)
    learn.fit(1)
    assert cb.names == ["0", "2"]
    learn.model = mlp(1, 2, 2, 1)
    learn.fit(1, reset_opt=True)

    assert cb.names == ["0", "2", "4"]
    assert all(s is not None for s in cb.hooks.stored)


def test_an_unknown_name_or_a_failing_hook_raises_and_nothing_stays() -> None:
    def bad(m: nn.Module, i: Any, o: Any) -> None:
        raise ValueError("in the hook")

    learn = quiet(model=mlp(1, 4, 1))

    with pytest.raises(SelectionError, match=r"layer9"):
        learn.fit(1, cbs=HookCallback("layer9"))
    assert n_hooks(learn.model) == 0
    with pytest.raises(ValueError, match=r"in the hook") as caught:
        learn.fit(1, cbs=HookCallback("2", hook=bad))

    assert any("'2' (Linear)" in note for note in caught.value.__notes__)
    assert n_hooks(learn.model) == 0


# --- what is stored


def test_without_detach_the_graph_is_kept() -> None:
    cb, seen = HookCallback(None, None, True, True, False, hook=lambda m, i, o: o), list[bool]()
    look = Callback(after_pred=lambda self: seen.append(cb.hooks.stored[0].requires_grad))

    quiet(cbs=[cb, look]).fit(1)

    assert seen == [True] * 3 + [False] * 2  # validation has no graph


# --- the end


@pytest.mark.filterwarnings(FIRST_LAYER)
@pytest.mark.parametrize("event", [e for e in EVENTS if e != "after_create"])
def test_no_hook_is_left_after_an_exception_in_any_event(event: str) -> None:
    part = event.removeprefix("after_cancel_")
    fired: list[str] = []

    def fail(self: Any) -> None:
        fired.append(event)
        raise RuntimeError("boom")

    def cancel(self: Any) -> None:
        raise CANCELS[part]

    cancels = [] if part == event else [Callback(**{f"before_{part}": cancel})]
    hooks = [HookCallback(is_forward=True), HookCallback(is_forward=False)]
    cbs = [*hooks, *cancels, Callback(**{event: fail})]
    learn = quiet(model=mlp(1, 4, 1))

    with pytest.raises(RuntimeError, match=r"boom"):
        learn.fit(1, cbs=cbs)

    assert fired
    assert n_hooks(learn.model) == 0
    assert len(learn.cbs) == 2


def test_without_remove_end_hooks_stay_once_and_stay_live() -> None:
    cb = HookCallback(remove_end=False, hook=lambda m, i, o: o)
    learn = quiet(cbs=cb)
    learn.fit(1)
    learn.fit(1)
    assert n_hooks(learn.model) == 1

    y = learn.model(torch.ones(2, 1))

    assert cb.hooks.stored[0].equal(y.detach())
    cb.hooks.remove()
    assert n_hooks(learn.model) == 0


# --- bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": True}, r"HookCallback\(modules=True.*Give a module, a name"),
        ({"hook": "f"}, r"hook must be a function, found a str"),
        ({"every": 2.5}, r"HookCallback\(every=.*None for 1\. Give a whole number"),
        ({"every": 2, "on_train": False}, r"every=2, on_train=False\).* Leave out `every`"),
    ],
)
def test_what_cannot_work_is_refused(options: Any, message: str) -> None:
    with pytest.raises((OptionError, ArgumentError), match=message):
        HookCallback(**options)


@pytest.mark.filterwarnings(FIRST_LAYER)
@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("is_forward", [True, False])
def test_what_is_stored_goes_where_it_is_asked(
    cpu: bool, is_forward: bool, gpu: torch.device
) -> None:
    cb = HookCallback(cpu=cpu, is_forward=is_forward, hook=lambda m, i, o: o)
    dls = DataLoaders(*synth_dbunch().loaders, device=gpu)

    quiet(data=dls, cbs=cb).fit(1)

    stored = cb.hooks.stored[0]
    stored = stored if is_forward else stored[0]
    assert stored.is_cpu == cpu


@pytest.mark.slow
def test_a_compiled_model_that_has_run_sees_the_hooks_and_is_not_compiled_for_each_batch() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    cb = HookCallback(every=3, hook=lambda m, i, o: o)
    learn = quiet(n_trn=12, model=torch.compile(mlp(1, 4, 1), backend=backend))
    learn.fit(1)
    before = len(graphs)

    learn.fit(1, cbs=cb)

    assert cb.names == ["0", "2"]
    assert [s.shape for s in cb.hooks.stored] == [(16, 4), (16, 1)]
    assert len(graphs) - before <= 3  # training on and off, validation
