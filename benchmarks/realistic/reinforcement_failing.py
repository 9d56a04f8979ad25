"""Agents that learn badly or not at all."""

from .reinforcement import cartpole_double_dqn, pointmass_cloning
from .trials import Watch, failing


@failing("a learning rate of 0.1 with Adam", names=("lr_too_high",), trace=True)
def cartpole_double_dqn_lr_100(watch: Watch) -> float:
    return cartpole_double_dqn(watch, lr=0.1)


@failing("positions in millimetres", names=("input_scale",), trace=True)
def pointmass_cloning_millimetres(watch: Watch) -> float:
    return pointmass_cloning(watch, unit=1000.0)


@failing("gradients are clipped at 1e-4", names=("clipping",), trace=True)
def pointmass_cloning_clip_1e4(watch: Watch) -> float:
    return pointmass_cloning(watch, clip=1e-4)


@failing("weights begin 40 times too large", names=("bad_init", "saturated"), trace=True)
def pointmass_cloning_saturated(watch: Watch) -> float:
    return pointmass_cloning(watch, gain=40.0)
