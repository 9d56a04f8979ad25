"""Each kind of bad argument has one message everywhere, before anything has changed."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from names import names
from torch import nn

import hookkit
from hookkit import (
    ActivationStats,
    DataLoaders,
    Hook,
    HookCallback,
    Hooks,
    Learner,
    edit_grad,
    edit_input,
    edit_output,
    hook_all,
    select,
    watch,
)
from hookkit.checks import (
    OfLast,
    check_callable,
    check_choice,
    check_flag,
    check_function,
    check_module,
    check_number,
    check_path,
    kind_of,
    shown,
)
from hookkit.errors import ArgumentError, OptionError
from hookkit.testing import synth_learner

SEEN = ("module", "input", "output")


# --- one function a kind


@pytest.mark.parametrize("value", [True, False, np.True_, 0, 1])
def test_check_flag_takes_true_and_false(value: Any) -> None:
    assert check_flag("f", "cpu", value) is bool(value)


@pytest.mark.parametrize("value", ["1", None, True, float("nan"), float("inf"), 1j, -1, 11])
def test_check_number_refuses_numbers_out_of_range(value: Any) -> None:
    with pytest.raises(OptionError, match=r"f\(k=.*k is a size\. Give a number from 0 to 10\."):
        check_number("f", "k", value, 0, 10, what="a size")


def test_check_number_with_open_limits() -> None:
    assert check_number("f", "k", 0.5, above=0, below=1) == 0.5
    for value in (0, 1):
        with pytest.raises(OptionError, match="Give a number above 0 below 1"):
            check_number("f", "k", value, above=0, below=1)


def test_check_number_gives_an_int_for_a_whole_number() -> None:
    assert type(check_number("f", "k", np.int64(3), 1, whole=True)) is int
    with pytest.raises(OptionError, match="Give a whole number from 1"):
        check_number("f", "k", 3.0, 1, whole=True)


def test_check_choice_names_the_nearest() -> None:
    assert check_choice("f", "keep", "all", ("last", "all")) == "all"
    with pytest.raises(
        OptionError, match=r'keep=\'al\'\): give one of "last", "all"\. Did .*"all"'
    ):
        check_choice("f", "keep", "al", ("last", "all"))


@pytest.mark.parametrize("path", ["", " ", "a\0b", b"x", 3, None, ["a"]])
def test_check_path_refuses_other_values(path: Any) -> None:
    with pytest.raises(ArgumentError, match=r"save\(file=.*give the path of a file"):
        check_path("save", path, "file")


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (nn.ReLU, r"the class ReLU\. Call the class"),
        ("fc", r'the string "fc"\. select'),
        (None, "None"),
        (3, "an int"),
        ([nn.ReLU()], "a list"),
        (lambda x: x, "a function"),
    ],
)
def test_check_module_refuses_other_values(module: Any, found: str) -> None:
    with pytest.raises(ArgumentError, match=rf"f: expected an nn\.Module, found {found}"):
        check_module("f", module)


def test_shown_gives_the_kind_of_an_object_that_cannot_be_printed() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    assert shown(Mute()) == "a Mute"
    assert shown([1] * 100).endswith("…")
    assert kind_of(nn.ReLU) == "the class ReLU"


# --- how many arguments a user's function takes


def three(module: Any, inputs: Any, output: Any) -> Any:
    return output


def rest(module: Any, *others: Any) -> Any:
    return others[-1]


def with_default(module: Any, inputs: Any, output: Any, scale: float = 2.0) -> Any:
    return output


def only_the_module_is_required(module: Any, inputs: Any = None, output: Any = None) -> Any:
    return output


class Method:
    def three(self, module: Any, inputs: Any, output: Any) -> Any:
        return output

    def one(self, output: Any) -> Any:
        return output

    def __call__(self, output: Any) -> Any:
        return output


@pytest.mark.parametrize(
    "f",
    [
        three,
        rest,
        with_default,
        only_the_module_is_required,
        lambda m, i=(), o=0: o,
        Method().three,
        lambda *all_: all_[-1],
        partial(three),
    ],
)
def test_check_function_passes_all_arguments(f: Callable[..., Any]) -> None:
    made = check_function("Hook", f, *SEEN)

    assert made is f
    assert made(None, (), 5) == 5


@pytest.mark.parametrize(
    "f",
    [
        len,
        torch.mean,
        torch.relu,
        np.mean,
        F.relu,
        F.softmax,
        nn.ReLU(),
        lambda o: o,
        lambda o, k=2: o,
        lambda o, name="a", k=2: o,
        lambda o=None: o,
        Method().one,
        Method(),
        partial(three, None, ()),
        torch.Tensor.float,
    ],
    ids=lambda f: getattr(f, "__name__", type(f).__name__),
)
def test_check_function_passes_the_last_to_a_function_of_one_argument(
    f: Callable[..., Any],
) -> None:
    made = check_function("Hook", f, *SEEN)

    assert isinstance(made, OfLast)
    assert made.f is f


@pytest.mark.parametrize(
    ("f", "found"),
    [
        (3, "found an int"),
        ("f", "found a str"),
        (nn.ReLU, "found the class ReLU"),
        (lambda a, b: a, r"<lambda>\(a, b\) takes 2 arguments"),
        (lambda: 0, r"<lambda>\(\) takes 0 arguments"),
        (lambda a, b, c, d: a, r"\(a, b, c, d\) takes 4 arguments"),
        (lambda a, b, c, *, k: a, "needs k= by keyword"),
        (nn.Bilinear(1, 1, 1), "Bilinear.* takes 2 arguments"),
    ],
)
def test_check_function_refuses_a_function_of_other_arguments(f: Any, found: str) -> None:
    form = r"Give f\(module, input, output\), or f\(output\)"
    with pytest.raises(ArgumentError, match=rf"Hook: hook_func .*{found}.*{form}"):
        check_function("Hook", f, *SEEN)


def test_every_public_function_takes_a_function_of_one_argument() -> None:
    net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2, requires_grad=True)
    seen: list[Any] = []

    with (
        Hook(net[0], torch.mean) as mean,
        Hooks(net, lambda o: o.shape) as shapes,
        Hook(net[0], lambda i: len(i), pre=True) as n_inputs,
        hook_all(lambda o: seen.append(o.shape), nn.ReLU),
    ):
        net(x)
    with edit_output(net[1], torch.zeros_like), edit_input(net[0], lambda i: i[0] * 2):
        edited = net(x)
    with edit_grad(net[0], lambda g: g * 0):
        net(x).sum().backward()

    assert mean.stored.shape == ()
    assert mean.hook_func is torch.mean
    assert [tuple(s) for s in shapes.stored] == [(1, 3), (1, 3)]
    assert n_inputs.stored == 1
    assert len(seen) == 1
    assert not edited.any()
    assert x.grad is not None
    assert not x.grad.any()
    assert list(select(net, lambda m: isinstance(m, nn.ReLU))) == ["1"]


def test_a_backward_hook_of_one_argument_gets_the_gradients_of_the_outputs() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)

    with Hook(layer, lambda grads: len(grads), is_forward=False) as h:
        layer(x).sum().backward()

    assert h.stored == 1


def test_a_callback_takes_a_function_of_the_output() -> None:
    shapes = HookCallback(modules="", hook=lambda o: tuple(o.shape))
    with synth_learner(cbs=shapes).no_logging() as learn:
        learn.fit(1)

    assert shapes.hooks.stored[0] == (16, 1)


def test_a_function_of_the_output_is_traced_and_copied() -> None:
    import copy
    import pickle

    made = check_function("Hook", len, *SEEN)

    assert pickle.loads(pickle.dumps(made))(None, (), [1, 2]) == 2
    assert copy.deepcopy(made)(None, (), [1]) == 1


# --- every flag of every public function

LINEAR = nn.Linear(2, 2)


def learner(**options: Any) -> Learner:
    batches = [(torch.ones(1, 2), torch.ones(1, 2))]
    return Learner((batches, None), nn.Linear(2, 2), F.mse_loss, **options)


GIVEN: dict[str, Callable[..., Any]] = {
    "Hook": partial(Hook, LINEAR, None),
    "Hooks": partial(Hooks, [LINEAR], None),
    "FeatureExtractor": partial(hookkit.FeatureExtractor, LINEAR, {"": ("", "")}),
    "Learner": learner,
    "SchedulerCallback": partial(hookkit.SchedulerCallback, torch.optim.lr_scheduler.ConstantLR),
    "collect": lambda **kw: hookkit.collect(LINEAR, [torch.ones(1, 2)], "", "acts", **kw),
    "compare_models": partial(hookkit.compare_models, LINEAR, LINEAR, torch.ones(1, 2)),
    "activation_stream": partial(hookkit.activation_stream, LINEAR, [torch.ones(1, 2)], ""),
    "edit_attention": partial(hookkit.edit_attention, LINEAR, hookkit.zero()),
    "edit_function": partial(hookkit.edit_function, torch.relu, hookkit.zero()),
    "edit_input": partial(hookkit.edit_input, LINEAR, hookkit.zero()),
    "edit_inputs": partial(hookkit.edit_inputs, [LINEAR], hookkit.zero()),
    "edit_output": partial(hookkit.edit_output, LINEAR, hookkit.zero()),
    "edit_outputs": partial(hookkit.edit_outputs, [LINEAR], hookkit.zero()),
    "feature_extractor": partial(hookkit.feature_extractor, LINEAR, ""),
    "hook_all": partial(hook_all, print),
    "hook_tensor": partial(hookkit.hook_tensor, torch.ones(1, requires_grad=True)),
    "summary": partial(hookkit.summary, LINEAR, torch.ones(1, 2)),
    "watch": partial(watch, LINEAR),
    "ParamStats.grad_norms": lambda **kw: hookkit.ParamStats().grad_norms(**kw),
    "hook_attention": partial(hookkit.hook_attention, LINEAR),
    "hook_function": partial(hookkit.hook_function, torch.relu),
    "hook_input": partial(hookkit.hook_input, LINEAR),
    "hook_inputs": partial(hookkit.hook_inputs, [LINEAR]),
    "hook_output": partial(hookkit.hook_output, LINEAR),
    "hook_outputs": partial(hookkit.hook_outputs, [LINEAR]),
}
"""How to call what has arguments without a default, but for the flag that is tried."""

MADE_HERE = {"Watcher", "ParamStats.record", "Recorder.plot_loss", "Hook.listen", "Summary.text"}
MADE_HERE |= {"Summary.html", "GlobalHook", "Diagnosis", "Finding", "FunctionHooks"}
MADE_HERE |= {"CSVLogger", "EarlyStoppingCallback", "SaveModelCallback", "SchedulerCallback"}
MADE_HERE |= {"Learner", "Recorder"}  # whose options are Python's to refuse
"""Made by hookkit itself, or checked by a test of its own folder."""


def flags() -> Iterator[tuple[str, str]]:
    """(function, argument) of every argument of the public names that is annotated as a bool."""
    for name, thing in names().items():
        if not callable(thing) or (isinstance(thing, type) and issubclass(thing, BaseException)):
            continue
        methods = vars(thing).items() if isinstance(thing, type) else ()
        public = [(f"{name}.{k}", f) for k, f in methods if k[0] != "_" and inspect.isfunction(f)]
        has_own = not isinstance(thing, type) or thing.__init__ is not dict.__init__
        for full, f in [(name, thing), *public] if has_own else public:
            for p in inspect.signature(f).parameters.values():
                made = {full, name} & MADE_HERE
                if str(p.annotation).replace(" | None", "") == "bool" and not made:
                    yield full, p.name


@pytest.mark.parametrize(("name", "flag"), list(flags()))
def test_every_flag_of_every_public_function_is_checked(name: str, flag: str) -> None:
    call = GIVEN.get(name) or getattr(hookkit, name)

    with pytest.raises(ArgumentError, match=rf"{flag}='no'\): give True or False"):
        call(**{flag: "no"})

    assert not LINEAR._forward_hooks
    assert not LINEAR._forward_pre_hooks


# --- optimizers, loaders, values, files


def test_a_validation_loader_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"valid loader is a generator.*only once\. Give a"):
        DataLoaders([1], (batch for batch in [1]))


@pytest.mark.parametrize("value", ["x", [1], object()])
def test_the_values_of_an_epoch_are_numbers(value: Any) -> None:
    w = watch(LINEAR, None, ActivationStats()).start()

    try:
        with pytest.raises(ArgumentError, match=r"w\.epoch\(valid_loss=.*expected a number"):
            w.epoch(valid_loss=value)
    finally:
        w.stop()  # its hooks would be found by other tests


@pytest.mark.parametrize("f", [None, len, nn.MSELoss(), torch.optim.SGD])
def test_check_callable_passes_what_can_be_called(f: Any) -> None:
    assert check_callable("Learner", "loss_func", f) is f


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (3, r"Learner\(loss_func=3\): expected a function, found an int\. Give a function\."),
        (nn.MSELoss, r"loss_func=MSELoss.*Call the class: MSELoss\(\)\."),
    ],
)
def test_check_callable_refuses_other_values(f: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_callable("Learner", "loss_func", f)
