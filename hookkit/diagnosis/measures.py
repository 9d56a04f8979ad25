"""Rules on measures: numbers whose healthy and broken values lie a factor of ten apart.

They warn, or report an error if the loss does not decrease. docs/understand/diagnosis.md says on
which runs the thresholds were measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hookkit.diagnosis.finding import Finding, plural
from hookkit.diagnosis.view import View, later_half, median, meta, names, percent, table


def input_scale(run: View) -> Iterator[Finding]:
    """Find inputs with an RMS above 10 (healthy: at most 2.3); a note if a norm layer follows."""
    a = run.activations
    rms = meta(a, "input_rms", np.nan).astype(float)
    rows = [i for i in run.input_layers if rms[i] > 10]
    if rows:
        normed = all(any("Norm" in kind for kind in a.types[i : i + 2]) for i in rows)
        severity = "note" if normed else run.severity
        what = f"what {a.names[rows[0]]} is given has RMS {rms[rows].max():.3g} before training"
        cause = "inputs that are not standardised (0–255 images, prices, times of 0 to 1000)"
        fix = "scale them to mean 0 and standard deviation 1: (x - mean) / std"
        yield Finding("input_scale", severity, what, cause, fix, names(a, rows))


def target_scale(run: View) -> Iterator[Finding]:
    """Find a regression whose error starts and ends above 20; standardised targets start near 1."""
    if run.loss_name not in ("mse", "l1", "smoothl1", "huber") or not len(run.losses):
        return
    power = 0.5 if run.loss_name == "mse" else 1.0
    first, last = (max(x, 0.0) ** power for x in (float(run.losses[0]), run.loss_end))
    if min(first, last) > 20 and last > 0.3 * first:
        what = f"the first error is {first:.3g}, and the last is {last:.3g}"
        cause = "targets that are not standardised, or a loss that is summed over the batch"
        fix = "scale the targets to mean 0 and standard deviation 1, and average the loss"
        yield Finding("target_scale", run.severity, what, cause, fix)


def bad_init(run: View) -> Iterator[Finding]:
    """Find initial weights that are too small or too large.

    The measure is the gain, RMS times √fan_in; PyTorch's own initial weights have 0.58. They are
    too small if most gains are below 0.07 and much of the loss is left. They are too large if one
    gain is above 5, or most are above 1.5, and an output has more than 4 times the RMS of the data
    (or of 1, if that is larger).
    """
    p, own = run.params, run.matrices
    if "shape" not in p.meta or not len(own) or run.pretrained:
        return
    if run.info.get("optimizer") == "LBFGS":  # its first record comes after many inner steps
        return
    fan_in = np.array([np.prod(p.meta["shape"][i][1:]) for i in own], float)
    gain = table(p, "weight_rms")[own, 0] * np.sqrt(fan_in)
    begun = gain > 0
    small, large = begun & (gain < 0.07), gain > (1.5 if 2 * (gain > 1.5).sum() > len(gain) else 5)
    output, a = 0.0, run.activations
    if a:
        owners = {p.names[i].rpartition(".")[0] for i in own}
        rows = [i for i, name in enumerate(a.names) if name in owners]
        data = meta(a, "input_rms", np.nan).astype(float)[run.input_layers]
        first = np.nan_to_num(table(a, "rms")[rows, 0], posinf=0)
        output = float(first.max(initial=0) / np.nan_to_num(data).max(initial=1))
    if 2 * small.sum() > begun.sum() and run.much_loss_left:
        what, hit, how = "", small, "small: hardly anything comes through"
    elif large.any() and output > 4:
        what, hit, how = f"an output has RMS {output:.3g} before training, and ", large, "large"
    else:
        return
    what += f"the gain (RMS times √fan_in) of {plural(int(hit.sum()), 'weight')} is "
    what += f"{np.median(gain[hit]):.2g}, where about 1 is usual"
    cause = f"weights that begin too {how}"
    fix = "initialise each for its fan-in: torch.nn.init.kaiming_normal_(layer.weight)"
    yield Finding("bad_init", run.severity, what, cause, fix, names(p, own[hit]))


def weight_decay(run: View) -> Iterator[Finding]:
    """Find weight decay of more than 1 % of each weight per step; 0.05 % or less is usual."""
    p = run.params
    if p is not None and "weight_decay" in p.meta and "lr" in p.values:
        rates = np.nan_to_num(p.values["lr"]).max(axis=1, initial=0)
        pairs = [*zip(rates, p.meta["weight_decay"], strict=True)]
    else:
        pairs = [*zip(run.info.get("lr", ()), run.info.get("weight_decay", ()), strict=False)]
    share = max((float(rate) * float(decay or 0) for rate, decay in pairs), default=0.0)
    if share > 0.01:
        what = f"learning rate × weight decay takes {percent(share)} of each weight a step"
        cause = "weight decay outweighs the gradient"
        fix = "divide the optimizer's weight_decay by 10 or more"
        yield Finding("weight_decay", run.severity, what, cause, fix)


def clipping(run: View) -> Iterator[Finding]:
    """Find a global gradient norm that is always the same, and almost 0."""
    p = run.params
    if not len(run.matrices):
        return
    norms = np.sqrt(np.nansum(table(p, "grad_norm") ** 2, axis=0))
    level = float(np.median(norms))
    same = (np.abs(norms - level) < 1e-3 * level).mean() > 0.9
    # Adam divides by the gradient's size, so updates stay large: judge the gradient itself
    if str(run.info.get("optimizer")).startswith(("Adam", "NAdam")):
        tiny = level < 1e-8 * np.sqrt(meta(p, "numel", 1).sum())
    else:
        tiny = np.nanmedian(np.append(later_half(p, "update_ratio")[run.matrices], 0)) < 1e-3
    if 0 < level < 1e-2 and same and tiny:
        what = f"the norm of all gradients is always {level:.3g}"
        cause = "gradients that are clipped to almost nothing"
        fix = "use a max_norm near their usual norm, such as 1.0"
        yield Finding("clipping", run.severity, what, cause, fix)


def fp16_underflow(run: View) -> Iterator[Finding]:
    """Find float16 gradients below 4 × 2**-24 in most layers, which keep two bits or fewer."""
    sizes: list[tuple[str, float]] = []  # name and RMS of the gradient of each float16 layer
    for record in (run.run.gradients, run.params):
        if not record or record.meta.get("unscaled"):
            continue
        rms = table(record, "grad_rms" if record.kind == "param" else "rms")
        zero = record.values.get("zero", np.zeros_like(rms))
        size = np.where(zero < 1, rms / np.sqrt(1 - zero), 0.0)  # RMS of the values that are not 0
        size = median(size[:, : max(len(record) // 2, 1)])
        dtypes = map(str, meta(record, "dtype", str(run.info.get("dtype", ""))))
        for row, dtype in enumerate(dtypes):
            counts = record.kind != "param" or row in run.matrices
            if "float16" in dtype and "bfloat16" not in dtype and counts and size[row] > 0:
                sizes.append((record.names[row], float(size[row])))
    tiny = [name for name, size in sizes if size < 4 * 2.0**-24]
    if 2 * len(tiny) > len(sizes):
        what = f"the gradients of {len(tiny)} of {len(sizes)} layers in float16 are below 2.4e-7"
        cause = "half precision without loss scaling: smaller gradients become exactly 0"
        fix = "scale the loss with torch.amp.GradScaler, or use bfloat16"
        yield Finding("fp16_underflow", run.severity, what, cause, fix, tuple(tiny))


# --- the size of steps


def lr_too_high(run: View) -> Iterator[Finding]:
    """Find a rate at which one step changes most matrices by half, or all steps triple them.

    It is an alarm if the loss is flat or breaks, or if one step changes matrices by their whole
    size and they grow 4-fold to a gain above 1.5. Otherwise it is a note. Matrices with the same
    optimizer and rate are judged together.
    """
    p, fails = run.params, run.loss_flat or run.first_nan_step is not None
    for rows, ratio in _by_rate(run):
        top = float(np.median(np.nanmax(np.where(np.isfinite(ratio), ratio, 0), axis=1)))
        norm, rms = table(p, "weight_norm")[rows], table(p, "weight_rms")[rows]
        grew = float(np.median(np.nan_to_num(median(norm[:, -5:]) / norm[:, 0], posinf=0)))
        fan_in = meta(p, "numel", 1)[rows] ** 0.5  # as if the matrix were square
        gain = float(np.median(median(rms[:, -5:]) * fan_in**0.5))
        if top > 0.5 or (fails and grew > 3):
            blown = len(rows) > 1 and top > 1 and grew > 4 and gain > 1.5  # a head may move far
            what = f"one step changes most of {plural(len(rows), 'matrix', 'matrices')} by "
            what += f"{top:.2g} times their size"
            what += f", and all together {grew:.2g}-fold" * (grew > 1)
            if fails:
                what += f", while the loss {'does not fall' if run.loss_flat else 'breaks'}"
            severity = run.severity if fails or blown else "note"
            cause, fix = "the learning rate is too high", "divide it by 10, or warm it up"
            yield Finding("lr_too_high", severity, what, cause, fix, names(p, rows))
            return


def lr_too_low(run: View) -> Iterator[Finding]:
    """Find steps that together move most matrices by less than a tenth, with most of the loss left.

    It is a note for pretrained weights, and in fewer than 100 steps. If gradients vanish towards
    the data, the rate is not judged.
    """
    for rows, ratio in _by_rate(run) if not run.gradients_vanish else ():
        p = run.params
        mean = np.nansum(ratio * p.spans, axis=1) / p.spans.sum()
        path = float(np.median(mean)) * float(p.steps[-1] - p.steps[0] + 1)
        if path < 0.1 and np.median(mean) < 1e-3:
            left = len(run.losses) >= 100 and run.loss_end > 0.5 * run.loss_start > 0
            severity = "warning" if left and not run.pretrained else "note"
            what = f"all steps together move most of {plural(len(rows), 'matrix', 'matrices')} by "
            what += f"{percent(path)} of their size"
            if left:
                what += f", and {percent(run.loss_end / run.loss_start)} of the loss is left"
            cause = "a learning rate that is too low, or a run that is short"
            fix = "multiply the learning rate by 10, or train longer"
            yield Finding("lr_too_low", severity, what, cause, fix, names(p, rows))
            return


def _by_rate(run: View) -> Iterator[tuple[Any, Any]]:
    """Yield (k,) rows of matrices of one optimizer and rate, and (k, n) update:weight ratios.

    Matrices that do not move, or begin at 0 (the ratio is infinite), are left out. A single matrix
    with its own rate is left out if other matrices share a rate.
    """
    p = run.params
    if not len(run.matrices) or run.info.get("optimizer") == "LBFGS":
        return
    norm, update = table(p, "weight_norm"), table(p, "update_ratio")
    ratio = np.where(norm > 0, update, np.nan)
    moves = (np.nan_to_num(ratio) > 0).any(axis=1) & (norm[:, 0] > 0)
    rates = np.nan_to_num(table(p, "lr")).max(axis=1, initial=0)
    optimizers, groups = meta(p, "optimizer", ""), dict[Any, list[int]]()
    for i in run.matrices[moves[run.matrices]]:
        groups.setdefault((optimizers[i], rates[i]), []).append(i)
    large = [rows for rows in groups.values() if len(rows) > 1] or groups.values()
    yield from ((np.array(rows), ratio[rows]) for rows in large)
