"""Tables on the site's pages: rules of `diagnose`, notebooks with their questions, costs."""

import json
import re
from pathlib import Path

from hookkit.health import RULES
from hookkit.health.rates import RATES

ROOT = Path(__file__).parent.parent
COSTS = [  # script, beginning of the case, what
    *(("capture", case, "hook_outputs") for case in ("MLP", "GPT", "ResNet")),
    ("functions", "MLP, 24 functional ReLUs: a forward", "hook_function"),
    ("functions", "GPT, 12 blocks: a forward", "hook_function"),
    ("loop", "MLP", "Learner, default callbacks"),
    *(
        ("stats", net, "activations with histogram")
        for net in ("transformer", "small conv net", "MLP")
    ),
    *(("stats", net, "all kinds") for net in ("transformer", "small conv net", "MLP")),
    ("summary", "resnet50", "later summary"),
    ("summary", "gpt2-small", "later summary"),
    *(("collect", case, "collect") for case in ("4 blocks of 256 → 1024", "4 blocks of 256 → 8")),
]


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
    for path in sorted((ROOT / "nbs").glob("*.ipynb")):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        title = first.splitlines()[0].removeprefix("# ")
        question = "".join(re.findall(r"\*\*(.+?\?)\*\*", first, re.S)[:1])
        link = f"{{doc}}`{_cell(title)} </notebooks/{path.stem}>`"
        lines.append(f"| {path.name[:2]} {link} | {_cell(question)} |")
    return "\n".join(lines)


def costs() -> str:
    """The main figures of the benchmarks as rows of a Markdown table, with those beside them."""
    scripts = json.loads((ROOT / "benchmarks" / "table.json").read_text())["rows"]
    lines = ["| over the bare run | hookkit | beside it |", "|---|---|---|"]
    for script, case, what in COSTS:
        same = [r for r in scripts[script] if r["what"] == what and r["case"].startswith(case)]
        others = [r for r in same if r["peer"] != "bare" and r["theirs"] is not None]
        beside = ", ".join(f"{r['peer']} {r['theirs']:.3g}" for r in others) or "–"
        name = same[0]["case"].partition(" (bare again")[0]
        own = f"{same[0]['hookkit']:.3g}"
        own = f"**{own}**" if any(r["verdict"] in ("missed", "worse") for r in same) else own
        lines.append(f"| {name}: {what} | {own} | {beside} |")
    return "\n".join(lines)
