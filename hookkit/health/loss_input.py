"""The rule on what a loss is given: probabilities, where it expects scores or their logarithm."""

from __future__ import annotations

from collections.abc import Iterator

from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding, rule
from hookkit.health.run_view import RunView


@rule(
    threshold="any softmax or sigmoid just before this loss",
    source="PyTorch, CrossEntropyLoss: the input is expected to contain unnormalised logits",
    cause="a softmax (or sigmoid) before a loss that applies its own",
    fix="return the scores from the model, without nn.Softmax or nn.Sigmoid at its end; apply "
    "torch.softmax only to show probabilities",
)
def probabilities(run: RunView) -> Iterator[Finding]:
    """Probabilities given to a loss that expects scores, as the loss's graph or the layers show."""
    name, record = run.loss_name, run.recorded.activations
    nll, binary = name == "nll", name.endswith("withlogits")
    says = _BINARY if binary else _NLL if nll else probabilities
    last = record.types[-1] if record is not None and record.names else ""
    ends, given = ("Softmax", "Sigmoid"), run.info.get("loss_input")
    expects_shares = name.startswith(("binary", "bce")) and not binary
    if given in ends and not expects_shares:
        what = f"the loss is given what a {given.lower()} gives"
        layer = record.names[-1:] if record is not None and last == given else ()
        yield says.found("error", what, layer, run.all_steps)
    elif given == "probabilities":
        what = "the loss is given probabilities, and reads them as their logarithms"
        yield _DIVERGENCE.found("error", what, (), run.all_steps)
    elif given == "scores":
        yield _SCORES.found("error", "the loss is given what a layer gives", (), run.all_steps)
    elif not nll and not binary and ("crossentropy" not in name or expects_shares):
        raise read.Missing("loss function unknown")
    elif record is not None and last in ends:
        yield says.found("error", f"the last layer is {last}", record.names[-1:], run.all_steps)
    elif run.info.get("output_is_probabilities"):
        what, line = "the model's output rows are probabilities", "rows from 0 to 1 that sum to 1"
        yield says.but(threshold=line).found("error", what, (), run.all_steps)


_BINARY = probabilities.but(
    source="PyTorch, BCEWithLogitsLoss: combines a Sigmoid layer and the BCELoss",
    cause="a sigmoid before a loss that applies its own",
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
