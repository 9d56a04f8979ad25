"""Tables on the site's pages: the rules of `diagnose`, and the notebooks with their questions."""

import json
import re
from pathlib import Path

from hookkit.health import RULES
from hookkit.health.rates import RATES


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def rules() -> str:
    """Every rule as rows of a Markdown table: what it compares, with its source and its record."""
    lines = ["| rule | alarms at | source | right | wrong |", "|---|---|---|---|---|"]
    for rule in sorted(RULES, key=lambda r: r.name):
        right, wrong = RATES.get(rule.name, ("", ""))
        row = (rule.name, rule.threshold, rule.source, right, wrong)
        lines.append("| " + " | ".join(_cell(str(v)) for v in row) + " |")
    return "\n".join(lines)


def rules_not_met() -> str:
    """Names of the rules that came first in no training of the benchmark."""
    return ", ".join(sorted(f"`{r.name}`" for r in RULES if r.name not in RATES))


def notebooks() -> str:
    """Every notebook as a row of a Markdown table: its title, and the question it answers."""
    lines = ["| notebook | the question |", "|---|---|"]
    for path in sorted((Path(__file__).parent.parent / "nbs").glob("*.ipynb")):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        title = first.splitlines()[0].removeprefix("# ")
        question = "".join(re.findall(r"\*\*(.+?\?)\*\*", first, re.S)[:1])
        link = f"{{doc}}`{_cell(title)} </notebooks/{path.stem}>`"
        lines.append(f"| {path.name[:2]} {link} | {_cell(question)} |")
    return "\n".join(lines)
