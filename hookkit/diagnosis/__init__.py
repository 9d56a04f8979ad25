"""Is this training healthy? `diagnose(run)` applies rules to a recorded run.

    finding       `Finding`, `Diagnosis`: the results, and which rules could not be applied.
    view          `View`: a run with the properties that several rules read.
    facts         Rules on facts about the loss, the loop, the data and units.
    weights       Rules on facts about parameters.
    non_finite    Rules on NaN and Inf, and where they begin.
    measures      Rules on numbers that are a factor of ten away from healthy.
    notes         Rules on the shape of curves; they never alarm.
    report_page   One HTML page of a run, which begins with its diagnosis.

A rule is a function that takes a `View` and yields findings with its own name. To add a rule, write
it in the file of its subject, and list it in `RULES` with its needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookkit.diagnosis import facts, measures, non_finite, notes, weights
from hookkit.diagnosis.finding import LOSSES, Diagnosis, Finding
from hookkit.diagnosis.view import View
from hookkit.records import Record, Run, as_run

__all__ = ["RULES", "Diagnosis", "Finding", "Rule", "diagnose"]


@dataclass(frozen=True)
class Rule:
    """List one rule in `RULES`.

    Args:
        ask: the function of the rule.
        needs: the data it needs: `"losses"`, `"loss graph"`, `"parameters"`, `"activations"`,
            `"units"`. A run without them is not judged by this rule.
    """

    ask: Callable[[View], Iterator[Finding]]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the function, which is also the `rule` of its findings."""
        return self.ask.__name__


_GRAPH, _PARAMS, _ACTS = ("loss graph",), ("parameters",), ("activations",)

RULES: tuple[Rule, ...] = (
    Rule(facts.broadcast, _GRAPH),
    Rule(facts.softmax_dim, _GRAPH),
    Rule(facts.probabilities, _GRAPH),
    Rule(facts.below_zero, (LOSSES,)),
    Rule(facts.no_step),
    Rule(facts.grads_pile_up),
    Rule(measures.fp16_underflow),
    Rule(measures.input_scale, _ACTS),
    Rule(measures.target_scale, (LOSSES,)),
    Rule(weights.zero_init, _PARAMS),
    Rule(weights.constant_init, _PARAMS),
    Rule(measures.bad_init, _PARAMS),
    Rule(measures.clipping, _PARAMS),
    Rule(measures.weight_decay),
    Rule(facts.dropout, _ACTS),
    Rule(measures.lr_too_high, _PARAMS),
    Rule(non_finite.non_finite),
    Rule(weights.not_in_optimizer, _PARAMS),
    Rule(weights.unregistered, _ACTS),
    Rule(weights.no_gradient, _PARAMS),
    Rule(weights.unmoved, _PARAMS),
    Rule(facts.eval_mode),
    Rule(facts.schedule_over, _PARAMS),
    Rule(facts.dead, (*_ACTS, "units")),
    Rule(weights.zero_gradient, _PARAMS),
    Rule(measures.lr_too_low, _PARAMS),
    Rule(facts.repeated_data),
    Rule(notes.saturated, _ACTS),
    Rule(notes.initial_loss, (LOSSES,)),
    Rule(notes.vanishing, _PARAMS),
    Rule(notes.exploding, _PARAMS),
    Rule(notes.overfit),
    Rule(notes.not_learning, (LOSSES,)),
)
"""All rules, causes before their effects: findings are listed in this order."""


def diagnose(run: Any) -> Diagnosis:
    """Return what is wrong with this run: alarms, causes before their effects, then notes.

    Applies every rule whose data were recorded. `.not_judged` has the missing data of the other
    rules; printing the `Diagnosis` shows the line of code that records them.

    Args:
        run: a Run, a Record, a Watcher, a Learner, or a recorder such as `ActivationStats`. The
            rules read the facts of `run.info` that are listed in `recorders.probes`, and
            `loss_func`, `n_classes`, `lr`, `weight_decay`, `optimizer`, `dtype`, `train_iter`,
            `nan_losses`.

    Returns:
        The `Diagnosis`, which prints as a list; `.healthy`, `.rules`, `.findings`, `.not_judged`.

    Raises:
        ArgumentError: `run` holds no records.

    Example:
        >>> import numpy as np
        >>> falling = 2.3 * np.exp(-np.arange(300) / 80)
        >>> diagnose(Run(losses=falling)).healthy
        True
        >>> diagnose(Run(losses=-falling, info={"loss_func": "MSELoss"})).rules
        ('below_zero', 'not_learning')
    """
    run = as_run(run)
    view = View(run)
    findings: list[Finding] = []
    missing: dict[str, list[str]] = {}
    with np.errstate(all="ignore"):  # numbers of broken runs overflow
        for rule in RULES:
            if lacks := next(filter(None, map(view.lacks, rule.needs)), ""):
                missing.setdefault(lacks, []).append(rule.name)
            else:
                findings += rule.ask(view)
    findings.sort(key=lambda f: f.severity == "note")
    looked = run.activations or run.params or run.gradients
    not_judged = {what: tuple(rules) for what, rules in missing.items()}
    n_layers = len(looked.names) if looked else 0
    return Diagnosis(tuple(findings), n_layers, run.n_steps, not_judged, _remarks(run, looked))


def _remarks(run: Run, looked: Record | None) -> tuple[str, ...]:
    """Return remarks for the first line: layers without values; that one rank recorded alone."""
    said = []
    if looked:
        known = [np.isfinite(table).any(axis=1) for table in looked.values.values()]
        seen = np.any([np.zeros(len(looked.names), bool), *known], axis=0)
        silent = [name for name, one in zip(looked.names, seen, strict=True) if not one]
        if silent:
            some = ", ".join(silent[:3]) + ", …" * (len(silent) > 3)
            said.append(f"{len(silent)} never gave a value ({some})")
    metas = (run.info, *(record.meta for record in run.records))
    if ranks := [meta["rank"] for meta in metas if "rank" in meta]:
        said.append(f"{ranks[0]} alone; gather() on every rank merges all")
    return tuple(said)
