"""Time series: point forecasts, forecasts with their uncertainty, and a selective recurrence."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realistic.trials import Watch, failing, healthy, update


def series(n: int, length: int = 33) -> Tensor:
    """(n, length) two waves and noise, of about mean 0 and std 1."""
    t, phase = torch.arange(length), 2 * math.pi * torch.rand(n, 2, 1)
    waves = torch.sin(2 * math.pi * t / 12 + phase[:, 0]) + torch.sin(t / 2.3 + phase[:, 1])
    return waves + 0.1 * torch.randn(n, length)


class Forecast(nn.Module):
    """A recurrent model of a series, and a linear layer of its last output."""

    def __init__(self, cell: type[nn.Module], d: int = 48, out: int = 1, **options) -> None:
        super().__init__()
        self.rnn, self.head = cell(1, d, batch_first=True, **options), nn.Linear(d, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[..., None])[0][:, -1])


@healthy
def gru_forecast(
    watch: Watch, *, lr: float = 5e-3, unit: float = 1.0, level: float = 0.0,
    target_unit: float = 1.0, broadcast: bool = False, steps: int = 300,
) -> float:  # fmt: skip
    """Next value of a series by a GRU; the error in units of the noise-free spread."""
    model = Forecast(nn.GRU)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=100)
    with watch(model, opt) as w:
        for _ in range(steps):
            data = series(32)
            x, y = level + unit * data[:, :-1], target_unit * data[:, -1:]
            loss = (model(x) - (y[:, 0] if broadcast else y)).pow(2).mean()
            update(w, opt, loss, sched=sched)
    data = series(500)
    guess = model(level + unit * data[:, :-1]).detach() / target_unit
    return float((guess - data[:, -1:]).pow(2).mean() / data[:, -1].var())


@failing("targets are not standardised: their std is 1000", names=("target_scale",), trace=True)
def gru_forecast_raw_targets(watch: Watch) -> float:
    return gru_forecast(watch, target_unit=1000.0)


@failing("inputs are not standardised: about 1000 ± 50", names=("input_scale",), trace=True)
def gru_forecast_raw_inputs(watch: Watch) -> float:
    return gru_forecast(watch, level=1000.0, unit=50.0)


@failing("predictions (N, 1) against targets (N,)", names=("broadcast",), trace=True)
def gru_forecast_broadcast(watch: Watch) -> float:
    return gru_forecast(watch, broadcast=True)


@failing("the learning rate is 1000 times too low", names=("lr_too_low",), trace=True)
def gru_forecast_lr_per_1000(watch: Watch) -> float:
    return gru_forecast(watch, lr=5e-6)


@healthy
def lstm_density_forecast(
    watch: Watch, *, lr: float = 2e-2, momentum: float = 0.9, clip: float = 1.0, gain: float = 1.0,
    decay: float = 0.0, steps: int = 300,
) -> float:  # fmt: skip
    """A forecast with its std, by the Gaussian log-likelihood, which becomes negative; SGD."""
    model = Forecast(nn.LSTM, d=32, out=2, num_layers=2)
    with torch.no_grad():
        for p in model.rnn.parameters():
            p.mul_(gain)
    opt = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=momentum, nesterov=True, weight_decay=decay
    )
    with watch(model, opt) as w:
        for _ in range(steps):
            data = series(64, 25)
            mean, log_std = model(data[:, :-1]).unbind(-1)
            loss = (
                -torch.distributions.Normal(mean, F.softplus(log_std)).log_prob(data[:, -1]).mean()
            )
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            w.loss(loss.detach())
    data = series(500, 25)
    return float((model(data[:, :-1])[:, 0] - data[:, -1]).pow(2).mean().detach())


@failing("weight decay is 0.5", names=("weight_decay",), trace=True)
def lstm_density_decay_half(watch: Watch) -> float:
    return lstm_density_forecast(watch, decay=0.5)


@failing("the learning rate is 100 times too high", names=("lr_too_high",), trace=True)
def lstm_density_lr_x100(watch: Watch) -> float:
    return lstm_density_forecast(watch, lr=2.0)


@failing("gradients are clipped at a norm of 0.001", names=("clipping",), trace=True)
def lstm_density_clip_1000th(watch: Watch) -> float:
    return lstm_density_forecast(watch, clip=1e-3)


@failing("weights of the LSTM begin ten times too small", names=("bad_init",), trace=True)
def lstm_density_small_init(watch: Watch) -> float:
    return lstm_density_forecast(watch, gain=0.1)


class SelectiveSSM(nn.Module):
    """Mamba's recurrence in small: what is kept depends on the input."""

    def __init__(self, d: int, n: int, sign: float) -> None:
        super().__init__()
        self.inner, self.gate, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.delta, self.b, self.c = nn.Linear(d, d), nn.Linear(d, n), nn.Linear(d, n)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, n + 1)).repeat(d, 1))
        self.skip, self.sign = nn.Parameter(torch.ones(d)), sign
        nn.init.constant_(self.delta.bias, -2.0)

    def forward(self, x: Tensor) -> Tensor:
        u = F.silu(self.inner(x))
        delta, b, c = F.softplus(self.delta(u)), self.b(u), self.c(u)
        keep = torch.exp(delta[..., None] * self.sign * self.log_a.exp())
        write = (delta * u)[..., None] * b[:, :, None]
        h, out = torch.zeros_like(write[:, 0]), []
        for t in range(x.shape[1]):
            h = keep[:, t] * h + write[:, t]
            out.append((h * c[:, t, None]).sum(-1))
        y = torch.stack(out, 1) + self.skip * u
        return self.out(y * F.silu(self.gate(x)))


class Mamba(nn.Module):
    """Residual blocks of it."""

    def __init__(self, vocab: int, d: int = 32, depth: int = 2, sign: float = -1.0) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(depth))
        self.blocks = nn.ModuleList(SelectiveSSM(d, 8, sign) for _ in range(depth))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def selective_copies(n: int, length: int = 16, vocab: int = 10) -> tuple[Tensor, Tensor]:
    """Words behind a mark (0), and at each place the word that was marked last (0: none yet)."""
    ids, kept = torch.randint(1, vocab, (n, length)), torch.zeros(n, dtype=torch.long)
    marks, target = torch.rand(n, length) < 0.2, []
    for t in range(length):
        kept = torch.where(marks[:, t], ids[:, t], kept)
        target.append(kept)
    return ids + vocab * marks, torch.stack(target, 1)


@healthy
def mamba_selective_copy(watch: Watch, *, lr: float = 3e-3, steps: int = 200, **options) -> float:
    """A selective recurrence that learns to remember what was marked; NAdam."""
    model = Mamba(20, **options)
    opt = torch.optim.NAdam(model.parameters(), lr=lr)
    with watch(model, opt) as w:
        for _ in range(steps):
            ids, target = selective_copies(32)
            loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
            update(w, opt, loss, clip=(model, 1.0))
    ids, target = selective_copies(300)
    return float((model(ids).argmax(-1) != target).float().mean())


@failing("the recurrence grows: a sign of A is lost", names=("exploding", "non_finite"), trace=True)
def mamba_growing_state(watch: Watch) -> float:
    return mamba_selective_copy(watch, sign=1.0)


@failing("the learning rate is 100 times too high", names=("lr_too_high",), trace=True)
def mamba_lr_x100(watch: Watch) -> float:
    return mamba_selective_copy(watch, lr=0.3)
