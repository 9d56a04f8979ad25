"""A package imports only from the rows above its own, and heavy libraries have one importer each.

Imports within functions count as well: a name is known wherever it is imported.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hookkit

PACKAGE = Path(hookkit.__file__).parent

ROWS = [
    {"errors", "_core"},
    {"hooks", "records"},
    {"edits", "diagnosis", "plotting"},
    {"inspection"},
    {"callbacks"},
    {"recorders"},
    {"training"},
    {"bridges", "testing", "fastai"},
]
ROW = {name: i for i, row in enumerate(ROWS) for name in row}

# The methods of `Run` import the files that do their work when they are called: those build on it.
BUILT_ON_RUN = ("diagnosis", "plotting", *(f"records.{x}" for x in ("joining", "npz")))
EXCEPTIONS = {("records/run.py", name) for name in BUILT_ON_RUN}

ONE_IMPORTER = {"matplotlib": "plotting", "torch.distributed": "_core"}

OPTIONAL = ("matplotlib", "tqdm", "sklearn", "pandas", "IPython", "accelerate", "tensorboard")


def sources() -> list[Path]:
    """Every file of the package but its own `__init__.py`, which imports from all packages."""
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_typing_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(path: Path) -> set[str]:
    """Every module that a file imports when it runs, at its top or in a function."""
    found, todo = set(), [ast.parse(path.read_text()), None]
    while (node := todo.pop(0)) is not None:
        todo[:0] = [] if is_typing_block(node) else ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = absolute(path, node)
            names = [a.name for a in node.names]
            found |= {f"{base}.{n}" if is_module(base, n) else base for n in names}
    return found


def absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = ["hookkit", *path.relative_to(PACKAGE).parts]
    return ".".join([*package[: len(package) - node.level], *filter(None, [node.module])])


def is_module(base: str, name: str) -> bool:
    """Whether `from base import name` imports a module, of hookkit or of torch."""
    place = PACKAGE.parent.joinpath(*base.split("."), name)
    return place.is_dir() or place.with_suffix(".py").exists() or base == "torch"


def breaches(path: Path) -> list[str]:
    here, wrong = package_of(path), []
    for name in sorted(imports(path)):
        other = [*name.split("."), ""][1]
        if name == "hookkit":
            wrong.append(f"{here} imports the whole of hookkit")
        below = name.startswith("hookkit.") and ROW[other] > ROW[here]
        if below and (path.relative_to(PACKAGE).as_posix(), other) not in EXCEPTIONS:
            wrong.append(f"{here} (row {ROW[here]}) imports {other} (row {ROW[other]})")
        for library, only in ONE_IMPORTER.items():
            if (name == library or name.startswith(library + ".")) and here != only:
                wrong.append(f"{here} imports {library}: only {only} may")
    return wrong


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """The modules that are in a cycle or import from one, directly or over others."""
    rest = dict(edges)
    while free := [name for name, others in rest.items() if not others & rest.keys()]:
        for name in free:
            del rest[name]
    return sorted(rest)


def module_graph() -> dict[str, set[str]]:
    """Module → modules of hookkit that it imports, but for the exceptions."""
    graph = {}
    for path in sources():
        place = path.relative_to(PACKAGE)
        parts = [*place.parts[:-1], *([] if path.name == "__init__.py" else [path.stem])]
        but = tuple(f"hookkit.{there}" for file, there in EXCEPTIONS if file == place.as_posix())
        there = {name for name in imports(path) if not name.startswith(but)}
        graph[".".join(["hookkit", *parts])] = there
    return graph


def test_every_file_has_a_row() -> None:
    assert {package_of(p) for p in sources()} - set(ROW) == set()


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_up_the_rows(path: Path) -> None:
    assert breaches(path) == []


@pytest.mark.slow
def test_no_module_imports_itself_over_others() -> None:
    assert cycle(module_graph()) == []


def test_a_breach_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    bad = tmp_path / "errors.py"
    bad.write_text(
        "def f():\n    from hookkit.hooks import Hook\nimport matplotlib.pyplot as plt\n"
    )

    assert len(breaches(bad)) == 2


def test_a_cycle_is_seen() -> None:
    assert cycle({"a": {"b", "numpy"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


@pytest.mark.slow
def test_import_loads_no_optional_library() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import hookkit; "
        f"print([n for n in {OPTIONAL!r} if n in set(sys.modules) - before])"
    )

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"
