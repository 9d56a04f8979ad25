"""Language models of characters and words, as people train them at home."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from realistic.texts import characters, windows, words
from realistic.trials import Watch, healthy


class CausalAttention(nn.Module):
    """Self-attention by hand, as in nanoGPT."""

    def __init__(self, d: int, heads: int, p: float, causal: bool, softmax_dim: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.attn_drop, self.resid_drop = nn.Dropout(p), nn.Dropout(p)
        self.heads, self.causal, self.softmax_dim = heads, causal, softmax_dim

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        att = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.causal:
            att = att.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
        att = self.attn_drop(att.softmax(self.softmax_dim))
        return self.resid_drop(self.proj((att @ v).transpose(1, 2).reshape(b, t, d)))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, d: int, heads: int, p: float, causal: bool, softmax_dim: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = CausalAttention(d, heads, p, causal, softmax_dim)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """GPT-2 in small: learnt positions, tied weights."""

    def __init__(
        self, vocab: int, d: int = 48, depth: int = 2, length: int = 48, dropout: float = 0.1,
        std: float = 0.02, causal: bool = True, softmax_dim: int = -1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d, 4, dropout, causal, softmax_dim) for _ in range(depth))
        self.ln, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.head.weight = self.tok.weight
        for m in self.modules():
            if isinstance(m, nn.Linear | nn.Embedding):
                nn.init.normal_(m.weight, std=std)
            if isinstance(m, nn.Linear) and m.bias is not None:
                nn.init.zeros_(m.bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tok(ids) + self.pos(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def warmup_cosine(opt: Optimizer, warmup: int, steps: int) -> LambdaLR:
    """Linear warm-up, then a cosine to a tenth."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    return LambdaLR(opt, factor)


def decay_groups(model: nn.Module, decay: float) -> list[dict]:
    """Weight decay for matrices; none for biases and norms."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def last_token_loss(model: nn.Module, ids: Tensor, length: int) -> float:
    """Held-out loss of the token after the window, of which the model has seen nothing."""
    model.eval()
    batch = windows(ids, 1000, length)
    loss = F.cross_entropy(model(batch[:, :-1])[:, -1], batch[:, -1])
    model.train()
    return float(loss)


@healthy
def char_gpt(
    watch: Watch, *, lr: float = 6e-3, decay: float = 0.1, clip: float = 1.0, steps: int = 250,
    betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, zero: bool = True,
    n_batches: int | None = None, shift: int = 1, probs: bool = False, frozen: str = "-",
    **options,
) -> float:  # fmt: skip
    """nanoGPT's recipe on Python's sources."""
    train, held_out, vocab = characters()
    model = GPT(vocab, **options)
    moved = nn.ModuleList(m for n, m in model.named_children() if n != frozen)
    opt = AdamW(decay_groups(moved, decay), lr=lr, betas=betas, eps=eps)
    sched = warmup_cosine(opt, 30, steps)
    fixed = [windows(train, 16, 48) for _ in range(n_batches or 0)]
    with watch(model, opt) as w:
        for i in range(steps):
            batch = fixed[i % len(fixed)] if fixed else windows(train, 16, 48)
            logits = model(batch[:, :-1])
            target = batch[:, 1:] if shift else batch[:, :-1]
            out = logits.softmax(-1) if probs else logits
            loss = F.cross_entropy(out.flatten(0, 1), target.flatten())
            if zero:
                opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            sched.step()
            w.loss(loss)
    return last_token_loss(model, held_out, 48)


class RMSNorm(nn.Module):
    """Root-mean-square norm, by hand."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on (batch, heads, time, d)."""
    t, d = x.shape[-2:]
    angle = torch.outer(torch.arange(t), 1e4 ** -(torch.arange(0, d, 2) / d)).to(x.dtype)
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention, SwiGLU; no biases."""

    def __init__(self, d: int, heads: int, scale: float | None, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = RMSNorm(d), RMSNorm(d), heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)
        self.scale, self.causal = scale, causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (
            f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = rotate(q), rotate(k)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        x = x + self.o(o.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """LLaMA in small, with an output layer of its own."""

    def __init__(
        self, vocab: int, d: int = 64, depth: int = 2,
        scale: float | None = None, causal: bool = True, q_std: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(LlamaBlock(d, 4, scale, causal) for _ in range(depth))
        self.norm, self.head = RMSNorm(d), nn.Linear(d, vocab, bias=False)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=q_std if name.endswith(("q.weight", "k.weight")) else 0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@healthy
def llama_chars(
    watch: Watch, *, lr: float = 3e-3, half: bool = False, steps: int = 200, **options
) -> float:
    """LLaMA's recipe: warm-up, stable, decay; two batches a step; the loss reported as a float."""
    train, held_out, vocab = characters()
    model = Llama(vocab, **options)
    model = model.half() if half else model
    opt = AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    sched = LambdaLR(opt, lambda i: min((i + 1) / 20, 1.0, (steps - i) / 50))
    with watch(model, opt) as w:
        for _ in range(steps):
            for _ in range(2):
                batch = windows(train, 12, 40)
                logits = model(batch[:, :-1]).float()
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                (loss / 2).backward()
                w.loss(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
    return last_token_loss(model.float(), held_out, 40)


class Muon(Optimizer):
    """Momentum whose matrices are made orthogonal (Jordan 2024)."""

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(p.grad)
                x = p.grad + group["momentum"] * m
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                p.add_(x, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


@healthy
def word_gpt_muon(watch: Watch, *, muon_lr: float = 0.02, lr: float = 3e-3) -> float:
    """A language model of words without dropout; Muon for matrices, Adam for the rest."""
    train, held_out, vocab = words()
    model = GPT(vocab, length=32, dropout=0.0)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is q for q in matrices)]
    opts = [Muon(matrices, lr=muon_lr), torch.optim.Adam(rest, lr=lr, betas=(0.9, 0.95))]
    criterion = nn.CrossEntropyLoss()
    with watch(model, opts, loss_func=criterion):
        for _ in range(200):
            batch = windows(train, 16, 32)
            loss = criterion(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            model.zero_grad()
            loss.backward()
            for opt in opts:
                opt.step()
    return last_token_loss(model, held_out, 32)
