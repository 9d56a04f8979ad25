"""What a rule is, what it finds, and all that was found: `Rule`, `Finding`, `Diagnosis`.

    @rule(needs=("activations",), threshold="…", source="…", cause="…", fix="…")
    def dead(run: RunView) -> Iterator[Finding]:
        yield dead.found("note", "62 % of a layer's units are …", ("fc1",), (0, 99))

The decorated name is then a `Rule`. Its function reads a `RunView` (see `run_view`) and yields a
`Finding` for each problem that it sees: how severe, what was measured, where and when; the rest is
the rule's own text. A branch with a line, a cause or a fix of its own is a variant of the rule:
`dead.but(fix="…").found(…)`. Texts are parts of sentences that `Finding` completes: "Cause:
`cause`.", or "Likely cause: `cause`." where the rule was less often right (see `rates`).

Longer than 300 lines, since all that makes the text of a diagnosis is read together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING, overload

from hookkit.health.rates import RATES, certainty
from hookkit.markup import details, fragment, prose, terms
from hookkit.records import label

if TYPE_CHECKING:
    from hookkit.health.run_view import RunView

SEVERITIES = ("note", "warning", "error")
"""From "good to know" to "look at this" to "this run does not work"."""

# sources that several rules cite
CHECKER = "Ben Braiek & Khomh 2022, TheDeepChecker (arXiv 2204.00694)"
CS231N = "cs231n, Neural Networks Part 3"
LECUN = "LeCun et al. 1998, Efficient BackProp: inputs of mean 0 and variance 1"
SAGEMAKER = "Amazon SageMaker Debugger"
SYMMETRY = "exact; Goodfellow et al. 2016, Deep Learning, 8.4: initial weights must break symmetry"
TAYLOR = "first-order Taylor expansion and the Cauchy-Schwarz inequality"

UNITS_UNSEEN = "dead units unseen without units=True"

CHANCE_UNKNOWN = "chance unknown: number of classes not known"

_UNSEEN = ("no losses", "no parameters", "no activations", UNITS_UNSEEN, CHANCE_UNKNOWN)
"""What a healthy run's headline says was not judged; the page lists the rest."""

_MARKS = {"note": "·", "warning": "!", "error": "✗"}

_COLUMNS = 100
"""How wide the text of a diagnosis is at most."""


