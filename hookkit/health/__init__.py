"""Is this training healthy? `diagnose(run)` reads what was recorded and answers with reasons.

    diagnosis.py         Finding, Diagnosis: text and HTML
    reading.py           windows, rows by type, robust averages
    activations.py       rules on activations
    units.py             rules on units: dead, dormant, saturated
    attention.py         the rule on attention's logits
    precision.py         rules on float16
    train_only_layers.py rules on layers that act otherwise in training: dropout, batch norm
    updates.py           rules on learning rate, weight decay and the depth of gradients
    unmoved.py           rules on parameters that stay put, or begin all the same
    loop_bugs.py         rules on mistakes in the loop: ascent, zero_grad forgotten, softmax twice
    loss.py              rules on the loss
    loss_expectations.py losses that need not fall
    loss_bound.py        how far the steps can have moved a loss

A rule is a function from a `Run` to findings; it raises `Missing` when the run lacks what it needs.
Each says where its line is and who published it. No rule speaks on one batch; the learning rate is
judged by the majority of matrices, dead and unmoved by a single layer, saturation by module type,
float16 by the dtype of each layer.
How often they are right is measured by `benchmarks/diagnosis.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hookkit.health import (
    activations,
    attention,
    loop_bugs,
    loss,
    loss_expectations,
    precision,
    train_only_layers,
    units,
    unmoved,
    updates,
)
from hookkit.health.diagnosis import SEVERITIES, Diagnosis, Finding
from hookkit.health.reading import Missing
from hookkit.records import Record, Run, as_run

__all__ = ["RULES", "Diagnosis", "Finding", "diagnose"]

Rule = Callable[[Run], Iterator[Finding]]

# causes before their consequences: among findings of one severity this order is kept
RULES: tuple[Rule, ...] = (
    loop_bugs.probabilities,
    loop_bugs.ascent,
    precision.fp16_underflow,
    unmoved.unmoved,
    unmoved.unregistered,
    unmoved.zero_init,
    unmoved.constant_init,
    loop_bugs.grads_pile_up,
    activations.input_scale,
    loss.target_scale,
    activations.bad_init,
    updates.momentum,
    updates.weight_decay,
    updates.lr_too_high,
    updates.lr_too_low,
    train_only_layers.dropout,
    train_only_layers.small_batch,
    units.dead,
    units.saturated,
    unmoved.zero_gradient,
    updates.vanishing,
    updates.exploding,
    activations.non_finite,
    attention.attention_logits,
    precision.fp16_range,
    loss.below_zero,
    loss.initial_loss,
    loss.not_learning,
    loss.spikes,
    units.dormant,
    loss.overfit,
)


def diagnose(run: Any) -> Diagnosis:
    """What ails this run, gravest first, each finding with evidence, source, cause and one fix.

    Works from whatever was recorded (activations only, parameters only, losses only); what it
    could not judge for want of data is in `.unjudged`. Attention inside
    `F.scaled_dot_product_attention` shows nothing of its logits: see `health/attention.py`.

    Args:
        run: a Run, a Record, a Watcher, a Learner, or a recorder such as `ActivationStats`. From
            `run.info` it uses, where present, `n_classes`, `loss_func` (its name), `lr`,
            `weight_decay` and `momentum` (per parameter group), `maximize`, `dtype` (where the
            records do not say), `output_is_probabilities` and `loss_input` (`"Softmax"` or
            `"Sigmoid"`, if that is what makes the loss's input).

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
    with np.errstate(all="ignore"):
        run = loss_expectations.with_excuse(loss_expectations.without_columns(run))
    findings: list[Finding] = []
    unjudged: list[tuple[str, str]] = []
    for rule in RULES:
        try:
            with np.errstate(all="ignore"):  # a run that overflowed is what they are to judge
                findings += rule(run)
        except Missing as why:
            unjudged.append((rule.__name__, str(why)))
    types = {n: t for r in run.records for n, t in zip(r.names, r.types, strict=True)}
    findings = [_with_types(_as_grave_as(f, findings), types) for f in findings]
    findings.sort(key=lambda f: (-SEVERITIES.index(f.severity), not _from_the_start(f)))
    looked = run.activations or run.params or run.gradients
    silent = _silent(looked) if looked else ()
    n_layers = len(looked.names) - len(silent) if looked else 0
    kinds = tuple(types[name] for name in silent)
    return Diagnosis(tuple(findings), n_layers, run.n_steps, tuple(unjudged), silent, kinds)


def _with_types(f: Finding, types: dict[str, str]) -> Finding:
    """`f`, whose text names the layers' types too: `0 Conv2d`."""
    return replace(f, types=tuple(types.get(name, "") for name in f.layers))


def _silent(record: Record) -> tuple[str, ...]:
    """The layers of which no number was ever recorded."""
    told = np.zeros(len(record.names), np.bool_)
    for values in record.values.values():
        told |= np.isfinite(values).any(axis=1)
    return tuple(name for name, seen in zip(record.names, told, strict=True) if not seen)


_BLOWS_UP = {"non_finite", "diverging", "exploding"}

_BRINGS = {
    "input_scale": {"saturated", "dead", "zero_gradient", *_BLOWS_UP},
    "bad_init": {"dead", "saturated", "lr_too_high", *_BLOWS_UP},
    "momentum": {"lr_too_high", "dead", "saturated", *_BLOWS_UP},
    "weight_decay": {"lr_too_high", "vanishing", "zero_gradient"},
    "lr_too_high": {"dead", "saturated", *_BLOWS_UP},
    "fp16_underflow": {"zero_gradient", "vanishing"},
}
"""A cause, and what it brings about."""


def _as_grave_as(f: Finding, findings: list[Finding]) -> Finding:
    """An alarm as grave as the worst of its consequences, so that it is read before them."""
    brought = [g.severity for g in findings if g.rule in _BRINGS.get(f.rule, ())]
    worst = max([f.severity, *brought], key=SEVERITIES.index)
    return f if f.severity == "note" else replace(f, severity=worst)


def _from_the_start(f: Finding) -> bool:
    """What was no number in the first step comes before all but what made it so."""
    first = f.rule == "non_finite" and f.steps[0] == 0
    return first or f.rule in ("input_scale", "bad_init")
