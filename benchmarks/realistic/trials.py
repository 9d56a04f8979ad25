"""What a training is here: a function that runs it, and what is wrong with it.

    @healthy
    def vae(watch: Watch, *, beta: float = 1.0) -> float:
        model = …
        with watch(model, opt) as w:
            for x in batches:
                …
                w.loss(loss)
        return float(loss)                     # how good it became: lower is better

    @failing("the weight of the KL term is 200", names=("posterior_collapse",), trace=True)
    def vae_beta_200(watch: Watch) -> float:
        return vae(watch, beta=200.0)

A function trains as its author would at home, calls `watch(model, opt)` where a user calls
`hookkit.watch`, and returns a number that says how good the result is; that of a failing training
can be compared with that of the healthy one beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from torch import nn
from torch.optim import Optimizer

from hookkit.records import Run
from hookkit.stats import ActivationStats, GradientStats, ParamStats
from hookkit.watching import Watcher
from hookkit.watching import watch as hookkit_watch

Watch = Callable[..., AbstractContextManager[Watcher]]
Train = Callable[[Watch], float]


@dataclass(frozen=True)
class Trial:
    """A training and what its author knew of it before the first run.

    Args:
        train: runs it and returns how good the result is; lower is better.
        wrong: the one thing that is wrong with it; "" if it is healthy.
        names: the rules that would name that cause.
        trace: whether the fault can be seen in losses, activations, gradients or parameters.
    """

    train: Train
    wrong: str = ""
    names: frozenset[str] = frozenset()
    trace: bool = False

    @property
    def name(self) -> str:
        return self.train.__name__

    @property
    def is_held(self) -> bool:
        """Whether it belongs to the half that nobody looks at while rules are made."""
        return crc32(self.name.encode()) % 2 == 1


TRIALS: dict[str, Trial] = {}


def healthy(train: Train) -> Any:
    """Registers a training that works; a note about it is fine, an alarm is not."""
    return _register(Trial(train))


def failing(wrong: str, *, names: tuple[str, ...], trace: bool) -> Callable[[Train], Any]:
    """Registers a training with one fault, marked before it has ever run."""
    return lambda train: _register(Trial(train, wrong, frozenset(names), trace))


def _register(trial: Trial) -> Train:
    if trial.name in TRIALS:
        raise ValueError(f"two trainings are called {trial.name}")
    TRIALS[trial.name] = trial
    return trial.train


def watcher_of(runs: list[Run]) -> Watch:
    """A `watch` that records everything; each run is appended to `runs` when its block ends."""

    @contextmanager
    def watch(model: nn.Module, opt: Optimizer | None = None, **options: Any) -> Iterator[Watcher]:
        stats = ActivationStats(include_paramless=True, units=True), GradientStats(), ParamStats()
        with hookkit_watch(model, opt, *stats, **options) as w:
            try:
                yield w
            finally:
                runs.append(w.run_record())

    return watch
