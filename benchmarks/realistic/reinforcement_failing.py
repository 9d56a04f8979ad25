"""Agents that learn badly or not at all."""

from .policies import (
    bandit_policy,
    cartpole_a2c,
    cartpole_ppo,
    cartpole_ppo_shared,
)
from .reinforcement import cartpole_double_dqn, catch_dqn, pointmass_cloning, pointmass_sac
from .trials import Watch, failing


@failing("a learning rate of 0.1 with Adam", names=("lr_too_high",), trace=True)
def cartpole_double_dqn_lr_100(watch: Watch) -> float:
    return cartpole_double_dqn(watch, lr=0.1)


@failing("rewards of 1000 that nobody scaled", names=("target_scale",), trace=True)
def catch_dqn_reward_1000(watch: Watch) -> float:
    return catch_dqn(watch, reward=1000.0)


@failing("the replay buffer gives its first 64 rows always", names=("repeated_data",), trace=True)
def catch_dqn_same_batch(watch: Watch) -> float:
    return catch_dqn(watch, first_only=True)


@failing("weights begin with a std of 1", names=("bad_init",), trace=True)
def catch_dqn_std_1(watch: Watch) -> float:
    return catch_dqn(watch, std=1.0)


@failing("the critic's gradients are never zeroed", names=("grads_pile_up",), trace=True)
def pointmass_sac_piled_critic(watch: Watch) -> float:
    return pointmass_sac(watch, critic_zeroed=False)


@failing("the entropy counts 2 instead of 0.02: it acts at random", names=(), trace=False)
def pointmass_sac_alpha_2(watch: Watch) -> float:
    return pointmass_sac(watch, alpha=2.0)


@failing("positions in millimetres", names=("input_scale",), trace=True)
def pointmass_cloning_millimetres(watch: Watch) -> float:
    return pointmass_cloning(watch, unit=1000.0)


@failing("gradients are clipped at 1e-4", names=("clipping",), trace=True)
def pointmass_cloning_clip_1e4(watch: Watch) -> float:
    return pointmass_cloning(watch, clip=1e-4)


@failing("weights begin 40 times too large", names=("bad_init", "saturated"), trace=True)
def pointmass_cloning_saturated(watch: Watch) -> float:
    return pointmass_cloning(watch, gain=40.0)


@failing("advantages have the wrong sign", names=(), trace=False)
def cartpole_ppo_wrong_sign(watch: Watch) -> float:
    return cartpole_ppo(watch, sign=-1.0)


@failing("a learning rate 300 times too high", names=("lr_too_high",), trace=True)
def cartpole_ppo_lr_300(watch: Watch) -> float:
    return cartpole_ppo(watch, lr=0.6)


@failing("returns of 1000 drown the policy in the trunk", names=("target_scale",), trace=True)
def cartpole_ppo_shared_returns(watch: Watch) -> float:
    return cartpole_ppo_shared(watch, reward=20.0)


@failing("SGD with the learning rate that was meant for Adam", names=("lr_too_low",), trace=True)
def cartpole_ppo_sgd(watch: Watch) -> float:
    return cartpole_ppo(watch, sgd_momentum=0.0)


@failing("a learning rate of 0.3 with RMSprop", names=("lr_too_high",), trace=True)
def cartpole_a2c_lr_high(watch: Watch) -> float:
    return cartpole_a2c(watch, lr=0.3)


@failing("a schedule in whole numbers: the rate is 0", names=("unmoved",), trace=True)
def bandit_policy_rate_0(watch: Watch) -> float:
    return bandit_policy(watch, frozen=True)


@failing("momentum of 0.999", names=("momentum",), trace=True)
def pointmass_cloning_momentum(watch: Watch) -> float:
    return pointmass_cloning(watch, momentum=0.999)
