"""Rows of measurements and likelihoods that are learnt badly or not at all."""

from .likelihoods import (
    cox_survival,
    gaussian_variance,
    mixture_density,
    ordinal_grades,
    poisson_counts,
    quantile_pinball,
)
from .tables import cancer_mlp, diabetes_mlp, housing_embeddings, wine_lion
from .trials import Watch, failing


@failing("targets of 25 to 346 as they are", names=("target_scale",), trace=True)
def diabetes_mlp_raw_target(watch: Watch) -> float:
    return diabetes_mlp(watch, scaled=False)


@failing("(N, 1) minus (N,) in the loss", names=("broadcast",), trace=True)
def diabetes_mlp_broadcast(watch: Watch) -> float:
    return diabetes_mlp(watch, flat=False)


@failing("all weights begin at 0", names=("zero_init",), trace=True)
def diabetes_mlp_zeros(watch: Watch) -> float:
    return diabetes_mlp(watch, zeros=True)


@failing("a ReLU after the output, which may be negative", names=(), trace=True)
def diabetes_mlp_relu_output(watch: Watch) -> float:
    return diabetes_mlp(watch, relu=True)


@failing("inputs up to 4000, not standardised", names=("input_scale",), trace=True)
def cancer_mlp_raw(watch: Watch) -> float:
    return cancer_mlp(watch, scaled=False)


@failing("the optimizer maximises the loss", names=("ascent",), trace=True)
def cancer_mlp_maximise(watch: Watch) -> float:
    return cancer_mlp(watch, sign=-1.0)


@failing("a softmax over the batch", names=("softmax_dim",), trace=True)
def wine_lion_softmax_batch(watch: Watch) -> float:
    return wine_lion(watch, softmax_dim=0)


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


@failing("a weight decay of 1 with SGD", names=("weight_decay",), trace=True)
def cox_survival_decay_1(watch: Watch) -> float:
    return cox_survival(watch, decay=1.0)


@failing("the rate falls at each batch, not each epoch", names=("lr_too_low",), trace=True)
def ordinal_grades_schedule_per_batch(watch: Watch) -> float:
    return ordinal_grades(watch, per_batch=True)


@failing(
    "tanh saturated by weights 30 times too large", names=("saturated", "bad_init"), trace=True
)
def mixture_density_saturated(watch: Watch) -> float:
    return mixture_density(watch, gain=30.0)


@failing("rows sorted by label, not shuffled", names=("unshuffled",), trace=True)
def wine_lion_sorted(watch: Watch) -> float:
    return wine_lion(watch, in_order=True)
