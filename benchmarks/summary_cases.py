"""Models of many kinds, at random initialisation: the cases of `summary.py`.

Each is a function that returns a model and its inputs by name. Those of `transformers` are the real
widths of well-known architectures with fewer layers; the others need torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Case = Callable[[], tuple[nn.Module, dict[str, Any]]]


def conv(ni: int, nf: int, k: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(ni, nf, k, stride, k // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(nf), nn.ReLU(inplace=True))


class Bottleneck(nn.Module):
    def __init__(self, ni: int, mid: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(conv(ni, mid, 1), conv(mid, mid, 3, stride))
        self.last = nn.Conv2d(mid, 4 * mid, 1, bias=False)
        self.norm, self.act = nn.BatchNorm2d(4 * mid), nn.ReLU(inplace=True)
        self.down = nn.Identity()
        if ni != 4 * mid or stride > 1:
            short = nn.Conv2d(ni, 4 * mid, 1, stride, bias=False)
            self.down = nn.Sequential(short, nn.BatchNorm2d(4 * mid))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.last(self.convs(x))) + self.down(x))


def resnet50() -> nn.Sequential:
    """25.6 M parameters, 4.09 G MACs at 224×224."""
    blocks, ni = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for mid, n, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(n):
            blocks.append(Bottleneck(ni, mid, stride if i == 0 else 1))
            ni = 4 * mid
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ni, 1000))


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.qkv, self.proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ln2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.drop(self.proj(a))
        return x + self.drop(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    """124 M parameters with the defaults (GPT-2-small)."""

    def __init__(self, d: int = 768, n: int = 12, heads: int = 12, t: int = 1024) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50257, d), nn.Embedding(t, d)
        self.h = nn.ModuleList(Block(d, heads) for _ in range(n))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, 50257, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class UNetBlock(nn.Module):
    """One level of a U-Net around `inner`."""

    def __init__(self, ni: int, nf: int, inner: nn.Module) -> None:
        super().__init__()
        self.down, self.inner = conv(ni, nf, 3, 2), inner
        self.up, self.out = nn.ConvTranspose2d(nf, ni, 2, 2), conv(2 * ni, ni, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([x, self.up(self.inner(self.down(x)))], 1))


def unet() -> nn.Module:
    inner: nn.Module = conv(512, 512, 3)
    for n in (256, 128, 64, 32):
        inner = UNetBlock(n, 2 * n, inner)
    return nn.Sequential(conv(3, 32, 3), inner, nn.Conv2d(32, 2, 1))


class Experts(nn.Module):
    """A mixture in which each token goes to one expert of `n`, by its router."""

    def __init__(self, d: int, n: int) -> None:
        super().__init__()
        self.router = nn.Linear(d, n)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(n)
        )

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        return x + sum(gates[..., i, None] * e(x) for i, e in enumerate(self.experts))


class Recurrent(nn.Module):
    """A cell called in a loop of Python over the steps."""

    def __init__(self, d: int, steps: int) -> None:
        super().__init__()
        self.cell, self.head, self.steps = nn.GRUCell(d, d), nn.Linear(d, d), steps

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0]
        for i in range(self.steps):
            h = self.cell(x[:, i], h)
        return self.head(h)


class LSTMText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10000, 400)
        self.rnn = nn.LSTM(400, 1152, 3, batch_first=True)
        self.head = nn.Linear(1152, 10000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.emb(x))[0])


class StateSpace(nn.Module):
    """A diagonal linear recurrence, scanned step by step."""

    def __init__(self, d: int, n_state: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(d, n_state))
        self.proj, self.out = nn.Linear(d, 2 * n_state + d), nn.Linear(d, d)
        self.sizes = (n_state, n_state, d)

    def forward(self, x: Tensor) -> Tensor:
        b, c, u = self.proj(x).split(self.sizes, -1)
        h, ys = torch.zeros(x.shape[0], *self.a.shape, device=x.device), []
        for i in range(x.shape[1]):
            h = self.a * h + u[:, i, :, None] * b[:, i, None]
            ys.append((h * c[:, i, None]).sum(-1))
        return x + self.out(torch.stack(ys, 1))


def _ours(make: Callable[[], nn.Module], x: Callable[[], Tensor], name: str) -> Case:
    return lambda: (make(), {name: x()})


def _ids(n: int = 128) -> Tensor:
    return torch.zeros(1, n, dtype=torch.long)


def _transformer(kind: str, **sizes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a kind (`Bert`), with two inputs if it has a decoder."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config)
    if getattr(config, "image_size", None):
        return model, {"pixel_values": torch.randn(1, 3, 224, 224)}
    given = {"input_ids": _ids()}
    return model, {**given, "decoder_input_ids": _ids()} if config.is_encoder_decoder else given


def _layers(n: int, d: int = 256) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(nn.Sequential(nn.Linear(d, d), nn.ReLU()) for _ in range(n)))


_EXPERTS = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
CASES: dict[str, Case] = {
    "resnet50": _ours(resnet50, lambda: torch.randn(1, 3, 224, 224), "input"),
    "gpt2-small": _ours(GPT, _ids, "ids"),
    "unet": _ours(unet, lambda: torch.randn(1, 3, 128, 128), "input"),
    "lstm": _ours(LSTMText, _ids, "x"),
    "gru cell, 128 steps": _ours(
        lambda: Recurrent(512, 128), lambda: torch.randn(4, 128, 512), "x"),
    "state space, 128 steps": _ours(
        lambda: nn.Sequential(*(StateSpace(256, 16) for _ in range(2))),
        lambda: torch.randn(1, 128, 256), "input"),
    "experts": _ours(
        lambda: nn.Sequential(*(Experts(256, 8) for _ in range(4))),
        lambda: torch.randn(1, 128, 256), "input"),
    "mlp, 200 layers": _ours(_layers(100), lambda: torch.randn(64, 256), "input"),
    "transformer encoder": _ours(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 6),
        lambda: torch.randn(1, 128, 512), "src"),
    "bert": partial(_transformer, "Bert", num_hidden_layers=6),
    "roberta": partial(_transformer, "Roberta", num_hidden_layers=6),
    "distilbert": partial(_transformer, "DistilBert"),
    "albert": partial(_transformer, "Albert", hidden_size=768, num_attention_heads=12,
                      intermediate_size=3072, embedding_size=128),
    "gpt2": partial(_transformer, "GPT2", n_layer=6),
    "llama": partial(_transformer, "Llama", hidden_size=768, intermediate_size=2048,
                     num_attention_heads=12, num_hidden_layers=6),
    "mixtral": partial(_transformer, "Mixtral", **_EXPERTS, num_attention_heads=8,
                       num_key_value_heads=4),
    "qwen2-moe": partial(_transformer, "Qwen2Moe", **_EXPERTS, num_experts=8,
                         moe_intermediate_size=512, shared_expert_intermediate_size=512,
                         num_attention_heads=8, num_key_value_heads=4),
    "t5": partial(_transformer, "T5"),
    "bart": partial(_transformer, "Bart", encoder_layers=4, decoder_layers=4),
    "vit": partial(_transformer, "ViT", num_hidden_layers=6),
    "convnext": partial(_transformer, "ConvNext", image_size=224),
    "swin": partial(_transformer, "Swin"),
    "mamba, 2 layers": partial(_transformer, "Mamba", hidden_size=768, num_hidden_layers=2),
    "rwkv": partial(_transformer, "Rwkv", hidden_size=512, num_hidden_layers=4),
}  # fmt: skip
