"""Rules on parameters: weights that never move, each with its cause; equal initial weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from hookkit.diagnosis.finding import Finding, plural
from hookkit.diagnosis.view import DENSE, View, meta, names, table
from hookkit.records import Record


def not_in_optimizer(run: View) -> Iterator[Finding]:
    """Find trainable parameters that never move and are in no optimizer that steps.

    It is a note for the first layers of a model that learns well: they may be frozen on purpose.
    """
    p = run.params
    left = _never_moved(p) & ~_in_optimizer(p)
    if left.any():
        wide = left[_wide_in_order(run)].astype(int)
        is_front = len(wide) > 0 and not wide[-1] and not (np.diff(wide) > 0).any()
        severity = "note" if is_front and not run.much_loss_left else "warning"
        what = f"{plural(int(left.sum()), 'trainable parameter')} are in no optimizer that steps"
        cause = "the optimizer was made without them, or before they were"
        fix = "give it all of model.parameters(), or freeze them: requires_grad_(False)"
        yield Finding("not_in_optimizer", severity, what, cause, fix, names(p, left))


def unregistered(run: View) -> Iterator[Finding]:
    """Find weights of the forward that are no parameters: a plain list or dict holds them."""
    hidden = tuple(run.activations.meta.get("unregistered", ()))
    if hidden:
        what = f"{plural(len(hidden), 'weight')} of the forward are not in model.parameters()"
        cause = "layers in a plain list, tuple or dict: they are never trained, moved or saved"
        fix = "hold them in an nn.ModuleList, nn.ModuleDict or nn.ParameterList"
        yield Finding("unregistered", "warning", what, cause, fix, hidden)


def no_gradient(run: View) -> Iterator[Finding]:
    """Find parameters that no gradient ever reaches.

    It is an alarm if the first layers are among them: a detach() cuts them off from the loss.
    Otherwise it is a note, because an unused head, pooler or expert is harmless.
    """
    p = run.params
    cut = _never_moved(p) & _in_optimizer(p) & ~np.isfinite(table(p, "grad_norm")).any(axis=1)
    if cut.any():
        what = f"no gradient ever reaches {plural(int(cut.sum()), 'parameter')}"
        cause = "the loss does not depend on them: a head, pooler or expert that is not used"
        severity, fix = "note", "nothing, or freeze them"
        if cut[_wide_in_order(run)[:1]].any():
            severity, what = run.severity, f"{what}, the layers that the data go into among them"
            cause = "a detach(), .data or no_grad block behind them"
            fix = "delete it, or freeze them: requires_grad_(False)"
        yield Finding("no_gradient", severity, what, cause, fix, names(p, cut))


def unmoved(run: View) -> Iterator[Finding]:
    """Find parameters that get a gradient but never move."""
    p = run.params
    # above 1e-7, because the gradient of a bias before a batch norm is a rounding error
    pushed = np.nan_to_num(table(p, "grad_rms")).max(axis=1, initial=0) > 1e-7
    still = _never_moved(p) & _in_optimizer(p) & pushed
    if still.any():
        what = f"{plural(int(still.sum()), 'parameter')} get a gradient, and never move"
        cause = "a learning rate of 0 for their group, or steps below the precision of their dtype"
        fix = 'print(opt.param_groups) and check "lr"; keep weights in float32'
        yield Finding("unmoved", "warning", what, cause, fix, names(p, still))


def zero_gradient(run: View) -> Iterator[Finding]:
    """Find matrices whose gradient is exactly 0 at every step."""
    p = run.params
    norms = table(p, "grad_norm")[run.matrices]
    zero = np.isfinite(norms).any(axis=1) & (np.nan_to_num(norms) == 0).all(axis=1)
    rows = run.matrices[zero & _in_optimizer(p)[run.matrices]]
    if len(rows):
        what = f"the gradient of {plural(len(rows), 'matrix', 'matrices')} is 0 at every step"
        cause = "its inputs are always 0, or all behind it is: dead units, zeros as first weights"
        fix = "look at its inputs, and at what is behind it"
        yield Finding("zero_gradient", run.severity, what, cause, fix, names(p, rows))


def zero_init(run: View) -> Iterator[Finding]:
    """Find a model whose matrices all begin at 0, so that all units of a layer stay equal."""
    p, own = run.params, run.matrices
    if len(own) < 2 or (table(p, "weight_norm")[own, 0] != 0).any():
        return
    if run.loss_flat or _never_moved(p)[own].any():  # otherwise the model learns all the same
        what = f"all {len(own)} matrices begin at exactly 0"
        cause = "zeros as first weights: the units of a layer get the same gradient, or none"
        fix = "initialise at random: torch.nn.init.kaiming_normal_(layer.weight)"
        yield Finding("zero_init", "error", what, cause, fix, names(p, own))


def constant_init(run: View) -> Iterator[Finding]:
    """Find two or more consecutive layers whose weights all begin at one value."""
    p = run.params
    constant = meta(p, "constant", False)
    alike = {i for i in run.matrices if constant[i] and p.types[i] in DENSE}
    pairs = [pair for pair in pairwise(run.matrices) if alike.issuperset(pair)]
    rows = sorted({i for pair in pairs for i in pair})
    if (table(p, "weight_norm")[rows, 0] > 0).any():  # `zero_init` handles zeros
        what = f"the weights of {len(rows)} layers in a row all begin at one value"
        cause = "the units between such layers compute the same, and get the same gradient"
        fix = "initialise at random: torch.nn.init.kaiming_normal_(layer.weight)"
        yield Finding("constant_init", run.severity, what, cause, fix, names(p, rows))


def _never_moved(p: Record) -> Any:
    """Return (rows,) bool: which parameters are trainable and finite, and never moved."""
    update = table(p, "update_norm")
    moved = (np.nan_to_num(update) > 0).any(axis=1) | ~np.isfinite(update).any(axis=1)
    moved |= meta(p, "moved", False).astype(bool)  # in steps between the records
    moved |= (np.nan_to_num(table(p, "nonfinite")) > 0).any(axis=1)
    return meta(p, "requires_grad", True).astype(bool) & (meta(p, "numel", 1) > 0) & ~moved


def _in_optimizer(p: Record) -> Any:
    """Return (rows,) bool: which parameters are, or may be, in an optimizer that steps."""
    return np.array([held is not False for held in meta(p, "in_optimizer", None).tolist()], bool)


def _wide_in_order(run: View) -> list[int]:
    """Return the rows of trainable weights with two or more dimensions, in the order of calls.

    Weights of layers that are never called come last. Without a record of outputs, the rows are in
    the order of the model.
    """
    p, a = run.params, run.activations
    rows = np.flatnonzero(meta(p, "requires_grad", True) & (meta(p, "ndim", 2) > 1)).tolist()
    if not a:
        return rows
    numbers = np.concatenate([table(a, "rms"), table(a, "count")], axis=1)
    called = [a.names[int(i)] for i in np.flatnonzero(np.isfinite(numbers).any(axis=1))]
    place = {name: i for i, name in enumerate(called)}
    return sorted(rows, key=lambda i: place.get(p.names[i].rpartition(".")[0], len(place)))
