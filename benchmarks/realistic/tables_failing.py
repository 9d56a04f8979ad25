"""Rows of measurements and likelihoods that are learnt badly or not at all."""

from .likelihoods import (
    gaussian_variance,
    poisson_counts,
    quantile_pinball,
)
from .tables import diabetes_mlp, housing_embeddings, wine_lion
from .trials import Watch, failing


@failing("targets of 25 to 346 as they are", names=("target_scale",), trace=True)
def diabetes_mlp_raw_target(watch: Watch) -> float:
    return diabetes_mlp(watch, scaled=False)


@failing("(N, 1) minus (N,) in the loss", names=("broadcast",), trace=True)
def diabetes_mlp_broadcast(watch: Watch) -> float:
    return diabetes_mlp(watch, flat=False)


@failing("the optimizer got biases only", names=("unmoved",), trace=True)
def wine_lion_biases_only(watch: Watch) -> float:
    return wine_lion(watch, biases_only=True)


@failing("income of 50000 beside the embeddings", names=("input_scale",), trace=True)
def housing_embeddings_raw_income(watch: Watch) -> float:
    return housing_embeddings(watch, scaled=False)


@failing("body and head replaced after the optimizer was made", names=("unmoved",), trace=True)
def housing_embeddings_new_head(watch: Watch) -> float:
    return housing_embeddings(watch, new_head=True)


@failing("a weight decay of 50 in AdamW", names=("weight_decay",), trace=True)
def housing_embeddings_decay(watch: Watch) -> float:
    return housing_embeddings(watch, wd=50.0)


@failing("a variance that may be 0: NaN", names=("non_finite",), trace=True)
def gaussian_variance_relu(watch: Watch) -> float:
    return gaussian_variance(watch, relu=True)


@failing("gradients are never zeroed", names=("grads_pile_up",), trace=True)
def quantile_pinball_piled(watch: Watch) -> float:
    return quantile_pinball(watch, zeroed=False)


@failing("inputs in thousandths", names=("input_scale",), trace=True)
def poisson_counts_tiny_inputs(watch: Watch) -> float:
    return poisson_counts(watch, unit=0.001)


@failing("rows sorted by label, not shuffled", names=("unshuffled",), trace=True)
def wine_lion_sorted(watch: Watch) -> float:
    return wine_lion(watch, in_order=True)
