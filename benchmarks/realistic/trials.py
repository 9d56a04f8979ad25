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
can be compared with that of the healthy one beside it. `fit` is the loop of those that have no
loop of their own, `update` the step of most others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookkit.recorders import ActivationStats, GradientStats, ParamStats
from hookkit.records import Run
from hookkit.training import Watcher, watch as hookkit_watch

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


def update(
    w: Watcher,
    opt: Optimizer,
    loss: Tensor,
    *,
    clip: tuple[nn.Module, float] | None = None,
    sched: Any = None,
) -> None:
    """One step of `opt` and `sched` on `loss`, reported; `clip`: whose gradients to what norm."""
    opt.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(clip[0].parameters(), clip[1])
    opt.step()
    if sched is not None:
        sched.step()
    w.loss(loss)


def fit(
    watch: Watch,
    model: Any,
    opt: Any,
    loss_of: Callable[[int], Tensor],
    n_steps: int,
    *,
    sched: Any = None,
    clip: float | None = None,
    after_step: Callable[[], object] = lambda: None,
    **options: Any,
) -> None:
    """The loop that most people write: `loss_of(step)` is the loss of the step's batch."""
    with watch(model, opt, **options) as w:
        for step in range(n_steps):
            loss = loss_of(step)
            opt.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            if sched is not None:
                sched.step()
            after_step()
            if "loss_func" not in options:
                w.loss(loss)
