"""`Finding`, one thing that a rule saw in a run, and `Diagnosis`, all of them with what is unknown.

A finding is an alarm (`"warning"`, `"error"`) or a note. Rules report alarms for what hookkit
knows: facts, and measures whose healthy and broken values lie a factor of ten apart. What only
looks odd in a picture is a note. A run is healthy if its loss was seen and nothing alarms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import overload

from hookkit.markup import details, fragment, terms

SEVERITIES = ("note", "warning", "error")
"""From "good to know" to "look at this" to "this run does not work"."""

_MARKS = {"note": "·", "warning": "!", "error": "✗"}

LOSSES = "losses"
"""The part of a run without which none is called healthy."""

CURES = {
    LOSSES: "call w.loss(loss) in each batch, or give watch(…, loss_func=…)",
    "loss graph": "give w.loss the tensor that backward() is called on, not a number",
    "parameters": "add ParamStats()",
    "activations": "add ActivationStats()",
    "units": "give ActivationStats(units=True)",
}
"""What a run may lack → the one line that records it."""


@dataclass(frozen=True)
class Finding:
    """One thing that a rule saw.

    Args:
        rule: the rule's name, such as `"dead"`.
        severity: `"note"`, `"warning"` or `"error"`.
        evidence: what was measured, in words and numbers.
        cause: what that comes from.
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
        """Layers and steps in a few words, such as `"fc1, fc2, steps 0–299"`; may be empty."""
        parts = [*self.layers[:3]]
        if len(self.layers) > 3:
            parts[-1] += f" and {len(self.layers) - 3} more"
        if self.steps:
            first, last = self.steps[0], self.steps[-1]
            parts.append(f"step {first}" if first == last else f"steps {first}–{last}")
        return ", ".join(parts)

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        head = f"{_MARKS[self.severity]} {self.severity}  {self.rule}: {self.evidence}{where}."
        return f"{head}\n    Cause: {self.cause}. Fix: {self.fix}."


@dataclass(frozen=True, repr=False)
class Diagnosis(Sequence[Finding]):
    """Findings: errors, warnings, then notes; within a severity causes before their effects.

    Args:
        findings: in that order.
        n_layers: layers (or, without them, parameters) that were looked at.
        n_steps: optimizer steps covered.
        not_judged: what the run lacks (`"losses"`, `"loss graph"`, `"parameters"`, `"activations"`,
            `"units"`) → the rules that could not be asked without it.
        remarks: what else the first line says, such as which rank recorded the run alone.

    >>> Diagnosis((), n_layers=7, n_steps=300)
    healthy: 7 layers, 300 steps
    >>> Diagnosis((), 7, 300, {"losses": ("below_zero", "target_scale")})
    no alarm, but 2 rules could not be asked: 7 layers, 300 steps
      losses unknown (2 rules): call w.loss(loss) in each batch, or give watch(…, loss_func=…)
    """

    findings: tuple[Finding, ...]
    n_layers: int
    n_steps: int
    not_judged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """True when something was recorded, the loss was seen, and nothing is worse than a note."""
        return bool(self.n_steps) and LOSSES not in self.not_judged and not self.alarms

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """The warnings and errors."""
        return tuple(f for f in self.findings if f.severity != "note")

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules that found something, each once, in the findings' order."""
        return tuple(dict.fromkeys(f.rule for f in self.findings))

    @property
    def headline(self) -> str:
        """The verdict, and how many layers and steps were judged. One line."""
        judged = [_n(self.n_layers, "layer"), _n(self.n_steps, "step"), *self.remarks]
        return f"{self._verdict()}: {', '.join(judged)}"

    def _verdict(self) -> str:
        if not self.n_layers and not self.n_steps and not self.findings:
            return "nothing was recorded, no verdict"
        counts = [(sum(f.severity == s for f in self), s) for s in SEVERITIES[::-1]]
        known = ", ".join(_n(n, s) for n, s in counts if n)
        if self.alarms:
            return known
        notes = f", {known}" if known else ""
        if self.healthy:
            return f"healthy{notes}"
        n = len({rule for rules in self.not_judged.values() for rule in rules})
        return f"no alarm{notes}, but {_n(n, 'rule')} could not be asked"

    @overload
    def __getitem__(self, i: int) -> Finding: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, i: int | slice) -> Finding | tuple[Finding, ...]:
        return self.findings[i]

    def __len__(self) -> int:
        return len(self.findings)

    def _unknown(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """What is not known, the rules that needed it, and a line: with the cure, if steps ran."""
        for what, rules in self.not_judged.items():
            cure = f": {CURES[what]}" if what in CURES and self.n_steps else ""
            yield what, rules, f"{what} unknown ({_n(len(rules), 'rule')}){cure}"

    def __str__(self) -> str:
        unknown = [f"  {line}" for _, _, line in self._unknown()]
        return "\n".join([self.headline, *map(str, self.findings), *unknown])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        html = f"<p>{escape(self.headline)}</p>{''.join(map(_item, self.findings))}"
        unknown = list(self._unknown())
        if unknown:
            n = len({rule for _, rules, _ in unknown for rule in rules})
            rows = terms((line, ", ".join(rules)) for _, rules, line in unknown)
            html += details(f"not judged: {_n(n, 'rule')}", rows)
        return fragment(html)


def _n(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def _item(f: Finding) -> str:
    where = f" ({f.where})" if f.where else ""
    head = f'<span class="tone">{f.severity}</span> {escape(f"{f.rule}: {f.evidence}{where}.")}'
    html = terms([("cause", f.cause), ("fix", f.fix)])
    return details(head, html, kind=f"finding {f.severity}", is_open=f.severity == "error")
