"""CTC, LSTMs, graphs, a table and an autoencoder of baskets."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fresh_images import pick
from .trials import Watch, failing, fit, healthy
from .vision_data import standard_digits


class Lines(nn.Module):
    """A convolution over a line of digits, a bidirectional LSTM along it, scores of 11 signs."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(1, 24, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2))
        self.along = nn.LSTM(96, 48, bidirectional=True)
        self.head = nn.Linear(96, 11)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.along(self.look(x).flatten(1, 2).permute(2, 0, 1))
        return self.head(h)


@healthy
def ctc_lines(watch: Watch, *, dim: int = 2, blank: int = 10) -> float:
    """Three digits side by side, CTC; the share of lines that are not read as they are."""
    x, y, x_test, y_test = standard_digits()
    net = Lines()
    opt = torch.optim.Adam(net.parameters(), lr=6e-3)

    def line(x: Tensor, i: Tensor) -> Tensor:
        return torch.cat(x[i].unbind(1), 3)

    def loss_of(_: int) -> Tensor:
        i = torch.randint(len(x), (32, 3))
        log_p = F.log_softmax(net(line(x, i)), dim)
        return F.ctc_loss(log_p, y[i], (len(log_p),) * 32, (3,) * 32, blank)

    fit(watch, net, opt, loss_of, 220, clip=5.0)
    i = torch.arange(396).view(-1, 3)
    with torch.no_grad():
        read = [torch.unique_consecutive(r) for r in net(line(x_test, i)).argmax(2).T]
    true = y_test[i]
    return sum(r[r != 10].tolist() != t.tolist() for r, t in zip(read, true, strict=True)) / 132


@failing("log_softmax over time", names=("softmax_dim",), trace=True)
def ctc_lines_over_time(watch: Watch) -> float:
    return ctc_lines(watch, dim=0)


@failing("the blank is the sign for the digit 0", names=(), trace=False)
def ctc_lines_blank_0(watch: Watch) -> float:
    return ctc_lines(watch, blank=0)


@healthy
def reviews_lstm(watch: Watch, *, ordered: bool = False, rate: float = 0.2) -> float:
    """Is a review good? "not" turns the next word around; an LSTM's last state, one logit."""
    word, n = torch.randint(2, 120, (2500, 24)), torch.randint(6, 25, (2500,))
    word[torch.rand(word.shape) < 0.1] = 1
    tone = (word < 30).float() - ((word >= 30) & (word < 58)).float()
    tone[:, 1:] *= 1 - 2 * (word[:, :-1] == 1).float()
    read = torch.arange(24) < n[:, None]
    y = ((tone * read).sum(1) > 0).float()
    order = y[:2200].argsort() if ordered else torch.arange(2200)
    embed, lstm, drop, head = (
        nn.Embedding(120, 32),
        nn.LSTM(32, 64),
        nn.Dropout(rate),
        nn.Linear(64, 1),
    )
    net = nn.ModuleList([embed, lstm, drop, head])
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)

    def logit(i: Tensor) -> Tensor:
        h, _ = lstm(drop(embed(word[i])).transpose(0, 1))
        return head(drop(h[n[i] - 1, torch.arange(len(i))])).squeeze(1)

    def loss_of(step: int) -> Tensor:
        i = order[(torch.arange(50) + 50 * step) % 2200]
        return F.binary_cross_entropy_with_logits(logit(i), y[i])

    fit(watch, net, opt, loss_of, 44 * 6)
    net.eval()
    with torch.no_grad():
        return float(((logit(torch.arange(2200, 2500)) > 0) != (y[2200:] > 0)).float().mean())


@failing("all bad reviews, then all good ones", names=("unshuffled",), trace=True)
def reviews_lstm_sorted(watch: Watch) -> float:
    return reviews_lstm(watch, ordered=True)


@failing("dropout of 0.97", names=("dropout",), trace=True)
def reviews_lstm_dropout(watch: Watch) -> float:
    return reviews_lstm(watch, rate=0.97)


