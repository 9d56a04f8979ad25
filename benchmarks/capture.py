"""What it costs to capture the outputs of all blocks, side by side with raw hooks and with peers.

Run `python benchmarks/capture.py` (`--rounds 60`, `--only hookkit,raw`, `--grad`). Everything is
measured in one process: in each round every method runs once per model, in shuffled order, best of
four calls, over the bare forward of the same round (CPU time of this thread). A cell is the median
ratio over the rounds, in brackets the microseconds per captured layer. Peers that are not installed
are left out. `bare again` shows the noise: what a method costs is what it has above that.

Methods marked `kept` leave their hooks in place; all others register and remove for each call.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookkit.hooks import Hooks, attach, hook_outputs

Capture = Callable[[], Sequence[Tensor] | None]
Method = Callable[[nn.Module, list[str], Tensor], Capture]


class Attention(nn.Module):
    def __init__(self, n: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(n, 3 * n), nn.Linear(n, n), heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, n = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, n))


class Block(nn.Module):
    def __init__(self, n: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.attn, self.ln1, self.ln2 = Attention(n, heads), nn.LayerNorm(n), nn.LayerNorm(n)
        self.mlp = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Residual(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out), nn.ReLU(True)
        self.down = nn.Conv2d(n_in, n_out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.down(x))


def mlp24() -> tuple[nn.Module, list[str], Tensor]:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(24)]
    return nn.Sequential(*layers), [str(i) for i in range(24)], torch.randn(16, 256)


def gpt12() -> tuple[nn.Module, list[str], Tensor]:
    return (
        nn.Sequential(*[Block() for _ in range(12)]),
        [str(i) for i in range(12)],
        torch.randn(2, 32, 64),
    )


def resnet() -> tuple[nn.Module, list[str], Tensor]:
    widths = [(16, 16, 1)] * 3 + [(16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 1)]
    return (
        nn.Sequential(*[Residual(*w) for w in widths]),
        [str(i) for i in range(8)],
        torch.randn(2, 16, 32, 32),
    )


def bare(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    def run() -> None:
        model(x)

    return run


def raw(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    modules = [model.get_submodule(n) for n in names]

    def run() -> Sequence[Tensor]:
        d: dict[int, Tensor] = {}
        handles = [
            m.register_forward_hook(lambda m, i, o, n=n: d.__setitem__(n, o))
            for n, m in enumerate(modules)
        ]
        try:
            model(x)
        finally:
            for h in handles:
                h.remove()
        return list(d.values())

    return run


def raw_clone(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    modules = [model.get_submodule(n) for n in names]

    def run() -> Sequence[Tensor]:
        d: dict[int, Tensor] = {}
        handles = [
            m.register_forward_hook(lambda m, i, o, n=n: d.__setitem__(n, o.detach().clone()))
            for n, m in enumerate(modules)
        ]
        try:
            model(x)
        finally:
            for h in handles:
                h.remove()
        return list(d.values())

    return run


def raw_kept(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    d: dict[int, Tensor] = {}
    for n, name in enumerate(names):
        m = model.get_submodule(name)
        m.register_forward_hook(lambda m, i, o, n=n: d.__setitem__(n, o))

    def run() -> Sequence[Tensor]:
        model(x)
        return list(d.values())

    return run


def noop_kept(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda m, i, o: None)
    return bare(model, names, x)


def hookkit_noop_kept(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    for name in names:
        attach(model.get_submodule(name), lambda m, args, kwargs, o: None)
    return bare(model, names, x)


def hookkit(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    return hookkit_with(model, names, x)


def hookkit_with(model: nn.Module, names: list[str], x: Tensor, **options: bool) -> Capture:
    modules = [model.get_submodule(n) for n in names]

    def run() -> Sequence[Tensor]:
        with hook_outputs(modules, **options) as h:
            model(x)
        return h.stored

    return run


def hookkit_live(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    return hookkit_with(model, names, x, detach=False)


def hookkit_detached(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    return hookkit_with(model, names, x, clone=False)


def hookkit_kept(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    h: Hooks = hook_outputs([model.get_submodule(n) for n in names])

    def run() -> Sequence[Tensor]:
        model(x)
        return h.stored

    return run


def fastai(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    from fastai.callback.hook import hook_outputs as fastai_hook_outputs

    modules = [model.get_submodule(n) for n in names]

    def run() -> Sequence[Tensor]:
        with fastai_hook_outputs(modules) as h:
            model(x)
        return h.stored

    return run


def baukit(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    from baukit import TraceDict

    def run() -> Sequence[Tensor]:
        with TraceDict(model, names) as t:
            model(x)
        return [t[n].output for n in names]

    return run


def surgeon(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    from surgeon_pytorch import Inspect

    def run() -> Sequence[Tensor]:
        return Inspect(model, layer=names)(x)[1]

    return run


def captum(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    from captum.attr import LayerActivation

    activation = LayerActivation(model, [model.get_submodule(n) for n in names])
    return lambda: activation.attribute(x)


def nnsight(model: nn.Module, names: list[str], x: Tensor) -> Capture:
    from nnsight import NNsight

    wrapped = NNsight(model)
    modules = [wrapped.get(n) for n in names]

    def run() -> Sequence[Tensor]:
        with wrapped.trace(x) as tracer:
            cache = tracer.cache(modules=modules).save()
        return [cache[f"model.{n}"].output for n in names]

    return run


METHODS: dict[str, Method] = {
    "bare again": bare,
    "raw noop, kept": noop_kept,
    "hookkit attach noop, kept": hookkit_noop_kept,
    "raw store, kept": raw_kept,
    "hookkit hook_outputs, kept": hookkit_kept,
    "raw store": raw,
    "raw detach + clone": raw_clone,
    "hookkit hook_outputs": hookkit,
    "hookkit hook_outputs(clone=False)": hookkit_detached,
    "hookkit hook_outputs(detach=False)": hookkit_live,
    "fastai hook_outputs": fastai,
    "baukit TraceDict": baukit,
    "surgeon Inspect": surgeon,
    "captum LayerActivation": captum,
    "nnsight cache": nnsight,
}
MODELS = {"mlp24": mlp24, "gpt12": gpt12, "resnet": resnet}


def best(f: Callable[[], Any], n: int = 4) -> float:
    """The least CPU time of `n` calls, in seconds."""
    times = []
    for _ in range(n):
        start = time.process_time_ns()
        f()
        times.append(time.process_time_ns() - start)
    return min(times) / 1e9


def working(name: str, build: Callable[[], Any], want: Sequence[Tensor]) -> Capture | None:
    """The method's function on a model of its own, checked; None where it is not installed."""
    model, names, x = build()
    try:
        run = METHODS[name](model, names, x)
        got = run()
    except Exception as e:
        print(f"<!-- {name} left out: {type(e).__name__}: {str(e).splitlines()[0][:80]} -->")
        return None
    if got is not None and not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
        print(f"<!-- {name}: wrong values -->")
    return run


