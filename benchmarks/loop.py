"""What the Learner's loop costs in each step, beside the bare PyTorch loop, fastai and Lightning.

The net is so small that only the loop counts: Linear(8, 16), ReLU, Linear(16, 3), batches of 16,
SGD. No statistics are recorded.

Loops take turns within each round, in a new order each time; a round's ratio is against the bare
loop of the same round.
"""

from __future__ import annotations

import random
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rows import Row, against, main, seconds
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
    from hookkit.training import Learner

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
    from hookkit.callbacks.hook_callback import HookCallback

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
    "hookkit Learner, TrainEvalCallback alone": hookkit_bare,
    "hookkit Learner, default callbacks": hookkit,
    "hookkit Learner, with ProgressCallback": hookkit_progress,
    "hookkit Learner, hooks installed and off": hookkit_hooks_off,
    "fastai's Learner (OptimWrapper)": fastai,
    "Lightning's Trainer": lightning,
}


PAIRS = [
    ("hookkit Learner, default callbacks", "bare", 1.15),
    ("hookkit Learner, TrainEvalCallback alone", "bare"),
    ("hookkit Learner, with ProgressCallback", "bare"),
    ("hookkit Learner, hooks installed and off", "bare"),
    ("hookkit Learner, default callbacks", "fastai's Learner (OptimWrapper)"),
    ("hookkit Learner, default callbacks", "Lightning's Trainer"),
]


def rows(full: bool, device: str) -> Iterator[Row]:
    steps, rounds = (400, 9) if full else (200, 5)
    warnings.simplefilter("ignore")
    runs: dict[str, Run] = {}
    for name, make in LOOPS.items():
        try:
            runs[name] = make(steps)
        except Exception:  # a peer that is there and cannot be imported is left out too
            continue
        runs[name](0)  # warm up
    times = {name: list[float]() for name in runs}
    for r in range(rounds):
        for name in random.Random(r).sample(list(runs), len(runs)):
            times[name].append(seconds(partial(runs[name], r)))
    base = times["bare PyTorch"]
    found = {
        name: statistics.median(t / b for t, b in zip(each, base, strict=True))
        for name, each in times.items()
    }
    case = f"MLP 8-16-3: a step of {statistics.median(base) / steps * 1e6:.0f} µs"
    yield from against(case, found, PAIRS)


if __name__ == "__main__":
    main(__doc__ or "", rows)
