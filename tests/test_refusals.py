"""What cannot work is refused before anything has changed, with the words that name the cure.

One table for the whole library's common slips. A room's own options are refused in its own file.
"""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookkit
from hookkit import (
    ActivationStats,
    DataLoaders,
    Hook,
    HookCallback,
    Hooks,
    edit_output,
    edit_outputs,
    feature_extractor,
    hook_all,
    hook_function,
    hook_inputs,
    hook_output,
    hook_outputs,
    select,
    swap,
    watch,
    zero,
)
from hookkit._core.checks import (
    OfLast,
    check_callable,
    check_choice,
    check_flag,
    check_function,
    check_module,
    check_number,
    check_path,
    kind_of,
    short_repr,
)
from hookkit.edits.swapping import Wrapper
from hookkit.errors import ArgumentError, HookkitWarning, OptionError
from hookkit.fastai import (
    dummy_eval,
    flatten_model,
    has_params,
    in_channels,
    model_sizes,
    num_features_model,
    total_params,
)
from hookkit.testing import synth_learner

LINEAR, X = nn.Linear(2, 2), torch.ones(1, 2)
SEEN = ("module", "input", "output")


def captured() -> Hooks:
    """The hooks of a Linear(2, 2) that is called "fc1", after one call."""
    model = nn.ModuleDict({"fc1": nn.Linear(2, 2)})
    with hook_outputs(select(model, "fc1")) as h:
        model["fc1"](X)
    return h


def function(f: Any) -> Callable[[], Any]:
    return lambda: check_function("Hook", f, *SEEN)


FORM = r".*Give f\(module, input, output\), or f\(output\)"
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # flags
    (
        lambda: check_flag("f", "cpu", 2, "So there"),
        ArgumentError,
        r"f\(cpu=2\): give True or False\. So there",
    ),
    # numbers
    *(
        (
            partial(check_number, "f", "k", value, 0, 10, what="a size"),
            OptionError,
            r"f\(k=.*k is a size\. Give a number from 0 to 10\.",
        )
        for value in ("1", None, True, float("nan"), float("inf"), 1j, -1, 11)
    ),
    (lambda: check_number("f", "k", 0, above=0, below=1), OptionError, "above 0 below 1"),
    (lambda: check_number("f", "k", 1, above=0, below=1), OptionError, "above 0 below 1"),
    (lambda: check_number("f", "k", 3.0, 1, whole=True), OptionError, "a whole number from 1"),
    # words
    (
        lambda: check_choice("f", "keep", "al", ("last", "all")),
        OptionError,
        r'keep=\'al\'\): give one of "last", "all"\. Did .*"all"',
    ),
    # paths
    *(
        (
            partial(check_path, "save", path, "file"),
            ArgumentError,
            r"save\(file=.*give the path of a file",
        )
        for path in ("", " ", "a\0b", b"x", 3, None, ["a"])
    ),
    # modules
    *(
        (
            partial(check_module, "f", module),
            ArgumentError,
            rf"expected an nn\.Module, found {text}",
        )
        for module, text in (
            (nn.ReLU, r"the class ReLU\. Call the class"),
            ("fc", r'the string "fc"\. select'),
            (None, "None"),
            (3, "an int"),
            ([nn.ReLU()], "a list"),
            (lambda x: x, "a function"),
        )
    ),
    *(
        (partial(f, nn.Linear), ArgumentError, f"{f.__name__}: expected an nn.Module, found")
        for f in (
            dummy_eval,
            flatten_model,
            has_params,
            in_channels,
            model_sizes,
            num_features_model,
            total_params,
        )
    ),
    (lambda: edit_output("fc1", zero()), ArgumentError, r'"fc1"\. Pass select\(model, "fc1"\)'),
    (lambda: hook_output("fc1"), ArgumentError, r'hook_outputs\(select\(model, "fc1"\)\)'),
    (lambda: hook_outputs([]), OptionError, "no module was given"),
    (lambda: hook_inputs([]), OptionError, "no module was given"),
    (lambda: edit_outputs([], zero()), OptionError, "no module was given"),
    # functions
    (function(3), ArgumentError, "Hook: hook_func .*found an int" + FORM),
    (function("f"), ArgumentError, "found a str" + FORM),
    (function(nn.ReLU), ArgumentError, "found the class ReLU" + FORM),
    (function(lambda a, b: a), ArgumentError, r"<lambda>\(a, b\) takes 2 arguments" + FORM),
    (function(lambda: 0), ArgumentError, r"<lambda>\(\) takes 0 arguments" + FORM),
    (function(lambda a, b, c, d: a), ArgumentError, r"\(a, b, c, d\) takes 4 arguments" + FORM),
    (function(lambda a, b, c, *, k: a), ArgumentError, "needs k= by keyword" + FORM),
    (function(nn.Bilinear(1, 1, 1)), ArgumentError, "Bilinear.* takes 2 arguments" + FORM),
    (
        lambda: check_callable("Learner", "loss_func", 3),
        ArgumentError,
        r"Learner\(loss_func=3\): expected a function, found an int\. Give a function\.",
    ),
    (
        lambda: check_callable("Learner", "loss_func", nn.MSELoss),
        ArgumentError,
        r"loss_func=MSELoss.*Call the class: MSELoss\(\)\.",
    ),
    # what was stored is in `.stored`
    (lambda: captured()["fc1"].shape, AttributeError, r"Write \.stored\.shape\."),
    (lambda: captured()["fc1"].output, AttributeError, r"Write \.stored\."),
    (lambda: captured().fc1, AttributeError, r'read by name: h\["fc1"\]\.'),
    (lambda: captured().nothing, AttributeError, r"Hooks have no 'nothing'\.$"),
    # data, targets, names
    (
        lambda: DataLoaders([1], (batch for batch in [1])),
        ArgumentError,
        r"valid loader is a generator.*only once\. Give a",
    ),
    (lambda: hookkit.hook_otput, AttributeError, "'hookkit' has no attribute 'hook_otput'"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[r[2][:60] for r in REFUSED])
