"""Sequences once more: sounds, sorting, forecasts, masked words, sessions, shared blocks."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from .fresh_images import pick
from .texts import MODULES, sources, windows, words
from .trials import Watch, fit, healthy


class Causal(nn.Module):
    """A dilated causal convolution with weight norm, beside its input."""

    def __init__(self, n_in: int, n_out: int, dilation: int, gain: float, rate: float):
        super().__init__()
        conv = nn.Conv1d(n_in, n_out, 3, dilation=dilation)
        conv.weight.data.mul_(gain)
        self.pad, self.conv, self.drop = 2 * dilation, weight_norm(conv), nn.Dropout(rate)
        self.short = nn.Conv1d(n_in, n_out, 1) if gain == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.relu(self.conv(F.pad(x, (self.pad, 0)))))
        return h if self.short is None else h + self.short(x)


@healthy
def tcn_sounds(
    watch: Watch, *, gain: float = 1.0, rate: float = 0.1, in_order: bool = False
) -> float:
    """Which of five ways a tone changes in raw sound; Adam, a plateau scheduler by epoch."""
    t, kind = torch.linspace(0, 1, 200), torch.randint(0, 5, (1200,))
    base = 8 + 8 * torch.rand(1200, 1)
    bend = torch.stack([0 * t, t**2 / 2, -(t**2) / 2, (t - 0.5).abs() * t, torch.sin(12 * t) / 12])
    x = torch.sin(6.28 * base * (t + bend[kind])) + 0.3 * torch.randn(1200, 200)
    order = kind[:1000].argsort() if in_order else torch.arange(1000)
    sizes = ((1, 24, 1), (24, 24, 2), (24, 24, 4), (24, 24, 8), (24, 24, 16))
    net = nn.Sequential(*(Causal(a, b, d, gain, rate) for a, b, d in sizes))
    net.extend([nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(24, 5)])
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=2)
    with watch(net, opt) as w:
        for _ in range(10):
            total = 0.0
            for i in (order if in_order else torch.randperm(1000)).split(40):
                loss = F.cross_entropy(net(x[i][:, None]), kind[i])
                opt.zero_grad()
                loss.backward()
                opt.step()
                w.loss(loss)
                total += loss.item()
            sched.step(total)
    net.eval()
    with torch.no_grad():
        return float((net(x[1000:, None]).argmax(1) != kind[1000:]).float().mean())


class WaveNet(nn.Module):
    """Gated dilated convolutions whose skips are added, over one value at each time."""

    def __init__(self, both_sides: bool):
        super().__init__()
        self.first = nn.Conv1d(1, 24, 1)
        self.gates = nn.ModuleList(nn.Conv1d(24, 48, 2, dilation=2**i) for i in range(5))
        self.skips = nn.ModuleList(nn.Conv1d(24, 24, 1) for _ in range(5))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(24, 32, 1))
        self.both_sides = both_sides

    def forward(self, x: Tensor) -> Tensor:
        h, total = self.first(x), torch.zeros(1)
        for i, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            pad = (2**i // 2, 2**i - 2**i // 2) if self.both_sides else (2**i, 0)
            if self.both_sides and i == 0:
                pad = (0, 1)
            a, b = gate(F.pad(h, pad)).chunk(2, 1)
            out = skip(a.tanh() * b.sigmoid())
            h, total = h + out, total + out
        return self.head(total)


@healthy
def wavenet_classes(watch: Watch, *, unit: float = 1.0, both_sides: bool = False) -> float:
    """The next sample of a sound as one of 32 mu-law classes; nats for each."""
    t, f = torch.arange(120.0), 0.1 + 0.3 * torch.rand(900, 1)
    x = 0.5 * torch.sin(f * t + 6 * torch.rand(900, 1)) + 0.4 * torch.sin(0.31 * f * t)
    x = (x + 0.02 * torch.randn(900, 120)).clamp(-1, 1)
    y = ((x.sign() * torch.log1p(255 * x.abs()) / math.log(256) + 1) * 15.99).long()
    net = WaveNet(both_sides)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)

    def loss_of(_: int) -> Tensor:
        i = pick(800, 24)
        return F.cross_entropy(net(x[i, None, :-1] * unit), y[i, 1:])

    fit(watch, net, opt, loss_of, 250, clip=1.0)
    with torch.no_grad():
        out = net(x[800:, None, :60] * unit)[:, :, -1]
    return F.cross_entropy(out, y[800:, 60]).item()


class Sorter(nn.Module):
    """PyTorch's own encoder-decoder transformer over small numbers."""

    def __init__(self, norm_first: bool):
        super().__init__()
        self.embed, self.place = nn.Embedding(33, 48), nn.Embedding(12, 48)
        self.body = nn.Transformer(48, 4, 2, 2, 96, 0.0, batch_first=True, norm_first=norm_first)
        self.head = nn.Linear(48, 32)

    def forward(self, src: Tensor, tgt: Tensor, padding: Tensor) -> Tensor:
        n = tgt.shape[1]
        a, b = (self.embed(t) + self.place.weight[: t.shape[1]] for t in (src, tgt))
        mask = torch.ones(n, n).triu(1).bool()
        out = self.body(a, b, tgt_mask=mask, src_key_padding_mask=padding,
                        memory_key_padding_mask=padding)  # fmt: skip
        return self.head(out)


