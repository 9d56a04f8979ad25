"""`Finding`: the result of one rule. `Diagnosis`: all findings, and what could not be judged.

A finding is an alarm (`"warning"`, `"error"`) or a note. Only facts, and measures whose healthy and
broken values lie a factor of ten apart, raise alarms. A curve that only looks odd gets a note. A
run is healthy if its loss was recorded and nothing alarms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, overload

from hookkit._core.html import details, fragment, terms

MARKS = {"error": "✗", "warning": "!", "note": "·"}
"""Severity → its mark: "this run does not work", "look at this", "good to know"."""

LOSSES = "losses"
"""The data without which no run is called healthy."""

CURES = {
    LOSSES: "call w.loss(loss) in each batch, or give watch(…, loss_func=module)",
    "loss graph": "give w.loss the tensor that backward() is called on, not a number",
    "parameters": "add ParamStats()",
    "activations": "add ActivationStats()",
    "units": "give ActivationStats(units=True)",
}
"""Data that a run may lack → the line of code that records them."""


@dataclass(frozen=True)
class Finding:
    """Hold the result of one rule.

    Args:
        rule: the rule's name, such as `"dead"`.
        severity: `"note"`, `"warning"` or `"error"`.
        evidence: the measurement, in words and numbers.
        cause: the probable cause.
        fix: one thing to do.
        layers: names of the layers or parameters concerned; empty for the whole run.
        steps: first and last optimizer step concerned (inclusive); empty for the whole run.

    >>> print(Finding("dead", "error", "95% of the units are never above 0", "a large step",
    ...               "divide the learning rate by 10", ("fc1",), (50, 99)))
    ✗ error  dead: 95% of the units are never above 0 (fc1, steps 50–99).
        Cause: a large step. Fix: divide the learning rate by 10.
    """

    rule: str
    severity: str
    evidence: str
    cause: str
    fix: str
    layers: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """Return layers and steps as text, `"fc1, fc2, steps 0–299"`; "" for the whole run."""
        parts = [*self.layers[:3]]
        if len(self.layers) > 3:
            parts[-1] += f" and {len(self.layers) - 3} more"
        if self.steps:
            first, last = self.steps[0], self.steps[-1]
            parts.append(f"step {first}" if first == last else f"steps {first}–{last}")
        return ", ".join(parts)

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        head = f"{MARKS[self.severity]} {self.severity}  {self.rule}: {self.evidence}{where}."
        return f"{head}\n    Cause: {self.cause}. Fix: {self.fix}."


@dataclass(frozen=True, repr=False)
class Diagnosis(Sequence[Finding]):
    """Holds the findings, as a sequence: alarms before notes, and causes before their effects.

    Args:
        findings: the findings in this order.
        n_layers: the number of layers (or, without them, parameters) in the records.
        n_steps: the number of optimizer steps.
        not_judged: what the run lacks (`"losses"`, `"loss graph"`, `"parameters"`, `"activations"`,
            `"units"`) → the rules that could not be applied without it.
        remarks: further texts of the first line, such as which rank recorded the run alone.

    >>> Diagnosis((), n_layers=7, n_steps=300)
    healthy: 7 layers, 300 steps
    >>> Diagnosis((), 7, 300, {"losses": ("below_zero", "target_scale")})
    no alarm, but 2 rules could not be asked: 7 layers, 300 steps
      losses unknown (2 rules): call w.loss(loss) in each batch, or give watch(…, loss_func=module)
    """

    findings: tuple[Finding, ...]
    n_layers: int
    n_steps: int
    not_judged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Return whether steps and the loss were seen, and nothing is worse than a note."""
        return bool(self.n_steps) and LOSSES not in self.not_judged and not self.alarms

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """Return the warnings and errors."""
        return tuple(f for f in self.findings if f.severity != "note")

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the names of the rules that found something, each once, in order."""
        return tuple(dict.fromkeys(f.rule for f in self.findings))

    @property
    def first(self) -> Finding | None:
        """Return the first finding, an alarm if there is one; None without findings."""
        return next(iter(self.findings), None)

    @property
    def verdict(self) -> str:
        """Return in one line whether the run is healthy, and how many layers and steps it has."""
        counts = [(sum(f.severity == s for f in self), s) for s in MARKS]
        found = [plural(n, severity) for n, severity in counts if n]
        n_unasked = len({rule for rules in self.not_judged.values() for rule in rules})
        if not self.n_layers and not self.n_steps and not self.findings:
            answer = "nothing was recorded, no verdict"
        elif self.alarms:
            answer = ", ".join(found)
        elif self.healthy:
            answer = ", ".join(["healthy", *found])
        else:
            unasked = f"but {plural(n_unasked, 'rule')} could not be asked"
            answer = ", ".join(["no alarm", *found, unasked])
        judged = [plural(self.n_layers, "layer"), plural(self.n_steps, "step"), *self.remarks]
        return f"{answer}: {', '.join(judged)}"

    @overload
    def __getitem__(self, i: int) -> Finding: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, i: int | slice) -> Finding | tuple[Finding, ...]:
        return self.findings[i]

    def __len__(self) -> int:
        return len(self.findings)

    def _unknown(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield a line for each kind of missing data, and the rules that needed it."""
        for what, rules in self.not_judged.items():
            cure = f": {CURES[what]}" if what in CURES and self.n_steps else ""
            yield f"{what} unknown ({plural(len(rules), 'rule')}){cure}", rules

    def to_dict(self) -> dict[str, Any]:
        """Return verdict, findings and what was not judged, as values that JSON can write."""
        return {
            "verdict": self.verdict,
            "healthy": self.healthy,
            "findings": [asdict(f) for f in self.findings],
            "not_judged": {what: list(rules) for what, rules in self.not_judged.items()},
        }

    def __str__(self) -> str:
        unknown = [f"  {line}" for line, _ in self._unknown()]
        return "\n".join([self.verdict, *map(str, self.findings), *unknown])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        html = f"<p>{escape(self.verdict)}</p>"
        for f in self.findings:
            where = f" ({f.where})" if f.where else ""
            head = f'<span class="tone">{f.severity}</span> '
            head += escape(f"{f.rule}: {f.evidence}{where}.")
            rows = terms([("cause", f.cause), ("fix", f.fix)])
            is_open, kind = f.severity == "error", f"finding {f.severity}"
            html += details(head, rows, kind=kind, is_open=is_open)
        if unknown := list(self._unknown()):
            n = len({rule for _, rules in unknown for rule in rules})
            rows = terms((line, ", ".join(rules)) for line, rules in unknown)
            html += details(f"not judged: {plural(n, 'rule')}", rows)
        return fragment(html)


def plural(n: int, noun: str, many: str = "") -> str:
    """Return a number with its noun: `"1 step"`, `"3 steps"`; `many` is an irregular plural."""
    return f"{n:,} {noun if n == 1 else many or noun + 's'}"
