"""What it costs to capture the outputs of all blocks in one forward, beside PyTorch's own hooks and
other libraries.

Bare is the forward alone. Hooks are registered before each forward and removed after it, except
those that are left on. In each round every method runs once per model, in shuffled order, best of
four calls, over the bare forward of the same round. baukit is not on PyPI; it is measured where it
was installed from its repository.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from rows import AGAIN, Row, against, best, main
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
    AGAIN: bare,
    "PyTorch's hook that does nothing (left on)": noop_kept,
    "hookkit hook that does nothing (left on)": hookkit_noop_kept,
    "PyTorch's hook that stores (left on)": raw_kept,
    "hookkit hook_outputs (left on)": hookkit_kept,
    "PyTorch's hook that stores": raw,
    "PyTorch's hook that stores a clone": raw_clone,
    "hookkit hook_outputs": hookkit,
    "hookkit hook_outputs(detach=False)": hookkit_live,
    "fastai's hook_outputs": fastai,
    "baukit's TraceDict": baukit,
    "surgeon-pytorch's Inspect": surgeon,
    "captum's LayerActivation": captum,
    "nnsight's cache": nnsight,
}
PEERS = ("fastai's hook_outputs", "baukit's TraceDict", "surgeon-pytorch's Inspect")
PEERS += ("captum's LayerActivation", "nnsight's cache")
MODELS = {"MLP, 24 layers": mlp24, "GPT, 12 blocks": gpt12, "ResNet, 8 blocks": resnet}


PAIRS: list[tuple[str, str] | tuple[str, str, float]] = [
    ("hookkit hook that does nothing (left on)", "PyTorch's hook that does nothing (left on)"),
    ("hookkit hook_outputs (left on)", "PyTorch's hook that stores (left on)"),
    ("hookkit hook_outputs(detach=False)", "PyTorch's hook that stores"),
    ("hookkit hook_outputs", "PyTorch's hook that stores"),
    ("hookkit hook_outputs", "PyTorch's hook that stores a clone"),
    *(("hookkit hook_outputs", peer) for peer in PEERS),
]
TARGETS = dict(zip(MODELS, (1.10, 1.05, 1.08), strict=True))  # over a hook that stores


def working(name: str, build: Callable[[], Any], want: Sequence[Tensor]) -> Capture | None:
    """The method's function on a model of its own, checked; None where it is not installed."""
    model, names, x = build()
    try:
        run = METHODS[name](model, names, x)
        got = run()
    except Exception as e:
        print(
            f"{name} left out: {type(e).__name__}: {str(e).splitlines()[0][:80]}", file=sys.stderr
        )
        return None
    if got is not None and not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
        print(f"{name}: wrong values", file=sys.stderr)
    return run


def compare(build: Callable[[], Any], rounds: int, device: str) -> dict[str, float]:
    """The median ratio of each method to `bare`."""

    def seeded() -> Any:
        torch.manual_seed(0)
        model, names, x = build()
        return model.eval().to(device), names, x.to(device)

    model, names, x = seeded()
    want = raw_clone(model, names, x)()
    assert want is not None
    runs = {name: run for name in METHODS if (run := working(name, seeded, want))}
    reference, ratios = bare(model, names, x), {name: list[float]() for name in runs}
    for _ in range(rounds):
        for name in random.sample(sorted(runs), len(runs)):
            base = best(reference, device)
            ratios[name].append(best(runs[name], device) / base)
    return {name: statistics.median(each) for name, each in ratios.items()}


def rows(full: bool, device: str) -> Iterator[Row]:
    random.seed(0)
    with torch.no_grad():
        for name, build in MODELS.items():
            ratios = compare(build, 60 if full else 15, device)
            for row in against(name, ratios, PAIRS):
                aimed = row.peer == "PyTorch's hook that stores" and row.what == "hook_outputs"
                yield replace(row, target=TARGETS[name]) if aimed else row


if __name__ == "__main__":
    main(__doc__ or "", rows)
