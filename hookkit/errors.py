"""The exceptions and warnings of hookkit, all under one base each.

    HookkitError
    ├── SelectionError      (KeyError)      no module of that name, pattern or type
    ├── OptionError         (ValueError)    an argument has a value that cannot work
    ├── ArgumentError       (TypeError)     an argument is of a kind that cannot work
    ├── HookError           (RuntimeError)  a hook, edit or swap cannot work here
    ├── ModelRunError       (RuntimeError)  the model cannot take the input it was given
    ├── NonFiniteError      (ArithmeticError)  NaN or Inf, where the user wants an error for it
    └── MissingExtraError   (ImportError)   an optional package is needed; prints its pip command

    HookkitWarning (UserWarning)
    ├── NeverFiredWarning   a hook, edit or stop was never reached
    ├── OverwrittenWarning  a stored value is no copy, and was changed since, or is not detached
    └── CompiledWarning     a compiled model will not see this hook

Each message has three parts: what was given, what was found, what to do.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from types import FrameType
from typing import Any

__all__ = [
    "ArgumentError",
    "CompiledWarning",
    "HookError",
    "HookkitError",
    "HookkitWarning",
    "MissingExtraError",
    "ModelRunError",
    "NeverFiredWarning",
    "NonFiniteError",
    "OptionError",
    "OverwrittenWarning",
    "SelectionError",
]


class HookkitError(Exception):
    """Base of every error that hookkit raises itself."""


class SelectionError(HookkitError, KeyError):
    """No module (or layer, or unit) has this name, pattern or type."""

    __str__ = Exception.__str__  # a KeyError shows the repr of its message


class OptionError(HookkitError, ValueError):
    """An argument has a value that cannot work."""


class ArgumentError(HookkitError, TypeError):
    """An argument is of a kind that cannot work."""


class HookError(HookkitError, RuntimeError):
    """A hook, an edit or a swap cannot work here."""


class ModelRunError(HookkitError, RuntimeError):
    """The model cannot take the input it was given, or lacks what the call needs."""


class NonFiniteError(HookkitError, ArithmeticError):
    """A NaN or an Inf was found, and the user wants an error for it."""


class MissingExtraError(HookkitError, ImportError):
    """An optional package is needed; the message is the pip command that installs it."""


class HookkitWarning(UserWarning):
    """Base of every warning that hookkit gives."""


class NeverFiredWarning(HookkitWarning):
    """A hook, an edit or a stop was never reached."""


class OverwrittenWarning(HookkitWarning):
    """A stored value is no copy, and was changed since, or is not what the options say."""


class CompiledWarning(HookkitWarning):
    """A compiled model ignores a hook added after its first call."""


def warn(message: str, kind: type[HookkitWarning] = HookkitWarning) -> None:
    """Warns at the user's line: the first one outside of hookkit, PyTorch and `with` itself."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _home(frame) in ("hookkit", "torch", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, kind, stacklevel=level)


def _home(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def nearest(name: str, names: Iterable[str], n: int = 3) -> list[str]:
    """The `n` of `names` that are most like `name`, best first; empty when none is.

    >>> nearest("layer1.conv", ["layer1.conv1", "layer1.conv2", "fc"], n=2)
    ['layer1.conv2', 'layer1.conv1']
    """
    return get_close_matches(name, list(names), n=n, cutoff=0.5)


def no_such(what: str, name: Any, names: Iterable[str]) -> SelectionError:
    """Return the error for a `name` that is none of `names`, with those that are most like it.

    >>> print(no_such("no layer fc", "fc", ["fc1", "conv"]))
    no layer fc. Nearest: 'fc1'.
    """
    known = list(names)
    near = ", ".join(map(repr, nearest(str(name), known) or known[:3])) or "there are none"
    return SelectionError(f"{what}. Nearest: {near}.")


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """The error for an optional package that is not installed.

    >>> missing_extra("matplotlib", "plot", "draw")
    MissingExtraError('hookkit needs matplotlib to draw: pip install "hookkit[plot]"')
    """
    return MissingExtraError(
        f'hookkit needs {package} to {purpose}: pip install "hookkit[{extra}]"'
    )