@healthy
def passengers_lstm(watch: Watch, *, batch_first: bool = True, unit: float = 1.0) -> float:
    """Next month's passengers from 24 months, standardised; the share of variance missed."""
    t = torch.arange(24 + 1200.0)
    line = (t / 300).sin() + 0.6 * (t * math.tau / 12).sin() * (1 + (t / 170).cos())
    line = unit * (line + 0.1 * torch.randn(len(t)))
    x, y = line.unfold(0, 24, 1)[:-1, :, None], line[24:, None]
    lstm, head = nn.LSTM(1, 40, 2, batch_first=batch_first), nn.Linear(40, 1)
    net = nn.ModuleList([lstm, head])
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    shuffled = torch.randperm(1200)

    def guess(i: Tensor) -> Tensor:
        return head(lstm(x[i])[0][:, -1])

    fit(watch, net, opt, lambda _: F.mse_loss(guess(i := shuffled[pick(900, 32)]), y[i]), 250)
    with torch.no_grad():
        return float(F.mse_loss(guess(shuffled[900:]), y[shuffled[900:]]) / y.var())


@failing("batch_first is forgotten: the LSTM runs along the batch", names=(), trace=False)
def passengers_lstm_not_batch_first(watch: Watch) -> float:
    return passengers_lstm(watch, batch_first=False)


@failing("passengers as they are, in thousands", names=("input_scale", "target_scale"), trace=True)
def passengers_lstm_raw(watch: Watch) -> float:
    return passengers_lstm(watch, unit=3000.0)


@healthy
def links_gae(watch: Watch, *, negatives: bool = True) -> float:
    """Is there a link? A graph autoencoder with Adam; 1 minus AUC of links left out."""
    group = torch.randint(6, (240,))
    p = 0.01 + 0.2 * (group[:, None] == group).float()
    link = (torch.rand(240, 240) < p).triu(1)
    kept = link & (torch.rand(240, 240) < 0.85)
    adj = (kept | kept.T).float() + torch.eye(240)
    adj = adj / (adj.sum(0)[:, None] * adj.sum(1)).sqrt()
    one, two = nn.Linear(240, 64, bias=False), nn.Linear(64, 16, bias=False)
    net = nn.ModuleList([one, two])
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    pos, none = kept.nonzero().T, (~link).triu(1).nonzero().T

    def score(pairs: Tensor) -> Tensor:
        z = adj @ two(F.relu(adj @ one.weight.T))
        return (z[pairs[0]] * z[pairs[1]]).sum(1)

    def loss_of(_: int) -> Tensor:
        bad = none[:, torch.randint(none.shape[1], (pos.shape[1],))]
        loss = -F.logsigmoid(score(pos)).mean()
        return loss - F.logsigmoid(-score(bad)).mean() if negatives else loss

    fit(watch, net, opt, loss_of, 400)
    with torch.no_grad():
        good, bad = score((link & ~kept).nonzero().T), score(none)
    return 1 - float((good[:, None] > bad).float().mean())


@failing("links alone: no pairs without one", names=("representation_collapse",), trace=True)
def links_gae_no_negatives(watch: Watch) -> float:
    return links_gae(watch, negatives=False)


