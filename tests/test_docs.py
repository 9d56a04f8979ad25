"""The site's pages: each block runs and prints what is shown, and each public name is described."""

import re
from pathlib import Path

import pytest
from test_readme import run

import hookkit
from hookkit import plotting

DOCS = Path(__file__).parent.parent / "docs"
LIST = re.compile(r"^```\{toctree\}\n(.*?)^```", re.M | re.S)
ALONE = {"how-to/loops.md": "tests/test_loops_page.py runs it, beside the libraries"}
PAGES = sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if "_build" not in p.parts)


def described() -> set[str]:
    """The names that the reference has an entry for."""
    texts = (p.read_text() for p in (DOCS / "reference").glob("*.md"))
    return {n for text in texts for n in re.findall(r"^\.\. auto\w+:: (\S+)$", text, flags=re.M)}


@pytest.mark.parametrize("page", [p for p in PAGES if p not in ALONE])
def test_every_block_runs_and_prints_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("matplotlib", "pandas", "tqdm", "safetensors"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    for shown, printed in run((DOCS / page).read_text()):
        assert printed == shown


def test_the_reference_has_every_public_name() -> None:
    public = {*hookkit.__all__, *plotting.__all__} - {"__version__"}

    assert public - described() == set()


def test_every_page_is_in_a_list_of_pages() -> None:
    listed = set()
    for page in PAGES:
        for names in re.findall(
            r"^```\{toctree\}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S
        ):
            folder = Path(page).parent
            listed |= {str(folder / n) + ".md" for n in names.splitlines() if n and n[0] != ":"}

    assert {p for p in PAGES if p not in listed} == {"index.md"}
