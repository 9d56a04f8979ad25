"""The site's pages: each block runs and prints what is shown, and each public name is described."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from names import names
from test_readme import run

import hookkit
from hookkit.testing import synth_learner

pytest.importorskip("matplotlib")
plotting = pytest.importorskip("hookkit.plotting")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = Path(hookkit.__file__).parent  # elsewhere, where the wheel is tested
LIST = re.compile(r"^```\{toctree\}\n(.*?)^```", re.M | re.S)
ALONE = {"how-to/loops.md": "tests/test_loops_page.py runs it, beside the libraries"}
PAGES = sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if "_build" not in p.parts)


ENTRY = r"^\.\. (?:auto\w+|py:function):: ([\w.]+)"


def described() -> set[str]:
    """The names that the reference has an entry for."""
    texts = (p.read_text() for p in (DOCS / "reference").glob("*.md"))
    return {n for text in texts for n in re.findall(ENTRY, text, flags=re.M)}


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if p not in ALONE])
def test_every_block_runs_and_prints_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("matplotlib", "pandas", "tqdm", "safetensors"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    for shown, printed in run((DOCS / page).read_text(), "net.py"):
        assert printed == shown


def shown_call(page: str, name: str, **names: Any) -> Any:
    """What the call of `name` gives that stands in a table of the page."""
    (text,) = re.findall(rf"`({name}\([^`]*\))`", (DOCS / page).read_text())
    return eval(text, {**vars(hookkit), **names})


def test_the_schedule_that_is_shown_trains() -> None:
    learn = synth_learner(n_trn=11, lr=0.1)

    with learn.no_logging():
        learn.fit(1, cbs=shown_call("how-to/learner.md", "SchedulerCallback", torch=torch))

    assert learn.recorder.lrs == pytest.approx([0.1] * 10 + [0.01])


def test_the_call_of_layer_info_that_is_shown_runs() -> None:
    learn = synth_learner(model=torch.nn.Linear(1, 3))

    assert shown_call("coming-from/fastai.md", "layer_info", learn=learn)[0][0] == "Linear"


def test_the_reference_has_every_public_name() -> None:
    public = {*names(), *plotting.__all__}

    assert public - described() == set()


def test_every_link_of_the_questions_leads_to_a_page_and_every_name_exists() -> None:
    text = (DOCS / "questions.md").read_text()
    pages = re.findall(r"\]\(([^)]+)\)", text)
    calls = set(re.findall(r"[`(]([A-Za-z_]\w+)\(", text)) - {"print", "SummaryWriter"}

    assert [page for page in pages if not (DOCS / page).exists()] == []
    assert [name for name in calls if not hasattr(hookkit, name)] == ["HookkitCallback"]


def test_every_page_is_in_a_list_of_pages() -> None:
    listed = set()
    for page in PAGES:
        for listing in re.findall(
            r"^```\{toctree\}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S
        ):
            folder = Path(page).parent
            listed |= {str(folder / n) + ".md" for n in listing.splitlines() if n and n[0] != ":"}

    assert {p for p in PAGES if p not in listed} == {"index.md"}


def test_the_map_for_programs_has_every_page_for_users_once() -> None:
    text = (DOCS / "llms.txt").read_text()
    linked = re.findall(r"\]\((\S+?)\.html\)", text)
    users = {p[:-3] for p in PAGES if p.split("/")[0] in ("how-to", "understand", "coming-from")}

    assert [page for page in linked if not (DOCS / f"{page}.md").exists()] == []
    assert len(linked) == len(set(linked))
    assert {p for p in users - set(linked) if not p.endswith("index")} == set()


def test_the_version_menu_begins_with_this_version() -> None:
    newest = json.loads((DOCS / "_static" / "versions.json").read_text())[0]

    assert newest["version"] == hookkit.__version__
    assert newest["url"] == f"/hookkit/{hookkit.__version__}/"


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {hookkit.__version__}\n" in (ROOT / "CITATION.cff").read_text()