@dataclass(frozen=True)
class Finding:
    """One problem that a rule found.

    Args:
        rule: the rule's name, such as `"dead"`.
        severity: `"note"`, `"warning"` or `"error"`.
        layers: names of the layers or parameters concerned; empty for the whole run.
        steps: first and last optimizer step looked at (inclusive).
        evidence: what was measured, in words and numbers.
        threshold: the line that the evidence has crossed, and no other one of the rule.
        source: who published the threshold, or how it was chosen.
        cause: the likely cause.
        fix: one thing to do.
        types: parallel to `layers`, the classes of their modules; empty where they are not known.

    >>> why = "over 90 %", "SageMaker Debugger", "a high learning rate", "divide it by 10"
    >>> print(Finding("my_rule", "error", ("fc1",), (50, 99), "95% of units are 0", *why))
    ✗ error  my_rule: 95% of units are 0 (fc1 · steps 50–99).
        Likely cause: a high learning rate.
        Fix: divide it by 10.
        Line: over 90 %. Source: SageMaker Debugger.
    """

    rule: str
    severity: str
    layers: tuple[str, ...]
    steps: tuple[int, int]
    evidence: str
    threshold: str
    source: str
    cause: str
    fix: str
    types: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The layers with their types, such as `("0 Conv2d", "fc Linear")`."""
        kinds = self.types or ("",) * len(self.layers)
        return tuple(label(*pair) for pair in zip(self.layers, kinds, strict=True))

    @property
    def where(self) -> str:
        """Layers and steps in a few words, such as `"fc1 Linear, fc2 Linear · steps 0–299"`."""
        names = ", ".join(self.labels[:3])
        more = f" and {len(self.layers) - 3} more" if len(self.layers) > 3 else ""
        first, last = self.steps
        steps = f"step {first}" if first == last else f"steps {first}–{last}"
        return f"{names}{more} · {steps}" if names else steps

    @property
    def certainty(self) -> str:
        """`"clear"` or `"likely"`: by how often the rule named the cause where it was measured.

        A note is never clear: only alarms were measured.
        """
        return "likely" if self.severity == "note" else certainty(self.rule)

    @property
    def sentences(self) -> tuple[str, str, str]:
        """What was seen and where, its likely cause, and what to do."""
        seen = f"{self.evidence} ({self.where})"
        likely = "Cause" if self.certainty == "clear" else "Likely cause"
        cause, fix = f"{likely}: {self.cause}", f"Fix: {self.fix}"
        return _sentence(seen), _sentence(cause), _sentence(fix)

    @property
    def line(self) -> str:
        """The line that was crossed, its source, and how often the rule was right."""
        parts = [f"Line: {self.threshold}", f"Source: {self.source}"]
        if self.rule in RATES and self.severity != "note":
            right, wrong = RATES[self.rule]
            parts.append(f"Right in {right} of {right + wrong} trainings: {self.certainty}")
        return " ".join(map(_sentence, parts))

    def __str__(self) -> str:
        seen, *rest = self.sentences
        head = _wrapped(f"{_MARKS[self.severity]} {self.severity}  {self.rule}: {seen}")
        return "\n".join([head, *(_wrapped(text, "    ") for text in (*rest, self.line))])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _wrapped(text: str, indent: str = "") -> str:
    """`text` in lines of at most `_COLUMNS`, those after the first indented."""
    return fill(
        text,
        _COLUMNS,
        initial_indent=indent,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


Check = Callable[["RunView"], Iterable[Finding]]


@dataclass(frozen=True, repr=False)
class Rule:
    """One question about a run, and what to say if the answer is bad.

    Args:
        name: the id that findings carry, such as `"dead"`.
        threshold: from which value on it reports something. A rule with several such lines has a
            variant for each (`but`), so that a finding shows the one that it crossed.
        source: who published the threshold, or how it was chosen.
        cause: the likely cause.
        fix: one thing to do.
        needs: properties of a `RunView` that must be there, such as `"activations"`; without one
            of them the rule is unjudged.
        check: reads the run; finds nothing in a rule that only another one's check reports.
    """

    name: str
    threshold: str
    source: str
    cause: str
    fix: str
    needs: tuple[str, ...] = ()
    check: Check = lambda run: ()

    def __repr__(self) -> str:
        return f"Rule({self.name!r})"

    def but(self, **texts: str) -> Rule:
        """This rule with other texts."""
        return replace(self, **texts)  # type: ignore[arg-type]

    def found(
        self, severity: str, evidence: str, layers: Iterable[str], steps: tuple[int, int]
    ) -> Finding:
        """A finding with this rule's name and texts."""
        texts = self.threshold, self.source, self.cause, self.fix
        return Finding(self.name, severity, tuple(layers), steps, evidence, *texts)


def rule(
    *, threshold: str, source: str, cause: str, fix: str, needs: tuple[str, ...] = ()
) -> Callable[[Check], Rule]:
    """Makes a `Rule` of the function below it, named like the function."""

    def made(check: Check) -> Rule:
        return Rule(check.__name__, threshold, source, cause, fix, needs, check)

    return made


