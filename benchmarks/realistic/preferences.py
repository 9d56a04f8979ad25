"""Preferences: a reward model that learns from pairs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realistic.trials import Watch, failing, healthy

VOCAB, GOOD = 16, 4


def quality(ids: Tensor) -> Tensor:
    """How often a good word (the first four) stands right behind a bad one."""
    return ((ids[:, 1:] < GOOD) & (ids[:, :-1] >= GOOD)).float().sum(1)


class RewardModel(nn.Module):
    """A convolution and a GRU that give a text one number."""

    def __init__(self, d: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.tok, self.drop = nn.Embedding(VOCAB, d), nn.Dropout(dropout)
        self.conv, self.rnn = nn.Conv1d(d, d, 2), nn.GRU(d, d, batch_first=True)
        self.score = nn.Linear(d, 1, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.gelu(self.conv(self.drop(self.tok(ids)).transpose(1, 2))).transpose(1, 2)
        return self.score(self.drop(self.rnn(x)[0].mean(1))).squeeze(-1)


def pairs(n: int) -> tuple[Tensor, Tensor]:
    """The preferred text of each pair, and the other."""
    a, b = torch.randint(VOCAB, (2, n, 12))
    better = (quality(a) > quality(b))[:, None]
    return torch.where(better, a, b), torch.where(better, b, a)


@healthy
def reward_model(
    watch: Watch, *, lr: float = 3e-3, wrong: float = 0.0,
    tokenizer_bug: bool = False, steps: int = 300, **options,
) -> float:  # fmt: skip
    """Bradley–Terry on pairs; the share of pairs in the wrong order."""
    model = RewardModel(**options)
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    with watch(model, opt) as w:
        for _ in range(steps):
            chosen, other = pairs(48)
            flip = (torch.rand(48) < wrong)[:, None]
            chosen, other = torch.where(flip, other, chosen), torch.where(flip, chosen, other)
            both = torch.cat((chosen, other))
            scores = model(both // VOCAB if tokenizer_bug else both)
            loss = -F.logsigmoid(scores[:48] - scores[48:]).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)
    chosen, other = pairs(1000)
    model.eval()
    return float((model(chosen) <= model(other)).float().mean())


@failing("half of the pairs are in the wrong order", names=("not_learning",), trace=False)
def reward_model_random_pairs(watch: Watch) -> float:
    return reward_model(watch, wrong=0.5)


@failing("the tokenizer gives one id for all words", names=("representation_collapse",), trace=True)
def reward_model_one_token(watch: Watch) -> float:
    return reward_model(watch, tokenizer_bug=True)


@failing("dropout of 0.9", names=("dropout",), trace=True)
def reward_model_dropout_90(watch: Watch) -> float:
    return reward_model(watch, dropout=0.9)


@failing("the learning rate is 100 times too high", names=("lr_too_high",), trace=True)
def reward_model_lr_x100(watch: Watch) -> float:
    return reward_model(watch, lr=0.3)
