"""A lander that learns when to burn, and a heater that learns how much."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from .trials import Watch, failing, healthy, update


@torch.no_grad()
def landings(net: nn.Module, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, actions and returns of 40 steps: fuel costs a little, a hard or no landing much."""
    height, speed, flying = 1 + 2 * torch.rand(n), -0.2 * torch.rand(n), torch.ones(n)
    states, actions, rewards = [], [], []
    for _ in range(40):
        states.append(torch.stack([height - 1, 5 * speed, flying - 0.5], 1))
        actions.append(Categorical(probs=net(states[-1])[0]).sample())
        speed = (speed + 0.1 * actions[-1] - 0.04) * flying
        height = height + speed
        down = (height <= 0).float() * flying
        rewards.append(-0.02 * actions[-1] * flying - down * 5 * speed.abs())
        flying = flying - down
    rewards[-1] = rewards[-1] - 3 * flying
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(states), torch.stack(actions), returns


class ActorCritic(nn.Module):
    """Two layers for both heads: how probable each action is, and what will be gained."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy, self.value, self.dim = nn.Linear(64, 2), nn.Linear(64, 1), dim

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.policy(h).softmax(self.dim), self.value(h).squeeze(-1)


@healthy
def lander_actor_critic(watch: Watch, *, lr: float = 4e-3, dim: int = -1) -> float:
    """Whole landings, advantages to mean 0 and std 1, a little entropy; what landings cost."""
    net = ActorCritic(dim)
    opt = torch.optim.Adam(net.parameters(), lr=lr, eps=1e-5)
    with watch(net, opt) as w:
        for _ in range(150):
            states, actions, returns = landings(net, 24)
            probs, value = net(states)
            chosen, gained = Categorical(probs=probs), returns - value.detach()
            gained = (gained - gained.mean()) / (gained.std() + 1e-6)
            loss = -(chosen.log_prob(actions) * gained).mean() - 0.01 * chosen.entropy().mean()
            loss = loss + 0.5 * F.mse_loss(value, returns)
            update(w, opt, loss, clip=(net, 0.5))
    return -float(landings(net, 300)[2][0].mean())


@failing("a learning rate of 0.4 with Adam", names=("lr_too_high", "saturated"), trace=True)
def lander_actor_critic_lr_x100(watch: Watch) -> float:
    return lander_actor_critic(watch, lr=0.4)


@failing("softmax(0): not over actions", names=("softmax_dim",), trace=True)
def lander_actor_critic_softmax_0(watch: Watch) -> float:
    return lander_actor_critic(watch, dim=0)


def mlp(n_in: int, *end: nn.Module) -> nn.Sequential:
    """Two hidden layers and one number."""
    body = nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    return nn.Sequential(*body, *end)


class Room:
    """`n` rooms whose heater or cooler should keep 21 degrees, and the weather around them."""

    def __init__(self, n: int, raw: bool) -> None:
        self.inside, self.outside, self.raw = 21 + 6 * torch.randn(n), 8 + 8 * torch.randn(n), raw

    def seen(self) -> Tensor:
        air = 1013 - 0.5 * self.outside
        if self.raw:
            return torch.stack([self.inside + 273.15, self.outside + 273.15, 100 * air], 1)
        return torch.stack([(self.inside - 21) / 6, (self.outside - 8) / 8, (air - 1009) / 4], 1)

    def step(self, power: Tensor) -> Tensor:
        """What the next hour costs: discomfort and power."""
        self.inside = self.inside + 0.2 * (self.outside - self.inside) + 6 * power
        self.inside = self.inside + 0.2 * torch.randn(len(power))
        self.outside = 8 + 0.98 * (self.outside - 8) + 1.6 * torch.randn(len(power))
        return (self.inside - 21).abs() / 6 + 0.05 * power**2


@healthy
def heater_ddpg(watch: Watch, *, raw: bool = False, blind: bool = False) -> float:
    """DDPG with noisy actions and slow targets, two nested watches; the cost of an hour."""
    actor, critic, room, kept = mlp(3, nn.Tanh()), mlp(4), Room(32, raw), []
    slow_actor, slow_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    opt_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=3e-3)
    with watch(actor, opt_a) as wa, watch(critic, opt_c) as wc:
        for _ in range(700):
            with torch.no_grad():
                state = room.seen()
                power = (actor(state) + 0.3 * torch.randn(32, 1)).clamp(-1, 1)
                cost = room.step(power[:, 0])[:, None]
            kept.append(torch.cat([state, power, -cost, room.seen()], 1))
            memory = torch.cat(kept[-150:])
            s, a, r, s2 = memory[torch.randint(len(memory), (96,))].split([3, 1, 1, 3], 1)
            with torch.no_grad():
                aim = r + 0.8 * slow_critic(torch.cat([s2, slow_actor(s2)], 1))
            update(wc, opt_c, F.mse_loss(critic(torch.cat([s, a], 1)), aim))
            with torch.set_grad_enabled(not blind):
                mine = actor(s)
            update(wa, opt_a, -critic(torch.cat([s, mine], 1)).mean())
            for slow, net in ((slow_actor, actor), (slow_critic, critic)):
                for old, new in zip(slow.parameters(), net.parameters(), strict=True):
                    old.data.lerp_(new.data, 0.05)
    room = Room(200, raw)
    with torch.no_grad():
        return float(torch.stack([room.step(actor(room.seen())[:, 0]) for _ in range(40)]).mean())


@failing("kelvin and pascals as they are", names=("input_scale",), trace=True)
def heater_ddpg_kelvin_pascals(watch: Watch) -> float:
    return heater_ddpg(watch, raw=True)


@failing("the actor acts under no_grad", names=("unmoved", "zero_gradient"), trace=True)
def heater_ddpg_no_grad_actor(watch: Watch) -> float:
    return heater_ddpg(watch, blind=True)
