"""What goes wrong with the physics and densities of `fresh_science`."""

from .fresh_science import (
    bayes_by_backprop,
    fno_heat,
    hamilton_pendulum,
    made_digits,
    maml_sines,
    ode_spirals,
    springs_interaction,
    wgan_ring,
)
from .trials import Watch, failing


@failing("a time step of 4 where 0.1 was meant", names=("exploding", "non_finite"), trace=True)
def ode_spirals_step(watch: Watch) -> float:
    return ode_spirals(watch, step=4.0)


@failing("all weights begin at 0", names=("zero_init",), trace=True)
def ode_spirals_zeros(watch: Watch) -> float:
    return ode_spirals(watch, zeros=True)


@failing("only the first layer is in the optimizer", names=("unmoved",), trace=True)
def ode_spirals_half(watch: Watch) -> float:
    return ode_spirals(watch, half=True)


@failing(
    "complex weights begin 50 times too large",
    names=("bad_init", "initial_loss", "exploding"),
    trace=True,
)
def fno_heat_init(watch: Watch) -> float:
    return fno_heat(watch, std=2.0)


@failing("(N, 1, 64) minus (N, 64) in the loss", names=("broadcast",), trace=True)
def fno_heat_broadcast(watch: Watch) -> float:
    return fno_heat(watch, flat=False)


@failing(
    "temperatures in thousandths of the unit: targets of 3000", names=("target_scale",), trace=True
)
def fno_heat_raw_targets(watch: Watch) -> float:
    return fno_heat(watch, unit=3000.0)


@failing("the angle in thousandths of a degree", names=("input_scale", "saturated"), trace=True)
def hamilton_pendulum_units(watch: Watch) -> float:
    return hamilton_pendulum(watch, unit=57296.0)


@failing("the log-likelihood is minimised", names=("ascent",), trace=True)
def made_digits_sign(watch: Watch) -> float:
    return made_digits(watch, sign=-1.0)


@failing("zero_grad once in an epoch", names=("grads_pile_up",), trace=True)
def made_digits_zero_grad_by_epoch(watch: Watch) -> float:
    return made_digits(watch, often=100, lr=0.02)


@failing(
    "the KL term of all weights counts for each batch, 100-fold",
    names=("posterior_collapse",),
    trace=True,
)
def bayes_by_backprop_kl(watch: Watch) -> float:
    return bayes_by_backprop(watch, share=2e5)


@failing(
    "standard deviations of weights begin at 5", names=("bad_init", "initial_loss"), trace=True
)
def bayes_by_backprop_rho_5(watch: Watch) -> float:
    return bayes_by_backprop(watch, rho=5.0)


@failing("tanh at the end of a generator of data to 3", names=("saturated",), trace=True)
def wgan_ring_tanh(watch: Watch) -> float:
    return wgan_ring(watch, tanh=True)


@failing("the generator's gradients go to the critic's optimizer", names=("unmoved",), trace=True)
def wgan_ring_one_optimizer(watch: Watch) -> float:
    return wgan_ring(watch, same_opt=True)


@failing(
    "the inner step goes from a copy: the net gets no gradient", names=("unmoved",), trace=True
)
def maml_sines_copied(watch: Watch) -> float:
    return maml_sines(watch, copied=True)


@failing("an inner learning rate of 20", names=("exploding", "lr_too_high"), trace=True)
def maml_sines_inner_20(watch: Watch) -> float:
    return maml_sines(watch, inner=20.0)


@failing("the square root of a distance of 0", names=("non_finite",), trace=True)
def springs_interaction_root(watch: Watch) -> float:
    return springs_interaction(watch, eps=0.0)


@failing("accelerations of 1e-5", names=("target_scale",), trace=True)
def springs_interaction_tiny_targets(watch: Watch) -> float:
    return springs_interaction(watch, unit=1e-5)
