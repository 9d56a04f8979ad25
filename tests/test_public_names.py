"""The public names and how they are called, as one golden file; few of them at the top."""

import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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


HOMES = ("edits", "callbacks", "errors", "fastai")


def test_names_are_at_the_top_and_in_completion() -> None:
    modules = {*HOMES, "bridges", "records", "testing"}
    modules |= {"plotting"} if find_spec("matplotlib") else set()
    assert list(hookkit._NAMES) == sorted(set(hookkit._NAMES))
    assert set(dir(hookkit)) == {*hookkit._NAMES, *modules, "__version__"}
    assert all(hasattr(hookkit, name) for name in dir(hookkit))


@pytest.mark.parametrize("home", HOMES)
def test_what_a_module_exports_is_the_same_thing_at_the_top(home: str) -> None:
    module = import_module(f"hookkit.{home}")
    exported = {n: getattr(module, n) for n in module.__all__}

    assert exported
    assert {n: v for n, v in exported.items() if names().get(n, v) is not v} == {}


def test_no_module_bears_a_public_functions_name() -> None:
    modules = {p.stem for p in Path(hookkit.__file__).parent.rglob("*") if p.suffix in ("", ".py")}

    assert modules & set(names()) == set()


@pytest.mark.slow
def test_the_star_of_fastais_names_replaces_no_learner() -> None:
    code = """
Learner = Callback = DataLoaders = Recorder = "fastai's"
from hookkit.fastai import *
assert Learner == Callback == DataLoaders == Recorder == "fastai's"
assert hook_outputs and ActivationStats and model_sizes
import hookkit
try:
    hookkit.sumary
except AttributeError as e:
    assert "no attribute 'sumary'" in str(e)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_is_the_map_with_every_name_and_stops_there() -> None:
    text = pydoc.plain(pydoc.render_doc(hookkit))

    assert set(hookkit._NAMES) - {*re.findall(r"\w+", text)} == set()
    assert len(text.splitlines()) < 120


@pytest.mark.slow
def test_the_star_has_all_names_and_no_helper() -> None:
    code = "from hookkit import *; Learner, watch, check_invariance, zero, OptionError, model_sizes"
    code += "; assert not {'import_module', 'version', 'ModuleType', 'annotations'} & set(dir())"

    subprocess.run([sys.executable, "-c", code], check=True)


def is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)
