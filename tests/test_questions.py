"""The page of questions: its links and names exist."""

import re
from pathlib import Path

import pytest

import hookkit

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "questions.md").read_text()


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
