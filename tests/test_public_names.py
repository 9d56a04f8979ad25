"""The public names and how they are called, as one golden file: a change of it is a decision."""

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, get_origin

import hookkit

PACKAGES = ("hookkit", "hookkit.plotting", "hookkit.testing", "hookkit.bridges", "hookkit.records")


def signature(f: Any) -> str:
    try:
        text = str(inspect.signature(f))
    except (TypeError, ValueError):
        return "(…)"
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", text).replace("'", "")


def members(kind: type) -> Iterator[str]:
    # what users call is a promise also where a base in hooks/ has it, for `Hook` and `Hooks` alike
    bases = [c for c in kind.__mro__ if c is kind or c.__module__ == "hookkit.hooks.block"]
    found = {name: value for base in reversed(bases) for name, value in vars(base).items()}
    for name, value in sorted(found.items()):
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
        module = import_module(package)
        yield package
        for name in public(module):
            thing = getattr(module, name)
            # of `NDArray[float64]` each numpy gives another signature, and nobody calls it
            is_alias = get_origin(thing) is not None
            if name.startswith("__") or is_error(thing) or is_alias or not callable(thing):
                yield f"  {name}"
            else:
                yield f"  {name}{signature(thing)}"
                if isinstance(thing, type):
                    yield from ("  " + line for line in members(thing))


def test_public_names_and_signatures(golden: Callable[[str, str], None]) -> None:
    golden("public_names.txt", "\n".join(lines()))


def test_every_public_name_is_there() -> None:
    assert sorted(set(hookkit.__all__)) == sorted(hookkit.__all__)
    assert [name for name in hookkit.__all__ if not hasattr(hookkit, name)] == []


def test_help_has_every_public_name_but_errors_in_less_than_sixty_lines() -> None:
    text = str(hookkit.__doc__)
    errors = [name for name in hookkit.__all__ if is_error(getattr(hookkit, name))]
    mentioned = re.findall(r"\w+", re.sub(r"(\w+)\(s\)", r"\1 \1s", text))

    assert set(hookkit.__all__) - {*mentioned, *errors, "__version__"} == set()
    assert len(text.splitlines()) < 60


def is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)
