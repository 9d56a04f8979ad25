"""DQN in a windy maze and PPO that steers a mass."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from .trials import Watch, failing, healthy, update

MOVES = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])


class Maze:
    """Many walkers on 6×6 fields: a goal in one corner pays 1, two holes cost 1, wind shoves."""

    def __init__(self, n: int):
        self.at, self.age = torch.randint(6, (n, 2)), torch.zeros(n)

    def see(self) -> Tensor:
        return F.one_hot(self.at[:, 0] * 6 + self.at[:, 1], 36).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is paid, whether that ends it, what is seen then, and whether a walk begins anew."""
        wind = torch.rand(len(action)) < 0.1
        action = torch.where(wind, torch.randint(4, action.shape), action)
        self.at, self.age = (self.at + MOVES[action]).clamp(0, 5), self.age + 1
        cell = self.at[:, 0] * 6 + self.at[:, 1]
        won, fell = cell == 35, (cell == 14) | (cell == 28)
        end, seen = won | fell, self.see()
        over = end | (self.age >= 40)
        self.at[over], self.age[over] = torch.randint(6, (int(over.sum()), 2)), 0
        return won.float() - fell.float(), end.float(), seen, over


@torch.no_grad()
def lost(q: nn.Module) -> float:
    """1 minus the mean of what 200 greedy walkers are paid in their first walk."""
    maze, alive, total = Maze(200), torch.ones(200), torch.zeros(200)
    for step in range(40):
        paid, _, _, over = maze.step(q(maze.see()).argmax(1))
        total += alive * paid * 0.99**step
        alive = alive * ~over
    return 1 - float(total.mean())


@healthy
def maze_dqn(watch: Watch, *, renew: int = 25, broadcast: bool = False) -> float:
    """DQN with replay and a copied target; 1 minus the discounted pay of its greedy walks."""
    net = nn.Sequential(
        nn.Linear(36, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4)
    )
    target = deepcopy(net).requires_grad_(False)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    maze, memory = Maze(12), []
    with watch(net, opt) as w:
        for step in range(900):
            seen, by_chance = maze.see(), torch.rand(12) < max(0.1, 1 - step / 600)
            with torch.no_grad():
                action = torch.where(by_chance, torch.randint(4, (12,)), net(seen).argmax(1))
            paid, end, then, _ = maze.step(action)
            memory.append((seen, action, paid, end, then))
            rows = [memory[k] for k in torch.randint(len(memory), (16,))]
            s, a, r, e, s2 = (torch.cat(column) for column in zip(*rows, strict=True))
            goal = r + 0.8 * (1 - e) * target(s2).max(1).values
            value = net(s).gather(1, a[:, None])
            update(w, opt, F.mse_loss(value, goal if broadcast else goal[:, None]))
            if renew and step % renew == 0:
                target.load_state_dict(net.state_dict())
    return lost(net)


@failing("the target net is never renewed", names=(), trace=False)
def maze_dqn_old_target(watch: Watch) -> float:
    return maze_dqn(watch, renew=0)


@failing("values (N, 1) against targets (N,)", names=("broadcast",), trace=True)
def maze_dqn_broadcast(watch: Watch) -> float:
    return maze_dqn(watch, broadcast=True)


class Masses:
    """Points in a plane with a speed, pushed by the agent, paid for being near the middle."""

    def __init__(self, n: int):
        self.x, self.v = 2 * torch.rand(n, 2) - 1, torch.zeros(n, 2)

    def see(self) -> Tensor:
        return torch.cat([self.x, self.v], 1)

    def step(self, push: Tensor) -> Tensor:
        self.v = 0.9 * self.v + 0.2 * push.clamp(-1, 1)
        self.x = self.x + 0.3 * self.v
        return -0.2 * (self.x**2).sum(1) - 0.02 * (push**2).sum(1).clamp(max=10)


class Agent(nn.Module):
    """The mean of pushes, their spread, and the value of a state."""

    def __init__(self, log_std: float):
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean.append(nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_std = nn.Parameter(torch.full((2,), log_std))
        nn.init.orthogonal_(self.mean[-1].weight, 0.01)

    def forward(self, seen: Tensor) -> tuple[Normal, Tensor]:
        return Normal(self.mean(seen), self.log_std.exp()), self.value(seen).squeeze(1)


def rollout(agent: Agent, masses: Masses) -> tuple[Tensor, ...]:
    """States, pushes, their log-probabilities, advantages (GAE) and returns of 20 steps."""
    steps, values = [], []
    with torch.no_grad():
        for _ in range(20):
            seen = masses.see()
            dist, value = agent(seen)
            push = dist.sample()
            steps.append((seen, push, dist.log_prob(push).sum(1), masses.step(push)))
            values.append(value)
        values.append(agent(masses.see())[1])
    ahead, gain = [], torch.zeros_like(values[0])
    for k in reversed(range(20)):
        gain = steps[k][3] + 0.97 * values[k + 1] - values[k] + 0.97 * 0.9 * gain
        ahead.insert(0, gain)
    s, a, lp, _ = (torch.cat(column) for column in zip(*steps, strict=True))
    return s, a, lp, torch.cat(ahead), torch.cat(ahead) + torch.cat(values[:-1])


@healthy
def masses_ppo(watch: Watch, *, entropy: float = 0.001, own: bool = False) -> float:
    """PPO with a Gaussian policy; how much it loses per step, on average, from any start."""
    agent = Agent(-0.5)
    opt = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
    with watch(agent, opt) as w:
        for _ in range(24):
            s, a, lp, gain, back = rollout(agent, Masses(32))
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            for i in torch.cat([torch.randperm(640) for _ in range(5)]).split(160):
                dist, value = agent(s[i])
                now = dist.log_prob(a[i]).sum(1)
                ratio = (now - (now if own else lp[i])).exp()
                gained = torch.min(ratio * gain[i], ratio.clamp(0.8, 1.2) * gain[i]).mean()
                miss = 0.5 * F.mse_loss(value, back[i])
                loss = -gained + miss - entropy * dist.entropy().sum(1).mean()
                update(w, opt, loss, clip=(agent, 0.5))
    masses, total = Masses(300), 0.0
    with torch.no_grad():
        for _ in range(30):
            total -= float(masses.step(agent(masses.see())[0].sample()).mean()) / 30
    return total


@failing("the entropy counts 10 instead of 0.001", names=("below_zero",), trace=True)
def masses_ppo_entropy_10(watch: Watch) -> float:
    return masses_ppo(watch, entropy=10.0)


@failing(
    "the ratio is that of the new policy to itself, with its gradient",
    names=("zero_gradient", "unmoved"),
    trace=True,
)
def masses_ppo_own_ratio(watch: Watch) -> float:
    return masses_ppo(watch, own=True)
