"""The rows of a comparison, from what two sides gave.

Builds on `measures`, `comparison` and `sides`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from hookkit._core.pytree import Parts, describe
from hookkit.inspection.comparison import MISSING, NOT_GIVEN, Comparison, Row
from hookkit.inspection.differences import dense, difference, pairs
from hookkit.inspection.sides import Key, Side


def compared(
    first: Side,
    second: Side,
    partners: Mapping[str, str],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    loosely: bool = False,
) -> Comparison:
    """The rows in the order of the first side's values, then what only the second one has.

    Args:
        first: what is expected.
        second: what is compared with it.
        partners: names of modules on the first side, and on the second.
        rtol: relative tolerance, None for the dtypes' own.
        atol: absolute tolerance.
        loosely: leaves out what one side lacks as it is built otherwise: a module around compared
            ones, one inside a module that is compared with a layer, one without parameters; and
            gradients of parameters.
    """
    if first.last or second.last:
        first, second = first.last_calls(), second.last_calls()
    limits = {partners[name]: paths for name, paths in first.paths.items()} | second.paths
    saved = first.saved or second.saved
    expected = {key: _counting(key, parts, limits.get(partners[key.name]), saved)
                for key, parts in first.values.items()}  # fmt: skip
    found = {key: _counting(key, parts, limits.get(key.name), saved)
             for key, parts in second.values.items()}  # fmt: skip
    rows, paired = list[tuple[Key, Row]](), set[tuple[Key, str]]()
    for key, mine in expected.items():
        there = key._replace(name=partners[key.name])
        own, note = first.own.get(key, ([], ""))
        alone = {path: x for path, _, _, x in pairs(mine, own)}
        theirs = {path: at for path, _, *at in pairs(mine, found.get(there, []))}
        lacks = NOT_GIVEN if there.name in second.types else MISSING
        for path, x in mine:
            other, y = theirs.get(path, (path, None))
            row = replace(_row(first, key, path, x), other_name=there.name + other, own_note=note)
            if path in theirs:
                paired.add((there, other))
                row = _apart(row, x, y, rtol, atol)
            else:
                row = replace(row, problem=f"{lacks}second")
            rows += [(key, _with_own(row, x, alone.get(path), rtol, atol))]
    known = {*partners.values()}
    for key, parts in found.items():
        lacks = NOT_GIVEN if key.name in known else MISSING
        rows += [(key, replace(_row(second, key, path, y), problem=f"{lacks}first"))
                 for path, y in parts if (key, path) not in paired]  # fmt: skip
    lonely = (
        (r, "second" if r.problem.endswith("first") else "first") for _, r in rows if r.is_alone
    )
    unpaired = tuple(f"{replace(r, type='').label} ({side} only)" for r, side in lonely)
    if saved:
        objects = [(key.name + path, x) for side in (first, second)
                   for key, parts in side.values.items()
                   for path, x in parts if not isinstance(x, Tensor)]  # fmt: skip
        unpaired += tuple(f"{at} ({type(x).__name__}: not in a file)" for at, x in objects)
    left_out = _structure(first, second, partners) if loosely else set()
    shown = (r for key, r in rows if (r.problem, key.name) not in left_out
             and not (loosely and r.is_alone and key.what == "param_grad"))  # fmt: skip
    return Comparison(tuple(shown), unpaired)


def _counting(key: Key, parts: Parts, paths: Collection[str] | None, saved: bool) -> Parts:
    """Those of `parts` that are at or in one of `paths`, all if it is None; `saved`: tensors."""
    parts = [p for p in parts if isinstance(p[1], Tensor) or not saved]
    if paths is None or key.what == "param_grad":
        return parts
    return [p for p in parts if any(p[0] == x or p[0].startswith((f"{x}.", f"{x}["))
                                    for x in paths)]  # fmt: skip


def _row(side: Side, key: Key, path: str, x: Any) -> Row:
    name, kind = key.name + path, side.types.get(key.name, "")
    shape = tuple(x.shape) if isinstance(x, Tensor) and not x.is_nested else ()
    return Row(name, name, kind, key.what, key.call, shape, path=path)


def _apart(row: Row, a: Any, b: Any, rtol: float | None, atol: float | None) -> Row:
    """`row` with how far `b` is from `a`."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        kind = type(b if isinstance(a, Tensor) else a).__name__
        problem = f"a {kind}, in which hookkit finds no tensor"
        return row if _equal(a, b) else replace(row, problem=problem)
    if a.is_nested or b.is_nested:
        return replace(row, problem="a nested tensor, which is not compared")
    a, b = dense(a), dense(b)
    if a.shape != b.shape:
        return replace(row, problem=f"{describe(b)} in the second")
    if a.is_meta or b.is_meta:
        return replace(row, problem="on meta, without values")
    return replace(row, **difference(a, b, rtol, atol)._asdict())


def _with_own(row: Row, a: Any, own: Any, rtol: float | None, atol: float | None) -> Row:
    """`row` with how far what the second module gives alone is from `a`."""
    known = [t for t in (a, own) if isinstance(t, Tensor) and not (t.is_meta or t.is_nested)]
    if len(known) < 2:
        return row
    a, own = dense(a), dense(own)
    if a.shape != own.shape:
        return replace(row, own_rel=math.inf, own_different=a.numel())
    apart = difference(a, own, rtol, atol)
    return replace(row, own_rel=apart.rel_error, own_different=apart.n_different)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # an object of the user's, such as an array of numpy
        return False


def _structure(first: Side, second: Side, partners: Mapping[str, str]) -> set[tuple[str, str]]:
    """Modules that only one side has since it is built otherwise, with what a row says of them.

    These are around compared modules, inside one that is compared with a layer, without parameters,
    or outside of the module of the second that is compared with the whole first model.
    """
    ours, theirs = ({key.name for key in side.values} for side in (first, second))
    both = {n: there for n in ours if (there := partners[n]) in theirs}
    wholes = {n for n, there in both.items() if not any(_inside(m, there) for m in theirs)}
    others = {there for n, there in both.items() if not any(_inside(m, n) for m in ours)}

    def explained(name: str, paired: Collection[str], layers: set[str], root: str) -> bool:
        is_around = any(_inside(n, name) for n in paired)
        return is_around or any(_inside(name, n) for n in layers) or not _inside(name, root)

    return {
        (f"{MISSING}second", n)
        for n in ours - {*both}
        if n in first.functions or explained(n, both, wholes, "")
    } | {
        (f"{MISSING}first", n)
        for n in theirs - {*both.values()}
        if n in second.functions or explained(n, both.values(), others, both.get("", ""))
    }


def _inside(name: str, around: str) -> bool:
    return name != around and (not around or name.startswith(f"{around}."))
