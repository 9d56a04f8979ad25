"""The exceptions and warnings of hookkit, all under one base each.

    HookkitError
    ├── SelectionError      (KeyError)      no module of that name, pattern or type
    ├── OptionError         (ValueError)    an argument has a value that cannot work
    ├── ArgumentError       (TypeError)     an argument is of a kind that cannot work
    ├── HookError           (RuntimeError)  a hook, edit or swap cannot do what was asked
    ├── ModelRunError       (RuntimeError)  the model cannot take the input it was given
    ├── NonFiniteError      (ArithmeticError)  NaN or Inf met where the user asked to be told
    └── MissingExtraError   (ImportError)   an optional package is needed; prints its pip command

    HookkitWarning (UserWarning)
    ├── NeverFiredWarning   a hook, edit or stop was never reached
    ├── OverwrittenWarning  what is stored is no copy, and was changed since, or is not detached
    └── CompiledWarning     a compiled model will not see this hook

Each message has three parts: what was asked, what was found, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any


class HookkitError(Exception):
    """Base of every error that hookkit raises on its own account."""


class SelectionError(HookkitError, KeyError):
    """No module (or layer, or unit) answers to what was asked for."""

    __str__ = Exception.__str__  # a KeyError shows the repr of its message


class OptionError(HookkitError, ValueError):
    """An argument has a value that cannot work."""


class ArgumentError(HookkitError, TypeError):
    """An argument is of a kind that cannot work."""


class HookError(HookkitError, RuntimeError):
    """A hook, an edit or a swap cannot do what was asked of it."""


class ModelRunError(HookkitError, RuntimeError):
    """The model cannot take the input it was given, or lacks what the call needs."""


class NonFiniteError(HookkitError, ArithmeticError):
    """A NaN or an Inf was met where the user asked to be told."""


class MissingExtraError(HookkitError, ImportError):
    """An optional package is needed; the message is the pip command that brings it."""


class HookkitWarning(UserWarning):
    """Base of every warning that hookkit gives."""


class NeverFiredWarning(HookkitWarning):
    """A hook, an edit or a stop was asked for and never reached."""


class OverwrittenWarning(HookkitWarning):
    """What is stored is no copy, and has been changed since, or cannot be as the options ask."""


class CompiledWarning(HookkitWarning):
    """A compiled model ignores a hook added after its first call."""


def nearest(name: str, names: Iterable[str], n: int = 3) -> list[str]:
    """The `n` of `names` that look most like `name`, best first; empty when none does.

    >>> nearest("layer1.conv", ["layer1.conv1", "layer1.conv2", "fc"], n=2)
    ['layer1.conv2', 'layer1.conv1']
    """
    return get_close_matches(name, list(names), n=n, cutoff=0.5)


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """The error for an optional package that is not installed.

    >>> missing_extra("matplotlib", "plot", "draw")
    MissingExtraError('hookkit needs matplotlib to draw: pip install "hookkit[plot]"')
    """
    return MissingExtraError(
        f'hookkit needs {package} to {purpose}: pip install "hookkit[{extra}]"'
    )


def is_number(x: Any) -> bool:
    """Whether `x` is one real number, of Python's or of numpy's; True and False are none.

    >>> is_number(0.5), is_number(True), is_number("1")
    (True, False, False)
    """
    return isinstance(x, Real) and not isinstance(x, bool)


def is_whole(x: Any) -> bool:
    """Whether `x` is a number without a fraction by its kind, as in `is_number`.

    >>> is_whole(3), is_whole(3.0)
    (True, False)
    """
    return isinstance(x, Integral) and not isinstance(x, bool)