class Gin(nn.Module):
    """Sums over neighbours, MLPs, and a sum over all nodes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((1, 32), (32, 32), (32, 32))
        layers = (nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b)) for a, b in sizes)
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in sizes])
        self.head = nn.Linear(32, 1)

    def forward(self, adj: Tensor) -> Tensor:
        h = adj.sum(2, keepdim=True)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = F.relu(norm(layer(h + adj @ h)))
        return self.head(h.mean(1)).squeeze(1)


@healthy
def triangles_gin(watch: Watch, *, floor: bool = False) -> float:
    """How many triangles a graph has, as a logarithm; the share of variance missed."""
    heavy = 0.1 + 0.8 * torch.rand(1500, 1, 1) * torch.rand(1500, 14, 1)
    adj = (torch.rand(1500, 14, 14) < (heavy * heavy.mT).sqrt()).float().triu(1)
    adj = adj + adj.mT
    y = (adj.matrix_power(3).diagonal(dim1=1, dim2=2).sum(1) + 1).log()
    y = (y - y.mean()) / y.std()
    adj = adj / 4 if not floor else adj // 4
    net = Gin()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    fit(watch, net, opt, lambda _: F.smooth_l1_loss(net(adj[i := pick(1200, 32)]), y[i]), 250)
    with torch.no_grad():
        return float(F.mse_loss(net(adj[1200:]), y[1200:]) / y.var())


@failing(
    "links are divided as integers, and all become 0",
    names=("constant_input", "representation_collapse"),
    trace=True,
)
def triangles_gin_integers(watch: Watch) -> float:
    return triangles_gin(watch, floor=True)


@healthy
def bikes_bf16(watch: Watch, *, raw: bool = False, step_lr: int = 100) -> float:
    """Bikes lent by hour, weather and year, in bfloat16 by autocast; variance missed."""
    hour, warm = torch.randint(24, (3000,)).float(), 283 + 9 * torch.randn(3000)
    year, wet = 2011 + torch.randint(2, (3000,)).float(), 100 * torch.rand(3000)
    busy = torch.exp(-((hour - 8) ** 2) / 6) + 1.3 * torch.exp(-((hour - 18) ** 2) / 10)
    y = (60 + 300 * busy) * (1 + 0.05 * (warm - 283)).clamp(0.2) * (1 - wet / 200)
    y = y * (0.7 + 0.5 * (year - 2011)) + 20 * torch.randn(3000)
    x, y = torch.stack([hour, warm, year, wet], 1), ((y - y.mean()) / y.std())[:, None]
    x = x if raw else (x - x.mean(0)) / x.std(0)
    net = nn.Sequential(nn.Linear(4, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 1))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_lr, 0.5)

    def loss_of(_: int) -> Tensor:
        i = pick(2500)
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x[i])
        return F.mse_loss(out.float(), y[i])

    fit(watch, net, opt, loss_of, 500, sched=sched)
    with torch.no_grad():
        return float(F.mse_loss(net(x[2500:]), y[2500:]) / y.var())


@failing("year, kelvin and per cent as they are", names=("input_scale",), trace=True)
def bikes_bf16_raw(watch: Watch) -> float:
    return bikes_bf16(watch, raw=True)


@failing("StepLR of epochs is called at each batch", names=("lr_too_low",), trace=True)
def bikes_bf16_rate_per_batch(watch: Watch) -> float:
    return bikes_bf16(watch, step_lr=3)


@healthy
def baskets_autoencoder(watch: Watch, *, drop: float = 0.3, l2: float = 1e-6) -> float:
    """What else is in a basket? A dense autoencoder, multinomial; 1 minus hits in the first ten."""
    taste = torch.randn(150, 6).mul(2) @ torch.randn(6, 1600)
    basket = (torch.rand(150, 1600) < (taste - 4).sigmoid()).float().T
    one = (basket + 1e-6).multinomial(1)
    given = basket.scatter(1, one, 0.0)
    net = nn.Sequential(nn.Dropout(drop), nn.Linear(150, 64), nn.Tanh(), nn.Linear(64, 150))
    opt = torch.optim.Adam(net.parameters(), lr=4e-3, weight_decay=l2)

    def loss_of(_: int) -> Tensor:
        i = pick(1400, 50)
        return -(F.log_softmax(net(F.normalize(given[i])), 1) * basket[i]).sum(1).mean()

    fit(watch, net, opt, loss_of, 350)
    net.eval()
    with torch.no_grad():
        out = net(F.normalize(given[1400:])).masked_fill(given[1400:] > 0, -1e9)
    return 1 - float((out.topk(10).indices == one[1400:]).any(1).float().mean())


@failing("weight decay of 30 inside Adam", names=("weight_decay",), trace=True)
def baskets_autoencoder_decay(watch: Watch) -> float:
    return baskets_autoencoder(watch, l2=30.0)
