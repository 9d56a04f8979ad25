"""Is this training healthy? `diagnose(run)` reads what was recorded, and says what it knows.

    finding       `Finding`, `Diagnosis`: what was seen, and what was not judged.
    view          A run as rules read it.
    facts         Of the loss, the loop, the data and units.
    weights       Facts of parameters.
    non_finite    NaN and Inf, and where they begin.
    measures      What is a factor of ten away from healthy.
    notes         What curves look like: never an alarm.
    report_page   A run as one HTML page, its diagnosis first.

A rule is a function of a `View` that yields findings under its own name. To add one, write it in
the file of its subject, and put it into `RULES` with what it needs.
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
    """Name one question about a run.

    Args:
        ask: the function that answers it.
        needs: what a run has to hold: `"losses"`, `"loss graph"`, `"parameters"`,
            `"activations"`, `"units"`.
    """

    ask: Callable[[View], Iterator[Finding]]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the function's name, which its findings bear too."""
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
"""Causes before their consequences: alarms are read in this order."""


def diagnose(run: Any) -> Diagnosis:
    """Say what is wrong with this run: alarms, causes before their effects, then notes.

    Judges whatever was recorded (activations only, parameters only, losses only). `.not_judged`
    names what the run lacks for the other rules, with the line that would record it.

    Args:
        run: a Run, a Record, a Watcher, a Learner, or a recorder such as `ActivationStats`. The
            facts of `run.info` that rules read are listed in `recorders.probes`; beside those
            `loss_func`, `n_classes`, `lr`, `weight_decay`, `optimizer`, `dtype`,
            `train_iter`, `nan_losses`.

    Returns:
        The `Diagnosis`: prints as a list; `.healthy`, `.rules`, `.findings`, `.not_judged`.

    Raises:
        ArgumentError: nothing of this kind can be read from `run`.

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
    with np.errstate(all="ignore"):  # overflows are what rules judge
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
    """Return what the first line adds: layers without a value, the one rank that recorded it."""
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