@dataclass(frozen=True, repr=False)
class Diagnosis(Sequence[Finding]):
    """Findings, the most severe first; a healthy run prints as one line.

    Args:
        findings: sorted by severity.
        n_layers: layers (or, without them, parameters) that were looked at.
        n_steps: optimizer steps covered.
        unjudged: rule → what it would have needed.
        silent: layers that were hooked, but gave no value.
        silent_types: parallel to `silent`, the classes of their modules.
        rank: which of several processes recorded the run alone; "" if it is whole.

    >>> Diagnosis((), n_layers=7, n_steps=300)
    7 layers, 300 steps: healthy
    """

    findings: tuple[Finding, ...]
    n_layers: int
    n_steps: int
    unjudged: tuple[tuple[str, str], ...] = ()
    silent: tuple[str, ...] = ()
    silent_types: tuple[str, ...] = ()
    rank: str = ""

    @property
    def healthy(self) -> bool:
        """True when nothing is worse than a note."""
        return all(f.severity == "note" for f in self.findings)

    @property
    def worst(self) -> str:
        """The highest severity, or `"healthy"`."""
        return "healthy" if self.healthy else self.findings[0].severity

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules that found something, the most severe first, each once."""
        return tuple(dict.fromkeys(f.rule for f in self.findings))

    @property
    def headline(self) -> str:
        """How many layers and steps were judged, and the verdict; of which rank alone. One line."""
        alone = f" ({self.rank} alone; gather() on every rank merges all)" if self.rank else ""
        return self._verdict() + alone

    def _verdict(self) -> str:
        if not self.n_layers and not self.n_steps and not self.findings:
            return "nothing was recorded: no verdict"
        if self.silent and not self.n_layers and self.healthy:
            return f"{_n(self.n_steps, 'step')}: no layer gave a value, no verdict on them"
        judged = f"{_n(self.n_layers, 'layer')}, {_n(self.n_steps, 'step')}"
        if self.healthy:
            remarks = ", ".join(self._remarks())
            return f"{judged}: healthy" + (f" ({remarks})" if remarks else "")
        counts = [(sum(f.severity == s for f in self.findings), s) for s in SEVERITIES[::-1]]
        return f"{judged}: " + ", ".join(_n(n, s) for n, s in counts if n)

    def _remarks(self) -> Iterator[str]:
        """What the headline of a healthy run adds: notes, silent layers, what was not recorded."""
        if len(self):
            yield _n(len(self), "note")
        if self.silent:
            types = self.silent_types or ("",) * len(self.silent)
            layers = [label(*pair) for pair in zip(self.silent, types, strict=True)]
            few = ", ".join(layers[:3]) + ", …" * (len(layers) > 3)
            yield f"{len(self.silent)} never gave a value: {few}"
        yield from dict.fromkeys(why for _, why in self.unjudged if why in _UNSEEN)

    @overload
    def __getitem__(self, i: int) -> Finding: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Finding, ...]: ...
    def __getitem__(self, i: int | slice) -> Finding | tuple[Finding, ...]:
        return self.findings[i]

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        parts = [_wrapped(self.headline), *map(str, self.findings)]
        if self.unjudged and not self.healthy:
            whys = (f"not judged: {', '.join(rules)} ({why})" for why, rules in self._whys())
            parts += map(_wrapped, whys)
        return "\n".join(parts)

    __repr__ = __str__

    def _whys(self) -> list[tuple[str, list[str]]]:
        """What was missing, and the rules that could not judge without it."""
        whys: dict[str, list[str]] = {}
        for rule, why in self.unjudged:
            whys.setdefault(why, []).append(rule)
        return list(whys.items())

    def _repr_html_(self) -> str:
        html = f"<p>{escape(self.headline)}</p>{''.join(map(_item, self.findings))}"
        if self.unjudged:
            whys = terms((why, ", ".join(rules)) for why, rules in self._whys())
            html += details(f"not judged ({len(self.unjudged)})", whys)
        return fragment(html)


def _n(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def _item(f: Finding) -> str:
    seen, *rest = f.sentences
    head = f'<span class="tone">{f.severity}</span> {escape(f.rule)}: {escape(seen)}'
    kind, is_open = f"finding {f.severity}", f.severity == "error"
    return details(head, prose(rest, small=f.line), kind=kind, is_open=is_open)
