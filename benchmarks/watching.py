"""What `watch` costs a plain PyTorch loop before any statistics, and what a live view adds.

Bare is the loop alone. Blocks of each kind are run in turn, in shuffled order; a figure is CPU time
over the bare loop of the same round. Of `ShowHealth(every_s=0.5)` it is 1 and the share of the CPU
time that its looks and pictures take in a loop with recorders, without the one at the end: exact
where ratios of whole loops are not.
"""

import random
import statistics
import time
from collections.abc import Iterator

import torch
from rows import Row, against, main
from torch import nn

from hookkit.callbacks import Callback
from hookkit.recorders import ActivationStats, ParamStats
from hookkit.training import watch
from hookkit.training.live import ShowHealth


class Noop(Callback):
    """Listens to every event of a step, and does nothing."""

    def before_batch(self) -> None: ...
    def after_pred(self) -> None: ...
    def before_step(self) -> None: ...
    def after_step(self) -> None: ...
    def after_batch(self) -> None: ...


def toy() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(16, 8)


def conv() -> tuple[nn.Module, torch.Tensor]:
    sizes = [(1, 8), (8, 16), (16, 32), (32, 64)]
    layers = [m for a, b in sizes for m in (nn.Conv2d(a, b, 3, 2, 1), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10)), torch.randn(64, 1, 28, 28)


def steps(model: nn.Module, x: torch.Tensor, opt: torch.optim.Optimizer, n: int) -> float:
    """CPU seconds per training step."""
    start = time.process_time()
    for _ in range(n):
        model(x).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    return (time.process_time() - start) / n


def measured(make, n_rounds: int, n_steps: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model, x = make()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    kinds = {
        "bare loop": None,
        "watch, no callback": watch(model, opt),
        "watch(model), which finds the optimizer": watch(model),
        "watch, a callback that does nothing": watch(model, opt, Noop()),
        "watch, a callback, and w.loss(loss)": watch(model, opt, Noop()),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(n_rounds):
        for kind in random.sample(list(kinds), len(kinds)):
            w = kinds[kind]
            if w is None:
                times[kind].append(steps(model, x, opt, n_steps))
            elif "w.loss" in kind:
                with w:
                    times[kind].append(reported(w, model, x, opt, n_steps))
            else:
                with w:
                    times[kind].append(steps(model, x, opt, n_steps))
    return times


def reported(w, model: nn.Module, x: torch.Tensor, opt: torch.optim.Optimizer, n: int) -> float:
    start = time.process_time()
    for _ in range(n):
        loss = model(x).pow(2).mean()
        w.loss(loss)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return (time.process_time() - start) / n


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(16, 32, 64)


class Cell:
    """A notebook that nobody looks at."""

    def show(self, html: str, text: str) -> None: ...


class Timed(ShowHealth):
    """Takes the time of its looks."""

    def __init__(self, kind: str) -> None:
        super().__init__(every_s=0.5)
        self.kind, self.spent = kind, 0.0

    def before_fit(self) -> None:
        super().before_fit()
        self._output = Cell() if self.kind == "notebook" else None

    def _look(self, last: bool = False) -> None:
        start = time.process_time()
        super()._look(last)
        self.spent += (time.process_time() - start) * (not last)


def share_of_looks(kind: str, seconds: float = 10.0) -> float:
    """The part of a loop's CPU time that looks and pictures take."""
    model, x = transformer()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    n = max(int(seconds / steps(model, x, opt, 50)), 50)
    shown = Timed(kind)
    stats = ActivationStats(every=10, units=True), ParamStats(every=10)
    with watch(model, opt, *stats, shown) as w:
        took = reported(w, model, x, opt, n) * n
    return shown.spent / took


def rows(full: bool, device: str) -> Iterator[Row]:
    random.seed(0)
    n_rounds, n_steps = (25, 400) if full else (7, 200)
    for name, make, share in ("MLP 8-16-3", toy, 1), ("small conv net", conv, 20):
        times = measured(make, n_rounds, max(n_steps // share, 1))
        bare = times.pop("bare loop")
        found = {
            kind: statistics.median(t / b for t, b in zip(each, bare, strict=True))
            for kind, each in times.items()
        }
        case = f"{name}: a step of {statistics.median(bare) * 1e6:.0f} µs"
        yield from against(case, found, [(kind, "bare") for kind in found])
    for kind in ("file", "notebook"):
        looks = statistics.median(share_of_looks(kind) for _ in range(5 if full else 1))
        case = "transformer of 3 layers with recorders, ten seconds"
        yield Row(case, f"ShowHealth in a {kind}", 1 + looks, "bare", 1.0, 1.02)


if __name__ == "__main__":
    main(__doc__ or "", rows)
