"""GloVe, LoRA, a DQN and a policy gradient."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from .fifth_texts import LETTERS, letters, manual, page_words
from .fresh_images import pick
from .texts import sources, windows
from .trials import Watch, failing, fit, healthy, update


def met(n_words: int) -> tuple[Tensor, Tensor]:
    """Pairs of words that come at most five apart, in any order, and how often they do."""
    count = torch.zeros(n_words, n_words)
    for page in page_words(n_words - 1)[0]:
        for far in range(1, 6):
            count.index_put_((page[far:], page[:-far]), torch.tensor(1 / far), accumulate=True)
    count = count + count.T
    return count.nonzero(), count[count > 0]


class Vectors(nn.Module):
    """Two vectors and two biases for each word."""

    def __init__(self, n_words: int, std: float):
        super().__init__()
        self.word, self.near = nn.Embedding(n_words, 50), nn.Embedding(n_words, 50)
        self.biases = nn.ModuleList(nn.Embedding(n_words, 1) for _ in range(2))
        for p in self.parameters():
            nn.init.normal_(p, 0, std)

    def forward(self, pairs: Tensor) -> Tensor:
        i, j = pairs.T
        return (self.word(i) * self.near(j)).sum(1) + (self.biases[0](i) + self.biases[1](j))[:, 0]


@healthy
def manual_glove(watch: Watch, *, decay: float = 0.0, std: float = 0.1) -> float:
    """GloVe with Adagrad; the share of the variance of log counts held out that it misses."""
    pairs, count = met(500)
    order = torch.randperm(len(pairs))
    pairs, count = pairs[order], count[order]
    goal, weight = count.log(), (count / 20).clamp(max=1) ** 0.75
    net = Vectors(500, std)
    opt = torch.optim.Adagrad(net.parameters(), lr=0.05, weight_decay=decay)

    def loss_of(_: int) -> Tensor:
        i = pick(len(pairs) - 4000, 512)
        return (weight[i] * (net(pairs[i]) - goal[i]) ** 2).mean()

    fit(watch, net, opt, loss_of, 900)
    with torch.no_grad():
        missed = (weight * (net(pairs) - goal) ** 2)[-4000:].sum()
    return float(missed / (weight * (goal - goal.mean()) ** 2)[-4000:].sum())


@failing("weight decay of 0.01 on the vectors", names=("weight_decay",), trace=True)
def manual_glove_decay(watch: Watch) -> float:
    return manual_glove(watch, decay=0.01)


@failing("nn.Embedding as it is, with a std of 1", names=("bad_init", "initial_loss"), trace=True)
def manual_glove_std_1(watch: Watch) -> float:
    return manual_glove(watch, std=1.0)


class Adapted(nn.Module):
    """A frozen layer of 64 inputs, and a low-rank one beside it."""

    def __init__(self, base: nn.Module, n_out: int, zero: bool):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, n_out, bias=False)
        nn.init.normal_(self.up.weight, 0, 0 if zero else 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def coder(n_steps: int = 120) -> GPT2LMHeadModel:
    """A GPT-2 of letters that knows Python's sources, not its manual."""
    config = {"vocab_size": len(LETTERS), "n_positions": 32, "tie_word_embeddings": False}
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
    net = GPT2LMHeadModel(GPT2Config(**config, **sizes))
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    text = letters(" ".join(sources().values()))
    for _ in range(n_steps):
        x = windows(text, 16, 31)
        opt.zero_grad()
        net(x, labels=x).loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
    return net


@healthy
def manual_lora(watch: Watch, *, zero: bool = True, loaded: bool = True) -> float:
    """From code to English by low-rank layers beside queries, MLPs and the head; nats a letter."""
    net = (coder() if loaded else coder(n_steps=0)).requires_grad_(False)
    net.lm_head = Adapted(net.lm_head, len(LETTERS), zero)
    for block in net.transformer.h:
        block.attn.c_attn = Adapted(block.attn.c_attn, 192, zero)
        block.mlp.c_fc = Adapted(block.mlp.c_fc, 256, zero)
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 4e-3, weight_decay=0)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 100)
    text, test = manual()

    def loss_of(_: int) -> Tensor:
        x = windows(text, 16, 31)
        return net(x, labels=x).loss

    fit(watch, net, opt, loss_of, 100, sched=sched)
    x = test.view(-1, 32)
    with torch.no_grad():
        return float(net.eval()(x, labels=x).loss)


@failing("LoRA begins at random, not 0", names=("bad_init", "initial_loss"), trace=True)
def manual_lora_up_std_1(watch: Watch) -> float:
    return manual_lora(watch, zero=False)


@failing("strict=False: no name fits, and the frozen base is random", names=(), trace=False)
def manual_lora_not_loaded(watch: Watch) -> float:
    return manual_lora(watch, loaded=False)


