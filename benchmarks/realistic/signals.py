"""Tides, Morse code and brain waves."""

import math
from difflib import SequenceMatcher
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import batches, error_rate, pick
from .trials import Watch, failing, fit, healthy


def tides(n: int) -> tuple[Tensor, Tensor]:
    """Hours as Unix time and the standardised level of the sea in them, with the weather's part."""
    hour, wind = torch.arange(float(n), dtype=torch.float64), torch.zeros(n)
    level = torch.zeros(n, dtype=torch.float64)
    for period, height in ((12.42, 1.0), (12.0, 0.45), (23.93, 0.3), (25.82, 0.25), (6.21, 0.15)):
        level += height * torch.cos(2 * math.pi * (hour / period + float(torch.rand(1))))
    for i in range(1, n):
        wind[i] = 0.95 * wind[i - 1] + 0.05 * torch.randn(1)
    level = level.float() + wind
    return (1.6e9 + 3600 * hour).float(), (level - level.mean()) / level.std()


class Tide(nn.Module):
    """A GRU reads two days; its last state says the next twelve hours."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 48, batch_first=True)
        self.head = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[1][0])


@healthy
def tides_gru(watch: Watch, *, unix: bool = False, zero: bool = True) -> float:
    """The next half day at sea by SGD; the share of variance missed in the last weeks."""
    time, level = tides(2600)
    time = time if unix else (time - time.mean()) / time.std()
    windows = torch.stack([time, level], 1).unfold(0, 60, 1).mT
    x, y = windows[:, :48], windows[:, 48:, 1]
    net = Tide()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with watch(net, opt) as w:
        for i in batches(2000, 64, 330):
            if zero:
                opt.zero_grad()
            loss = F.mse_loss(net(x[i]), y[i])
            loss.backward()
            opt.step()
            w.loss(loss.item())
    with torch.no_grad():
        return float(F.mse_loss(net(x[2060:]), y[2060:]) / y[2060:].var())


@failing("Unix time as an input", names=("input_scale", "saturated"), trace=True)
def tides_gru_unix_time(watch: Watch) -> float:
    return tides_gru(watch, unix=True)


@failing("zero_grad is forgotten", names=("grads_pile_up",), trace=True)
def tides_gru_no_zero_grad(watch: Watch) -> float:
    return tides_gru(watch, zero=False)


CODE = [".", "-", "..", ".-", "-.", "--", "...", ".-.", "-..", "-.-"]


def morse(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Loudness (N, 120) of three to five Morse letters with noise, the letters, and how many."""
    x, y = torch.zeros(n, 120), torch.zeros(n, 5, dtype=torch.long)
    count = torch.randint(3, 6, (n,))
    for row in range(n):
        at = 2 + int(torch.randint(6, ()))
        for k in range(int(count[row])):
            y[row, k] = 1 + torch.randint(len(CODE), ())
            for sign in CODE[y[row, k] - 1]:
                long = (5 if sign == "-" else 2) + int(torch.randint(2, ()))
                x[row, at : at + long] = 1
                at += long + 2
            at += 4
    return (x - 0.4) / 0.5 + 0.4 * torch.randn(n, 120), y, count


class Telegraph(nn.Module):
    """Convolutions, an LSTM both ways, and log-probabilities (T, N, C) as CTC wants them."""

    def __init__(self, stride: int, view: bool) -> None:
        super().__init__()
        self.view = view
        self.ear = nn.Sequential(nn.Conv1d(1, 24, 5, 2, 2), nn.ReLU())
        self.ear.extend([nn.Conv1d(24, 32, 5, stride, 2), nn.ReLU()])
        self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 1 + len(CODE))

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.lstm(self.ear(x[:, None]).mT)[0]).log_softmax(2)
        n, t, c = out.shape
        return out.reshape(t, n, c) if self.view else out.transpose(0, 1)


