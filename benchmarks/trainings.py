"""Small trainings that are healthy, and small trainings that fail for one known cause.

`HEALTHY` and `FAILING` are lists of `Case`; `make()` of a case gives a `Setup` for `run_steps`.
Data: scikit-learn's digits (as vectors, images, or sequences of 8 rows), and synthetic tasks.
A failing case names the rules that would name its true cause.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

STEPS, BATCH = 200, 64


@dataclass
class Setup:
    """A training about to begin."""

    model: nn.Module
    opt: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy
    n_classes: int | None = 10
    zero_grad: bool = True
    accumulate: int = 1
    clip: float | None = None
    sched: Any = None
    steps: int = STEPS
    half: bool = False  # under autocast in float16
    scaler: Any = None

    @property
    def loss_name(self) -> str:
        return "CrossEntropyLoss" if self.loss is F.cross_entropy else "other"


@dataclass(frozen=True)
class Case:
    """A training by name; `cause` holds the rules that name why it fails (empty: healthy)."""

    name: str
    make: Callable[[], Setup]
    cause: frozenset[str] = field(default_factory=frozenset)


HEALTHY: list[Case] = []
FAILING: list[Case] = []


def healthy(make: Callable[[], Setup]) -> Callable[[], Setup]:
    HEALTHY.append(Case(make.__name__, make))
    return make


def failing(*cause: str) -> Callable[[Callable[[], Setup]], Callable[[], Setup]]:
    def register(make: Callable[[], Setup]) -> Callable[[], Setup]:
        FAILING.append(Case(make.__name__, make, frozenset(cause)))
        return make

    return register


def run_steps(s: Setup) -> Iterator[float]:
    """Train `s`, giving the loss of each optimizer step."""
    s.model.train()
    for _ in range(s.steps):
        if s.zero_grad:
            s.opt.zero_grad()
        total = 0.0
        for _ in range(s.accumulate):
            x, y = next(s.batches)
            with torch.autocast("cpu", torch.float16, enabled=s.half):
                loss = s.loss(s.model(x), y) / s.accumulate
            (s.scaler.scale(loss) if s.scaler else loss).backward()
            total += loss.item()
        if s.clip:
            nn.utils.clip_grad_norm_(s.model.parameters(), s.clip)
        if s.scaler:
            s.scaler.step(s.opt)
            s.scaler.update()
        else:
            s.opt.step()
        if s.sched:
            s.sched.step()
        yield total


# data


@cache
def digits_data() -> tuple[Tensor, Tensor]:
    d = load_digits()
    x = torch.tensor(d.data, dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(d.target)


def digits(*shape: int, n: int = BATCH, scale: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = digits_data()
    while True:
        i = torch.randint(len(x), (n,))
        yield x[i].view(n, *(shape or (64,))) * scale, y[i]


def raw_digits(n: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Digits as somebody might feed them: 0 to 255."""
    d = load_digits()
    x, y = torch.tensor(d.data * (255 / 16), dtype=torch.float32), torch.tensor(d.target)
    while True:
        i = torch.randint(len(x), (n,))
        yield x[i], y[i]


IMAGE, ROWS = (1, 8, 8), (8, 8)


