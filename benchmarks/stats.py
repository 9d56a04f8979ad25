"""What watching a training costs: a step with statistics over a bare step, side by side with peers.

Run `python benchmarks/stats.py` (`--rounds 15`, `--nets transformer,conv`, `--only hookkit`,
`--compile`). Everything is measured in one process, on one net: two nets of one kind differ by some
per cent, by where their memory lies. In each round every method watches the net anew, in shuffled
order, for two steps to begin with and then for a block of steps, whose time is taken over the mean
of the bare blocks just before and after it (CPU time, so that neighbours on the machine disturb
little). A cell is the median ratio over the rounds. `bare again` shows the noise. Compiled nets and
wandb's runs cannot be watched anew, and have a net of their own. Peers that are not installed are
left out.

Where numba is installed (the `fast` extra) its loops read the tensors; `--numpy` leaves it out.

`reads` are tensor read-outs by the host in a step (item, tolist, cpu, float, bool), `ops` the aten
operations that a step has above a bare one: on a GPU, waits and kernel launches. With `--compile`,
`graphs` are those that were compiled and `breaks` the places where Python had to step in.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hookkit.moments.numba_loader import machine
from hookkit.stats import ActivationStats, GradientStats, ParamStats
from hookkit.stats.flight import FlightRecorder
from hookkit.watching import watch

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
    def __init__(self, depth: int = 6, n: int = 256, vocab: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, n)
        self.blocks = nn.Sequential(*[Block(n, 8) for _ in range(depth)])
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


class Net:
    def __init__(self, name: str, steps: int, compiled: bool) -> None:
        torch.manual_seed(0)
        self.name, self.steps, self.compiled = name, steps, compiled
        if name == "transformer":
            self.model: Any = Transformer()
            self.x, self.y = torch.randint(1000, (8, 128)), torch.randint(1000, (1024,))
        elif name == "mlp":
            self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
            self.x, self.y = torch.randn(64, 64), torch.randint(10, (64,))
        else:
            self.model = conv_net() if name == "conv" else wide_conv_net()
            self.x, self.y = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        if compiled:
            self.model = torch.compile(self.model, fullgraph=True)

    def step(self) -> None:
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
    "bare again": lambda model, opt: nullcontext(),
    "hookkit watch alone": hooked(),
    "hookkit activations": hooked(ActivationStats),
    "hookkit activations + hist": hooked(lambda: ActivationStats(with_hist=True)),
    "hookkit activations + exact hist": hooked(
        lambda: ActivationStats(with_hist=True, exact_hist=True)
    ),
    "hookkit activations + hist, every=10": hooked(lambda: ActivationStats(True, every=10)),
    "hookkit gradients": hooked(GradientStats),
    "hookkit params": hooked(ParamStats),
    "hookkit activations, units, params": hooked(
        lambda: ActivationStats(with_hist=True, units=True), ParamStats
    ),
    "hookkit flight recorder": hooked(lambda: FlightRecorder("report")),
    "hookkit everything": everything(None),
    "hookkit everything, no hist": hooked(
        lambda: ActivationStats(units=True), GradientStats, ParamStats
    ),
    "hookkit everything, every=10": everything(10),
    "hookkit flag off": everything(1_000_000_000),
    "fastai's hook": lambda model, opt: fastai_like(model, False),
    "fastai's hook + hist": lambda model, opt: fastai_like(model, True),
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
    return counter.ops, counter.reads


def block(net: Net, steps: int) -> float:
    """Seconds of CPU time per step."""
    start = time.process_time()
    for _ in range(steps):
        net.step()
    return (time.process_time() - start) / steps


class Method:
    """One way to watch, and the ratios of its steps to bare ones."""

    def __init__(self, name: str, watching: Watch, bare: Net, stack: ExitStack):
        torch.compiler.reset()
        counters: Any = torch._dynamo.utils.counters
        counters.clear()
        self.name, self.watching, self.net, self.anew = name, watching, bare, True
        if bare.compiled or "wandb" in name:
            self.anew, self.net = False, Net(bare.name, bare.steps, bare.compiled)
            stack.enter_context(watching(self.net.model, self.net.opt))
        for _ in range(3):  # compiles, and allocates what is kept
            self.net.step()
        self.graphs = counters["stats"]["unique_graphs"]
        self.breaks = sum(counters["graph_break"].values())
        # a block of `every=10` holds one recorded step wherever it begins
        steps = bare.steps
        self.steps = -(-steps // 10) * 10 if "every=10" in name else steps
        self.ratios: list[float] = []

    def __call__(self, run: Callable[[], Any]) -> Any:
        """What `run` gives while the net is watched."""
        if not self.anew:
            return run()
        with self.watching(self.net.model, self.net.opt):
            for _ in range(2):
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


def found(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--nets", default="transformer,wide conv,conv,mlp")
    parser.add_argument("--only", default="", help="methods whose names contain one of these")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True)")
    parser.add_argument("--numpy", action="store_true", help="without numba's compiled loops")
    o = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    if o.numpy:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    machine.load()  # before anything is timed
    loops = machine.found
    methods = dict(METHODS)
    if found("wandb"):
        methods["wandb.watch('all')"] = wandb_watch
    wanted = [w for w in o.only.split(",") if w]
    methods = {n: m for n, m in methods.items() if not wanted or any(w in n for w in wanted)}
    reader = "numpy" if loops is None else found("numba")
    torch_is = f"torch {torch.__version__}"
    print(platform.machine(), torch_is, reader, found("wandb"), f"{o.rounds} rounds")
    for name in o.nets.split(","):
        report(name, methods, o.rounds, o.compile)


def report(name: str, methods: dict[str, Watch], rounds: int, compiled: bool) -> None:
    """Prints one net's table."""
    steps = {"transformer": 4, "wide conv": 4, "conv": 30, "mlp": 100}[name]
    with ExitStack() as stack:
        bare = Net(name, steps, compiled)
        ways = [Method(n, w, bare, stack) for n, w in methods.items()]
        bare.step()
        seconds = statistics.median(measure(bare, ways, rounds))
        columns = "graphs  breaks" if compiled else "  ops  reads"
        title = f"{name}{', compiled' * compiled}: bare step {seconds * 1e3:.2f} ms"
        print(f"\n{title}\n{'':38} ratio     added  {columns}")
        ops = 0 if compiled else counted(bare)[0]
        for m in ways:
            ratio = statistics.median(m.ratios)
            if compiled:
                extra = f"{m.graphs:6d}  {m.breaks:6d}"
            else:
                more, reads = m(partial(counted, m.net))
                extra = f"{more - ops:5d}  {reads:5d}"
            added = (ratio - 1) * seconds * 1e3
            print(f"{m.name:38} {ratio:5.3f} {added:6.2f} ms  {extra}", flush=True)


if __name__ == "__main__":
    main()
