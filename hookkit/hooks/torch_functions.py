"""Which torch functions a `TorchFunctionMode` sees, and which of them are the same function."""

from __future__ import annotations

import contextlib
import dis
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from inspect import signature
from traceback import walk_tb
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hookkit.checks import kind_of
from hookkit.errors import ArgumentError

_HOMES = (torch, functional, Tensor)
# The whole of what PyTorch's documentation says of a function that is another one: the other's name
_ALIAS = re.compile(r"^Alias (?:for|of) :\w+:`(?:torch|~)\.([\w.]+)`\.?$", re.MULTILINE)
_OPERATORS = {  # names of operators that are not those of the function
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}


def same_functions(who: str, f: Any) -> dict[Any, str]:
    """Every function that is `f` under another name or in place, each with the name of all.

    Raises:
        ArgumentError: PyTorch does not report calls of `f`.

    >>> sorted({g.__name__ for g in same_functions("", torch.Tensor.relu_)})
    ['relu', 'relu.default', 'relu.out', 'relu_', 'relu_.default']
    """
    if isinstance(f, torch._ops.OpOverload):
        f = f.overloadpacket
    name = _plain(getattr(f, "__name__", ""))
    found = _reported(name)
    try:
        if f in found:
            return found
        if isinstance(f, torch._ops.OpOverloadPacket) or f in _overridable():
            return dict.fromkeys(_with_overloads(f), name)
    except TypeError:  # it cannot be hashed
        pass
    raise ArgumentError(f"{who}: {_why_not(f)}")


def _plain(name: str) -> str:
    """The name without what marks a method, an operator, or a function that works in place."""
    if not name.startswith("__"):
        return name.rstrip("_")
    name = name.strip("_")
    if name[:1] in ("r", "i") and hasattr(Tensor, f"__{name[1:]}__"):
        name = name[1:]  # of __radd__ and __iadd__
    return _OPERATORS.get(name, name)


def _named(name: str) -> list[Any]:
    """What is called so, in place and as an operator too, in torch's three homes of functions."""
    other = {v: k for k, v in _OPERATORS.items()}.get(name, name)
    names = [name, f"{name}_", *(f"__{p}{n}__" for p in ("", "r", "i") for n in {name, other})]
    homes = (*_HOMES, torch.ops.aten)
    found = [getattr(home, n, None) for home in homes for n in names if name]
    home, _, inner = name.partition("_")  # of linalg_norm: it is torch.linalg.norm
    if home in ("linalg", "special"):
        found.append(getattr(getattr(torch, home), inner, None))
    return [g for each in found if callable(each) for g in _with_overloads(each)]


def _with_overloads(f: Any) -> list[Any]:
    """`f`, and if it is an operator of `torch.ops` each form of it."""
    if not isinstance(f, torch._ops.OpOverloadPacket):
        return [f]
    return [f, *(getattr(f, name) for name in f.overloads())]  # type: ignore[no-untyped-call]


@cache
def _reported(name: str) -> dict[Any, str]:
    """What is called so, or an alias, and reported, each with the name; kept, as it takes long."""
    names = _aliases().get(name, [name])
    return {g: name for n in names for g in _named(n) if _is_reported(g)}


@cache
def _aliases() -> dict[str, set[str]]:
    """All names of each function that has several: `concat` and `concatenate` are `cat`."""
    names: dict[str, set[str]] = {}
    for home in (*_HOMES, torch.special, torch.linalg):
        for f in vars(home).values():
            if callable(f) and (same := _ALIAS.search(str(f.__doc__))):
                other = same[1].removeprefix("nn.functional.").replace(".", "_")
                both = names.get(f.__name__, {f.__name__}) | names.get(other, {other})
                names.update(dict.fromkeys(both, both))
    return names


@cache
def _overridable() -> frozenset[Any]:
    """The functions that PyTorch lists as those whose calls it reports."""
    return frozenset(f for each in overrides.get_overridable_functions().values() for f in each)


def _is_reported(f: Any) -> bool:
    """Whether a mode sees calls of `f`: all that C++ binds, and Python functions that say so."""
    asks = not _ASKS.keys().isdisjoint(_used(f))
    return asks or not isinstance(f, FunctionType | type) or f in _overridable()


def _used(f: Any) -> tuple[str, ...]:
    """The names of what `f` calls, of one that is written in Python."""
    return getattr(getattr(f, "__code__", None), "co_names", ())


