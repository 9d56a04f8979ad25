"""More trainings, healthy and failing.

Attention whose logits show, float16, ReLUs that are functions, losses that need not fall.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trainings import (
    IMAGE,
    ROWS,
    Residual,
    Setup,
    Transformer,
    adam,
    adamw,
    conv,
    digits,
    failing,
    healthy,
    lm_loss,
    markov,
    mlp,
    rescale,
    sgd,
)


class Attention(nn.Module):
    """With layers of their own for queries and keys; with `softmax`, a module that gives weights.

    Without, `F.scaled_dot_product_attention`, behind norms of queries and keys if so asked.
    """

    def __init__(self, d: int, *, softmax: bool = True, norm: bool = False, causal: bool = False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d) for _ in range(4))
        self.softmax = nn.Softmax(-1) if softmax else None
        self.q_norm, self.k_norm = (nn.LayerNorm(d // 4) if norm else nn.Identity() for _ in "qk")
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.softmax is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            out = self.softmax(q @ k.mT / math.sqrt(q.shape[-1])) @ v
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def blocks(d: int = 32, n: int = 2, **kw: Any) -> nn.Sequential:
    feed = nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)
    parts = [(Attention(d, **kw),), feed]
    return nn.Sequential(
        *(Residual(nn.Sequential(nn.LayerNorm(d), *part)) for _ in range(n) for part in parts)
    )


class Reader(nn.Module):
    """Reads digits row by row."""

    def __init__(self, d: int = 32, **kw: Any) -> None:
        super().__init__()
        self.inp, self.pos = nn.Linear(8, d), nn.Parameter(0.02 * torch.randn(8, d))
        self.blocks, self.norm, self.head = blocks(d, **kw), nn.LayerNorm(d), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.inp(x) + self.pos)).mean(1))


class Writer(nn.Module):
    """A small causal language model."""

    def __init__(self, d: int = 32, vocab: int = 12) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Parameter(0.02 * torch.randn(16, d))
        self.blocks = blocks(d, softmax=False, causal=True)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.emb(x) + self.pos)))


def queries_and_keys(m: nn.Module) -> list[nn.Parameter]:
    names = ("q_proj", "k_proj")
    return [p for name, p in m.named_parameters() if any(part in name for part in names)]


# The order matters: at even places of each list "tune", at odd places "held".


@healthy
def attention_softmax_module() -> Setup:
    m = Reader()
    return Setup(m, adamw(m, 2e-3), digits(*ROWS))


@healthy
def attention_qk_norm() -> Setup:
    m = Reader(softmax=False, norm=True)
    return Setup(m, adamw(m, 5e-3), digits(*ROWS))


@healthy
def half_precision_mlp() -> Setup:
    m = mlp()
    return Setup(m, adam(m, 2e-3), digits(), half=True, scaler=torch.amp.GradScaler("cpu"))


@healthy
def half_precision_transformer() -> Setup:
    m = Transformer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # too large: it skips the first steps
    return Setup(m, adamw(m, 2e-3), digits(*ROWS), half=True, scaler=scaler)


@failing("attention_logits", "lr_too_high")
def queries_learn_too_fast() -> Setup:
    m = Writer()
    fast = queries_and_keys(m)
    slow = [p for p in m.parameters() if not any(p is q for q in fast)]
    groups = [{"params": slow, "lr": 2e-3}, {"params": fast, "lr": 0.3}]
    return Setup(m, torch.optim.AdamW(groups), markov(), lm_loss, n_classes=12)


@failing("attention_logits")
def queries_begin_too_large() -> Setup:
    m = Reader()
    with torch.no_grad():
        for p in queries_and_keys(m):
            p.mul_(20)
    return Setup(m, adamw(m, 2e-3), digits(*ROWS))


@failing("fp16_range", "bad_init")
def half_precision_too_large() -> Setup:
    m = mlp(depth=4)
    rescale(m[2:5], 60.0)  # two layers
    return Setup(m, adam(m, 1e-3), digits(), half=True, scaler=torch.amp.GradScaler("cpu"))


@failing("fp16_underflow")
def half_precision_without_a_scaler() -> Setup:
    def small(logits: Tensor, y: Tensor) -> Tensor:
        return 1e-4 * F.cross_entropy(logits, y)  # as one of many terms, or per pixel

    m = conv()
    return Setup(m, adam(m, 1e-3), digits(*IMAGE), small, half=True)


# losses that need not fall, or are climbed; ReLUs that are functions


def policy_loss(logits: Tensor, y: Tensor) -> Tensor:
    """REINFORCE with the batch's mean as baseline: a reward of 1 for the right digit."""
    policy = torch.distributions.Categorical(logits=logits)
    action = policy.sample()
    reward = (action == y).float()
    loss: Tensor = -(policy.log_prob(action) * (reward - reward.mean())).mean()
    return loss


@healthy
def policy_gradient() -> Setup:
    m = mlp()
    return Setup(m, adam(m, 2e-3), digits(), policy_loss, n_classes=None)


class Functional(nn.Module):
    """Calls `F.relu`, where most units of the second layer may begin shut."""

    def __init__(self, shut: int = 0) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(1, 16, 3), nn.Linear(144, 64), nn.Linear(64, 10)
        nn.init.constant_(self.fc.bias.data[:shut], -10.0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        out: Tensor = self.head(F.relu(self.fc(x.flatten(1))))
        return out


@healthy
def relus_that_are_functions() -> Setup:
    m = Functional()
    return Setup(m, sgd(m, 0.05), digits(*IMAGE))


@failing("ascent")
def climbed_loss() -> Setup:
    m = conv()
    return Setup(m, torch.optim.Adam(m.parameters(), 1e-3, maximize=True), digits(*IMAGE))


@failing("dead")
def dead_behind_a_function() -> Setup:
    m = Functional(shut=45)
    return Setup(m, adam(m), digits(*IMAGE))


@failing("momentum")
def momentum_too_high() -> Setup:
    m = mlp(nn.GELU)
    return Setup(m, sgd(m, 0.2, 0.999), digits())


@failing("constant_init")
def constant_weights() -> Setup:
    m = mlp()
    for p in m.parameters():
        nn.init.constant_(p, 0.01)
    return Setup(m, adam(m, 2e-3), digits())
