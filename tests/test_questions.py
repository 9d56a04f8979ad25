"""The page of questions: each is found by the words that people type, and its answer is there."""

import re
from pathlib import Path

import pytest

import hookkit

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "questions.md").read_text()
# a row of the table of symptoms; a heading, which a search finds first, with its answer
ENTRIES = [line for line in TEXT.splitlines() if line[:2] == "| "]
ENTRIES += re.findall(r"^## How do I .+\n\n.+", TEXT, re.M)

SEARCHES = {
    "gradient of an output": "how-to/capture.md",
    "color_dim": "how-to/pictures.md",
    "learning rate finder": "how-to/learner.md",
    "early stopping": "how-to/learner.md",
    "input size": "how-to/summary.md",
    "tensorboard": "how-to/logging.md",
    "resume": "how-to/resume.md",
    "torch.compile": "how-to/compiled.md",
    "zero a head": "how-to/edit.md",
    "activation patching": "how-to/edit.md",
    "stop the forward": "how-to/features.md",
    "attention weights": "how-to/functions.md",
    "residual stream": "how-to/capture.md",
    "discriminative learning rates": "how-to/learner.md",
    "loss not decreasing": "how-to/diagnose.md",
    "Lightning with wandb": "how-to/loops.md",
    "overhead": "understand/cost.md",
    "last token": "how-to/capture.md",
}


@pytest.mark.parametrize("words", SEARCHES)
def test_a_search_finds_one_entry_with_the_page_that_answers(words: str) -> None:
    found = [entry for entry in ENTRIES if words.lower() in entry.lower()]

    assert len(found) == 1
    assert f"]({SEARCHES[words]})" in found[0]


def test_every_link_leads_to_a_page_and_every_name_exists() -> None:
    pages = re.findall(r"\]\(([^)]+)\)", TEXT)
    calls = set(re.findall(r"[`(]([A-Za-z_]\w+)\(", TEXT)) - {"print", "SummaryWriter"}

    assert [page for page in pages if not (DOCS / page).exists()] == []
    assert [name for name in calls if not hasattr(hookkit, name)] == ["HookkitCallback"]


@pytest.mark.parametrize(
    "page", ["changes", "benchmarks", "results", "decisions", "diagnosis-results"]
)
def test_records_of_the_past_are_not_searched(page: str) -> None:
    assert (DOCS / "develop" / f"{page}.md").read_text().startswith("---\nnosearch: true\n---\n")
