"""Helpers of the values in this folder: array types, equality, read-only arrays, layer labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class PlainValue:
    """Base of the frozen dataclasses here: equal if all fields are equal; arrays are read-only.

    A value holds a read-only view of each array, and the array itself stays writable. So nobody can
    change a record that a recorder has cached. To change an array, copy it: `record.hist.copy()`.
    """

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            if isinstance(x, dict):
                object.__setattr__(self, name, {key: read_only(each) for key, each in x.items()})
            else:
                object.__setattr__(self, name, read_only(x))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and same(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]  # it holds arrays


def read_only(x: Any) -> Any:
    """Return a read-only view of an array; return any other object as it is."""
    if isinstance(x, np.ndarray):
        x = x.view()
        x.flags.writeable = False
    return x


def same(a: Any, b: Any) -> bool:
    """Return whether two plain values are equal in every part; NaN equals NaN."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        floats = all(np.asarray(x).dtype.kind in "fc" for x in (a, b))
        return np.array_equal(a, b, equal_nan=floats)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


def label(name: str, kind: str) -> str:
    """Return the label of a layer in pictures, pages and messages: its name and class.

    >>> label("0", "Conv2d"), label("", "Net"), label("features.0", "")
    ('0 Conv2d', '(model) Net', 'features.0')
    """
    return f"{name or '(model)'} {kind}".rstrip()
