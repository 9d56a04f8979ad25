"""Equations, fields, recommenders, experts and sets that are learnt badly or not at all."""

from .learners import bpr_factors, deep_sets, digits_muon, expert_mixture, two_towers
from .science import (
    field_surrogate,
    oscillator_pinn,
    siren_picture,
    surface_lbfgs,
)
from .trials import Watch, failing


@failing("ReLU, whose second derivative is 0", names=(), trace=False)
def oscillator_pinn_relu(watch: Watch) -> float:
    return oscillator_pinn(watch, relu=True)


@failing("a learning rate of 0.3 with Adam", names=("lr_too_high",), trace=True)
def oscillator_pinn_lr_high(watch: Watch) -> float:
    return oscillator_pinn(watch, lr=0.3)


@failing("sin(30 x) with PyTorch's own weights", names=("bad_init",), trace=True)
def siren_picture_own_init(watch: Watch) -> float:
    return siren_picture(watch, siren=False)


@failing("LBFGS with a rate of 30, without a search", names=("lr_too_high",), trace=True)
def surface_lbfgs_lr_30(watch: Watch) -> float:
    return surface_lbfgs(watch, lr=30.0, search=False)


@failing("inputs of 1000, tanh saturates", names=("input_scale", "saturated"), trace=True)
def surface_lbfgs_raw_inputs(watch: Watch) -> float:
    return surface_lbfgs(watch, gain=1000.0)


@failing("weights in bfloat16 swallow small updates", names=("unmoved",), trace=True)
def field_surrogate_bf16(watch: Watch) -> float:
    return field_surrogate(watch, bf16=True)


@failing("the loss has the wrong sign", names=("below_zero",), trace=True)
def bpr_factors_wrong_sign(watch: Watch) -> float:
    return bpr_factors(watch, sign=-1.0)


@failing("embeddings begin with a std of 5", names=("bad_init", "initial_loss"), trace=True)
def bpr_factors_std_5(watch: Watch) -> float:
    return bpr_factors(watch, std=5.0)


@failing("pairs are pulled together, none apart", names=("representation_collapse",), trace=True)
def two_towers_no_negatives(watch: Watch) -> float:
    return two_towers(watch, negatives=False)


@failing("experts in a plain list", names=("unregistered",), trace=True)
def expert_mixture_plain_list(watch: Watch) -> float:
    return expert_mixture(watch, plain=True)


@failing("a rate 100 times too low", names=("lr_too_low",), trace=True)
def deep_sets_lr_low(watch: Watch) -> float:
    return deep_sets(watch, lr=2e-4)


@failing("Muon with a rate of 5", names=("lr_too_high",), trace=True)
def digits_muon_lr_high(watch: Watch) -> float:
    return digits_muon(watch, lr=5.0)