def works_in_place(f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of a torch function writes what it gives into its first argument."""
    name = f.__name__.partition(".")[0]  # of an operation: `relu_.default`
    if name.startswith("__"):
        return name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")
    if name.endswith("_") or kwargs.get("inplace"):
        return True
    place = _place_of_inplace(f)
    return place is not None and len(args) > place and bool(args[place])


@cache
def _place_of_inplace(f: Any) -> int | None:
    """Which argument of `f` is `inplace`, as in `F.relu(x, True)`; None if there is none."""
    names = [*signature(f).parameters] if isinstance(f, FunctionType) else []
    return names.index("inplace") if "inplace" in names else None


def written(f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls `f`, which works in place, on a copy, and writes what it gives into the original.

    So what `f` has written, which autograd may need, is not overwritten by what is made of it.
    """
    place: Tensor = args[0] if args else kwargs["input"]
    if args:
        return place.copy_(f(place.clone(), *args[1:], **kwargs))
    return place.copy_(f(**{**kwargs, "input": place.clone()}))


def _why_not(f: Any) -> str:
    """Why the calls of `f` cannot be seen, and what can be done instead."""
    if isinstance(f, nn.Module) or (isinstance(f, type) and issubclass(f, nn.Module)):
        return f"found {kind_of(f)}, a module. Use hook_output(module), or edit_output(module, f)."
    if not callable(f):
        return (
            f"f must be a torch function, found {kind_of(f)}. Give one, such as "
            "F.scaled_dot_product_attention or torch.Tensor.softmax."
        )
    name = getattr(f, "__name__", None) or type(f).__name__
    named = [(n, getattr(home, n, None)) for n in _used(f) for home in _HOMES]
    seen = [*dict.fromkeys(n for n, g in named if callable(g) and _is_reported(g))][:6]
    one = f"one of those that it calls ({', '.join(seen)})" if seen else "one that it calls"
    return (
        f"{name} is not one of the torch functions whose calls PyTorch reports, so it cannot be "
        f"seen from outside. Hook {one}, or the module that calls it with hook_output."
    )


def _no(*_: Any) -> bool:
    return False


# Private: a torch function that is written in Python begins by asking `has_torch_function` (or one
# of its two shorter forms, all in torch.overrides since 1.5) whether a mode is on, and goes to the
# mode if so. Without these names `opened` changes nothing, and calls inside of it are not seen.
_ASKS: Mapping[str, Any] = dict.fromkeys(
    ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no
)


_OPERATE = ("BINARY_", "COMPARE_", "UNARY_", "STORE_S")  # the last is `x[i] = y`
_ASKED = "handle_torch_function"  # goes to the mode; what it calls itself is no torch function
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def opened(f: Any, names: Mapping[Any, str]) -> Callable[..., Any] | None:
    """`f`, a torch function written in Python, with its own calls seen by a mode that is on.

    It does not ask the mode once more. None if it calls none of the functions in `names`: then it
    need not be opened. A backward pass may call any of them: a checkpoint runs its forward again.
    """
    if not isinstance(f, FunctionType):
        return None
    wanted = {*names.values(), *(getattr(g, "__name__", "") for g in names)}
    wanted |= {name.partition("_")[2] for name in wanted}  # of linalg_norm: it is torch.linalg.norm
    wanted |= {"__"} & {name[:2] for name in wanted}
    if f not in _BACKWARD and wanted.isdisjoint(_reached(f)):
        return None
    code = f.__code__
    twin = FunctionType(code, {**f.__globals__, **_ASKS}, f.__name__, f.__defaults__, f.__closure__)
    twin.__kwdefaults__ = f.__kwdefaults__
    return twin


@cache
def _reached(f: FunctionType) -> frozenset[str]:
    """The names of what `f` calls, itself or by another Python function of torch that it calls.

    "__" stands for operators.
    """
    names: set[str] = set()
    seen, found = {f}, [f]
    for g in found:  # it grows meanwhile
        new = set(_used(g)) - names
        names |= new | {"__" for i in dis.get_instructions(g) if i.opname.startswith(_OPERATE)}
        homes = (g.__globals__, *map(vars, _HOMES))  # getattr would import torch's lazy modules
        inner = [home.get(n) for home in homes for n in new - _ASKS.keys() - {_ASKED}]
        more = {i for i in inner if isinstance(i, FunctionType)} - seen
        seen |= more
        found.extend(more)
    return frozenset(names)


def overridden(types: Iterable[type]) -> bool:
    """Whether one of these classes of tensors handles torch functions itself, as DTensor may."""
    usual: Any = Tensor.__torch_function__
    each: list[Any] = [t.__torch_function__ for t in types]  # type: ignore[attr-defined]
    return any(getattr(own, "__func__", usual.__func__) is not usual.__func__ for own in each)


# Private: `_get_current_function_mode`, `_pop_mode` and `_push_mode` of torch.overrides, the stack
# of modes of this thread (since 2.0). A mode's own `__exit__` takes off whichever is on top, which
# is another one where blocks end in another order than the reverse of their beginning, or where
# this one is off for the time of a call. Without them that is done.
_TOP, _POP, _PUSH = (
    getattr(overrides, name, None)
    for name in ("_get_current_function_mode", "_pop_mode", "_push_mode")
)


def take_off(mode: TorchFunctionMode, is_on: bool) -> bool:
    """Takes `mode` off this thread's stack of modes; returns whether it was found there.

    `is_on` says whether it should be.
    """
    if _TOP is None or _POP is None or _PUSH is None:
        if is_on:
            TorchFunctionMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
        return False
    above = []
    while (top := _TOP()) is not None and top is not mode:
        above.append(top)
        _POP()
    if top is mode:
        _POP()
    for other in reversed(above):
        _PUSH(other)
    return top is mode


# Private: `_pop_mode_temporarily` of torch.overrides, a generator behind a context manager, which
# takes a mode off for the time of a call (since 2.0). A Ctrl-C as the manager begins or ends leaves
# the generator suspended until the traceback is freed: it puts the mode on when the block has
# ended. Without the name it still does.
def end_suspended() -> None:
    """Ends what the exception that is being handled has left suspended so."""
    error = sys.exc_info()[1]
    frames = [frame for frame, _ in walk_tb(error.__traceback__)] if error else []
    for frame in reversed(frames):  # the innermost first, as they would have ended
        if frame.f_code.co_filename == contextlib.__file__:
            suspended: Any = getattr(frame.f_locals.get("self"), "gen", None)
            if getattr(suspended, "__name__", "") == "_pop_mode_temporarily":
                suspended.close()
