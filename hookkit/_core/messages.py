"""Warnings at the user's line, names that are nearest to an unknown one, missing packages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from types import FrameType
from typing import Any

from hookkit.errors import HookkitWarning, MissingExtraError, SelectionError


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
