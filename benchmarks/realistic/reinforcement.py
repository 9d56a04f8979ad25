"""Agents that learn from values: DQN, double DQN, soft actor-critic; and cloning."""

from collections import deque
from copy import deepcopy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trials import Watch, healthy, update
from .worlds import CartPole, Catch, PointMass, generator, tensor


class Replay:
    """The last transitions, as batches of tensors."""

    def __init__(self, rng: np.random.Generator, size: int = 20_000, first_only: bool = False):
        self.rows: deque[tuple[np.ndarray, ...]] = deque(maxlen=size)
        self.rng, self.first_only = rng, first_only

    def add(self, *columns: np.ndarray) -> None:
        self.rows.extend(zip(*columns, strict=True))

    def sample(self, n: int) -> list[Tensor]:
        chosen = range(n) if self.first_only else self.rng.integers(0, len(self.rows), n)
        return [tensor(np.stack(c)) for c in zip(*(self.rows[i] for i in chosen), strict=True)]


def cartpole_length(policy: nn.Module) -> float:
    """Minus the mean length of 32 episodes (at most 200)."""
    env = CartPole(32, np.random.default_rng(1))
    alive, length = np.ones(32, bool), np.zeros(32)
    for _ in range(200):
        with torch.no_grad():
            action = policy(tensor(env.state)).argmax(-1).numpy()
        length += alive
        alive &= ~env.step(action)[1]
    return -float(length.mean())


@healthy
def cartpole_double_dqn(
    watch: Watch, *, lr: float = 1e-3, reward: float = 1.0, tau: float = 0.02, relu: bool = False
) -> float:
    """Double DQN with a target network that follows slowly."""
    rng = generator()
    env, replay = CartPole(16, rng), Replay(rng)
    q = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    if relu:
        q.append(nn.ReLU())
    target = deepcopy(q).requires_grad_(False)
    opt = torch.optim.Adam(q.parameters(), lr=lr)
    with watch(q, opt) as w:
        for step in range(700):
            eps = max(0.05, 1 - step / 250)
            state = env.state.copy()
            with torch.no_grad():
                greedy = q(tensor(state)).argmax(1).numpy()
            action = np.where(rng.random(16) < eps, rng.integers(0, 2, 16), greedy)
            after, fell, _ = env.step(action)
            replay.add(state, action, after, fell)
            if step < 20:
                continue
            s, a, s2, end = replay.sample(128)
            with torch.no_grad():
                best = q(s2).argmax(1, keepdim=True)
                goal = reward + 0.97 * (1 - end) * target(s2).gather(1, best).squeeze(1)
            loss = F.smooth_l1_loss(q(s).gather(1, a.long()[:, None]).squeeze(1), goal)
            update(w, opt, loss, clip=(q, 10.0))
            for p, t in zip(q.parameters(), target.parameters(), strict=True):
                t.lerp_(p.detach(), tau)
    return cartpole_length(q)


def catch_score(q: nn.Module) -> float:
    """Minus the mean reward of a ball."""
    env, total, balls = Catch(64, np.random.default_rng(1)), 0.0, 0
    for _ in range(35):
        with torch.no_grad():
            _, reward, over = env.step(q(tensor(env.board)).argmax(1).numpy())
        total, balls = total + reward.sum(), balls + over.sum()
    return -float(total / balls)


def catch_net() -> nn.Sequential:
    """A convolution over the board and a head of three values."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 3),
    )


@healthy
def catch_dqn(
    watch: Watch, *, reward: float = 1.0, first_only: bool = False, std: float = 0.0
) -> float:
    """DQN on the board's picture; the target is copied every 10 updates."""
    rng = generator()
    env, replay, q = Catch(16, rng), Replay(rng, first_only=first_only), catch_net()
    for p in q.parameters():
        if std and p.dim() > 1:
            nn.init.normal_(p, std=std)
    target = deepcopy(q).requires_grad_(False)
    opt, criterion = torch.optim.Adam(q.parameters(), lr=2e-3), nn.SmoothL1Loss()
    with watch(q, opt, loss_func=criterion):
        for step in range(800):
            board, eps = env.board, max(0.1, 1 - step / 300)
            with torch.no_grad():
                greedy = q(tensor(board)).argmax(1).numpy()
            action = np.where(rng.random(16) < eps, rng.integers(0, 3, 16), greedy)
            after, gain, over = env.step(action)
            replay.add(board, action, gain * reward, after, over)
            if step < 10:
                continue
            s, a, r, s2, end = replay.sample(96)
            goal = r + 0.9 * (1 - end) * target(s2).amax(1)
            loss = criterion(q(s).gather(1, a.long()[:, None]).squeeze(1), goal)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % 10 == 0:
                target.load_state_dict(q.state_dict())
    return catch_score(q)


