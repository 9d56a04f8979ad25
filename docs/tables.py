"""Tables on the site's pages: notebooks with their questions, costs, figures of `diagnose`."""

import json
import re
from pathlib import Path

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


def diagnosis_rates() -> str:
    """The two main figures of the check of `diagnose`, as sentences."""
    text = (ROOT / "benchmarks" / "RESULTS_diagnosis.md").read_text()
    found = re.search(r"\*\*(.+?)\*\*", text, re.S)
    assert found, "RESULTS_diagnosis.md has no result in bold"
    return " ".join(found[1].split())


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
