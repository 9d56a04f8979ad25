"""What a training loop costs per step, beside the bare PyTorch loop, on a net so small that only
the loop counts: Linear(8, 16), ReLU, Linear(16, 3), batches of 16, SGD.

    OMP_NUM_THREADS=1 python benchmarks/loop.py [--rounds 9] [--steps 400]

Loops take turns within each round, in a new order each time; a round's ratio is against the bare
loop of the same round; the table has medians. CPU time of the process, one thread. fastai and
Lightning are measured where they can be imported.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

Run = Callable[[int], None]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def batches(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=g), torch.randint(0, 3, (16,), generator=g)) for _ in range(n)
    ]


def bare(n: int) -> Run:
    data, model = batches(n), net()
    opt, loss_func = torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()

    def run(_: int) -> None:
        model.train()
        for x, y in data:
            loss = loss_func(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()

    return run


def hookkit(n: int, *cbs: Any, default_cbs: bool = True) -> Run:
    from hookkit.learner import Learner

    learn = Learner(
        (batches(n), None),
        net(),
        nn.CrossEntropyLoss(),
        torch.optim.SGD,
        lr=0.01,
        cbs=list(cbs),
        default_cbs=default_cbs,
    )
    learn.logger = lambda row: None
    return lambda _: learn.fit(1)


def hookkit_bare(n: int) -> Run:
    from hookkit.callbacks import TrainEvalCallback

    return hookkit(n, TrainEvalCallback, default_cbs=False)


def hookkit_progress(n: int) -> Run:
    from hookkit.callbacks import ProgressCallback

    return hookkit(n, ProgressCallback)


def hookkit_hooks_off(n: int) -> Run:
    from hookkit.recording import HookCallback

    return hookkit(n, HookCallback(every=10**9, hook=lambda m, i, o: None))


def fastai(n: int) -> Run:
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    dls = DataLoaders(batches(n), [])
    learn = Learner(
        dls,
        net(),
        nn.CrossEntropyLoss(),
        lambda p, lr: OptimWrapper(p, torch.optim.SGD, lr=lr),
        lr=0.01,
    )
    learn.logger = lambda row: None
    return lambda _: learn.fit(1)


def lightning(n: int) -> Run:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = net(), nn.CrossEntropyLoss()

        def training_step(self, batch: Any, i: int) -> Any:
            x, y = batch
            return self.loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    # in a loader: Lightning takes a list for several loaders, and a batch for one of them
    module, data = Module(), DataLoader(batches(n), batch_size=None)

    def run(_: int) -> None:
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)

    return run


LOOPS: dict[str, Callable[[int], Run]] = {
    "bare PyTorch": bare,
    "hookkit, TrainEvalCallback alone": hookkit_bare,
    "hookkit, default callbacks": hookkit,
    "hookkit, with ProgressCallback": hookkit_progress,
    "hookkit, hooks installed and off": hookkit_hooks_off,
    "fastai (OptimWrapper)": fastai,
    "Lightning": lightning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=400)
    opts = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runs: dict[str, Run] = {}
    for name, make in LOOPS.items():
        try:
            runs[name] = make(opts.steps)
        except Exception:  # a peer that is there and cannot be imported is left out too
            continue
        runs[name](0)  # warm up
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for r in range(opts.rounds):
        random.Random(r).shuffle(order)
        for name in order:
            start = time.process_time()
            runs[name](r)
            times[name].append((time.process_time() - start) / opts.steps)
    base = times["bare PyTorch"]
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print(f"\n| loop | µs a step | × bare |\n|{'-' * 36}|----------:|-------:|")
    for name, seconds in times.items():
        ratio = statistics.median(s / b for s, b in zip(seconds, base, strict=True))
        print(f"| {name:<34} | {statistics.median(seconds) * 1e6:>9.0f} | {ratio:>6.2f} |")


if __name__ == "__main__":
    main()