class Actor(nn.Module):
    """A Gaussian squashed by tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mean, self.log_std = nn.Linear(64, 2), nn.Linear(64, 2)

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(s)
        normal = torch.distributions.Normal(self.mean(h), self.log_std(h).clamp(-5, 1).exp())
        raw = normal.rsample()
        log_p = normal.log_prob(raw) - 2 * (np.log(2) - raw - F.softplus(-2 * raw))
        return raw.tanh(), log_p.sum(1)


def value_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


class Critic(nn.Module):
    """Two values of a state and an action."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = value_net(), value_net()

    def forward(self, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([s, a], 1)
        return self.one(x).squeeze(1), self.two(x).squeeze(1)


def pointmass_return(act: nn.Module) -> float:
    """Minus the mean return of 64 episodes."""
    env, total = PointMass(64, np.random.default_rng(1)), 0.0
    for _ in range(40):
        with torch.no_grad():
            action = act(tensor(env.state))
        action = action[0] if isinstance(action, tuple) else action
        total += env.step(action.numpy())[1].mean()
    return -float(total)


@healthy
def pointmass_sac(
    watch: Watch, *, alpha: float = 0.02, critic_zeroed: bool = True, scale: float = 1.0
) -> float:
    """Soft actor-critic with two critics and two optimizers."""
    rng = generator()
    env, replay, actor, critic = PointMass(16, rng), Replay(rng), Actor(), Critic()
    target = deepcopy(critic).requires_grad_(False)
    opt_a, opt_c = (torch.optim.Adam(m.parameters(), lr=2e-3) for m in (actor, critic))
    with watch(actor, opt_a) as w_a, watch(critic, opt_c) as w_c:
        for step in range(350):
            state = env.state
            with torch.no_grad():
                action = actor(tensor(state))[0].numpy()
            after, reward = env.step(action)
            replay.add(state, action, reward * scale, after)
            if step < 10:
                continue
            s, a, r, s2 = replay.sample(128)
            with torch.no_grad():
                a2, log_p2 = actor(s2)
                goal = r + 0.9 * (torch.minimum(*target(s2, a2)) - alpha * log_p2)
            q1, q2 = critic(s, a)
            loss_c = F.mse_loss(q1, goal) + F.mse_loss(q2, goal)
            if critic_zeroed:
                opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
            w_c.loss(loss_c)
            new, log_p = actor(s)
            critic.requires_grad_(False)
            loss_a = (alpha * log_p - torch.minimum(*critic(s, new))).mean()
            critic.requires_grad_(True)
            opt_a.zero_grad()
            loss_a.backward()
            opt_a.step()
            w_a.loss(loss_a)
            for p, t in zip(critic.parameters(), target.parameters(), strict=True):
                t.lerp_(p.detach(), 0.05)
    return pointmass_return(actor)


@healthy
def pointmass_cloning(
    watch: Watch, *, unit: float = 1.0, clip: float = 1.0, gain: float = 1.0, momentum: float = 0.9
) -> float:
    """Behaviour cloning of a controller, from its noisy walks; SGD with momentum and cosine."""
    env, rows = PointMass(32, generator()), []
    for _ in range(80):
        action = np.clip(-2 * env.state[:, :2] - 1.5 * env.state[:, 2:], -1, 1)
        rows.append((env.state * unit, action))
        env.step(action + 0.3 * env.rng.standard_normal(action.shape))
    states, actions = (tensor(np.concatenate(c)) for c in zip(*rows, strict=True))
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    for layer in (m for m in net if isinstance(m, nn.Linear)):
        layer.weight.data *= gain
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 400)
    with watch(net, opt) as w:
        for _ in range(400):
            i = torch.randint(0, len(states), (64,))
            loss = F.mse_loss(net(states[i]), actions[i])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            opt.step()
            schedule.step()
            w.loss(loss.item())
    return pointmass_return(nn.Sequential(Scaled(unit), net))


class Scaled(nn.Module):
    """Gives the states in the unit that the data had."""

    def __init__(self, unit: float):
        super().__init__()
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        return x * self.unit
