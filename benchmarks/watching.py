"""What `watch` costs a plain PyTorch loop, by itself: no statistics, only seeing the steps.

    python benchmarks/watching.py [--rounds 25] [--steps 400]
    python benchmarks/watching.py --live [--rounds 5]

Blocks of each kind are run in turn, in shuffled order, in one process on one thread; times are
CPU time per step (median over the rounds) and its ratio to the bare loop of the same round.
With `--live`: what `ShowHealth(every_s=0.5)` adds to a loop with recorders, over ten seconds of it,
in a terminal and in a notebook: how many looks and pictures there were, those at the end too, and
their share of the CPU time, which is exact where ratios of whole loops are not.
"""

import argparse
import io
import platform
import random
import statistics
import time

import torch
from torch import nn

from hookkit.callbacks import Callback
from hookkit.live import ShowHealth, screens, show_health
from hookkit.stats import ActivationStats, ParamStats
from hookkit.watching import watch


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
        "watch, optimizer found by itself": watch(model),
        "watch, a callback that does nothing": watch(model, opt, Noop()),
        "watch, and w.loss(loss) reported": watch(model, opt, Noop()),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(n_rounds):
        for kind in random.sample(list(kinds), len(kinds)):
            w = kinds[kind]
            if w is None:
                times[kind].append(steps(model, x, opt, n_steps))
            elif "reported" in kind:
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


class Cell(screens.Notebook):
    """A notebook that nobody looks at."""

    def _update(self) -> None:
        self._html()


class Counted(ShowHealth):
    """Shows into a stream or a cell, and counts how often."""

    def __init__(self, kind: str) -> None:
        super().__init__(every_s=0.5)
        self.kind, self.done, self.spent = kind, {"_look": 0, "_draw": 0}, 0.0

    def before_fit(self) -> None:
        made = screens.Terminal(io.StringIO()) if self.kind == "terminal" else Cell()
        show_health.screen = lambda: made
        super().before_fit()

    def _do(self, job: str, last: bool = False) -> None:
        self.done[job] += 1
        start = time.process_time()
        super()._do(job, last)
        self.spent += time.process_time() - start


def live(make, n_rounds: int, seconds: float = 10.0) -> None:
    model, x = make()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    n = max(int(seconds / steps(model, x, opt, 50)), 50)
    times: dict[str, list[float]] = {"recorders": [], "terminal": [], "notebook": []}
    done: dict[str, list[str]] = {kind: [] for kind in times}
    for _ in range(n_rounds):
        for kind in random.sample(list(times), len(times)):
            shown = [] if kind == "recorders" else [Counted(kind)]
            stats = ActivationStats(every=10, units=True), ParamStats(every=10)
            with watch(model, opt, *stats, *shown) as w:
                times[kind].append(reported(w, model, x, opt, n))
            for cb in shown:
                share = cb.spent / (times[kind][-1] * n)
                done[kind].append(f"{cb.done['_look']}+{cb.done['_draw']} {share:.1%}")
    for kind, mine in times.items():
        ratio = statistics.median(a / b for a, b in zip(mine, times["recorders"], strict=True))
        print(f"{kind:12} {statistics.median(mine) * 1e6:8.1f} µs/step   × {ratio:.4f}   ", end="")
        print(", ".join(done[kind]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--live", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread")
    for name, make in (("toy MLP 8-16-3", toy), ("transformer", transformer)) if args.live else ():
        print(f"\n{name}, {args.rounds} rounds; looks + pictures of each")
        live(make, args.rounds)
    if args.live:
        return
    for name, make, share in ("toy MLP 8-16-3", toy, 1), ("conv net 28×28, batch 64", conv, 20):
        times = measured(make, args.rounds, max(args.steps // share, 1))
        bare = times["bare loop"]
        print(f"\n{name}\n{'':38} µs/step   added   × bare")
        for kind, mine in times.items():
            ratio = statistics.median(a / b for a, b in zip(mine, bare, strict=True))
            added = statistics.median(a - b for a, b in zip(mine, bare, strict=True))
            median = statistics.median(mine)
            print(f"{kind:38} {median * 1e6:7.1f} {added * 1e6:7.1f}   {ratio:.3f}")


if __name__ == "__main__":
    main()
