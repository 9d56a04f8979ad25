"""Names, dates and passages by transformers, an MLP and a GRU with attention."""

import re
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .fresh_images import pick
from .texts import sources
from .trials import Watch, failing, fit, healthy

LETTERS = ".abcdefghijklmnopqrstuvwxyz_"


@cache
def identifiers() -> Tensor:
    """Names from Python's library as ids of letters, with a 0 before and zeros after each."""
    names = {w for s in sources().values() for w in re.findall(r"[a-z_]{4,14}", s.lower())}
    rows = [[0, *(LETTERS.index(c) for c in name)] for name in sorted(names)]
    ids = torch.tensor([row + [0] * (16 - len(row)) for row in rows])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(4))]


def next_letters(ids: Tensor) -> tuple[Tensor, Tensor]:
    """What is read, and the next letter; -1 after the end of a name."""
    x, y = ids[:, :-1], ids[:, 1:].clone()
    y[:, 1:][(y[:, 1:] == 0) & (y[:, :-1] == 0)] = -1
    return x, y


class Block(nn.Module):
    """Attention to what came before, and an MLP."""

    def __init__(self, dim: int, causal: bool):
        super().__init__()
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out, self.causal = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), causal
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class NameGPT(nn.Module):
    """Three blocks over letters, a place for each."""

    def __init__(self, causal: bool):
        super().__init__()
        self.letter, self.place = nn.Embedding(28, 64), nn.Embedding(15, 64)
        self.blocks = nn.Sequential(*(Block(64, causal) for _ in range(3)), nn.LayerNorm(64))
        self.head = nn.Linear(64, 28, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.letter(ids) + self.place.weight[: ids.shape[1]]))


@healthy
def names_gpt(watch: Watch, *, lr: float = 1e-3, causal: bool = True) -> float:
    """A GPT of names as in makemore; nats per letter when a prefix alone is read."""
    ids = identifiers()
    net = NameGPT(causal)
    opt = torch.optim.AdamW(net.parameters(), lr, betas=(0.9, 0.99), weight_decay=0.1)

    def loss_of(_: int) -> Tensor:
        x, y = next_letters(ids[pick(len(ids) - 300, 48)])
        return F.cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=-1)

    fit(watch, net, opt, loss_of, 200, clip=1.0)
    x, y = next_letters(ids[-300:])
    with torch.no_grad():
        out = torch.stack([net(x[:, : n + 1])[:, -1] for n in range(15)], 1)
    return float(F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-1))


@failing("a learning rate of 0.3 with AdamW", names=("lr_too_high",), trace=True)
def names_gpt_lr_x300(watch: Watch) -> float:
    return names_gpt(watch, lr=0.3)


@failing("attention sees the letters that are to be guessed", names=(), trace=False)
def names_gpt_no_mask(watch: Watch) -> float:
    return names_gpt(watch, causal=False)


@healthy
def names_mlp(watch: Watch, *, randn: bool = False, late_zero: bool = False) -> float:
    """Bengio et al. 2003: three letters, an embedding, tanh; SGD, a lower rate at the end."""
    x, y = next_letters(F.pad(identifiers(), (2, 0)))
    x, y = x.unfold(1, 3, 1).flatten(0, 1), y[:, 2:].flatten()
    x, y = x[y >= 0], y[y >= 0]
    net = nn.Sequential(nn.Embedding(28, 12), nn.Flatten(), nn.Linear(36, 200), nn.Tanh())
    net.append(nn.Linear(200, 28))
    for p in net.parameters() if randn else ():
        nn.init.normal_(p)
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    cut = len(x) * 9 // 10
    with watch(net, opt) as w:
        for step in range(900):
            opt.param_groups[0]["lr"] = 0.2 if step < 600 else 0.02
            i = pick(cut)
            loss = F.cross_entropy(net(x[i]), y[i])
            if not late_zero:
                opt.zero_grad()
            loss.backward()
            if late_zero:
                opt.zero_grad()
            opt.step()
            w.loss(loss.item())
    with torch.no_grad():
        return float(F.cross_entropy(net(x[cut:]), y[cut:]))


@failing(
    "all parameters by torch.randn, not scaled by the fan-in",
    names=("bad_init", "initial_loss", "saturated"),
    trace=True,
)
def names_mlp_randn(watch: Watch) -> float:
    return names_mlp(watch, randn=True)


@failing("zero_grad between backward and step", names=("unmoved",), trace=True)
def names_mlp_zero_grad_late(watch: Watch) -> float:
    return names_mlp(watch, late_zero=True)


MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
SIGNS = "^ -,/0123456789abcdefghijklmnopqrstuvwxyz"


@cache
def dates(n: int) -> tuple[Tensor, Tensor]:
    """Dates as people write them, right-padded with 0, and as ^yyyy-mm-dd."""
    g = torch.Generator().manual_seed(1)
    rows = []
    parts = torch.rand(n, 4, generator=g) * torch.tensor([60, 12, 28, 3])
    for y, m, d, how in parts.int().tolist():
        y, d = 1970 + y, d + 1
        free = f"{d} {MONTHS[m]} {y}", f"{MONTHS[m]} {d}, {y}", f"{d}/{m + 1}/{y % 100:02}"
        rows.append((free[how].ljust(12, "^"), f"^{y}-{m + 1:02}-{d:02}"))
    x, y = (
        torch.tensor([[SIGNS.index(c) for c in s] for s in side])
        for side in zip(*rows, strict=True)
    )
    return x, y


