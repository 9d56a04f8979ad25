"""What goes wrong with the rows of `fresh_rows`."""

from .fresh_rows import (
    dcn_clicks,
    frauds_focal,
    ft_wine,
    transe_facts,
    two_tasks,
)
from .trials import Watch, failing


@failing(
    "queries and keys begin 30 times too large", names=("attention_logits", "bad_init"), trace=True
)
def ft_wine_large_queries(watch: Watch) -> float:
    return ft_wine(watch, gain=30.0)


@failing("the optimizer has the weights of the net before deepcopy", names=("unmoved",), trace=True)
def ft_wine_copied(watch: Watch) -> float:
    return ft_wine(watch, copied=True)


@failing("the step of the optimizer of the ids is forgotten", names=("unmoved",), trace=True)
def dcn_clicks_no_sparse_step(watch: Watch) -> float:
    return dcn_clicks(watch, sparse_steps=False)


@failing("a column that is known only after the click", names=(), trace=False)
def dcn_clicks_leak(watch: Watch) -> float:
    return dcn_clicks(watch, leak=True)


@failing(
    "a constant column divided by its standard deviation of 0", names=("non_finite",), trace=True
)
def frauds_focal_constant_column(watch: Watch) -> float:
    return frauds_focal(watch, constant=True)


@failing("the weight of the rare class is upside down", names=(), trace=False)
def frauds_focal_upside_down(watch: Watch) -> float:
    return frauds_focal(watch, rare=0.02)


@failing("float16, and a loss of 2e-5 that is not scaled up", names=("fp16_underflow",), trace=True)
def frauds_focal_half(watch: Watch) -> float:
    return frauds_focal(watch, half=2e-5)


@failing("a learning rate of 1e-6 with Adagrad", names=("lr_too_low",), trace=True)
def transe_facts_lr_1e6(watch: Watch) -> float:
    return transe_facts(watch, lr=1e-6)


@failing("the false facts are the true ones", names=("zero_gradient", "not_learning"), trace=True)
def transe_facts_same_tail(watch: Watch) -> float:
    return transe_facts(watch, same_tail=True)


@failing(
    "areas in units in which they are 10000, added as they are", names=("target_scale",), trace=True
)
def two_tasks_unit(watch: Watch) -> float:
    return two_tasks(watch, learned=False, unit=1e4)
