"""A file imports only from rows above its own, and each heavy library has one door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hookkit

PACKAGE = Path(hookkit.__file__).parent

ROWS = [
    {"errors", "interrupts"},
    {"checks"},
    {"events", "files", "nested", "texts", "modules"},
    {"autograd_graph", "markup"},
    {"selecting", "ranks", "data"},
    {"hooks", "moments", "records", "callbacks"},
    {"editing", "swapping", "features", "modelinfo", "recording"},
    {"summaries", "stats"},
    {"health", "plotting"},
    {"pages"},
    {"learner", "watching"},
    {"bridges", "testing", "demo", "__main__"},
]
ROW = {name: i for i, row in enumerate(ROWS) for name in row}

# A method such as `stats.color_dim`, `run.diagnose`, `run.plot` or `run.report` opens these rooms
# when it is called, not when it is imported.
OPENED_LATER = {"plotting", "health", "pages", "summaries"}

ONE_DOOR = {"matplotlib": {"plotting"}, "torch.distributed": {"ranks"}}

OPTIONAL = ("matplotlib", "tqdm", "sklearn", "pandas", "IPython", "accelerate", "tensorboard")


def sources() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__init__.py"]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    """Every module named by an import in `tree`, as absolute dotted names, with its statement."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f"hookkit.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            joined = [f"{base}.{alias.name}" for alias in node.names]
            found += [(name, node) for name in (joined if base in ("hookkit", "torch") else [base])]
    return found


def is_typing_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def run_time_tree(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not is_typing_block(node)]
    return tree


def breaches(path: Path) -> list[str]:
    tree, here = run_time_tree(path), room(path)
    at_top = {id(node) for node in tree.body}
    wrong = []
    for name, node in imports(tree):
        parts = name.split(".")
        if parts[0] == "hookkit" and len(parts) > 1 and parts[1] in ROW and parts[1] != here:
            later = parts[1] in OPENED_LATER and id(node) not in at_top
            if ROW[parts[1]] > ROW[here] and not later:
                wrong.append(f"{here} (row {ROW[here]}) imports {parts[1]} (row {ROW[parts[1]]})")
        for library, doors in ONE_DOOR.items():
            if (name == library or name.startswith(library + ".")) and here not in doors:
                wrong.append(f"{here} imports {library}: only {sorted(doors)} may")
    return wrong


def test_every_file_has_a_row() -> None:
    assert {room(p) for p in sources()} - set(ROW) == set()


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.stem)
def test_imports_point_up_the_rows(path: Path) -> None:
    assert breaches(path) == []


def test_a_breach_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    bad = tmp_path / "nested.py"
    bad.write_text("from hookkit import hooks\nimport matplotlib.pyplot as plt\n")

    assert len(breaches(bad)) == 2


def test_import_loads_no_optional_library() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import hookkit; "
        f"print([n for n in {OPTIONAL!r} if n in set(sys.modules) - before])"
    )

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"