class Translator(nn.Module):
    """A GRU that reads both ways, one that writes, and attention of the latter to the former."""

    def __init__(self, cut: bool, inverted: bool):
        super().__init__()
        self.embed = nn.Embedding(len(SIGNS), 32)
        self.reader = nn.GRU(32, 64, batch_first=True, bidirectional=True)
        self.writer, self.query = nn.GRU(32, 128, batch_first=True), nn.Linear(128, 128)
        self.head, self.cut, self.inverted = nn.Linear(256, len(SIGNS)), cut, inverted

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, _ = self.reader(self.embed(x))
        if self.cut:
            memory = memory.detach()
        h, _ = self.writer(self.embed(y), memory.mean(1)[None].contiguous())
        score = self.query(h) @ memory.mT / 128**0.5
        hidden = ((x == 0) != self.inverted)[:, None]
        seen = score.masked_fill(hidden, -1e9).softmax(-1) @ memory
        return self.head(torch.cat([h, seen], -1))


@healthy
def dates_seq2seq(
    watch: Watch, *, shift: int = 1, cut: bool = False, inverted: bool = False
) -> float:
    """Dates in ISO's form, RAdam; the share of signs that are wrong when it writes alone."""
    x, y = dates(4000)
    net = Translator(cut, inverted)
    opt = torch.optim.RAdam(net.parameters(), lr=8e-3)

    def loss_of(_: int) -> Tensor:
        i = pick(3600)
        logits = net(x[i], y[i, 1 - shift : 11 - shift])
        return F.cross_entropy(logits.flatten(0, 1), y[i, 1:].flatten())

    fit(watch, net, opt, loss_of, 200, clip=5.0)
    out = torch.zeros(400, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(10):
            out = torch.cat([out, net(x[3600:], out)[:, -1:].argmax(-1)], 1)
    return float((out != y[3600:])[:, 1:].float().mean())


@failing("the writer is fed the sign that it is to write", names=(), trace=False)
def dates_seq2seq_not_shifted(watch: Watch) -> float:
    return dates_seq2seq(watch, shift=0)


@failing("what the encoder gives is detached", names=("unmoved", "zero_gradient"), trace=True)
def dates_seq2seq_detached(watch: Watch) -> float:
    return dates_seq2seq(watch, cut=True)


@failing("the mask of attention hides words and shows padding", names=(), trace=False)
def dates_seq2seq_mask_inverted(watch: Watch) -> float:
    return dates_seq2seq(watch, inverted=True)


class LowRank(nn.Module):
    """A weight matrix plus a product of two thin ones."""

    def __init__(self, n_out: int, n_in: int, scale: float):
        super().__init__()
        self.down = nn.Parameter(torch.randn(4, n_in) / n_in**0.5)
        self.up, self.scale = nn.Parameter(torch.zeros(n_out, 4)), scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.up @ self.down


class SmallBert(nn.Module):
    """Letters of a name, two layers with LayerNorm behind, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(29, 48), nn.Parameter(0.1 * torch.randn(16, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, 0.0, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(48, 28)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.letter(ids) + self.place))


def pretrained_bert(ids: Tensor) -> SmallBert:
    """A model that has guessed masked letters for a while."""
    net = SmallBert()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(200):
        x = ids[pick(len(ids))]
        mask = torch.rand(x.shape) < 0.2
        opt.zero_grad()
        F.cross_entropy(net(x.masked_fill(mask, 28))[mask], x[mask]).backward()
        opt.step()
    return net


@healthy
def names_lora(watch: Watch, *, scale: float = 2.0) -> float:
    """LoRA by parametrization: at which letter an underscore was taken out of a name."""
    ids = identifiers()
    ids = ids[(ids == 27).sum(1) == 1]
    at = (ids == 27).int().argmax(1)
    without = torch.stack(
        [torch.cat([r[:k], r[k + 1 :], r[:1]]) for r, k in zip(ids, at, strict=True)]
    )
    net = pretrained_bert(identifiers())
    net.requires_grad_(False)
    net.head = nn.Linear(48, 1)
    for layer in net.body.layers:
        for linear in (layer.linear1, layer.linear2, layer.self_attn.out_proj):
            low = LowRank(*linear.weight.shape, scale)
            parametrize.register_parametrization(linear, "weight", low)
    own = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(own, lr=6e-3, weight_decay=0.01)

    def loss_of(_: int) -> Tensor:
        i = pick(len(at) - 100, 32)
        return F.cross_entropy(net(without[i]).squeeze(-1), at[i])

    fit(watch, net, opt, loss_of, 350)
    net.eval()
    with torch.no_grad():
        return float((net(without[-100:]).squeeze(-1).argmax(1) != at[-100:]).float().mean())


@failing("LoRA is scaled by 512 instead of 2", names=("lr_too_high", "exploding"), trace=True)
def names_lora_scale_512(watch: Watch) -> float:
    return names_lora(watch, scale=512.0)
