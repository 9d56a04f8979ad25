"""The public names and how they are called, as one golden file: a change of it is a decision."""

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, get_origin

import pytest
from names import names

import hookkit

PACKAGES = ["hookkit", "edits", "callbacks", "errors", "fastai"]
PACKAGES += ["plotting", "testing", "bridges", "records"]


def signature(f: Any) -> str:
    try:
        text = str(inspect.signature(f))
    except (TypeError, ValueError):
        return "(…)"
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", text).replace("'", "")


def members(kind: type) -> Iterator[str]:
    for name, value in sorted(vars(kind).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, (classmethod, staticmethod)):
            yield f"    {name}{signature(getattr(kind, name))}"
        elif inspect.isfunction(value):
            yield f"    {name}{signature(value)}"
        elif isinstance(value, property) or not callable(value):
            yield f"    {name}"


def public(module: ModuleType) -> list[str]:
    """What `__all__` says, else what is defined there."""
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    names = getattr(module, "__all__", [n for n in own if not n.startswith("_")])
    return sorted(names, key=str.lower)


def lines() -> Iterator[str]:
    for package in PACKAGES:
        module = import_module("hookkit" if package == "hookkit" else f"hookkit.{package}")
        yield package
        for name in names() if package == "hookkit" else public(module):
            thing = getattr(module, name)
            if package in ("edits", "callbacks", "fastai", "errors") and name in names():
                yield f"  {name}"
                continue
            # of `NDArray[float64]` each numpy gives another signature, and nobody calls it
            is_alias = get_origin(thing) is not None
            if name.startswith("__") or is_error(thing) or is_alias or not callable(thing):
                yield f"  {name}"
            else:
                yield f"  {name}{signature(thing)}"
                if isinstance(thing, type):
                    yield from ("  " + line for line in members(thing))


def test_public_names_and_signatures(golden: Callable[[str, str], None]) -> None:
    pytest.importorskip("matplotlib")  # names of pictures are among them
    golden("public_names.txt", "\n".join(lines()))


def test_help_has_every_name_of_the_top() -> None:
    assert set(hookkit.__all__) - {*re.findall(r"\w+", str(hookkit.__doc__))} == set()


def is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)
