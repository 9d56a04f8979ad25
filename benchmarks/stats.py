"""What statistics cost a training step, beside a bare step, fastai's hook and wandb.watch.

Bare is the training step without hookkit. `all kinds` records activations, gradients and
parameters, with histograms and units; `no step recorded` is the same with its hooks installed and
off. fastai's hook is what its `ActivationStats` does for each batch, without its Learner. Of each
step the values that the host reads are counted too: on a GPU it would wait for each of them.

One net is measured in one process: two nets of one kind differ by some per cent, by where their
memory lies. In each round every method watches the net anew, in shuffled order, for some steps to
begin with and then for a block of steps, whose CPU time is taken over the mean of the bare blocks
just before and after it. The small nets begin with 100 steps: after 64 a watch no longer tells
batches apart, as in nearly all of a training. The large ones begin with 2, so they pay for it.
wandb's runs, and compiled nets, have a net of their own, since they cannot be watched anew.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from rows import AGAIN, Row, against, environment, markdown, options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hookkit.recorders import ActivationStats, GradientStats, ParamStats
from hookkit.recorders.flight import FlightRecorder
from hookkit.training import watch

Watch = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]


class Block(nn.Module):
    def __init__(self, n: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2, self.heads = nn.LayerNorm(n), nn.LayerNorm(n), heads
        self.qkv, self.out = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.mlp = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))

    def forward(self, x: Tensor) -> Tensor:
        b, t, n = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, n))
        return x + self.mlp(self.ln2(x))


class Transformer(nn.Module):
    def __init__(self, depth: int = 6, n: int = 256, vocab: int = 1000, heads: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, n)
        self.blocks = nn.Sequential(*[Block(n, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(n), nn.Linear(n, vocab)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))))


def conv_net() -> nn.Module:
    """miniai's: five convolutions, 28×28."""
    layers: list[nn.Module] = []
    for n_in, n_out in ((1, 8), (8, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(n_in, n_out, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(64, 10, 3, 2, 1), nn.Flatten())


def wide_conv_net() -> nn.Module:
    """Convolutions that keep 28×28 at 64 channels: activations count, not calls."""
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Bottleneck(nn.Module):
    def __init__(self, n_in: int, n: int, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b, size, by in ((n_in, n, 1, 1), (n, n, 3, stride), (n, 4 * n, 1, 1)):
            conv = nn.Conv2d(a, b, size, by, size // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        self.layers, self.relu = nn.Sequential(*layers[:-1]), nn.ReLU(inplace=True)
        same = n_in == 4 * n
        down = [nn.Conv2d(n_in, 4 * n, 1, stride, bias=False), nn.BatchNorm2d(4 * n)]
        self.down = nn.Identity() if same else nn.Sequential(*down)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.layers(x) + self.down(x))


def resnet50() -> nn.Module:
    """He et al. 2015, 25.6 M parameters, for 224×224."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    n_in = 64
    for n, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(depth):
            layers.append(Bottleneck(n_in, n, stride if i == 0 else 1))
            n_in = 4 * n
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Net:
    """A model with its data and optimizer, by the options of the command line."""

    def __init__(self, name: str, steps: int, o: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.name, self.steps, self.options = name, steps, o
        if name == "resnet50":
            self.model: Any = resnet50()
            self.x, self.y = torch.randn(64, 3, 224, 224), torch.randint(1000, (64,))
        elif name == "gpt2":  # the size of GPT-2 small
            self.model = Transformer(12, 768, 50257, heads=12)
            self.x, self.y = torch.randint(50257, (8, 1024)), torch.randint(50257, (8192,))
        elif name == "transformer":
            self.model = Transformer()
            self.x, self.y = torch.randint(1000, (8, 128)), torch.randint(1000, (1024,))
        elif name == "mlp":
            self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
            self.x, self.y = torch.randn(16, 8), torch.randint(3, (16,))
        else:
            self.model = conv_net() if name == "conv" else wide_conv_net()
            self.x, self.y = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
        self.model, self.x, self.y = (v.to(o.device) for v in (self.model, self.x, self.y))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        if o.compile:
            self.model = torch.compile(self.model, fullgraph=True)

    def step(self) -> None:
        with torch.autocast(self.options.device, torch.bfloat16, enabled=self.options.bf16):
            loss = F.cross_entropy(self.model(self.x).view(len(self.y), -1), self.y)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()


def hooked(*make: Callable[[], Any]) -> Watch:
    return lambda model, opt: watch(model, opt, *[f() for f in make])


def everything(every: int | None) -> Watch:
    return hooked(
        lambda: ActivationStats(with_hist=True, every=every, units=True),
        lambda: GradientStats(with_hist=True, every=every),
        lambda: ParamStats(every=every),
    )


@contextmanager
def fastai_like(model: nn.Module, with_hist: bool) -> Iterator[None]:
    """What fastai 2.8's ActivationStats does per batch (cpu=True), without its Learner."""

    def hook(m: nn.Module, i: Any, o: Tensor) -> None:
        o = o.detach().cpu()
        _ = [x.detach().cpu() for x in i]
        _ = o.float().mean().item(), o.float().std().item()
        _ = (o <= 0.05).long().sum().item() / o.numel()
        if with_hist:
            o.float().histc(40, 0, 10)

    leaves = [m for m in model.modules() if not list(m.children()) and list(m.parameters())]
    handles = [m.register_forward_hook(hook) for m in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


METHODS: dict[str, Watch] = {
    AGAIN: lambda model, opt: nullcontext(),
    "hookkit watch, no statistics": hooked(),
    "hookkit activations": hooked(ActivationStats),
    "hookkit activations with histogram": hooked(lambda: ActivationStats(with_hist=True)),
    "hookkit activations with histogram, every=10": hooked(lambda: ActivationStats(True, every=10)),
    "hookkit gradients": hooked(GradientStats),
    "hookkit parameters": hooked(ParamStats),
    "hookkit activations with units, parameters": hooked(
        lambda: ActivationStats(with_hist=True, units=True), ParamStats
    ),
    "hookkit FlightRecorder": hooked(lambda: FlightRecorder("report")),
    "hookkit all kinds": everything(None),
    "hookkit all kinds, no histogram": hooked(
        lambda: ActivationStats(units=True), GradientStats, ParamStats
    ),
    "hookkit all kinds, every=10": everything(10),
    "hookkit all kinds, no step recorded": everything(1_000_000_000),
    "fastai's hook": lambda model, opt: fastai_like(model, False),
    "fastai's hook with histogram": lambda model, opt: fastai_like(model, True),
}


@contextmanager
def wandb_watch(model: nn.Module, opt: Any) -> Iterator[None]:
    """Offline and quiet, its files in a folder that goes afterwards."""
    os.environ["WANDB_MODE"] = "offline"  # "disabled" has no run to watch with
    import wandb

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        settings = wandb.Settings(silent=True, console="off")
        run = wandb.init(mode="offline", dir=folder, reinit="finish_previous", settings=settings)
        run.watch(model, log="all", log_freq=1)
        handle = opt.register_step_post_hook(lambda *args: run.log({}))
        try:
            yield
        finally:
            handle.remove()
            run.unwatch(model)
            run.finish()


class Counter(TorchDispatchMode):
    """Counts operations; a read-out is `_local_scalar_dense` (item, float, bool, tolist)."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def counted(net: Net) -> tuple[int, int]:
    with Counter() as counter:
        net.step()
    return counter.ops, waits(net) if net.options.device == "cuda" else counter.reads


def waits(net: Net) -> int:
    """How often the host waits for the device in one step."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            net.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in seen)


def block(net: Net, steps: int) -> float:
    """Seconds per step: of CPU time, or with a device of the wall clock until it is done."""
    on_device = net.options.device == "cuda"
    clock = time.perf_counter if on_device else time.process_time
    if on_device:  # the steps before have been launched, not made
        torch.cuda.synchronize()
    start = clock()
    for _ in range(steps):
        net.step()
    if on_device:
        torch.cuda.synchronize()
    return (clock() - start) / steps


class Method:
    """One way to watch, and the ratios of its steps to bare ones."""

    def __init__(self, name: str, watching: Watch, bare: Net, stack: ExitStack):
        torch.compiler.reset()
        counters: Any = torch._dynamo.utils.counters
        counters.clear()
        self.name, self.watching, self.net, self.anew = name, watching, bare, True
        if bare.options.compile or "wandb" in name:
            self.anew, self.net = False, Net(bare.name, bare.steps, bare.options)
            stack.enter_context(watching(self.net.model, self.net.opt))
        for _ in range(3):  # compiles, and allocates what is kept
            self.net.step()
        self.graphs = counters["stats"]["unique_graphs"]
        self.breaks = sum(counters["graph_break"].values())
        # a block of `every=10` holds one recorded step wherever it begins
        steps = bare.steps
        self.steps = -(-steps // 10) * 10 if "every=10" in name else steps
        self.ratios: list[float] = []
        self.counts = (0, 0)

    def __call__(self, run: Callable[[], Any]) -> Any:
        """What `run` gives while the net is watched."""
        if not self.anew:
            return run()
        with self.watching(self.net.model, self.net.opt):
            for _ in range(FIRST.get(self.net.name, 2)):
                self.net.step()
            return run()


def measure(bare: Net, methods: list[Method], rounds: int) -> list[float]:
    """Fills the methods' ratios; seconds of the bare steps."""
    times = [block(bare, bare.steps)]
    for _ in range(rounds):
        for method in random.sample(methods, len(methods)):
            mine = method(partial(block, method.net, method.steps))
            times.append(block(bare, bare.steps))
            method.ratios.append(2 * mine / (times[-2] + times[-1]))
    return times


def keep_memory() -> None:
    """Has glibc keep what is freed: else steps differ by the pages they happen to get anew."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)
        libc.mallopt(-1, (1 << 31) - 1)


NETS = {
    "transformer": "transformer, 6 blocks",
    "wide conv": "wide conv net",
    "conv": "small conv net",
    "mlp": "MLP 8-16-3",
    "resnet50": "ResNet-50",
    "gpt2": "GPT-2's size",
}
STEPS = {"transformer": 4, "wide conv": 4, "conv": 30, "mlp": 200, "resnet50": 10, "gpt2": 10}
FIRST = {"conv": 100, "mlp": 100}  # steps before those that are timed
EVERY_STEP, ALL = "hookkit activations with histogram", "hookkit all kinds"
PEERS = [
    ("hookkit activations", "fastai's hook"),
    (EVERY_STEP, "fastai's hook with histogram"),
    (EVERY_STEP, "wandb.watch('all')"),
]
TARGETS = {  # over a bare step
    "hookkit watch, no statistics": {"conv": 1.02},
    "hookkit activations": {"conv": 1.15},
    EVERY_STEP: {"transformer": 1.06, "conv": 1.20, "resnet50": 1.10, "gpt2": 1.03},
    "hookkit gradients": {"conv": 1.18},
    "hookkit parameters": {"conv": 1.10},
    ALL: {"conv": 1.35},
    "hookkit all kinds, no step recorded": {"transformer": 1.01},
}


def ratios(name: str, rounds: int, o: argparse.Namespace) -> tuple[list[Method], float, Net]:
    """The methods with their ratios on one net, and the seconds of a bare step."""
    methods = dict(METHODS)
    if find_spec("wandb"):
        methods["wandb.watch('all')"] = wandb_watch
    wanted = [w for w in o.only.split(",") if w]
    with ExitStack() as stack:
        bare = Net(name, STEPS[name], o)
        ways = [
            Method(n, m, bare, stack)
            for n, m in methods.items()
            if not wanted or any(w in n for w in wanted)
        ]
        bare.step()
        bare_s = statistics.median(measure(bare, ways, rounds))
        if not o.compile:
            for m in ways:
                m.counts = m(partial(counted, m.net))
        return ways, bare_s, bare


def rows(full: bool, device: str) -> Iterator[Row]:
    o = command_line().parse_args(["--device", device])
    o.bf16 = device != "cpu"
    keep_memory()
    if device != "cpu":
        nets = {"resnet50": 5, "gpt2": 5}
    elif full:
        nets = {"transformer": 9, "wide conv": 9, "conv": 15, "mlp": 15}
    else:
        nets = {"transformer": 3, "conv": 5, "mlp": 5}
    for name, rounds in nets.items():
        ways, bare_s, _ = ratios(name, rounds, o)
        found = {m.name: statistics.median(m.ratios) for m in ways}
        case = f"{NETS[name]}: a step of {bare_s * 1e3:.3g} ms"
        own = [n for n in found if n.startswith("hookkit")]
        pairs = [(n, "bare", *[t for t in (TARGETS.get(n, {}).get(name),) if t]) for n in own]
        yield from (table := list(against(case, found, [*pairs, *PEERS])))
        waits = max(m.counts[1] for m in ways if m.name.startswith("hookkit"))
        less = next(m.counts[1] for m in ways if m.name == AGAIN)
        yield Row(table[0].case, "values that the host reads in a step", waits, "bare", less, 1.0)


def command_line() -> argparse.ArgumentParser:
    parser = options(__doc__ or "")
    parser.add_argument("--nets", default="", help=f"a table of each of these: {', '.join(STEPS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="methods whose names contain one of these")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True)")
    parser.add_argument("--bf16", action="store_true", help="forward under autocast to bfloat16")
    return parser


def main() -> None:
    o = command_line().parse_args()
    torch.set_num_threads(1)
    print(environment(o.device))
    if not o.nets:
        print(markdown(rows(o.full, o.device)))
        return
    keep_memory()
    for name in o.nets.split(","):
        report(name, o)


def report(name: str, o: argparse.Namespace) -> None:
    """Prints one net's table."""
    ways, bare_s, bare = ratios(name, o.rounds, o)
    count = "reads" if o.device == "cpu" else "waits"
    columns = "graphs  breaks" if o.compile else f"  ops  {count}"
    how = ", compiled" * o.compile + ", bfloat16" * o.bf16
    print(f"\n{name}{how}: bare step {bare_s * 1e3:.2f} ms")
    print(f"{'':45} ratio     added  {columns}")
    ops = 0 if o.compile else counted(bare)[0]
    for m in ways:
        ratio = statistics.median(m.ratios)
        first, second = (m.graphs, m.breaks) if o.compile else (m.counts[0] - ops, m.counts[1])
        added = (ratio - 1) * bare_s * 1e3
        print(f"{m.name:45} {ratio:5.3f} {added:6.2f} ms  {first:5d}  {second:6d}", flush=True)


if __name__ == "__main__":
    main()