@healthy
def sorting_transformer(
    watch: Watch, *, norm_first: bool = True, warm: int = 40, lr: float = 3e-3, keep: bool = False
) -> float:
    """Numbers sorted by an encoder and a decoder, the rate of Vaswani et al.; tokens wrong."""
    net = Sorter(norm_first)
    opt = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-9)
    factor = lambda i: min((i + 1) / warm, (warm / (i + 1)) ** 0.5) if warm else 1.0  # noqa: E731
    sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)

    def logits(n: int) -> tuple[Tensor, Tensor]:
        length = torch.randint(5, 9, (n, 1))
        real = torch.arange(8) < length
        src = torch.randint(0, 31, (n, 8)).where(real, torch.tensor(31))
        y = src.sort(1).values
        start = torch.full((n, 1), 32)
        return net(src, torch.cat([start, y[:, :-1]], 1), real if keep else ~real), y

    def loss_of(_: int) -> Tensor:
        out, y = logits(48)
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=31)

    fit(watch, net, opt, loss_of, 260, sched=sched)
    net.eval()
    with torch.no_grad():
        out, y = logits(200)
    return float((out.argmax(2) != y)[y < 31].float().mean())


class Beats(nn.Module):
    """N-BEATS: blocks that explain a part of the past, and pass on what is left."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(36, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 42)
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), 6)
        for block in self.blocks:
            back, ahead = block(x).split((36, 6), 1)
            x, total = x - back, total + ahead
        return total


@healthy
def nbeats_sales(watch: Watch, *, percent: bool = False, gain: float = 1.0) -> float:
    """Six months ahead of three years, with MAE; the share of the naive forecast's error."""
    t, n = torch.arange(42.0), 900
    season = torch.randn(n, 1) * torch.sin(6.283 * t / 12 + 6.283 * torch.rand(n, 1))
    all_ = season + torch.randn(n, 1) * t / 30 + 0.1 * torch.randn(n, 42)
    x, y = all_[:, :36], all_[:, 36:]
    net = Beats()
    for p in net.parameters():
        p.data *= gain
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1, factor=0.2)
    with watch(net, opt) as w:
        for _ in range(20):
            total = 0.0
            for i in torch.randperm(800).split(50):
                miss = (net(x[i]) - y[i]).abs()
                loss = (miss / y[i].abs()).mean() if percent else miss.mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                w.loss(loss)
                total += loss.item()
            sched.step(total)
    with torch.no_grad():
        out = net(x[800:])
    naive = (x[800:, 24:30] - y[800:]).abs().mean()
    return float((out - y[800:]).abs().mean() / naive)


class TextCNN(nn.Module):
    """Kim's CNN for sentences: filters of three widths, each one's largest answer."""

    def __init__(self, transposed: bool):
        super().__init__()
        self.embed = nn.Embedding(400, 32)
        self.filters = nn.ModuleList(nn.Conv1d(32, 32, k) for k in (2, 3, 4))
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(96, len(MODULES)))
        self.transposed = transposed

    def forward(self, ids: Tensor) -> Tensor:
        e = self.embed(ids)
        e = e.transpose(1, 2) if self.transposed else e.view(len(e), 32, -1)
        return self.head(torch.cat([F.relu(f(e)).amax(2) for f in self.filters], 1))


def passages(n: int, length: int = 40) -> tuple[Tensor, Tensor]:
    """Passages of ids of characters, 40 each, and the module that each comes from."""
    x, y = [], []
    for label, text in enumerate(sources().values()):
        ids = torch.tensor(list(text.lower().encode("ascii", "replace"))).clamp(max=127)
        x.append(windows(ids, n, length))
        y.append(torch.full((n,), label))
    mix = torch.randperm(n * len(x))
    return torch.cat(x)[mix], torch.cat(y)[mix]


@healthy
def text_cnn(watch: Watch, *, transposed: bool = True, lr: float = 2e-3) -> float:
    """Which module a passage of Python comes from; the share of wrong answers."""
    x, y = passages(400, 80)
    net = TextCNN(transposed)
    opt = torch.optim.Adam(net.parameters(), lr=lr)

    def loss_of(_: int) -> Tensor:
        i = pick(2800, 50)
        return F.cross_entropy(net(x[i]), y[i], label_smoothing=0.1)

    fit(watch, net, opt, loss_of, 350)
    net.eval()
    with torch.no_grad():
        return float((net(x[2800:]).argmax(1) != y[2800:]).float().mean())


class Masked(nn.Module):
    """A small BERT whose output layer is its embedding."""

    def __init__(self, std: float, shared: int = 1):
        super().__init__()
        self.embed, self.place = nn.Embedding(401, 64), nn.Parameter(torch.randn(24, 64) * 0.02)
        nn.init.normal_(self.embed.weight, std=std)
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList(deepcopy(layer) for _ in range(2 if shared == 1 else 1))
        self.shared, self.norm = shared, nn.LayerNorm(64)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.place
        for layer in list(self.layers) * self.shared:
            h = layer(h)
        return self.norm(h) @ self.embed.weight[:400].T


@healthy
def masked_words(watch: Watch, *, std: float = 0.02, warm: int = 30, shared: int = 1) -> float:
    """Masked words from both sides, gradients of two batches added; nats for a masked word."""
    ids, test, _ = words()
    net = Masked(std, shared)
    opt = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / warm))

    def loss_of(source: Tensor, n: int) -> Tensor:
        x = windows(source, n, 23)
        hide = torch.rand(x.shape) < 0.2
        y = x.where(hide, torch.tensor(-100))
        return F.cross_entropy(net(x.masked_fill(hide, 400)).flatten(0, 1), y.flatten())

    with watch(net, opt) as w:
        for _ in range(200):
            opt.zero_grad()
            for _ in range(2):
                loss = loss_of(ids, 16)
                (loss / 2).backward()
                w.loss(loss)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            sched.step()
    net.eval()
    with torch.no_grad():
        return loss_of(test, 200).item()


@healthy
def albert_words(watch: Watch) -> float:
    """One layer of a transformer used three times, masked words."""
    return masked_words(watch, shared=3)