def test_it_is_refused_with_the_words_that_name_the_cure(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("value", ["x", [1], object()])
def test_the_values_of_an_epoch_are_numbers(value: Any) -> None:
    with (
        watch(LINEAR, None, ActivationStats()) as w,
        pytest.raises(ArgumentError, match=r"w\.epoch\(valid_loss=.*expected a number"),
    ):
        w.epoch(valid_loss=value)


# --- flags

FLAGS: dict[str, Callable[..., Any]] = {
    "detach": partial(hook_output, LINEAR),
    "stop": partial(hook_outputs, [LINEAR]),
    "edit": partial(Hook, LINEAR, None),
    "pre": partial(Hooks, [LINEAR], None),
    "inputs": partial(hook_function, torch.relu),
    "scores": partial(hookkit.hook_attention, LINEAR),
    "with_hist": ActivationStats,
    "grads": partial(hookkit.compare_models, LINEAR, LINEAR, X),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_is_no_flag_is_refused_before_a_hook_is_on(flag: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{flag}='no'\): give True or False"):
        FLAGS[flag](**{flag: "no"})

    assert not LINEAR._forward_hooks
    assert not LINEAR._forward_pre_hooks


# --- what is taken


@pytest.mark.parametrize("value", [True, False, np.True_, 0, 1])
def test_a_flag_is_true_or_false(value: Any) -> None:
    assert check_flag("f", "cpu", value) is bool(value)


def test_values_are_given_back_as_what_they_mean() -> None:
    assert check_number("f", "k", 0.5, above=0, below=1) == 0.5
    assert type(check_number("f", "k", np.int64(3), 1, whole=True)) is int
    assert check_choice("f", "keep", "all", ("last", "all")) == "all"
    assert check_path("save", "a/b.npz") == check_path("save", Path("a/b.npz")) == Path("a/b.npz")
    assert check_callable("Learner", "loss_func", len) is len
    assert check_callable("Learner", "loss_func", None) is None


class Method:
    def three(self, module: Any, inputs: Any, output: Any) -> Any:
        return output

    def one(self, output: Any) -> Any:
        return output

    def __call__(self, output: Any) -> Any:
        return output


def with_default(module: Any, inputs: Any, output: Any, scale: float = 2.0) -> Any:
    return output


def only_the_module_is_required(module: Any, inputs: Any = None, output: Any = None) -> Any:
    return output


@pytest.mark.parametrize(
    "f",
    [
        with_default,
        only_the_module_is_required,
        lambda module, *others: others[-1],
        lambda m, i=(), o=0: o,
        lambda *all_: all_[-1],
        Method().three,
        partial(with_default),
    ],
)
def test_a_function_of_three_arguments_gets_all(f: Callable[..., Any]) -> None:
    made = check_function("Hook", f, *SEEN)

    assert made is f
    assert made(None, (), 5) == 5


@pytest.mark.parametrize(
    "f",
    [
        len,
        torch.mean,
        np.mean,
        F.relu,
        F.softmax,
        nn.ReLU(),
        lambda o: o,
        lambda o, name="a", k=2: o,
        lambda o=None: o,
        Method().one,
        Method(),
        partial(with_default, None, ()),
        torch.Tensor.float,
    ],
    ids=lambda f: getattr(f, "__name__", type(f).__name__),
)
def test_a_function_of_one_argument_gets_the_output(f: Callable[..., Any]) -> None:
    made = check_function("Hook", f, *SEEN)

    assert isinstance(made, OfLast)
    assert made.f is f


def test_hooks_of_every_kind_take_a_function_of_one_argument() -> None:
    net, seen = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), list[Any]()
    callback = HookCallback(modules="", hook=lambda o: tuple(o.shape))

    with (
        Hook(net[0], len, is_forward=False) as n_grads,
        Hook(net[0], lambda i: len(i), pre=True) as n_inputs,
        hook_all(lambda o: seen.append(o.shape), nn.ReLU),
    ):
        net(torch.ones(1, 2, requires_grad=True)).sum().backward()
    with synth_learner(cbs=callback).no_logging() as learn:
        learn.fit(1)

    assert n_inputs.stored == n_grads.stored == len(seen) == 1
    assert callback.hooks.stored[0] == (16, 1)


def test_a_function_of_the_output_is_copied() -> None:
    made = check_function("Hook", len, *SEEN)

    assert pickle.loads(pickle.dumps(made))(None, (), [1, 2]) == 2
    assert copy.deepcopy(made)(None, (), [1]) == 1


# --- how messages are made


def test_shown_gives_the_kind_of_an_object_that_cannot_be_printed() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    assert short_repr(Mute()) == "a Mute"
    assert short_repr([1] * 100).endswith("…")
    assert kind_of(nn.ReLU) == "the class ReLU"


# --- warnings


class Net(nn.Module):
    """It never calls `idle`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.idle = nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.fc(x))
        return out


def captures(net: Net) -> None:
    with hook_outputs([net.idle]):
        net(X)


def reads_what_was_overwritten(net: Net) -> None:
    h = hook_outputs([net.fc], detach=False)
    net(X)
    _ = h.stored


def sees_no_function(net: Net) -> None:
    with hook_function(F.softmax):
        net(X)


def edits(net: Net) -> None:
    with edit_output(net.idle, zero()):
        net(X)


def swaps(net: Net) -> None:
    with swap(net, {"idle": Wrapper}):
        net(X)


def extracts(net: Net) -> None:
    feature_extractor(net, "idle")(X)


def watches(net: Net) -> None:
    with watch(net, None, ActivationStats()):
        for _ in range(3):
            net(X).sum().backward()


@pytest.mark.parametrize(
    "act",
    [captures, reads_what_was_overwritten, sees_no_function, edits, swaps, extracts, watches],
)
def test_a_warning_names_the_users_line_however_deep_it_comes_from(
    act: Callable[[Net], None],
) -> None:
    with pytest.warns(HookkitWarning) as caught:
        act(Net())

    assert {w.filename for w in caught} == {__file__}
    first = act.__code__.co_firstlineno
    assert all(first < w.lineno < first + 5 for w in caught)
