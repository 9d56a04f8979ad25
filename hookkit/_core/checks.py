"""Check arguments, with one function for each kind: module, function, flag, number, choice, path.

Each returns the checked value, or raises before anything has changed. The message says what was
given, what was expected, and what to do. Every public function checks its arguments here, so that
the same mistake gets the same message everywhere.

All take `who`, the function or class that the user called, and the argument's `name` and `value`;
`hint` says what to do instead, where a mistake is likely. A wrong number or choice raises an
`OptionError`, any other wrong argument an `ArgumentError`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from hookkit._core.messages import nearest
from hookkit.errors import ArgumentError, OptionError


def check_module(who: str, module: Any, hint: str = "") -> nn.Module:
    """Return `module`; raise unless it is an nn.Module.

    >>> check_module("edit_output", nn.ReLU)
    Traceback (most recent call last):
    hookkit.errors.ArgumentError: edit_output: expected an nn.Module, found the class ReLU. \
Call the class: ReLU(…).
    """
    if isinstance(module, nn.Module):
        return module
    found, cure = kind_of(module), hint or "Give a module, such as model.layer1."
    if isinstance(module, type) and issubclass(module, nn.Module):
        cure = f"Call the class: {module.__name__}(…)."
    elif isinstance(module, str):
        found = f'the string "{module:.60}"'
        cure = hint or "select(model, name) finds modules by name."
    raise ArgumentError(f"{who}: expected an nn.Module, found {found}. {cure}")


def check_flag(who: str, name: str, value: Any, hint: str = "") -> bool:
    """Return `value` as True or False; it may be numpy's, or 0 or 1. Raise for anything else."""
    if isinstance(value, (bool, np.bool_)) or (is_whole(value) and value in (0, 1)):
        return bool(value)
    raise ArgumentError(
        f"{who}({name}={short_repr(value)}): give True or False.{hint and ' ' + hint}"
    )


def check_number(
    who: str,
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    whole: bool = False,
    what: str = "",
) -> Any:
    """Return `value`, a number from `low` to `high`, above `above` and below `below`; else raise.

    Args:
        whole: accept only whole numbers and return an int; otherwise return a float.
        what: what the number means, for the message: `"batches in one step"`.
    """
    fits = is_whole(value) if whole else is_number(value)
    if fits and low <= value <= high and above < value < below:
        return int(value) if whole else float(value)
    limits = {"from": low, "above": above, "to": high, "below": below}
    words = [f"{word} {limit:.12g}" for word, limit in limits.items() if abs(limit) < math.inf]
    wanted = " ".join(["a whole number" if whole else "a number", *words])
    meaning = f"{name} is {what}. " if what else ""
    raise OptionError(f"{who}({name}={short_repr(value)}): {meaning}Give {wanted}.")


def check_choice(who: str, name: str, value: Any, choices: Collection[str]) -> Any:
    """Return `value`, one of the strings `choices`; else raise with the nearest of them."""
    if isinstance(value, str) and value in choices:
        return value
    near = nearest(value, choices, n=1) if isinstance(value, str) else []
    hint = f' Did you mean "{near[0]}"?' if near else ""
    options = ", ".join(f'"{choice}"' for choice in choices)
    raise OptionError(f"{who}({name}={short_repr(value)}): give one of {options}.{hint}")


def check_path(who: str, path: Any, name: str = "path") -> Path:
    """Return `path`, text or path-like, as a `Path`; raise if it is empty or has a null byte."""
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if isinstance(text, str) and text.strip() and "\0" not in text:
            return Path(text)
    raise ArgumentError(
        f'{who}({name}={short_repr(path)}): give the path of a file, such as "run.npz".'
    )


