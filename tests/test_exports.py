"""The names that `hookkit` exports: sorted, complete, documented, and its own."""

import inspect
from pathlib import Path

import pytest

import hookkit


def test_all_is_sorted_without_repeats() -> None:
    assert list(hookkit.__all__) == sorted(set(hookkit.__all__))


@pytest.mark.parametrize("name", hookkit.__all__)
def test_every_export_is_there_and_documented(name: str) -> None:
    thing = getattr(hookkit, name)

    assert name == "__version__" or inspect.getdoc(thing)


def test_no_module_bears_a_public_functions_name() -> None:
    modules = {p.stem for p in Path(hookkit.__file__).parent.rglob("*") if p.suffix in ("", ".py")}

    assert modules & set(hookkit.__all__) == set()


def test_everything_public_in_the_namespace_is_exported() -> None:
    public = {
        n
        for n, v in vars(hookkit).items()
        if not n.startswith("_") and not inspect.ismodule(v) and n != "annotations"
    }

    assert public - set(hookkit.__all__) == set()
