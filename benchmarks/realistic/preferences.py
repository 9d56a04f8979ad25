"""Preferences: a reward model, and language models tuned by DPO and by REINFORCE."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realistic.trials import Watch, failing, healthy, update

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
            update(w, opt, loss)
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


class Policy(nn.Module):
    """A language model by a GRU; 0 begins."""

    def __init__(self, d: int = 48) -> None:
        super().__init__()
        self.tok, self.rnn = nn.Embedding(VOCAB, d), nn.GRU(d, d, batch_first=True)
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.tok(ids))[0])

    def log_prob(self, ids: Tensor) -> Tensor:
        """(n,) log-likelihood of each text."""
        logits = self(F.pad(ids[:, :-1], (1, 0)))
        return logits.log_softmax(-1).gather(2, ids[..., None]).squeeze(-1).sum(1)

    @torch.no_grad()
    def sample(self, n: int, length: int = 10) -> Tensor:
        """(n, length) texts."""
        ids, word, h = [], torch.zeros(n, 1, dtype=torch.long), None
        for _ in range(length):
            out, h = self.rnn(self.tok(word), h)
            word = self.head(out[:, 0]).softmax(-1).multinomial(1)
            ids.append(word)
        return torch.cat(ids, 1)


def pretrained() -> Policy:
    """A model of texts in which most words follow from the one before."""
    model = Policy()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        ids = [torch.randint(VOCAB, (32,))]
        for _ in range(9):
            other = torch.randint(VOCAB, (32,))
            ids.append(torch.where(torch.rand(32) < 0.6, (5 * ids[-1] + 1) % VOCAB, other))
        loss = -model.log_prob(torch.stack(ids, 1)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model


def regret(policy: Policy, reference: Policy) -> float:
    """Negative reward of samples, and a tenth of how far the policy has moved away."""
    ids = policy.eval().sample(1000)
    moved = policy.log_prob(ids) - reference.log_prob(ids)
    return float((0.1 * moved - quality(ids)).mean().detach())


@healthy
def dpo_policy(
    watch: Watch, *, lr: float = 1e-3, beta: float = 0.3, same_model: bool = False, steps: int = 150
) -> float:
    """Direct preference optimization of a model that was trained before; begins at log 2."""
    start = pretrained()
    policy = copy.deepcopy(start)
    reference = policy if same_model else copy.deepcopy(start).requires_grad_(False)
    opt = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    with watch(policy, opt) as w:
        for _ in range(steps):
            a, b = start.sample(64), start.sample(64)
            better = (quality(a) > quality(b))[:, None]
            both = torch.cat((torch.where(better, a, b), torch.where(better, b, a)))
            own = policy.log_prob(both)
            with torch.no_grad():
                ref = reference.log_prob(both)
            ratio = beta * (own - ref)
            loss = -F.logsigmoid(ratio[:64] - ratio[64:]).mean()
            update(w, opt, loss, clip=(policy, 1.0))
    return regret(policy, start)


@failing("the reference is the policy itself, not a copy", names=("not_learning",), trace=True)
def dpo_reference_is_policy(watch: Watch) -> float:
    return dpo_policy(watch, same_model=True)


@failing("the learning rate is 200 times too high", names=("lr_too_high",), trace=True)
def dpo_lr_x200(watch: Watch) -> float:
    return dpo_policy(watch, lr=0.2)


@healthy
def reinforce_lm(
    watch: Watch, *, lr: float = 2e-3, kl: float = 0.1, sign: float = 1.0, steps: int = 200
) -> float:
    """Policy gradient on a model's own samples, with a baseline and a KL penalty."""
    policy = pretrained()
    reference = copy.deepcopy(policy).requires_grad_(False)
    opt = torch.optim.Adam(policy.parameters(), lr=lr)
    with watch(policy, opt) as w:
        for _ in range(steps):
            ids = policy.sample(48)
            own = policy.log_prob(ids)
            with torch.no_grad():
                reward = quality(ids) - kl * (own - reference.log_prob(ids))
                advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            loss = -sign * (advantage * own).mean()
            update(w, opt, loss, clip=(policy, 1.0))
    return regret(policy, reference)


@failing("the sign of the policy gradient is wrong", names=("ascent",), trace=False)
def reinforce_lm_wrong_sign(watch: Watch) -> float:
    return reinforce_lm(watch, sign=-1.0)


@failing("the learning rate is 100 times too high", names=("lr_too_high",), trace=True)
def reinforce_lm_lr_x100(watch: Watch) -> float:
    return reinforce_lm(watch, lr=0.2)