def curve(n: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        x = torch.randn(n, 4)
        yield x, (x[:, :1] * x[:, 1:2] + x[:, 2:3].sin()) + 0.05 * torch.randn(n, 1)


def xor(n: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        x = torch.randint(2, (n, 2)).float()
        yield 2 * x - 1, (x[:, :1] != x[:, 1:]).float()


def markov(n: int = 16, t: int = 16, vocab: int = 12) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens of a Markov chain, and their successors."""
    g = torch.Generator().manual_seed(7)
    p = (2 * torch.randn(vocab, vocab, generator=g)).softmax(1)
    while True:
        seq = [torch.randint(vocab, (n,))]
        for _ in range(t):
            seq.append(torch.multinomial(p[seq[-1]], 1)[:, 0])
        x = torch.stack(seq, 1)
        yield x[:, :-1], x[:, 1:]


def lm_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


# nets


def mlp(
    act: Callable[[], nn.Module] = nn.ReLU, *, depth: int = 3, width: int = 64, out: int = 10,
    norm: Callable[[int], nn.Module] | None = None, i: int = 64,
) -> nn.Sequential:  # fmt: skip
    layers: list[nn.Module] = []
    for k in range(depth):
        layers.append(nn.Linear(i if k == 0 else width, width))
        if norm:
            layers.append(norm(width))
        layers.append(act())
    return nn.Sequential(*layers, nn.Linear(width, out))


def conv(norm: bool = True, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in ((1, 8), (8, 16), (16, 32)):
        layers.append(nn.Conv2d(i, o, 3, stride=2 if i > 1 else 1, padding=1, bias=not norm))
        layers += [nn.BatchNorm2d(o)] * norm + [act()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Residual(nn.Module):
    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def resnet(blocks: int = 3, ch: int = 12) -> nn.Sequential:
    def block() -> nn.Module:
        inner = [nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch), nn.ReLU()]
        return Residual(
            nn.Sequential(*inner, nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch))
        )

    stem = [nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ch, 10)]
    return nn.Sequential(*stem, *(block() for _ in range(blocks)), *tail)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int = 48, **kwargs: Any) -> None:
        super().__init__()
        self.rnn = kind(8, width, batch_first=True, **kwargs)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.fc(out[:, -1])


class Transformer(nn.Module):
    def __init__(self, d: int = 32, layers: int = 2, norm_first: bool = True) -> None:
        super().__init__()
        self.inp, self.pos = nn.Linear(8, d), nn.Parameter(0.02 * torch.randn(8, d))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                d, 4, 2 * d, 0.0, batch_first=True, norm_first=norm_first, activation=F.gelu
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x) + self.pos
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))


class TokenModel(nn.Module):
    def __init__(self, vocab: int = 12, d: int = 32, tied: bool = False) -> None:
        super().__init__()
        self.emb, self.rnn = nn.Embedding(vocab, d), nn.GRU(d, d, batch_first=True)
        self.head = nn.Linear(d, vocab)
        if tied:
            nn.init.normal_(self.emb.weight, std=0.1)
            self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.emb(x))[0])


def sgd(m: nn.Module, lr: float = 0.05, momentum: float = 0.9, **kw: Any) -> torch.optim.SGD:
    return torch.optim.SGD(m.parameters(), lr, momentum=momentum, **kw)


def adam(m: nn.Module, lr: float = 1e-3, **kw: Any) -> torch.optim.Adam:
    return torch.optim.Adam(m.parameters(), lr, **kw)


def adamw(m: nn.Module, lr: float = 1e-3, **kw: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(m.parameters(), lr, **kw)


def he(m: nn.Module) -> nn.Module:
    for layer in m.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return m


def rescale(m: nn.Module, k: float) -> nn.Module:
    with torch.no_grad():
        for p in m.parameters():
            if p.ndim >= 2:
                p.mul_(k)
    return m


def pretrain(m: nn.Module, *shape: int, steps: int = 150) -> nn.Module:
    for _ in run_steps(Setup(m, adam(m, 2e-3), digits(*shape), steps=steps)):
        pass
    return m


# healthy: optimizers on an MLP


@healthy
def mlp_sgd() -> Setup:
    m = mlp()
    return Setup(m, sgd(m, 0.1, 0.0), digits())


@healthy
def mlp_momentum() -> Setup:
    m = mlp()
    return Setup(m, sgd(m, 0.05, nesterov=True), digits())


@healthy
def mlp_adam() -> Setup:
    m = mlp()
    return Setup(m, adam(m), digits())


@healthy
def mlp_adamw_decay() -> Setup:
    m = mlp()
    return Setup(m, adamw(m, 2e-3, weight_decay=0.05), digits())


@healthy
def mlp_rmsprop() -> Setup:
    m = mlp()
    return Setup(m, torch.optim.RMSprop(m.parameters(), 1e-3), digits())


@healthy
def mlp_adagrad() -> Setup:
    m = mlp()
    return Setup(m, torch.optim.Adagrad(m.parameters(), 2e-2), digits())


@healthy
def mlp_adadelta() -> Setup:
    m = mlp()
    return Setup(m, torch.optim.Adadelta(m.parameters(), 0.5), digits())


@healthy
def mlp_nadam_he() -> Setup:
    m = he(mlp(depth=5))
    return Setup(m, torch.optim.NAdam(m.parameters(), 1e-3), digits())


# healthy: units and norms


@healthy
def mlp_tanh() -> Setup:
    m = mlp(nn.Tanh)
    return Setup(m, adam(m, 2e-3), digits())


@healthy
def mlp_sigmoid_shallow() -> Setup:
    m = mlp(nn.Sigmoid, depth=1)
    return Setup(m, adam(m, 1e-2), digits())


@healthy
def mlp_gelu() -> Setup:
    m = mlp(nn.GELU, depth=4)
    return Setup(m, adamw(m, 2e-3), digits())


@healthy
def mlp_silu() -> Setup:
    m = mlp(nn.SiLU, depth=4)
    return Setup(m, adamw(m, 2e-3), digits())


@healthy
def mlp_batchnorm_deep() -> Setup:
    m = mlp(depth=8, norm=nn.BatchNorm1d)
    return Setup(m, sgd(m, 0.05), digits())


@healthy
def mlp_layernorm_residual() -> Setup:
    def block() -> nn.Module:
        return Residual(nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU()))

    m = nn.Sequential(nn.Linear(64, 48), *(block() for _ in range(12)), nn.Linear(48, 10))
    return Setup(m, adamw(m, 1e-3), digits())


@healthy
def mlp_dropout() -> Setup:
    net = [nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5)]
    m = nn.Sequential(*net, nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
    return Setup(m, adam(m, 2e-3), digits())


# healthy: convolutions


@healthy
def conv_batchnorm() -> Setup:
    m = conv()
    return Setup(m, sgd(m, 0.05), digits(*IMAGE))


@healthy
def conv_plain() -> Setup:
    m = conv(norm=False)
    return Setup(m, adam(m, 3e-3), digits(*IMAGE))


@healthy
def conv_onecycle() -> Setup:
    m = conv()
    opt = adamw(m, 1e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=STEPS)
    return Setup(m, opt, digits(*IMAGE), sched=sched)


@healthy
def resnet_momentum() -> Setup:
    m = resnet()
    return Setup(m, sgd(m, 0.05, weight_decay=5e-4), digits(*IMAGE))


@healthy
def resnet_zero_init() -> Setup:
    m = resnet(4)
    for block in m.modules():
        if isinstance(block, Residual):
            nn.init.zeros_(block.f[-1].weight)  # each block begins as the identity
    return Setup(m, adamw(m, 3e-3), digits(*IMAGE))


# healthy: sequences


@healthy
def rnn_tanh_clipped() -> Setup:
    m = Recurrent(nn.RNN)
    return Setup(m, adam(m, 2e-3), digits(*ROWS), clip=1.0)


@healthy
def lstm() -> Setup:
    m = Recurrent(nn.LSTM)
    return Setup(m, adam(m, 4e-3), digits(*ROWS))


@healthy
def gru_two_layers() -> Setup:
    m = Recurrent(nn.GRU, num_layers=2)
    return Setup(m, adam(m, 3e-3), digits(*ROWS))


@healthy
def transformer_warmup() -> Setup:
    m = Transformer()
    opt = adamw(m, 2e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: min(1.0, (t + 1) / 40))
    return Setup(m, opt, digits(*ROWS), sched=sched, clip=1.0)


@healthy
def transformer_cosine_deep() -> Setup:
    m = Transformer(layers=4)
    opt = adamw(m, 2e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    return Setup(m, opt, digits(*ROWS), sched=sched)


@healthy
def token_gru_tied() -> Setup:
    m = TokenModel(tied=True)
    return Setup(m, adam(m, 5e-3), markov(), lm_loss, n_classes=12)


# healthy: deliberate oddities


@healthy
def frozen_body() -> Setup:
    m = pretrain(mlp())
    m[:4].requires_grad_(False)
    nn.init.normal_(m[-1].weight, std=0.05)
    head = [p for p in m.parameters() if p.requires_grad]
    return Setup(m, torch.optim.Adam(head, 1e-3), digits())


@healthy
def fine_tuning_small_lr() -> Setup:
    m = pretrain(conv(), *IMAGE)
    return Setup(m, adamw(m, 1e-5), digits(*IMAGE))


@healthy
def low_rank_adapters() -> Setup:
    m = pretrain(mlp(), steps=40).requires_grad_(False)
    for k in (0, 2, 4):
        m[k] = LowRank(m[k])
    trainable = [p for p in m.parameters() if p.requires_grad]
    return Setup(m, torch.optim.Adam(trainable, 5e-3), digits())


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@healthy
def accumulated() -> Setup:
    m = mlp()
    return Setup(m, adam(m, 2e-3), digits(n=16), accumulate=4)


@healthy
def regression() -> Setup:
    m = mlp(nn.SiLU, i=4, out=1)
    return Setup(m, adam(m, 3e-3), curve(), F.mse_loss, n_classes=None)


@healthy
def autoencoder() -> Setup:
    m = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 12), nn.ReLU(), nn.Linear(12, 32), nn.ReLU(),
        nn.Linear(32, 64),
    )  # fmt: skip
    return Setup(m, adam(m, 3e-3), ((x, x) for x, _ in digits()), F.mse_loss, n_classes=None)


@healthy
def tiny_xor() -> Setup:
    m = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    bce = F.binary_cross_entropy_with_logits
    return Setup(m, adam(m, 3e-2), xor(), bce, n_classes=None)


@healthy
def binary_sigmoid_output() -> Setup:
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    data = ((x, (y[:, None] < 5).float()) for x, y in digits())
    return Setup(m, adam(m, 5e-3), data, F.binary_cross_entropy, n_classes=None)


@healthy
def log_softmax_output() -> Setup:
    m = nn.Sequential(*mlp(), nn.LogSoftmax(1))
    return Setup(m, adam(m, 2e-3), digits(), F.nll_loss)


@healthy
def label_smoothing() -> Setup:
    m = conv(act=nn.LeakyReLU)

    def smooth(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, label_smoothing=0.1)

    return Setup(m, adam(m, 5e-3), digits(*IMAGE), smooth)
