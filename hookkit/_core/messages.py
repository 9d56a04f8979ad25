"""Warnings at the user's line, names that are nearest to an unknown one, missing packages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from types import FrameType
from typing import Any

from hookkit.errors import HookkitWarning, MissingExtraError, SelectionError


def warn(message: str, kind: type[HookkitWarning] = HookkitWarning) -> None:
    """Warn at the user's line: the first one outside of hookkit, PyTorch and `with` itself."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _home(frame) in ("hookkit", "torch", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, kind, stacklevel=level)


def _home(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def nearest(name: str, names: Iterable[str], n: int = 3) -> list[str]:
    """Return up to `n` of `names` that are most like `name`, best first; none may be.

    Names whose last part is `name` come before names that are spelt like it.

    >>> nearest("layer1.conv", ["layer1.conv1", "layer1.conv2", "fc"])
    ['layer1.conv1', 'layer1.conv2']
    >>> nearest("fc", ["fcs", "net.a.fc", "net.b.fc", "net.c.fc"])
    ['net.a.fc', 'net.b.fc', 'net.c.fc']
    """
    known = list(names)
    same_end = [each for each in known if each.endswith(f".{name}")]
    like = get_close_matches(name, known, n=n, cutoff=0.5)  # equally good ones in any order
    like.sort(key=lambda each: (-SequenceMatcher(None, each, name).ratio(), known.index(each)))
    return list(dict.fromkeys([*same_end, *like]))[:n]


def nearest_text(name: Any, names: Iterable[str]) -> str:
    """Return the sentence of a message that shows the names nearest to an unknown one.

    If none is like it, the sentence shows the first names.

    >>> print(nearest_text("fc", ["fc1", "conv"]))
    Nearest: "fc1".
    >>> print(nearest_text("zzz", ["a", "b", "c", "d"]))
    There are "a", "b", "c" and 1 more.
    """
    known = list(names)
    near = nearest(str(name), known)
    quoted = ", ".join(f'"{each}"' for each in near or known[:3])
    if near:
        return f"Nearest: {quoted}."
    more = f" and {len(known) - 3} more" if known[3:] else ""
    return f"There are {quoted}{more}." if known else "There are none."


def no_such(what: str, name: Any, names: Iterable[str], cure: str = "") -> SelectionError:
    """Return the error for a `name` that is none of `names`: `what`, the nearest ones, a cure.

    >>> print(no_such("no layer fc", "fc", ["fc1", "conv"], "Use one of these."))
    no layer fc. Nearest: "fc1". Use one of these.
    """
    return SelectionError(f"{what}. {nearest_text(name, names)}{cure and ' ' + cure}")


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """Return the error for an optional package that is not installed.

    >>> missing_extra("matplotlib", "plot", "draw")
    MissingExtraError('hookkit needs matplotlib to draw: pip install "hookkit[plot]"')
    """
    return MissingExtraError(
        f'hookkit needs {package} to {purpose}: pip install "hookkit[{extra}]"'
    )


def import_pandas() -> Any:
    """Return pandas; raise a MissingExtraError without it."""
    try:
        import pandas as pd
    except ImportError:
        raise missing_extra("pandas", "pandas", "make a DataFrame") from None
    return pd
