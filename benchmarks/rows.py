"""The rows of `TABLE.md`, and the command line that the benchmarks with peers have in common.

Each of those scripts has a function `rows(full, device)`, which measures and yields rows: alone it
prints them (`python benchmarks/loop.py --full`); `python benchmarks` runs all and writes the table.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any

import torch

Rows = Callable[[bool, str], Iterable["Row"]]
Pair = tuple[str, str] | tuple[str, str, float]

PEERS = ("fastai", "lightning", "torchinfo", "captum", "wandb", "surgeon-pytorch")
PEERS += ("nnsight", "baukit")
NOISE = 0.05  # what two measurements of one thing differ by, on a machine that does other work too
AGAIN = "bare again"  # one more bare run: it differs from 1 for no reason


@dataclass(frozen=True)
class Row:
    """What hookkit takes beside a peer in the same run; less is better in every unit."""

    case: str  # the model, and what it does
    what: str
    hookkit: float
    peer: str
    theirs: float | None  # None: not installed
    target: float | None = None  # the greatest ratio aimed at
    unit: str = ""  # none: a multiple of the bare run

    @property
    def ratio(self) -> float | None:
        if self.theirs is None:
            return None
        if self.theirs == 0:  # nothing of it, as hookkit should have
            return 1.0 if self.hookkit == 0 else float("inf")
        return self.hookkit / self.theirs

    @property
    def verdict(self) -> str:
        """`missed` and `worse` are what hookkit loses; nothing is free beside `bare`."""
        if self.ratio is None:
            return "not measured"
        if self.target is not None:
            return "met" if self.ratio <= self.target else "missed"
        if self.peer == "bare":
            return "cost"
        return (
            "worse" if self.ratio > 1 + NOISE else "better" if self.ratio < 1 - NOISE else "level"
        )

    @property
    def lost(self) -> bool:
        return self.verdict in ("missed", "worse")

    @property
    def sentence(self) -> str:
        """What is lost, in words."""
        case = self.case.partition(f" ({AGAIN}")[0]
        aim = f"; {self.target:g} is aimed at" if self.target else ""
        said = f"{self.what} takes {self.ratio:.4g} times as much as {self.peer}{aim}"
        if self.peer == "target":
            said = f"{self.what} is {self.hookkit:.3g} {self.unit}; {self.theirs:g} is aimed at"
        return f"*{case}*: {said}."

    @property
    def cells(self) -> list[str]:
        theirs = "–" if self.theirs is None else f"{self.theirs:.3g} {self.unit}".strip()
        ratio = "–" if self.ratio is None else f"{self.ratio:.2f}"
        target = "" if self.target is None else f" (≤\u00a0{self.target:g})"
        verdict = f"**{self.verdict}**" if self.lost else self.verdict
        own = f"{self.hookkit:.3g} {self.unit}".strip()
        return [verdict + target, self.what, own, self.peer, theirs, ratio]


def against(case: str, over_bare: dict[str, float], pairs: Iterable[Pair]) -> Iterator[Row]:
    """Rows of `(hookkit's method, the peer's, target)` from the times of methods over `bare`."""
    times = {"bare": 1.0, **over_bare}
    if AGAIN in times:
        case += f" ({AGAIN} {times[AGAIN]:.3g})"
    for ours, peer, *target in pairs:
        if ours in times:
            what = ours.removeprefix("hookkit ")
            yield Row(case, what, times[ours], peer, times.get(peer), *target)


def markdown(rows: Iterable[Row]) -> str:
    """A table for each case, with the verdict first, where a narrow window shows it."""
    head = ["", "what", "hookkit", "beside it", "takes", "ratio"]
    tables = []
    for case, group in groupby(rows, key=lambda row: row.case):
        lines = [head, ["---"] * len(head), *(row.cells for row in group)]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        tables.append(f"**{case}**\n\n{table}")
    return "\n\n".join(tables)


def seconds(run: Callable[[], Any], device: str = "cpu") -> float:
    """CPU time, which neighbours on the machine disturb little; with a device the clock's time
    until it is done."""
    if device == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.accelerator.synchronize()
    start = time.perf_counter()
    run()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def best(run: Callable[[], Any], device: str = "cpu") -> float:
    """The least of four calls."""
    return min(seconds(run, device) for _ in range(4))


def environment(device: str) -> str:
    """The versions and the machine, in one line."""
    found = []
    for package in PEERS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    name = platform.machine() if device == "cpu" else torch.cuda.get_device_name()
    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name}, 1 thread, {python}, {', '.join(found)}"


def options(text: str) -> argparse.ArgumentParser:
    """`--full` and `--device`."""
    parser = argparse.ArgumentParser(description=text.split("\n\n")[0])
    parser.add_argument("--full", action="store_true", help="more rounds, and all cases")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda where that makes sense")
    return parser


def measured(script: str, full: bool, device: str) -> list[Row]:
    """The rows of one benchmark, in the process that it has for itself."""
    torch.set_num_threads(1)
    return list(import_module(script).rows(full, device))


def main(text: str, rows: Rows) -> None:
    """The command line of a benchmark alone."""
    o = options(text).parse_args()
    torch.set_num_threads(1)
    print(f"{environment(o.device)}\n\n{markdown(rows(o.full, o.device))}")
