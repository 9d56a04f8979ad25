"""What `collect` costs, beside a bare loop with plain hooks that writes the same bytes.

Run `python benchmarks/collect.py` (`--rounds 7`, `--mb 256`). In each round every method runs once,
in shuffled order, in a process that has run each of them before; wall clock until the files are
closed. A cell is the best of the rounds, which other work on the machine disturbs least, or the
median of the ratios of one round. Both loops are measured with and without waiting for the disk
(`os.fsync`), as `collect` always does, so that what its index names survives a crash. captum's `AV`
is measured where it is installed; it has one file for each batch and layer. SAELens needs a model
of its own kind and is not measured.

Then the memory: the greatest resident size of a fresh process that collects `--mb`, and four times
as much (Linux).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from hookkit import collect


class Net(nn.Module):
    """`n` blocks of an MLP over tokens; `width` decides what a forward costs for each byte."""

    def __init__(self, n: int, d: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(d, width), nn.GELU(), nn.Linear(width, d)) for _ in range(n)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


NETS = {"4 blocks of 256 → 1024": (4, 256, 1024), "4 blocks of 256 → 8": (4, 256, 8)}
NAMES = [f"blocks.{i}" for i in range(4)]


def batches(n_bytes: int, d: int = 256) -> Iterator[Tensor]:
    """As many as give `n_bytes` of activations."""
    x = torch.randn(32, 64, d)
    for _ in range(n_bytes // (x.numel() * 4 * len(NAMES))):
        yield x


def bare(model: Net, n_bytes: int, to: Path, *, sync: bool = False) -> None:
    """Plain hooks, and each layer's rows appended to a file of its own."""
    to.mkdir()
    files = [open(to / name, "wb") for name in NAMES]  # noqa: SIM115

    def hook(file: object) -> Callable[..., None]:
        return lambda m, i, o: file.write(memoryview(o.numpy()))  # type: ignore[attr-defined]

    pairs = zip(model.blocks, files, strict=True)
    handles = [block.register_forward_hook(hook(file)) for block, file in pairs]
    with torch.no_grad():
        for x in batches(n_bytes):
            model(x)
    for handle, file in zip(handles, files, strict=True):
        handle.remove()
        if sync:
            file.flush()
            os.fsync(file.fileno())
        file.close()


def hookkit(model: Net, n_bytes: int, to: Path) -> None:
    collect(model, [*batches(n_bytes)], NAMES, to, per="token")


def not_synced(model: Net, n_bytes: int, to: Path) -> None:
    """As `hookkit`, without waiting for the disk: to compare with `bare`."""
    fsync, os.fsync = os.fsync, lambda fd: None
    try:
        hookkit(model, n_bytes, to)
    finally:
        os.fsync = fsync


def captum(model: Net, n_bytes: int, to: Path) -> None:
    from captum._utils.av import AV

    data = [(x, torch.zeros(len(x))) for x in batches(n_bytes)]
    AV.generate_dataset_activations(str(to), model, "m", NAMES, data, identifier="x")


METHODS: dict[str, Callable[[Net, int, Path], None]] = {
    "bare": bare,
    "bare again": bare,
    "bare, synced": lambda model, n, to: bare(model, n, to, sync=True),
    "collect": hookkit,
    "collect, not synced": not_synced,
    "captum": captum,
}


def timed(method: str, model: Net, n_bytes: int) -> tuple[float, float]:
    """Seconds by the wall, and of this process's CPU time."""
    folder = Path(tempfile.mkdtemp())
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        METHODS[method](model, n_bytes, folder / "acts")
        return time.perf_counter() - wall, time.process_time() - cpu
    finally:
        shutil.rmtree(folder)
        os.sync()  # what one method has left to the system is not the next one's


def speeds(net: str, n_bytes: int, rounds: int) -> None:
    model = Net(*NETS[net])
    methods = [*METHODS]
    try:
        import captum.attr  # noqa: F401
    except ImportError:
        methods.remove("captum")
    for method in methods:
        timed(method, model, 2**24)
    taken: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in random.sample(methods, len(methods)):
            taken[method].append(timed(method, model, n_bytes))
    print(f"\n{net}, {n_bytes >> 20} MB\n")
    print("| method | MB/s, best | CPU s, best | of bare: best, median | of bare, synced |")
    print("|---|---|---|---|---|")
    for method, times in taken.items():
        cells = [ratio(taken[base], times) for base in ("bare", "bare, synced")]
        mb_s = n_bytes / 2**20 / min(times)[0]
        cpu = min(t[1] for t in times)
        print(f"| {method} | {mb_s:.0f} | {cpu:.2f} | {' | '.join(cells)} |")


def ratio(base: list[tuple[float, float]], times: list[tuple[float, float]]) -> str:
    """The speed over the base's: of the best rounds, and the median of those of one round."""
    each = statistics.median(b[0] / t[0] for b, t in zip(base, times, strict=True))
    return f"{min(base)[0] / min(times)[0]:.2f}, {each:.2f}"


def peak(n_mb: int) -> int:
    """MB that a fresh process holds at most while it collects `n_mb`."""
    command = [sys.executable, __file__, "--peak", str(n_mb)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        model, folder = Net(*NETS["4 blocks of 256 → 8"]), Path(tempfile.mkdtemp())
        hookkit(model, args.peak << 20, folder / "acts")
        # not ru_maxrss, which a process begins with as its parent had it
        status = Path("/proc/self/status").read_text()
        print(int(status.split("VmHWM:")[1].split()[0]) >> 10)
        shutil.rmtree(folder)
        return
    for net in NETS:
        speeds(net, args.mb << 20, args.rounds)
    sizes = {n: peak(n) for n in (8, args.mb, 4 * args.mb)}
    print("\n" + ", ".join(f"{n} MB: peak {size} MB" for n, size in sizes.items()))


if __name__ == "__main__":
    main()
