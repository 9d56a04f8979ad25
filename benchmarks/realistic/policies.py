"""Agents that learn a policy from its own actions: PPO, A2C, a bandit."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from .reinforcement import cartpole_length
from .trials import Watch, healthy, update
from .worlds import CartPole, generator, tensor


class Apart(nn.Module):
    """A policy and a value that share nothing, orthogonal at first."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = self.net(2, 0.01), self.net(1, 1.0)

    @staticmethod
    def net(n_out: int, gain: float) -> nn.Sequential:
        sizes, net = ((4, 64, 2**0.5), (64, 64, 2**0.5), (64, n_out, gain)), nn.Sequential()
        for n_in, n, g in sizes:
            layer = nn.Linear(n_in, n)
            nn.init.orthogonal_(layer.weight, g)
            nn.init.zeros_(layer.bias)
            net.extend([layer, nn.Tanh()])
        return net[:-1]

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(s), self.value(s).squeeze(-1)


class Shared(nn.Module):
    """A policy and a value on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.policy, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(s)
        return self.policy(h), self.value(h).squeeze(-1)


class Policy(nn.Module):
    """The logits alone, to be played."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, s: Tensor) -> Tensor:
        return self.net(s)[0]


def rollout(
    env: CartPole, net: nn.Module, n: int, reward: float, gae: float = 0.95
) -> tuple[Tensor, ...]:
    """States, actions, log-probabilities, advantages and returns of `n` steps, flat."""
    rows = []
    for _ in range(n):
        s = tensor(env.state)
        with torch.no_grad():
            logits, value = net(s)
            dist = Categorical(logits=logits)
            a = dist.sample()
        _, _, over = env.step(a.numpy())
        rows.append((s, a, dist.log_prob(a), value, tensor(over)))
    s, a, log_p, v, over = (torch.stack(c) for c in zip(*rows, strict=True))
    with torch.no_grad():
        after = torch.cat([v[1:], net(tensor(env.state))[1][None]])
    delta, adv, last = reward + 0.98 * (1 - over) * after - v, torch.zeros_like(v), 0.0
    for t in reversed(range(n)):
        last = adv[t] = delta[t] + 0.98 * gae * (1 - over[t]) * last
    return tuple(x.flatten(0, 1) for x in (s, a, log_p, adv, adv + v))


@healthy
def cartpole_ppo(
    watch: Watch,
    *,
    lr: float = 2e-3,
    sign: float = 1.0,
    reward: float = 1.0,
    net: nn.Module | None = None,
    sgd_momentum: float | None = None,
) -> float:
    """PPO with clipped ratio, GAE, four epochs a rollout, separate networks, a falling rate."""
    env, net = CartPole(16, generator()), net or Apart()
    opt = torch.optim.Adam(net.parameters(), lr=lr, eps=1e-5)
    if sgd_momentum is not None:
        opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=sgd_momentum)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 25)
    with watch(net, opt) as w:
        for _ in range(25):
            s, a, old, adv, ret = rollout(env, net, 48, reward)
            for i in (i for _ in range(4) for i in torch.randperm(len(s)).chunk(4)):
                logits, value = net(s[i])
                dist = Categorical(logits=logits)
                ratio, gain = (dist.log_prob(a[i]) - old[i]).exp(), adv[i] * sign
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                won = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = -won + 0.5 * F.mse_loss(value, ret[i]) - 0.01 * dist.entropy().mean()
                update(w, opt, loss, clip=(net, 0.5))
            schedule.step()
    return cartpole_length(Policy(net))


@healthy
def cartpole_ppo_shared(watch: Watch, *, reward: float = 0.05) -> float:
    """PPO with one trunk for both; rewards are small so that returns are about one."""
    return cartpole_ppo(watch, net=Shared(), reward=reward)


@healthy
def cartpole_a2c(watch: Watch, *, reward: float = 0.05, lr: float = 2e-3) -> float:
    """A2C with a shared trunk and RMSprop, one step for each short rollout."""
    env, net = CartPole(32, generator()), Shared()
    opt = torch.optim.RMSprop(net.parameters(), lr=lr, alpha=0.99, eps=1e-5)
    with watch(net, opt) as w:
        for _ in range(450):
            s, a, _, adv, ret = rollout(env, net, 8, reward, gae=1.0)
            logits, value = net(s)
            dist = Categorical(logits=logits)
            gain = (adv - adv.mean()) / (adv.std() + 1e-8)
            loss_p = -(dist.log_prob(a) * gain).mean()
            loss = loss_p + 0.5 * F.mse_loss(value, ret) - 0.01 * dist.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            w.loss(loss.item())
    return cartpole_length(Policy(net))


@healthy
def bandit_policy(watch: Watch, *, lr: float = 0.05, frozen: bool = False) -> float:
    """A contextual bandit with policy gradients: the loss stays about zero all the time."""
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
    best = torch.randn(8, 5)
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: t // 400 if frozen else 1 - t / 400)
    with watch(net, opt) as w:
        for _ in range(400):
            x = torch.randn(128, 8)
            dist = Categorical(logits=net(x))
            a = dist.sample()
            reward = (x @ best).argmax(1).eq(a).float()
            loss = -(dist.log_prob(a) * (reward - reward.mean())).mean()
            update(w, opt, loss, sched=schedule)
    x = torch.randn(2000, 8)
    return float((net(x).argmax(1) != (x @ best).argmax(1)).float().mean())
