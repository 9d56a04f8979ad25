"""What a summary costs, as a ratio to one real forward, with torchinfo beside it in the same run.

    python benchmarks/summary.py                 # torchinfo is timed if it is installed
    python benchmarks/summary.py --only gpt2

Times are medians of interleaved rounds in one thread. Each computes what it can: hookkit
for shapes, calls, MACs, saved bytes and warnings; torchinfo for all its columns at full depth.
"""

import argparse
import platform
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookkit.summaries import summary

Step = Callable[[], object]


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


def torchinfo_of(model: nn.Module, x: Tensor) -> Step | None:
    try:
        import torchinfo
    except ImportError:
        return None
    columns = ("kernel_size", "input_size", "output_size", "num_params", "mult_adds", "trainable")

    def step() -> object:
        return torchinfo.summary(
            model, input_data=x, col_names=columns, depth=99, verbose=0, cache_forward_pass=False
        )

    return step


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of each step, taken in turns so that a busy machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def against_forward(name: str, model: nn.Module, x: Tensor, rounds: int) -> None:
    steps: dict[str, Step] = {"forward": lambda: model(x), "hookkit": lambda: summary(model, x)}
    if peer := torchinfo_of(model, x):
        steps["torchinfo"] = peer
    found = medians(steps, rounds)
    bare = found.pop("forward")
    ratios = "   ".join(f"{peer} {t / bare:5.2f}" for peer, t in found.items())
    print(f"{name:<28} forward {bare:7.3f} s   summary / forward: {ratios}", flush=True)


def batch_sizes(rounds: int) -> None:
    model = resnet50()
    for n in (1, 16, 64):
        x = torch.randn(n, 3, 224, 224)
        t = medians({"summary": lambda x=x: summary(model, x)}, rounds)["summary"]
        print(f"resnet50, batch {n:<12} summary {t:7.3f} s", flush=True)


def huge() -> None:
    with torch.device("meta"):
        model = GPT(8160, 80, 85, 2048)
    ids = torch.zeros(1, 2048, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    s = summary(model, ids)
    took = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    print(
        f"{s.n_params / 1e9:.1f} B parameters on meta    {took:5.2f} s, +{grown:.0f} MB", flush=True
    )


def many_modules() -> None:
    for n in (1250, 2500, 5000):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))
        start = time.perf_counter()
        str(summary(model, torch.ones(1, 4)))
        took = time.perf_counter() - start
        print(f"{n} modules{'':<17} {took:5.2f} s, {1e3 * took / n:.2f} ms a module", flush=True)


def main() -> None:
    p = argparse.ArgumentParser(
        description="Time summaries against forwards and against torchinfo."
    )
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--only", choices=("resnet50", "gpt2", "batch", "huge", "modules"))
    args = p.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
          f"torch {torch.__version__}, 1 thread, median of {args.rounds}")  # fmt: skip
    if args.only in (None, "resnet50"):
        against_forward(
            "resnet50, 1×3×224×224", resnet50(), torch.randn(1, 3, 224, 224), args.rounds
        )
    if args.only in (None, "gpt2"):
        against_forward(
            "gpt2-small, 1×128", GPT(), torch.zeros(1, 128, dtype=torch.long), args.rounds
        )
    if args.only in (None, "batch"):
        batch_sizes(3)
    if args.only in (None, "huge"):
        huge()
    if args.only in (None, "modules"):
        many_modules()


if __name__ == "__main__":
    main()
