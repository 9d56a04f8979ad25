"""What a rule is: a value with its texts, what it needs, and a function that checks a run.

    @rule(needs=("activations",), threshold="…", source="…", cause="…", fix="…")
    def dormant(run: RunView) -> Iterator[Hit]:
        yield Hit("note", ("fc1",), (0, 99), "62 % of a layer's units are …")

The decorated name is then a `Rule`. Its function reads a `RunView` (see `run_view`) and yields one
`Hit` for each problem that it sees: how severe, where, when, and what was measured. The rest of a
`Finding` is the rule's own text. A hit that needs other words names a variant of the rule:
`Hit(…, of=dormant.but(fix="…"))`.

Builds on `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from hookkit.health.diagnosis import Finding

if TYPE_CHECKING:
    from hookkit.health.run_view import RunView

# sources that several rules cite
CHECKER = "Ben Braiek & Khomh 2022, TheDeepChecker (arXiv 2204.00694)"
CS231N = "cs231n, Neural Networks Part 3"
LECUN = "LeCun et al. 1998, Efficient BackProp: inputs of mean 0 and variance 1"
SAGEMAKER = "Amazon SageMaker Debugger"
SYMMETRY = "exact; Goodfellow et al. 2016, Deep Learning, 8.4: initial weights must break symmetry"
TAYLOR = "first-order Taylor expansion and the Cauchy-Schwarz inequality"


class Hit(NamedTuple):
    """What a check saw, once.

    Args:
        severity: `"note"`, `"warning"` or `"error"`.
        layers: names of the layers or parameters concerned; empty for the whole run.
        steps: first and last optimizer step concerned (inclusive).
        evidence: what was measured, in words and numbers.
        of: the rule whose name and texts the finding gets, where it is not the checking one.
    """

    severity: str
    layers: tuple[str, ...]
    steps: tuple[int, int]
    evidence: str
    of: Rule | None = None


Check = Callable[["RunView"], Iterator[Hit]]


@dataclass(frozen=True, repr=False)
class Rule:
    """One question about a run, and what to say if the answer is bad.

    Args:
        name: the id that findings carry, such as `"dead"`.
        threshold: from which value on it reports something.
        source: who published the threshold, or how it was chosen.
        cause: the likely cause.
        fix: one thing to do.
        needs: properties of a `RunView` that must be there, such as `"activations"`; without one
            of them the rule is unjudged.
        check: reads the run; None for a rule that is only reported by another one's check.
    """

    name: str
    threshold: str
    source: str
    cause: str
    fix: str
    needs: tuple[str, ...] = ()
    check: Check | None = None

    def __repr__(self) -> str:
        return f"Rule({self.name!r})"

    def but(self, **texts: str) -> Rule:
        """This rule with other texts."""
        return replace(self, **texts)  # type: ignore[arg-type]

    def findings(self, run: RunView) -> Iterator[Finding]:
        """Its findings about a run.

        Raises:
            Missing: the run does not hold what the rule needs.
        """
        for need in self.needs:
            getattr(run, need)
        for hit in self.check(run) if self.check is not None else ():
            says = hit.of or self
            texts = says.threshold, says.source, says.cause, says.fix
            yield Finding(says.name, *hit[:4], *texts)


def rule(
    *, threshold: str, source: str, cause: str, fix: str, needs: tuple[str, ...] = ()
) -> Callable[[Check], Rule]:
    """Makes a `Rule` of the function below it, named like the function."""

    def made(check: Check) -> Rule:
        return Rule(check.__name__, threshold, source, cause, fix, needs, check)

    return made