class Pendulums:
    """Pendulums that hang or swing; a push alone does not bring them up."""

    def __init__(self, n: int):
        self.x = torch.rand(n, 2) * torch.tensor([2 * math.pi, 2.0])

    def see(self, x: Tensor) -> Tensor:
        return torch.stack([x[..., 0].cos(), x[..., 0].sin(), x[..., 1] / 4], -1)

    def step(self, push: Tensor) -> Tensor:
        angle, speed = self.x.unbind(1)
        speed.add_(0.1 * (15 * angle.sin() + 10 * push)).clamp_(-8, 8)
        angle.add_(0.1 * speed)
        off = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        return -(off**2 + 0.1 * speed**2) / 8


@healthy
def pendulum_dqn(watch: Watch, *, relu: bool = False, copied: bool = True) -> float:
    """DQN with a target that follows slowly; what greedy pendulums cost per step."""
    net = nn.Sequential(nn.Linear(3, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
    net.extend([nn.Linear(96, 3), nn.ReLU() if relu else nn.Identity()])
    target = deepcopy(net).requires_grad_(False)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    world, memory = Pendulums(32), []
    with watch(net, opt) as w:
        for step in range(900):
            before = world.x.clone() if copied else world.x
            with torch.no_grad():
                action = net(world.see(before)).argmax(1)
            by_chance = torch.rand(32) < max(0.05, 1 - step / 500)
            action = torch.where(by_chance, torch.randint(3, (32,)), action)
            paid = world.step(action - 1.0)
            memory.append((before, action, paid, world.x.clone() if copied else world.x))
            if step % 50 == 49:
                world = Pendulums(32)
            rows = [memory[k] for k in torch.randint(len(memory), (6,))]
            s, a, r, s2 = (torch.cat(column) for column in zip(*rows, strict=True))
            goal = r + 0.93 * target(world.see(s2)).max(1).values
            value = net(world.see(s)).gather(1, a[:, None]).squeeze(1)
            update(w, opt, F.smooth_l1_loss(value, goal), clip=(net, 10.0))
            for p, q in zip(target.parameters(), net.parameters(), strict=True):
                p.data.lerp_(q.data, 0.03)
    world = Pendulums(300)
    paid = [world.step(net(world.see(world.x)).argmax(1) - 1.0).mean() for _ in range(60)]
    return -float(sum(paid)) / 60


@failing("a ReLU after values below 0", names=("dead", "zero_gradient", "unmoved"), trace=True)
def pendulum_dqn_relu_output(watch: Watch) -> float:
    return pendulum_dqn(watch, relu=True)


@failing("the buffer holds the state that changes in place, not copies", names=(), trace=False)
def pendulum_dqn_not_copied(watch: Watch) -> float:
    return pendulum_dqn(watch, copied=False)


@torch.no_grad()
def fortnight(policy: nn.Module, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """What n shops see on each of 14 days, what they order, and what they earn."""
    wanted, stock, days = torch.tensor([2.0, 3, 3, 4, 6, 8, 1]), torch.zeros(n), []
    for day in range(14):
        week = F.one_hot(torch.full((n,), day % 7), 7)
        seen = torch.cat([stock[:, None] / 10, week], 1)
        order = torch.distributions.Categorical(logits=policy(seen)).sample()
        have = stock + order
        sold = torch.minimum(have, torch.poisson(wanted[day % 7].expand(n)))
        stock = (have - sold).clamp(max=15)
        days.append((seen, order, 4 * sold - 2 * order - 0.3 * stock))
    return tuple(torch.stack(column) for column in zip(*days, strict=True))


@healthy
def shop_reinforce(watch: Watch, *, cents: bool = False, squeeze: bool = True) -> float:
    """REINFORCE for a shop that orders each day, SGD; what it fails to earn of 8 a day."""
    policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 11))
    opt = torch.optim.SGD(policy.parameters(), lr=0.2, momentum=0.9)
    with watch(policy, opt) as w:
        for _ in range(200):
            seen, order, earned = fortnight(policy, 48)
            gain = earned.flip(0).cumsum(0).flip(0)
            gain = 100 * gain if cents else (gain - gain.mean(1, True)) / gain.std(1, keepdim=True)
            logp = policy(seen).log_softmax(-1).flatten(0, 1).gather(1, order.view(-1, 1))
            loss = -((logp.squeeze(1) if squeeze else logp) * gain.flatten()).mean()
            update(w, opt, loss)
    return 8 - float(fortnight(policy, 400)[2].mean())


SCALE = "target_scale", "lr_too_high", "exploding", "saturated"


@failing("gains in cents, no baseline, not standardised", names=SCALE, trace=True)
def shop_reinforce_cents(watch: Watch) -> float:
    return shop_reinforce(watch, cents=True)


@failing("log-probabilities (N, 1) times gains (N,)", names=("broadcast",), trace=True)
def shop_reinforce_broadcast(watch: Watch) -> float:
    return shop_reinforce(watch, squeeze=False)
