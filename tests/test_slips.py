"""The slips that newcomers make first: each message has the cure, and the cure works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookkit
from hookkit import (
    HookCallback,
    edit_output,
    edit_outputs,
    hook_inputs,
    hook_output,
    hook_outputs,
    select,
    summary,
    zero,
)
from hookkit.errors import ArgumentError, OptionError


def net() -> nn.Module:
    return nn.ModuleDict({"fc1": nn.Linear(4, 4), "fc2": nn.Linear(4, 2)})


@pytest.mark.parametrize(
    ("slip", "cure"),
    [
        (lambda h: h["fc1"].shape, r"Write \.stored\.shape\."),
        (lambda h: h["fc1"].mean(), r"Write \.stored\.mean\."),
        (lambda h: h["fc1"].output, r"Write \.stored\."),
        (lambda h: h["fc1"].stord, r"nearest: \.stored; what it stored is in \.stored\."),
        (lambda h: h["fc1"].edit, r"has no 'edit': nearest: .*Write \.stored\."),
        (lambda h: h.fc1, r'read by name: h\["fc1"\]\.'),
        (lambda h: h.nothing, r"Hooks have no 'nothing'\.$"),
    ],
)
def test_what_is_looked_for_in_a_hook_is_in_stored(slip: Callable[[Any], Any], cure: str) -> None:
    with hook_outputs(select(model := net(), "fc1")) as h:
        model["fc1"](torch.ones(1, 4))  # type: ignore[index]

    with pytest.raises(AttributeError, match=cure):
        slip(h)
    assert h["fc1"].stored.shape == (1, 4)


@pytest.mark.parametrize("f", [hook_outputs, hook_inputs])
def test_hooks_on_nothing_are_an_error(f: Any) -> None:
    with pytest.raises(OptionError, match="no module was given"):
        f([])
    with pytest.raises(OptionError, match="no module was given"):
        edit_outputs([], zero())
    HookCallback([])  # a callback may be switched off so


def test_a_name_in_the_place_of_a_module() -> None:
    with pytest.raises(ArgumentError, match=r'"fc1"\. Pass select\(model, "fc1"\)'):
        edit_output("fc1", zero())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r'hook_outputs\(select\(model, "fc1"\)\)'):
        hook_output("fc1")  # type: ignore[arg-type]


def test_a_size_for_a_model_that_takes_whole_numbers() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(48, 2))

    with pytest.raises(RuntimeError) as e:
        summary(model, (12,))

    cure = "summary(model, torch.zeros(1, 12, dtype=torch.long))"
    assert e.value.__notes__[-1].endswith(cure)
    assert eval(cure, {"summary": summary, "model": model, "torch": torch}).n_params == 138


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'hookkit' has no attribute 'hook_otput'"):
        _ = hookkit.hook_otput
