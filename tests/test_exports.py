"""The names that `hookkit` exports: few at the top, all documented, each with a home."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from names import names

import hookkit

HOMES = ("edits", "callbacks", "errors", "fastai")


def test_names_are_at_the_top_and_in_completion() -> None:
    assert list(hookkit.__all__) == sorted(set(hookkit.__all__))
    assert set(dir(hookkit)) - set(hookkit.__all__) == {
        *HOMES, "__version__", "bridges", "plotting", "records", "testing"
    }  # fmt: skip
    there = set(dir(hookkit)) - (set() if find_spec("matplotlib") else {"plotting"})
    assert all(hasattr(hookkit, name) for name in there)


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
