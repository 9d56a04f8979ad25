"""Tables on the site's pages that are read from the package: the rules of `diagnose`."""

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
