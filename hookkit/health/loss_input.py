"""The rule on what a loss is given: probabilities, where it expects scores or their logarithm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding, rule
from hookkit.health.reading import end_level, known
from hookkit.health.run_view import RunView

# An RMS of scores that would make a binary cross entropy almost 0, or large (measured)
SCORES_SIZE = 4
# Scores below this mask something out, and do not change the loss
MASK_SIZE = -1e3
# How near its floor a loss must end to have settled there (hookkit, measured)
NEAR_FLOOR = 0.1


@rule(
    threshold="any softmax or sigmoid just before this loss",
    source="PyTorch, CrossEntropyLoss: the input is expected to contain unnormalised logits",
    cause="a softmax (or sigmoid) before a loss that applies its own",
    fix="return the scores from the model, without nn.Softmax or nn.Sigmoid at its end; apply "
    "torch.softmax only to show probabilities",
)
def probabilities(run: RunView) -> Iterator[Finding]:
    """Probabilities given to a loss that expects scores.

    Proved by the last layer or the values themselves where they were seen; else by bounds that a
    loss of inputs between 0 and 1 cannot leave.
    """
    name, record = run.loss_name, run.recorded.activations
    nll, binary = name == "nll", name.endswith("withlogits")
    says = _BINARY if binary else _NLL if nll else probabilities
    last = record.types[-1] if record is not None and record.names else ""
    ends, given = ("Softmax", "Sigmoid"), run.info.get("loss_input")
    expects_shares = name.startswith(("binary", "bce")) and not binary
    if given in ends and not expects_shares:
        what = f"the loss is given what a {given.lower()} gives"
        yield says.found("error", what, (), run.all_steps)
    elif given == "probabilities":
        what = "the loss is given probabilities, and reads them as their logarithms"
        yield _DIVERGENCE.found("error", what, (), run.all_steps)
    elif given == "scores":
        yield _SCORES.found("error", "the loss is given what a layer gives", (), run.all_steps)
    elif not nll and not binary and ("crossentropy" not in name or expects_shares):
        raise read.Missing("loss function unknown")
    elif record is not None and last in ends:
        yield says.found("error", f"the last layer is {last}", record.names[-1:], run.all_steps)
    elif says is probabilities and run.info.get("output_is_probabilities"):
        what = "the model's output rows are probabilities"
        yield _SUM_TO_1.found("error", what, (), run.all_steps)
    elif binary:
        yield from _by_narrow_range(run)
    elif not nll:
        yield from _by_floor(run)


_SUM_TO_1 = probabilities.but(threshold="rows of non-negative numbers that sum to 1")

_BINARY = probabilities.but(
    source="PyTorch, BCEWithLogitsLoss: combines a Sigmoid layer and the BCELoss",
    cause="a sigmoid before a loss that applies its own",
)

_NARROW = _BINARY.but(
    threshold="from ln(1 + 1/e) = 0.313 to ln(1 + e) = 1.313, which inputs between 0 and 1 cannot "
    "leave, where the last layer gives RMS above 4",
    source=f"{_BINARY.source}; the bounds are exact; 4: hookkit, measured",
)

_NLL = probabilities.but(
    source="PyTorch, NLLLoss: the input is expected to contain log probabilities",
    cause="a softmax before a loss that expects its logarithm",
    fix="use torch.log_softmax, or return the scores and use nn.CrossEntropyLoss",
)

_DIVERGENCE = probabilities.but(
    threshold="any softmax just before this loss",
    source="PyTorch, KLDivLoss: expects the argument input in the log-space",
    cause="a softmax before a loss that expects its logarithm",
    fix="F.kl_div(scores.log_softmax(-1), target): its first argument are logarithms",
)

_SCORES = probabilities.but(
    threshold="anything but logarithms of probabilities before this loss",
    source="PyTorch, NLLLoss and CTCLoss: the input is expected to contain log probabilities",
    cause="scores before a loss that expects logarithms of probabilities",
    fix="give the loss scores.log_softmax(-1); or use nn.CrossEntropyLoss in place of nn.NLLLoss",
)


def _by_narrow_range(run: RunView) -> Iterator[Finding]:
    """With inputs in [0, 1] no batch of a binary cross entropy is below .313, or above 1.313.

    Scores as large as 4 would make it almost 0 where they are right, and large where they are not.
    """
    record, series = run.recorded.activations, run.losses_of(50)
    if record is None or len(record) < read.MIN_RECORDS:
        return
    if not set(record.types[-1:]) & set(read.PRE_ACTIVATION):
        return
    low, high = np.nanmin(series), np.nanmax(series)
    inside = low >= np.log1p(1 / np.e) and high <= np.log1p(np.e)
    late = read.last_half(record)
    rms, least = (read.median(read.table(record, s)[-1, late]) for s in ("rms", "min"))
    if not inside or not rms > SCORES_SIZE or least < MASK_SIZE:
        return
    what = f"the loss stays within {low:.3g} and {high:.3g} while {record.names[-1]} gives values "
    yield _NARROW.found("warning", f"{what}of RMS {rms:.3g}", (), run.all_steps)


def _by_floor(run: RunView) -> Iterator[Finding]:
    """With inputs in [0, 1] a cross entropy stays in [floor, floor + 1]; learning nears floor."""
    losses, n = run.recorded.losses, int(run.info.get("n_classes") or 0)
    if losses is None or len(losses) < 50 or n < 3 or not len(series := known(losses)):
        return
    floor = float(np.log(np.e + n - 1) - 1)
    low, high, end = series.min(), series.max(), end_level(series)
    if low < floor - 1e-4 or high > floor + 1 + 1e-4 or end > floor + NEAR_FLOOR:
        return
    before = float(np.median(series[-max(len(series) // 4, 10) :][:10]))
    if before - end > end - floor:
        return  # it is falling past the floor, and does not settle there
    line = f"from {floor:.4g} (ln(e + C - 1) - 1) to {floor + 1:.4g}, which inputs between 0 and 1 "
    line += f"cannot leave, and at the end below {floor + NEAR_FLOOR:.4g}"
    what = f"the loss stays within {low:.4g} and {high:.4g} and settles on {end:.4g}"
    source = f"{probabilities.source}; the bounds are exact; 0.1: hookkit, measured"
    here = probabilities.but(threshold=line, source=source)
    yield here.found("warning", what, (), run.all_steps)
