"""What it costs to write activations to disk with `collect`, beside plain hooks that append the
same bytes to files, and captum's `AV`.

Bare is the loop with plain hooks, which does not wait for the disk. `collect` waits for its index
alone, a small file that it writes at the end; it is measured without that too. In each round
every method runs once, in shuffled order, in a process that has run each of them before; wall clock
until the files are closed, over the bare loop's of the same round. captum has one file for each
batch and layer. SAELens needs a model of its own kind and is not measured. Memory is the greatest
resident size of a fresh process (Linux).

glibc hands the pages of freed tensors back to the system and takes new ones, or does not: that
depends on what lies behind them in memory, and changes the time of either loop by a third from run
to run. Here it keeps them.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

import torch
from rows import AGAIN, Row, against, main
from torch import Tensor, nn

from hookkit import Activations, collect


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


WRITING = "4 blocks of 256 → 8 (writing is all)"
NETS = {"4 blocks of 256 → 1024 (the model computes)": (4, 256, 1024), WRITING: (4, 256, 8)}
NAMES = [f"blocks.{i}" for i in range(4)]
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def batches(n_bytes: int, d: int = 256) -> Iterator[Tensor]:
    """As many as give `n_bytes` of activations."""
    x = torch.randn(32, 64, d)
    for _ in range(n_bytes // (x.numel() * 4 * len(NAMES))):
        yield x


def ids_of(i: int, x: Tensor) -> Tensor:
    """(n tokens, 2): the sample and the position in it of each token of the `i`-th batch."""
    n, length = x.shape[:2]
    samples = torch.arange(i * n, (i + 1) * n).repeat_interleave(length)
    return torch.stack([samples, torch.arange(length).repeat(n)], 1)


def bare(model: Net, n_bytes: int, to: Path) -> None:
    """Plain hooks, and each layer's rows, and their ids, appended to a file of their own."""
    to.mkdir()
    files = [open(to / name, "wb") for name in (*NAMES, "ids")]  # noqa: SIM115

    def hook_of(file: BinaryIO) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            file.write(memoryview(output.numpy()))  # what it returned would replace the output

        return hook

    pairs = zip(model.blocks, files[:-1], strict=True)
    handles = [block.register_forward_hook(hook_of(file)) for block, file in pairs]
    with torch.no_grad():
        for i, x in enumerate(batches(n_bytes)):
            model(x)
            files[-1].write(memoryview(ids_of(i, x).numpy()))
    for handle in handles:
        handle.remove()
    for file in files:
        file.close()


def hookkit(model: Net, n_bytes: int, to: Path) -> None:
    collect(model, [*batches(n_bytes)], NAMES, to, rows="token")


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


def check_same(model: Net, n_bytes: int) -> None:
    """Raises unless `bare` and `hookkit` write the same rows and ids."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        bare(model, n_bytes, Path(folder) / "bare")
        torch.manual_seed(0)
        hookkit(model, n_bytes, Path(folder) / "acts")
        acts = Activations(Path(folder) / "acts")
        for name in (*NAMES, "ids"):
            rows = (acts.ids if name == "ids" else acts[name][:]).numpy()
            if rows.tobytes() != (Path(folder) / "bare" / name).read_bytes():
                raise RuntimeError(f"the loops write other rows of {name}")


def keep_pages() -> None:
    """Has glibc keep the pages of freed tensors (up to 32 MB each) for the next ones."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_TRIM_THRESHOLD, 2**30)
        mallopt(_MMAP_THRESHOLD, 2**25)


METHODS: dict[str, Callable[[Net, int, Path], None]] = {
    "bare": bare,
    AGAIN: bare,
    "collect": hookkit,
    "collect without fsync": not_synced,
    "captum's AV": captum,
}


PAIRS = [
    ("collect", "bare"),
    ("collect without fsync", "bare", 1.1),
    ("collect", "captum's AV"),
]


def timed(method: str, model: Net, n_bytes: int) -> float:
    """Seconds by the wall."""
    folder = Path(tempfile.mkdtemp())
    try:
        start = time.perf_counter()
        METHODS[method](model, n_bytes, folder / "acts")
        return time.perf_counter() - start
    finally:
        shutil.rmtree(folder)
        os.sync()  # what one method has left to the system is not the next one's


def over_bare(net: str, n_bytes: int, rounds: int) -> dict[str, float]:
    """The median ratio of each method to the bare loop of the same round."""
    model = Net(*NETS[net])
    check_same(model, 2**24)
    methods = [m for m in METHODS if "captum" not in m or find_spec("captum")]
    for method in methods:
        timed(method, model, 2**24)
    taken = {method: list[float]() for method in methods}
    for _ in range(rounds):
        for method in random.sample(methods, len(methods)):
            taken[method].append(timed(method, model, n_bytes))
    return {
        method: statistics.median(t / b for t, b in zip(each, taken["bare"], strict=True))
        for method, each in taken.items()
    }


def peak_mb(n_mb: int) -> int:
    """What this process has held at most once it has collected `n_mb`."""
    with tempfile.TemporaryDirectory() as folder:
        hookkit(Net(*NETS[WRITING]), n_mb << 20, Path(folder) / "acts")
    # not ru_maxrss, which a process begins with as its parent had it
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10


def rows(full: bool, device: str) -> Iterator[Row]:
    keep_pages()
    for net in NETS:
        n_mb = 256 if full or net == WRITING else 64
        found = over_bare(net, n_mb << 20, 7 if full else 5)
        yield from against(f"{net}, {n_mb} MB", found, PAIRS)
    n_mb = 256 if full else 64
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        small, large = pool.map(peak_mb, (n_mb, 4 * n_mb), chunksize=1)
    case, what = WRITING, f"memory of a process that collects {4 * n_mb} MB"
    yield Row(case, what, large, f"one that collects {n_mb} MB", small, 1.05, "MB")


if __name__ == "__main__":
    main(__doc__ or "", rows)
