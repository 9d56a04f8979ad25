"""Editors see the public names: pyright finds the mistakes of a typed script, and no others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "typed_script.py"


@pytest.mark.slow
def test_pyright_finds_misspelt_names_and_no_others() -> None:
    for library in ("pyright", "matplotlib", "pandas"):
        pytest.importorskip(library)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, str(SCRIPT)], capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not run here: {(done.stderr or done.stdout)[:200]}")

    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = {d["range"]["start"]["line"] + 1: d["message"] for d in found}
    lines = enumerate(SCRIPT.read_text().splitlines(), 1)
    assert {n for n, line in lines if line.endswith("# wrong")} == set(errors), errors