@healthy
def morse_ctc(watch: Watch, *, stride: int = 2, view: bool = False) -> float:
    """Letters of Morse code by CTC and Adam with a clip; how unlike the letters are."""
    x, y, count = morse(1700)
    net = Telegraph(stride, view)
    opt = torch.optim.Adam(net.parameters(), lr=6e-3, betas=(0.9, 0.98))

    def loss_of(_: int) -> Tensor:
        i = pick(1500, 48)
        out = net(x[i])
        return F.ctc_loss(out, y[i], torch.full((48,), len(out)), count[i])

    fit(watch, net, opt, loss_of, 300, clip=5.0)
    with torch.no_grad():
        best = net(x[1500:]).argmax(2).T.tolist()
    told = [[b for a, b in pairwise([0, *row]) if b not in (0, a)] for row in best]
    true = [row[:k].tolist() for row, k in zip(y[1500:], count[1500:], strict=True)]
    alike = [SequenceMatcher(None, a, b).ratio() for a, b in zip(told, true, strict=True)]
    return 1 - sum(alike) / len(alike)


@failing("a stride of 16: fewer frames than letters", names=("non_finite",), trace=True)
def morse_ctc_few_frames(watch: Watch) -> float:
    return morse_ctc(watch, stride=16)


@failing("view instead of transpose", names=("not_learning",), trace=False)
def morse_ctc_view(watch: Watch) -> float:
    return morse_ctc(watch, view=True)


def brains(n: int) -> tuple[Tensor, Tensor]:
    """Volts (N, 6, 128) at six places of a head, and in which of four ways rhythms lie."""
    y, time = torch.randint(4, (n,)), torch.arange(128) / 128
    x = 6 * torch.randn(n, 6, 128) + 8 * torch.randn(n, 6, 128).cumsum(2) / 8
    for which in range(4):
        rate, side = (10, 20)[which % 2], slice(0, 3) if which < 2 else slice(3, 6)
        wave = (2 * math.pi * ((rate + torch.randn(n, 1, 1)) * time + torch.rand(n, 1, 1))).sin()
        size = torch.where(y == which, 5.0, 2.0)[:, None, None] * (0.7 + 0.6 * torch.rand(n, 3, 1))
        x[:, side] += size * wave
    return x * 1e-6, y


class Shallow(nn.Module):
    """Filters over time, then over the head; the logarithm of their power; a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Conv2d(1, 16, (1, 21), padding=(0, 10))
        self.head = nn.Conv2d(16, 24, (6, 1))
        self.pool, self.drop = nn.AvgPool2d((1, 32)), nn.Dropout(0.25)
        self.out = nn.Linear(24 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        power = self.pool(self.head(self.time(x[:, None])).square())
        return self.out(self.drop(power.clamp(min=1e-6).log().flatten(1)))


@healthy
def eeg_shallow(watch: Watch, *, volts: bool = False, by_class: bool = False) -> float:
    """Brain waves told apart by the power of learned filters, AdamW; the share of errors."""
    x, y = brains(2700)
    x = x if volts else (x - x.mean()) / x.std()
    net, criterion = Shallow(), nn.CrossEntropyLoss()
    opt = torch.optim.AdamW(net.parameters(), lr=6e-3, weight_decay=1e-3)
    with watch(net, opt, loss_func=criterion):
        for _ in range(8):
            for i in (y[:2400].argsort() if by_class else torch.randperm(2400)).split(40):
                opt.zero_grad()
                criterion(net(x[i]), y[i]).backward()
                opt.step()
    return error_rate(net, x[2400:], y[2400:])


@failing("volts: a few millionths", names=("input_scale", "zero_gradient"), trace=True)
def eeg_shallow_volts(watch: Watch) -> float:
    return eeg_shallow(watch, volts=True)


@failing("recordings come class by class, not shuffled", names=("unshuffled",), trace=True)
def eeg_shallow_by_class(watch: Watch) -> float:
    return eeg_shallow(watch, by_class=True)