def check_function(who: str, f: Any, *arguments: str, name: str = "hook_func") -> Any:
    """Return the user's `f` as a function of all `arguments`: `f` itself, or `OfLast(f)`.

    This is decided once, when the function is registered. `f` gets all `arguments`, such as
    `("module", "input", "output")`. It gets only the last one if it has one required parameter, or
    if Python cannot read its signature, as for many of torch's own functions (`torch.mean`). But a
    function that can take all of them, and whose first parameter is called `module` or `m`, gets
    all: `f(module, input=None, output=None)`.

    Raises:
        ArgumentError: `f` cannot be called, is a class of modules, or takes other arguments.

    >>> check_function("Hook", len, "module", "input", "output")(nn.ReLU(), (), [1.0, 2.0])
    2
    >>> check_function("Hook", lambda a, b: a, "module", "input", "output")
    Traceback (most recent call last):
    hookkit.errors.ArgumentError: Hook: hook_func <lambda>(a, b) takes 2 arguments. \
Give f(module, input, output), or f(output).
    """
    forms = f"f({', '.join(arguments)}), or f({arguments[-1]})"
    if not callable(f) or (isinstance(f, type) and issubclass(f, nn.Module)):
        raise ArgumentError(f"{who}: {name} must be a function, found {kind_of(f)}. Give {forms}.")
    try:
        # a module's `__call__` has the arguments (*args, **kwargs), so its forward is read
        params = signature(f.forward if isinstance(f, nn.Module) else f).parameters.values()
    except (TypeError, ValueError):
        return OfLast(f)
    takes = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in takes if p.default is Parameter.empty]
    varargs = any(p.kind is p.VAR_POSITIONAL for p in params)
    keywords = [p for p in params if p.kind is p.KEYWORD_ONLY and p.default is Parameter.empty]
    takes_all = len(takes) >= len(arguments) and takes[0].name in (arguments[0], arguments[0][0])
    if not keywords and not varargs and not takes_all and (len(required) == 1 or len(takes) == 1):
        return OfLast(f)
    enough = varargs or len(takes) >= len(arguments)
    if not keywords and len(required) <= len(arguments) and enough:
        return f
    given = getattr(f, "__name__", type(f).__name__)
    needs = f"takes {len(takes)} argument{'s' * (len(takes) != 1)}"
    if keywords:
        needs = f"needs {', '.join(p.name + '=' for p in keywords)} by keyword"
    listed = ", ".join(str(p) for p in params)
    raise ArgumentError(f"{who}: {name} {given}({listed}) {needs}. Give {forms}.")


def check_callable(who: str, name: str, f: Any, cure: str = "a function") -> Any:
    """Return `f` if it is None or can be called; raise for others and for a class of modules."""
    is_module_class = isinstance(f, type) and issubclass(f, nn.Module)
    if f is None or (callable(f) and not is_module_class):
        return f
    fix = f"Call the class: {f.__name__}()." if is_module_class else f"Give {cure}."
    raise ArgumentError(
        f"{who}({name}={short_repr(f)}): expected a function, found {kind_of(f)}. {fix}"
    )


class OfLast:
    """Calls `f` with only the last argument: with the output, of (module, input, output)."""

    __slots__ = ("f",)

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f

    def __call__(self, *arguments: Any) -> Any:
        """Return `f` of the last of `arguments`."""
        return self.f(arguments[-1])

    @property
    def __name__(self) -> str:
        """Return the name of `f`, for messages."""
        return getattr(self.f, "__name__", type(self.f).__name__)


def kind_of(x: Any) -> str:
    """Return the type of `x` in words: `a list`, `the class ReLU`, `None`."""
    if x is None:
        return "None"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    name = type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def is_number(x: Any) -> bool:
    """Return whether `x` is a real number of Python or numpy; True and False are not.

    >>> is_number(0.5), is_number(True), is_number("1")
    (True, False, False)
    """
    return isinstance(x, Real) and not isinstance(x, bool)


def is_whole(x: Any) -> bool:
    """Return whether `x` is an integer of Python or numpy; True and False are not.

    >>> is_whole(3), is_whole(3.0)
    (True, False)
    """
    return isinstance(x, Integral) and not isinstance(x, bool)


def short_repr(x: Any, most: int = 60) -> str:
    """Return `repr(x)` on one line of at most `most` characters."""
    try:
        text = x.__name__ if isinstance(x, type) else " ".join(repr(x).split())
    except Exception:  # a user's object may not print
        return kind_of(x)
    return text if len(text) <= most else text[: most - 1] + "…"
