"""Rules on what the loss's own operations show: facts, which need no statistics and no threshold.

The facts are read from the autograd graph of the first loss (`callbacks/loss_graph.py`); where no
loss with a graph was seen, nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator

from hookkit.health.diagnosis import Finding, rule
from hookkit.health.run_view import RunView

_EXACT = "exact, by the operations of the loss"


@rule(
    threshold="n predictions and n targets of other shapes, which PyTorch makes n × n",
    source=f"{_EXACT}; PyTorch, broadcasting semantics",
    cause="predictions and targets of different shapes: each prediction is compared with every "
    "target, so that the best the model can do is their mean",
    fix="give both the same shape: loss_func(pred.squeeze(-1), target)",
)
def broadcast(run: RunView) -> Iterator[Finding]:
    """(n, 1, …) compared with (n, …), or multiplied by it."""
    if what := run.info.get("broadcast"):
        yield broadcast.found("error", f"in the loss {what}", (), run.all_steps)
    elif what := run.info.get("outer_product"):
        what = f"in the loss {what}, of which all are added up"
        yield _OUTER.found("note" if run.learns else "warning", what, (), run.all_steps)


_OUTER = broadcast.but(
    threshold="n numbers times n of another shape, which PyTorch makes n × n, and their mean",
    cause="factors of different shapes, such as (n, 1) and (n,): each of one is multiplied by all "
    "of the other, so that the result is the product of two means and no sample has its own",
    fix="give both the same shape: log_probs.squeeze(-1) * rewards",
)


@rule(
    threshold="any dimension but that of the classes",
    source=f"{_EXACT}; PyTorch, nll_loss: classes are dimension 1",
    cause="a softmax that shares its probabilities among the samples (or places) and not among the "
    "classes",
    fix="use torch.nn.functional.cross_entropy on the scores, or torch.log_softmax(scores, dim=-1)",
)
def softmax_dim(run: RunView) -> Iterator[Finding]:
    """A softmax over another dimension than what reads it expects."""
    if what := run.info.get("softmax_dim"):
        what = f"the softmax before the loss is taken {what}"
        yield softmax_dim.found("error", what, (), run.all_steps)
    record = run.recorded.activations
    if record is not None and (inside := record.meta.get("softmax_dim")):
        what = f"{len(inside)} softmax{'es' * (len(inside) > 1)} inside the model, before a product"
        what += f" with values, {'are' if len(inside) > 1 else 'is'} taken {inside[0]}"
        severity = "error" if run.fails else "warning"
        yield _NOT_OF_KEYS.found(severity, what, (), run.all_steps)


_NOT_OF_KEYS = softmax_dim.but(
    threshold="over any dimension but the one over which the weighted values are added up",
    source="exact, by the model's operations; Vaswani et al. 2017 (arXiv 1706.03762), eq. 1",
    cause="attention whose weights are shared among the queries, the heads or the samples, and not "
    "among the keys",
    fix="use softmax(dim=-1) for weights that are multiplied as weights @ values, and dim=k for "
    "(weights * values).sum(k)",
)


@rule(
    threshold="no target, no negatives and no stopped gradient in the loss",
    source=f"{_EXACT}; Jing et al. 2022 (arXiv 2110.09348), on complete collapse",
    cause="a loss that is best when the model gives the same for every sample",
    fix="keep samples apart: compare with other samples of the batch too (F.cross_entropy of all "
    "similarities), or detach() one side, behind a predictor or in a slow copy of the model",
)
def only_pulls(run: RunView) -> Iterator[Finding]:
    """A loss that only pulls outputs together, whether or not they are alike already."""
    if what := run.info.get("pulls"):
        what = f"the loss only pulls together {what}, both of which get a gradient"
        yield _COLLAPSE.found("error", what, (), run.all_steps)


_COLLAPSE = only_pulls.but(name="representation_collapse")
