"""Every notebook runs top to bottom and shows what it was committed with.

A cell tagged `varies` may print something else each time (times, paths); every other cell's text
output is compared. A cell tagged `needs-X` is left out where X is not installed. What the
text says is asserted by code in the notebook's metadata, `check`, which no reader sees.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "nbs").glob("*.ipynb"))


def text_of(cell: Any) -> str:
    """What a cell shows as plain text: streams and results, pictures and objects' HTML left out."""
    shown: list[str] = []
    before = None
    for out in cell.outputs:
        if out.output_type == "stream" and out.name == "stdout":
            if before is not None and before.output_type == "stream":
                shown[-1] += out.text  # a kernel may send one line in two parts
            else:
                shown.append(out.text)
        elif out.output_type in ("execute_result", "display_data"):
            plain = out.data.get("text/plain", "")
            shown.append("" if plain.startswith("<Figure") else plain)
        elif out.output_type == "error":
            shown.append(f"{out.ename}: {out.evalue}")
        before = out if shown else None
    lines = "\n".join(s.rstrip() for s in shown if s.strip()).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def code_cells(book: Any) -> list[Any]:
    return [c for c in book.cells if c.cell_type == "code"]


def read(path: Path) -> Any:
    """The notebook, without the cells of libraries that are not installed, and its check."""
    book = nbformat.read(path, as_version=4)
    book.cells = [c for c in book.cells if all(map(find_spec, needed(c)))]
    if check := book.metadata.get("check"):
        book.cells.append(nbformat.v4.new_code_cell("\n".join(check)))
    return book


def needed(cell: Any) -> list[str]:
    tags = cell.metadata.get("tags", [])
    return [tag.removeprefix("needs-") for tag in tags if tag.startswith("needs-")]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One kernel for all notebooks, which is emptied between them: each new one costs seconds."""
    manager = jupyter_client.KernelManager(kernel_name="python3")
    env = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}  # the kernel has its own
    manager.start_kernel(env=env)
    yield manager
    manager.shutdown_kernel(now=True)


def executed(book: Any, kernel: Any, folder: Path) -> Any:
    """The notebook, run in `folder`, with nothing in the kernel's namespace before it."""
    empty = "get_ipython().reset(); import matplotlib.pyplot; matplotlib.pyplot.close('all')"
    first = nbformat.v4.new_code_cell(f"{empty}; import os; os.chdir({str(folder)!r}); del os")
    book.cells.insert(0, first)
    client = nbclient.NotebookClient(book, km=kernel, timeout=300)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    del book.cells[0]
    return book


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_and_shows_what_was_committed(
    path: Path, kernel: Any, tmp_path: Path
) -> None:
    committed, book = read(path), executed(read(path), kernel, tmp_path)

    for was, now in zip(code_cells(committed), code_cells(book), strict=True):
        if "varies" not in was.metadata.get("tags", []):
            assert text_of(now) == text_of(was), was.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_asks_a_question_has_outputs_and_a_check_that_nobody_sees(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    cells, first = code_cells(book), book.cells[0]

    assert "assert" in "\n".join(book.metadata["check"])
    assert "assert" not in cells[-1].source
    lines = cells[0].source.splitlines()
    assert len(lines) <= 10 or "hide-input" in cells[0].metadata.tags
    assert re.search(r"^# .+\n(.|\n)*\*\*(.|\n)+?\?\*\*", first.source)  # a title and a question
    assert all(c.execution_count for c in cells)
    assert any(c.outputs for c in cells)


def test_cells_of_a_library_that_is_missing_are_left_out(tmp_path: Path) -> None:
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(name) for name in ("torch", "no_such_library")]
    for cell in book.cells:
        cell.metadata.tags = ["varies", f"needs-{cell.source}"]
    nbformat.write(book, tmp_path / "book.ipynb")

    assert [cell.source for cell in read(tmp_path / "book.ipynb").cells] == ["torch"]


@pytest.mark.slow
@pytest.mark.ranks
def test_the_script_of_several_processes_prints_what_is_shown(tmp_path: Path) -> None:
    (path,) = (p for p in NOTEBOOKS if p.stem.startswith("07"))
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    (script,) = re.findall(r"```python\n(.+?)```", text, flags=re.S)
    ((command, shown),) = re.findall(r"```text\n\$ torchrun (.+?)\n(.+?)```", text, flags=re.S)
    options = command.split()
    (tmp_path / options[-1]).write_text(script)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *options],
        **{"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 300},
    )

    assert done.stdout == shown, done.stderr


DRAWN = """
import sys; sys.path.insert(0, {tests!r})
import made
from hookkit import plotting
import matplotlib.pyplot as plt
run = made.run(n=9)
---
run.plot()
---
figure = plotting.plot_stats(run)
---
figure
---
display(plotting.plot_depth(run))
---
given = plt.figure()
plotting.plot_stats(run, fig=given)
---
plotting.plot_loss(run);
---
figure, again = plotting.plot_stats(run), plotting.plot_depth(run)
figure
---
plt.plot([1, 2])
plotting.plot_depth(run)
"""
PICTURES_OF_CELLS = [0, 1, 1, 1, 1, 1, 1, 2, 2]


@pytest.mark.slow
def test_a_notebook_shows_a_picture_once(kernel: Any, tmp_path: Path) -> None:
    for library in ("matplotlib", "matplotlib_inline"):
        pytest.importorskip(library)
    book = nbformat.v4.new_notebook()
    code = DRAWN.format(tests=str(Path(__file__).parent))
    book.cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in code.split("---")]

    executed(book, kernel, tmp_path)

    shown = [sum("image/png" in out.get("data", {}) for out in c.outputs) for c in book.cells]
    assert shown == PICTURES_OF_CELLS
    assert not any(out.output_type == "error" for c in book.cells for out in c.outputs)
