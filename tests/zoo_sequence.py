"""Recurrent nets, attention, and compositions of them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import add, ids, module, rand

B, T = 2, 5  # batch and sequence length used throughout


# recurrent


def lstm_params(i: int, h: int, layers: int = 1) -> int:
    return sum(4 * h * ((i if k == 0 else h) + h) + 8 * h for k in range(layers))


add(
    "lstm_tuple",
    lambda: nn.LSTM(6, 8, batch_first=True).eval(),
    rand(B, T, 6),
    params=4 * 8 * (6 + 8) + 8 * 8,
    macs=B * T * 4 * 8 * (6 + 8),
    note="output is (out, (h, c))",
)
add(
    "packed_input",
    lambda: nn.GRU(6, 8).eval(),
    lambda: (nn.utils.rnn.pack_sequence([torch.randn(5, 6), torch.randn(3, 6)]),),
    params=3 * 8 * (6 + 8) + 6 * 8,
    macs=(5 + 3) * 3 * 8 * (6 + 8),
    note="a PackedSequence goes in and comes out",
)


@module(
    "lstmcell_loop",
    rand(B, T, 6),
    params=lstm_params(6, 8) + 8 * 3 + 3,
    macs=B * T * 4 * 8 * (6 + 8) + B * 8 * 3,
    calls={"cell": T, "fc": 1},
)
class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(len(x), 8), x.new_zeros(len(x), 8))
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.fc(state[0])


# attention


def mha_macs(d: int, q: int, k: int) -> int:
    """Per sample: q, k, v and output projections, scores and weighted sum (any head count)."""
    return q * d * d + 2 * k * d * d + q * d * d + 2 * q * k * d


def layer_macs(d: int, ff: int, q: int) -> int:
    return mha_macs(d, q, q) + 2 * q * d * ff


def layer_params(d: int, ff: int) -> int:
    return (3 * d * d + 3 * d) + (d * d + d) + (d * ff + ff) + (ff * d + d) + 2 * 2 * d


@module(
    "mha",
    rand(B, T, 16),
    params=4 * 16 * 16 + 4 * 16,
    macs=B * mha_macs(16, T, T),
    calls={"mha": 1, "mha.out_proj": 0},
    note="output is (attention output, averaged weights)",
)
class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.mha(x, x, x)


def encoder(dropout: float = 0.0) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


add(
    "encoder_padded",
    lambda: encoder().eval(),
    rand(B, T, 16),
    kwargs=lambda: {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    params=2 * layer_params(16, 32),
    macs=B * 2 * layer_macs(16, 32, T),
    calls={"layers.0": 1, "layers.0.linear1": 1, "layers.0.self_attn.out_proj": 0},
    note="with the fast path on and no grad, nested tensors flow inside; counts are without it",
)


class GPTBlock(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            s.view(b, t, self.heads, -1).transpose(1, 2) for s in self.qkv(self.ln1(x)).chunk(3, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


@module(
    "gpt_like",
    ids(40, B, T),
    params=40 * 16 + 8 * 16 + 3 * layer_params(16, 64) + 2 * 16,
    macs=B * (3 * layer_macs(16, 64, T) + T * 16 * 40),
    calls={"h": 0, "h.2.qkv": 1, "head": 1},
    note="head is tied to wte: counted once; attention counted in full, mask or not",
)
class GPT(nn.Module):
    def __init__(self, vocab: int = 40, d: int = 16, n: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(8, d)
        self.h = nn.ModuleList(GPTBlock(d, 4) for _ in range(n))
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            h = block(h)
        return self.head(self.ln_f(h))


class SDPA(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


add(
    "sdpa",
    SDPA,
    lambda: tuple(torch.randn(B, 4, t, 8) for t in (T, 7, 7)),
    params=0,
    macs=B * 4 * 2 * T * 7 * 8,
    note="no module below, no parameter: all compute is the root's own",
)
