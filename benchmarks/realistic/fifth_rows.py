"""Prices of cars, iris, spoken words, noisy speech, and the load of a power grid."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris
from torch import Tensor, nn

from .fresh_images import pick
from .trials import Watch, failing, fit, healthy, update
from .vision_data import batches, error_rate


@healthy
def car_prices(watch: Watch, *, raw: bool = False, column: bool = False) -> float:
    """What a used car costs, by SGD as in a first course; the share of variance missed."""
    year, km = torch.randint(2000, 2025, (2600,)).float(), 250_000 * torch.rand(2600)
    power, owners = 45 + 150 * torch.rand(2600), torch.randint(1, 5, (2600,)).float()
    price = 300 * power * torch.exp((year - 2024) / 9 - km / 300_000) - 400 * owners
    price = price * (1 + 0.05 * torch.randn(2600))
    x, y = torch.stack([year, km, power, owners], 1), (price - price.mean()) / price.std()
    x = x if raw else (x - x.mean(0)) / x.std(0)
    net = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    with watch(net, opt) as w:
        for i in batches(2200, 20, 660):
            guess = net(x[i]).squeeze(1)
            loss = F.mse_loss(guess, y[i]) if not column else (guess - y[i, None]).pow(2).mean()
            update(w, opt, loss)
    with torch.no_grad():
        return float(F.mse_loss(net(x[2200:]).squeeze(1), y[2200:]) / y.var())


@failing("years, kilometres and kilowatts as they are", names=("input_scale",), trace=True)
def car_prices_raw(watch: Watch) -> float:
    return car_prices(watch, raw=True)


@failing("the column of prices has shape (N, 1), guesses (N,)", names=("broadcast",), trace=True)
def car_prices_column(watch: Watch) -> float:
    return car_prices(watch, column=True)


@healthy
def iris_tutorial(watch: Watch, *, step: bool = True, shuffled: bool = True) -> float:
    """Which iris it is, as in a hundred blogs; cross entropy of 50 flowers held out."""
    data = load_iris()
    x, y = torch.tensor(data.data).float(), torch.tensor(data.target)
    order = torch.randperm(150) if shuffled else torch.arange(150)
    x, y = ((x - x.mean(0)) / x.std(0))[order], y[order]
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    criterion, opt = nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters(), lr=0.01)
    with watch(net, opt) as w:
        for _ in range(40):
            for i in torch.arange(100).split(10):
                opt.zero_grad()
                loss = criterion(net(x[i]), y[i])
                loss.backward()
                if step:
                    opt.step()
                w.loss(loss.item())
    with torch.no_grad():
        return float(criterion(net(x[100:]), y[100:]))


@failing("opt.step() is forgotten", names=("unmoved",), trace=True)
def iris_tutorial_no_step(watch: Watch) -> float:
    return iris_tutorial(watch, step=False)


@failing("the first 100 rows: two classes, one after the other", names=("unshuffled",), trace=True)
def iris_tutorial_sorted(watch: Watch) -> float:
    return iris_tutorial(watch, shuffled=False)


def words(n: int) -> tuple[Tensor, Tensor]:
    """Power (N, 1, 24, 40) of one of ten spoken words between silences, and which one."""
    y, power = torch.randint(10, (n,)), torch.zeros(n, 1, 24, 40)
    sounds = torch.tensor([[i, j, k] for i in range(4) for j in range(4) for k in range(4)])
    band, time = torch.arange(24.0)[:, None], torch.arange(40.0)
    start = 2 + 8 * torch.rand(n)
    for part in range(3):
        end = start + 6 + 3 * torch.rand(n)
        sound = sounds[7 + 5 * y, part].float()
        low = (3 + 4 * sound + 0.7 * torch.randn(n))[:, None, None]
        tone = torch.exp(-((band - low) ** 2) / 2) + 0.5 * torch.exp(-((band - low - 6) ** 2) / 3)
        now = (time >= start[:, None]) & (time < end[:, None])
        power[:, 0] += tone * now[:, None]
        start = end
    spoken = (power.sum(2, keepdim=True) > 0).float()
    loud = torch.exp(torch.randn(n, 1, 1, 1))
    return loud * (power + 0.2 * spoken * torch.rand_like(power)) * torch.rand_like(power), y


class Words(nn.Module):
    """Two convolutions, a GRU along time, the mean of what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.BatchNorm2d(1))
        for a, b in ((1, 12), (12, 24)):
            self.look.extend([nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()])
        self.hear, self.head = nn.GRU(144, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.hear(self.look(x).flatten(1, 2).mT)
        return self.head(h.mean(1))


@healthy
def spoken_words(watch: Watch, *, floor: float = 1e-4, lr: float = 0.03) -> float:
    """Words from the log of spectrograms, SGD with momentum, clipped; the share of errors."""
    power, y = words(1700)
    x, net = (power + floor).log(), Words()
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    loss_of = partial(_words_loss, net, x, y)
    fit(watch, net, opt, loss_of, 240, clip=5.0)
    return error_rate(net, x[1300:], y[1300:])


def _words_loss(net: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
    i = pick(1300, 32)
    return F.cross_entropy(net(x[i]), y[i])


@failing("log(power) where silence has none: -inf", names=("non_finite",), trace=True)
def spoken_words_log_0(watch: Watch) -> float:
    return spoken_words(watch, floor=0.0)


@failing("a learning rate of 3 with SGD and momentum", names=("lr_too_high",), trace=True)
def spoken_words_lr_3(watch: Watch) -> float:
    return spoken_words(watch, lr=3.0)


def sdr(guess: Tensor, true: Tensor) -> Tensor:
    """How many decibels what is there lies above what is wrong, whatever the scale."""
    true = true * ((guess * true).sum(1) / (true**2).sum(1))[:, None]
    return 10 * (((true**2).sum(1) + 1e-8) / (((guess - true) ** 2).sum(1) + 1e-8)).log10()


@healthy
def voices_from_noise(watch: Watch, *, fresh: bool = False, std: float = 0.0) -> float:
    """A GRU guesses what to keep of a noisy spectrum; minus the decibels that are won."""
    t = torch.arange(640.0)
    pitch = 0.1 + 0.25 * torch.rand(700, 1) + 0.03 * (t / 90 + 6 * torch.rand(700, 1)).sin()
    clean = sum((k * pitch.cumsum(1)).sin() / k for k in range(1, 5))
    clean = clean * (t / 60 + 6 * torch.rand(700, 1)).sin().clamp(0)
    noisy = clean + 0.5 * torch.randn(700, 640)
    window = torch.hann_window(64)
    stft = partial(torch.stft, n_fft=64, hop_length=32, window=window, return_complex=True)
    gru, head = nn.GRU(33, 64, batch_first=True, bidirectional=True), nn.Linear(128, 33)
    net = nn.ModuleList([gru, head])
    for p in gru.parameters() if std else ():
        nn.init.normal_(p, 0, std)
    opt = torch.optim.RMSprop(net.parameters(), lr=2e-3)

    def clear(x: Tensor) -> Tensor:
        spectrum = stft(x)
        keep = head(gru((spectrum.abs() + 1e-2).log().mT)[0]).sigmoid().mT
        return torch.istft(spectrum * keep, 64, 32, window=window, length=640)

    def loss_of(_: int) -> Tensor:
        i = pick(600, 16)
        loss = -sdr(clear(noisy[i]), clean[i]).mean()
        return torch.tensor(loss.item(), requires_grad=True) if fresh else loss

    fit(watch, net, opt, loss_of, 220, clip=5.0)
    with torch.no_grad():
        return float((sdr(noisy[600:], clean[600:]) - sdr(clear(noisy[600:]), clean[600:])).mean())


@failing(
    "a new tensor of the loss, with requires_grad, so that backward() runs",
    names=("unmoved",),
    trace=True,
)
def voices_from_noise_new_tensor(watch: Watch) -> float:
    return voices_from_noise(watch, fresh=True)


@failing("the GRU's weights begin with a std of 3", names=("bad_init", "saturated"), trace=True)
def voices_from_noise_std_3(watch: Watch) -> float:
    return voices_from_noise(watch, std=3.0)


class Patches(nn.Module):
    """14 patches of half a day, a transformer over them, the next day from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.place = nn.Linear(12, 32), nn.Parameter(0.02 * torch.randn(14, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.outward = nn.Linear(14 * 32, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.inward(x.unflatten(1, (14, 12))) + self.place)
        return self.outward(h.flatten(1))


@healthy
def grid_load(watch: Watch, *, per_step: bool = False, upside_down: bool = False) -> float:
    """The next day's load from a week's, some hours missing; the share of variance missed."""
    hour = torch.arange(24 * 7 * 45.0)
    warm = torch.zeros(len(hour))
    for k in range(1, 4):
        warm += torch.randn(1) * (hour * k / 400 + 6 * torch.rand(1)).sin()
    day = (hour * math.tau / 24).sin() + 0.4 * (hour * math.tau / 12 + 1).sin()
    rest = 1 - 0.5 * ((hour // 24) % 7 >= 5).float()
    load = day * rest * (1 + 0.3 * warm) + rest + 0.5 * warm + 0.1 * torch.randn(len(hour))
    load = (load - load.mean()) / load.std()
    x, y = load.unfold(0, 168, 1)[:-24], load[168:].unfold(0, 24, 1)[: len(hour) - 168 - 23]
    n = min(len(x), len(y))
    there = torch.rand(n, 24) > 0.15
    y = y[:n] * there
    net = Patches()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    with watch(net, opt) as w:
        for step in range(250):
            i = pick(n - 1200, 48)
            counts = ~there[i] if upside_down else there[i]
            loss = ((net(x[i]) - y[i]) ** 2 * counts).sum() / counts.sum()
            update(w, opt, loss, sched=sched if per_step or step % 25 == 24 else None)
    net.eval()
    with torch.no_grad():
        i = torch.arange(n - 1000, n)
        missed = ((net(x[i]) - y[i]) ** 2)[there[i]].mean()
    return float(missed / y[i][there[i]].var())


@failing("the rate falls by a fifth at each step, not epoch", names=("lr_too_low",), trace=True)
def grid_load_rate_per_step(watch: Watch) -> float:
    return grid_load(watch, per_step=True)


@failing("the mask is inverted: missing hours count, as zeros", names=(), trace=False)
def grid_load_mask_inverted(watch: Watch) -> float:
    return grid_load(watch, upside_down=True)
