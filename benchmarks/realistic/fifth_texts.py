"""An LSTM of Python's manual, an encoder of its pages, a transformer that translates numbers."""

import re
from collections import Counter
from functools import cache
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from .fresh_images import pick
from .trials import Watch, failing, fit, healthy

LETTERS = " etaosnirlcdhmupfb\"'ygv.wxk,_()-:=jq`*0z1/[]><2{}#|5"


def letters(text: str) -> Tensor:
    """Ids of the letters that there are in LETTERS."""
    return torch.tensor([k for c in " ".join(text.lower().split()) if (k := LETTERS.find(c)) >= 0])


@cache
def manual() -> tuple[Tensor, Tensor]:
    """Letters of the manual's pages in alphabetical order: to train with, and held out."""
    ids = letters(" ".join(topics[name] for name in sorted(topics)))
    return ids[:-9600], ids[-9600:]


class Reader(nn.Module):
    """An LSTM of letters that goes on from a state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(len(LETTERS), 48), nn.Dropout(0.1)
        self.lstm, self.head = nn.LSTM(48, 128), nn.Linear(128, len(LETTERS))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, ...]:
        h, (a, b) = self.lstm(self.drop(self.embed(x)), state)
        return self.head(self.drop(h)), a.detach(), b.detach()


@healthy
def manual_lstm(watch: Watch, *, adam: bool = False, step_every: int = 1) -> float:
    """As PyTorch's example: states go on, SGD with a high rate, cut to a quarter; nats a letter."""
    text, test = (ids[: len(ids) // 24 * 24].view(24, -1).T for ids in manual())
    net = Reader()
    opt = (torch.optim.Adam if adam else torch.optim.SGD)(net.parameters(), lr=8.0)
    sched = ReduceLROnPlateau(opt, factor=0.25, patience=0)

    def nats() -> Tensor:
        net.eval()
        with torch.no_grad():
            out = net(test[:-1])[0]
        net.train()
        return F.cross_entropy(out.flatten(0, 1), test[1:].flatten())

    with watch(net, opt) as w:
        state = None
        for step in range(240):
            x = text[32 * step : 32 * step + 33]
            out, *state = net(x[:-1], state)
            loss = F.cross_entropy(out.flatten(0, 1), x[1:].flatten())
            net.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.25)
            if step % step_every == step_every - 1:
                opt.step()
            w.loss(loss.item())
            if step % 60 == 59:
                sched.step(nats())
    return float(nats())


@failing("Adam with the rate that was meant for SGD", names=("lr_too_high",), trace=True)
def manual_lstm_adam(watch: Watch) -> float:
    return manual_lstm(watch, adam=True)


@failing("opt.step() once an epoch", names=("unmoved", "lr_too_low", "not_learning"), trace=True)
def manual_lstm_step_outside(watch: Watch) -> float:
    return manual_lstm(watch, step_every=60)


def spelled(n: int, german: bool) -> list[int]:
    """A number by words: 1 to 19, 20 … 90 as 20 to 27, 100 as 28, 1000 as 29, und 30; ends 32."""
    words = [31] if german else []
    for part, name in ((n // 1000, 29), (n // 100 % 10, 28)):
        words += [part, name] if part else []
    ten, one = (0, n % 100) if n % 100 < 20 else (18 + n % 100 // 10, n % 10)
    rest = [one, 30 * (one * ten > 0), ten] if german else [ten, one]
    return [*words, *(word for word in rest if word), 32]


@cache
def numbers() -> tuple[Tensor, Tensor]:
    """Numbers below 10000 in English and, after 31, in German; padded with 0."""
    chosen = torch.randperm(9999, generator=torch.Generator().manual_seed(6))[:3300] + 1
    rows = ([torch.tensor(spelled(int(n), german)) for n in chosen] for german in (False, True))
    return tuple(nn.utils.rnn.pad_sequence(row, batch_first=True) for row in rows)


class Translator(nn.Module):
    """PyTorch's transformer with learnt places."""

    def __init__(self, softmax: bool):
        super().__init__()
        self.read, self.write, self.place = (nn.Embedding(n, 48) for n in (33, 33, 10))
        self.body = nn.Transformer(48, 4, 1, 1, 96, 0.05, batch_first=True)
        self.head, self.softmax = nn.Linear(48, 33), softmax

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = 1.7 * self.read(x) + self.place.weight[: x.shape[1]]
        b = 1.7 * self.write(y) + self.place.weight[: y.shape[1]]
        later = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
        h = self.body(a, b, tgt_mask=later, src_key_padding_mask=x == 0)
        return self.head(h).softmax(-1) if self.softmax else self.head(h)


@healthy
def numbers_transformer(watch: Watch, *, softmax: bool = False, lr: float = 0.2) -> float:
    """Noam's schedule and label smoothing; the share of words that are wrong when it writes."""
    x, y = numbers()
    net = Translator(softmax)
    opt = torch.optim.Adam(net.parameters(), lr, betas=(0.9, 0.98), eps=1e-9)
    sched = LambdaLR(opt, lambda s: 48**-0.5 * min((s + 1) ** -0.5, (s + 1) * 80**-1.5))
    criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)

    def loss_of(_: int) -> Tensor:
        i = pick(3000)
        return criterion(net(x[i], y[i, :-1]).flatten(0, 1), y[i, 1:].flatten())

    fit(watch, net, opt, loss_of, 120, sched=sched, loss_func=criterion)
    net.eval()
    out, goal = y[3000:, :1], y[3000:, 1:]
    with torch.no_grad():
        for _ in range(goal.shape[1]):
            out = torch.cat([out, net(x[3000:], out)[:, -1:].argmax(-1)], 1)
    return float((out[:, 1:] != goal)[goal > 0].float().mean())


@failing("the net ends in a softmax, before CrossEntropyLoss", names=("probabilities",), trace=True)
def numbers_transformer_softmax(watch: Watch) -> float:
    return numbers_transformer(watch, softmax=True)


@failing("LambdaLR: Noam's rates times Adam's 1e-4", names=("lr_too_low",), trace=True)
def numbers_transformer_rates_multiplied(watch: Watch) -> float:
    return numbers_transformer(watch, lr=1e-4)


PAGES = ("typesseq", "specialnames", "compound", "formatstrings", "debugger", "import")


@cache
def page_words(n_words: int) -> tuple[list[Tensor], int]:
    """Words of the longest pages by their rank from 1; rare ones are 0, and left out."""
    found = [re.findall(r"[a-z_]+", topics[p].lower()) for p in PAGES]
    known = [w for w, _ in Counter(w for page in found for w in page).most_common(n_words)]
    rank = {w: i for i, w in enumerate(known, 1)}
    return [torch.tensor([rank[w] for w in page if w in rank]) for page in found], n_words + 1


class Sorter(nn.Module):
    """A transformer's encoder, and the mean over words that are no padding."""

    def __init__(self, n_words: int):
        super().__init__()
        self.embed, self.place = nn.Embedding(n_words, 64, padding_idx=0), nn.Embedding(24, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, len(PAGES)))

    def forward(self, ids: Tensor) -> Tensor:
        empty = ids == 0
        h = self.body(self.embed(ids) + self.place.weight, src_key_padding_mask=empty)
        words = (~empty).unsqueeze(2).float()
        return self.head((h * words).sum(1) / words.sum(1))


@healthy
def pages_encoder(watch: Watch, *, shortest: int = 6, zeroed: bool = True) -> float:
    """Of which page of the manual a few words are, AdamW with one cycle; the share it misses."""
    pages, n_words = page_words(800)
    net = Sorter(n_words)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
    sched = OneCycleLR(opt, 4e-3, 300)

    def texts(n: int, held: bool) -> tuple[Tensor, Tensor]:
        y = torch.randint(len(PAGES), (n,))
        ends = [
            (len(p) * 4 // 5, len(p) - 24) if held else (0, len(p) * 4 // 5 - 24) for p in pages
        ]
        starts = [int(torch.randint(*ends[k], ())) for k in y.tolist()]
        x = torch.stack([pages[k][s : s + 24] for k, s in zip(y.tolist(), starts, strict=True)])
        return x * (torch.arange(24) < torch.randint(shortest, 25, (n, 1))), y

    with watch(net, opt) as w:
        for _ in range(300):
            x, y = texts(32, False)
            loss = F.cross_entropy(net(x), y)
            if zeroed:
                opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            w.loss(loss)
    net.eval()
    x, y = texts(1000, True)
    with torch.no_grad():
        out = net(x)
    return float((out.argmax(1) != y).float().mean()) if bool(out.isfinite().any()) else 1.0


@failing("some texts have no words: their mean is NaN", names=("non_finite",), trace=True)
def pages_encoder_empty_texts(watch: Watch) -> float:
    return pages_encoder(watch, shortest=0)


@failing("zero_grad is forgotten, with AdamW", names=("grads_pile_up",), trace=True)
def pages_encoder_no_zero_grad(watch: Watch) -> float:
    return pages_encoder(watch, zeroed=False)
