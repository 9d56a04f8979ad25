"""What Record and Run share: array types, equality, layer labels; and how a source is read.

A *source* is anything that holds records: a Record, a Run, or an object with a method
`run_record()` (a Learner, a Watcher) or `record()` (a recorder) that returns one. Both values have
`.records`, which is all that tables, files and loggers read.
"""

from __future__ import annotations

from inspect import getattr_static
from typing import Any

import numpy as np
import numpy.typing as npt

from hookkit.errors import ArgumentError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are equal in every part; NaN equals NaN."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        floats = all(np.asarray(x).dtype.kind in "fc" for x in (a, b))
        return np.array_equal(a, b, equal_nan=floats)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


class Plain:
    """Base of the values, whose arrays are read-only: a recorder hands out the same one again.

    Two are equal if all their fields are, arrays and NaN included. A copy of an array can be
    written to: `record.value("mean").copy()`.
    """

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            if isinstance(x, np.ndarray):
                object.__setattr__(self, name, _read_only(x))
            elif isinstance(x, dict):
                object.__setattr__(self, name, {key: _read_only(each) for key, each in x.items()})

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and same(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]  # it holds arrays


def _read_only(x: Any) -> Any:
    """A view of an array that cannot be written to; anything else as it is."""
    if isinstance(x, np.ndarray):
        x = x.view()
        x.flags.writeable = False
    return x


def label(name: str, kind: str) -> str:
    """A layer's name and the class of its module, as every picture, page and message writes them.

    >>> label("0", "Conv2d"), label("", "Net"), label("features.0", "")
    ('0 Conv2d', '(model) Net', 'features.0')
    """
    return f"{name or '(model)'} {kind}".rstrip()


def read_source(source: Any) -> Any:
    """The Record or the Run that `source` is, or that its `run_record()` or `record()` returns.

    Raises:
        ArgumentError: it is no such thing.
    """
    if isinstance(source, Plain) and hasattr(source, "records"):
        return source
    for name in () if isinstance(source, type) else ("run_record", "record"):
        # looked up without __getattr__: a callback also answers with what its learner has, and
        # would be read as the run of all callbacks
        if callable(getattr_static(source, name, None)):
            return read_source(getattr(source, name)())
    raise no_records(source)


def no_records(source: Any) -> ArgumentError:
    """The error about a source that holds no records."""
    kind = f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__
    return ArgumentError(
        f"{kind} was given, and it holds no records. "
        "Give a Run, Records (one of each kind), a Watcher, a Learner, or a recorder such as "
        "ActivationStats; a saved run is read by Run.load(path)."
    )
