"""Is this training healthy? `diagnose(run)` reads what was recorded and answers with reasons.

One file for each subject, since rules are looked for by what they are about; what several read is
in `reading`, `run_view` and `layer_order`. To add a rule, write a check under `@rule(…)` in the
file of its subject and put it in `RULES`.

Each rule says where its threshold is and who published it. None reports anything that was seen in
one batch alone; the learning rate is judged by the majority of matrices, dead and unmoved by a
single layer, saturation by module type, float16 by the dtype of each layer. How often they are
right is measured by `benchmarks/diagnosis.py`, and on trainings of the kinds that people run by
`benchmarks/verdicts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hookkit.health import (
    activations,
    attention,
    batches,
    collapse,
    gradients,
    inputs,
    learning_rate,
    loss,
    loss_graph,
    loss_input,
    non_finite,
    precision,
    steps,
    units,
    unmoved,
)
from hookkit.health.diagnosis import SEVERITIES, Diagnosis, Finding, Rule
from hookkit.health.reading import Missing
from hookkit.health.run_view import RunView
from hookkit.records import Record, Run, as_run

__all__ = ["RULES", "Diagnosis", "Finding", "diagnose"]

# causes before their consequences: among findings of one severity this order is kept
RULES: tuple[Rule, ...] = (
    loss_graph.broadcast,
    loss_graph.softmax_dim,
    loss_graph.only_pulls,
    loss_input.probabilities,
    loss.below_zero,
    steps.ascent,
    precision.fp16_underflow,
    unmoved.no_step,
    unmoved.eval_mode,
    unmoved.unmoved,
    unmoved.unregistered,
    unmoved.zero_init,
    unmoved.constant_init,
    gradients.grads_pile_up,
    batches.constant_input,
    batches.repeated_data,
    batches.small_batch,
    activations.dropout,
    inputs.input_scale,
    inputs.target_scale,
    activations.bad_init,
    gradients.clipping,
    steps.momentum,
    steps.weight_decay,
    learning_rate.lr_too_high,
    learning_rate.lr_too_low,
    batches.unshuffled,
    units.dead,
    units.saturated,
    unmoved.zero_gradient,
    gradients.vanishing,
    gradients.exploding,
    non_finite.non_finite,
    attention.attention_logits,
    precision.fp16_range,
    collapse.representation_collapse,
    loss.initial_loss,
    loss.not_learning,
    loss.spikes,
    loss.overfit,
)


def diagnose(run: Any) -> Diagnosis:
    """What is wrong with this run: findings, the most severe first, with source, cause and a fix.

    Works from whatever was recorded (activations only, parameters only, losses only); what it
    could not judge for lack of data is in `.unjudged`. Attention inside
    `F.scaled_dot_product_attention` shows nothing of its logits: see `health/attention.py`.

    Args:
        run: a Run, a Record, a Watcher, a Learner, or a recorder such as `ActivationStats`. From
            `run.info` it uses, where present, `n_classes`, `loss_func` (its name), `lr`,
            `weight_decay` and `momentum` (per parameter group), `maximize`, `dtype` (where the
            records do not say), `output_is_probabilities` and `loss_input` (`"Softmax"` or
            `"Sigmoid"`, if that is what makes the loss's input).

    Returns:
        The `Diagnosis`: prints as a list; `.healthy`, `.rules`, `.findings`.

    Raises:
        ArgumentError: nothing of this kind can be read from `run`.

    Example:
        >>> import numpy as np
        >>> falling = 2.3 * np.exp(-np.arange(300) / 80)
        >>> diagnose(Run(losses=falling))
        0 layers, 300 steps: healthy (no parameters, no activations)
        >>> flat = np.full(300, 2.3)
        >>> diagnose(Run(losses=flat)).rules
        ('not_learning',)
    """
    run = as_run(run)
    findings, unjudged = _judge(run)
    types = {n: t for r in run.records for n, t in zip(r.names, r.types, strict=True)}
    findings = [_with_types(_as_severe_as_its_effects(f, findings), types) for f in findings]
    findings.sort(key=lambda f: (-SEVERITIES.index(f.severity), not _from_the_start(f)))
    looked = run.activations or run.params or run.gradients
    silent = _without_values(looked) if looked else ()
    n_layers = len(looked.names) - len(silent) if looked else 0
    kinds = tuple(types[name] for name in silent)
    facts = (run.info, *(r.meta for r in run.records))
    rank = next((str(known["rank"]) for known in facts if "rank" in known), "")
    return Diagnosis(tuple(findings), n_layers, run.n_steps, tuple(unjudged), silent, kinds, rank)


def _judge(run: Run) -> tuple[list[Finding], list[tuple[str, str]]]:
    """The findings of all rules, in their order; and rules without what they need, with why."""
    findings: list[Finding] = []
    unjudged: list[tuple[str, str]] = []
    view = RunView(run)
    # Overflows are what rules judge. Warnings of medians of nothing are avoided, not caught: after
    # `catch_warnings` Python repeats the user's own warnings that were shown once.
    with np.errstate(all="ignore"):
        for rule in RULES:
            try:
                for need in rule.needs:
                    getattr(view, need)
                findings += rule.check(view)
            except Missing as why:
                unjudged.append((rule.name, str(why)))
    return findings, unjudged


def _with_types(f: Finding, types: dict[str, str]) -> Finding:
    """`f`, whose text names the layers' types too: `0 Conv2d`."""
    return replace(f, types=tuple(types.get(name, "") for name in f.layers))


def _without_values(record: Record) -> tuple[str, ...]:
    """The layers of which no number was ever recorded."""
    seen = np.zeros(len(record.names), np.bool_)
    for values in record.values.values():
        seen |= np.isfinite(values).any(axis=1)
    return tuple(name for name, any_ in zip(record.names, seen, strict=True) if not any_)


_BLOWS_UP = {"non_finite", "not_learning", "exploding"}

_EFFECTS = {
    "grads_pile_up": {"lr_too_high", "dead", "saturated", *_BLOWS_UP},
    "input_scale": {
        *("saturated", "dead", "zero_gradient", "vanishing", "representation_collapse"),
        *_BLOWS_UP,
    },
    "bad_init": {"dead", "saturated", "lr_too_high", *_BLOWS_UP},
    "target_scale": {"lr_too_high", *_BLOWS_UP},
    "small_batch": {"lr_too_high", *_BLOWS_UP},
    "momentum": {"lr_too_high", "dead", "saturated", *_BLOWS_UP},
    "weight_decay": {"lr_too_high", "vanishing", "zero_gradient", "representation_collapse"},
    "lr_too_high": {"dead", "saturated", "representation_collapse", *_BLOWS_UP},
    "fp16_underflow": {"zero_gradient", "vanishing"},
    "unshuffled": {"not_learning"},
}
"""A rule, and those that report what it causes."""


def _as_severe_as_its_effects(f: Finding, findings: list[Finding]) -> Finding:
    """A cause gets the severity of its worst effect, so that it is read before it.

    What is exact gets that of the worst finding: it is so, whatever has been measured beside it.
    """
    exact = f.source.startswith("exact")
    effects = [g.severity for g in findings if exact or g.rule in _EFFECTS.get(f.rule, ())]
    worst = max([f.severity, *effects], key=SEVERITIES.index)
    return f if f.severity == "note" else replace(f, severity=worst)


def _from_the_start(f: Finding) -> bool:
    """Whether it comes first among its severity: what was wrong before the first step."""
    began = (f.rule == "non_finite" and f.steps[0] == 0, f.rule == "vanishing" and f.steps[1] == 0)
    return any(began) or f.rule in ("constant_input", "input_scale", "bad_init", "dropout")