def compare(build: Callable[[], Any], methods: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each method, and of `bare`, for each round."""

    def seeded() -> Any:
        torch.manual_seed(0)
        model, names, x = build()
        return model.eval(), names, x

    model, names, x = seeded()
    want = raw_clone(model, names, x)()
    assert want is not None
    runs = {name: run for name in methods if (run := working(name, seeded, want))}
    reference, seconds = bare(model, names, x), {name: [] for name in ["bare", *runs]}
    for _ in range(rounds):
        for name in random.sample(sorted(runs), len(runs)):
            seconds["bare"].append(best(reference))
            seconds[name].append(best(runs[name]) / seconds["bare"][-1])
    return seconds


def table(results: dict[str, dict[str, list[float]]], n_layers: dict[str, int]) -> str:
    """The results as a markdown table."""
    bares = {model: statistics.median(r.pop("bare")) for model, r in results.items()}
    head = [f"{m}, {n_layers[m]} layers, bare {bares[m] * 1e3:.2f} ms" for m in results]
    lines = ["| method | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for method in METHODS:
        cells = []
        for m, r in results.items():
            if method in r:
                ratio = statistics.median(r[method])
                cells.append(f"{ratio:.3f} ({(ratio - 1) * bares[m] / n_layers[m] * 1e6:.1f} µs)")
        if cells:
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def installed(*packages: str) -> str:
    """The versions of those of `packages` that are installed."""
    found = []
    for p in packages:
        try:
            found.append(f"{p} {version(p)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="What capturing all blocks costs, over bare.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="methods whose names begin so, comma-separated")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--grad", action="store_true", help="with autograd recording")
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    wanted = tuple(args.only.split(",")) if args.only else ("",)
    methods = [m for m in METHODS if m.startswith(wanted) or m == "bare again"]
    with torch.set_grad_enabled(args.grad):
        results = {m: compare(MODELS[m], methods, args.rounds) for m in args.models.split(",")}
    print(table(results, {m: len(build()[1]) for m, build in MODELS.items()}))
    packages = installed("torch", "fastai", "baukit", "surgeon-pytorch", "captum", "nnsight")
    print(f"\n{packages}; Python {platform.python_version()}, {platform.machine()}, 1 thread")


if __name__ == "__main__":
    main()
