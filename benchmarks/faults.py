"""The commonest mistakes, made in each healthy training of `realistic/`: are they named first?

    python benchmarks/diagnosis.py --runs DIR --train                    # the healthy ones
    python benchmarks/faults.py --runs DIR --faulty OTHER [--faults 2] [--skip 0] [--workers 2]
                                [--harmless]

`diagnosis.py` judges mistakes that an author chose, one by one; here the same twelve are made by
machine wherever they can be, so that a rule is measured on trainings that nobody chose for it: from
outside, by changed defaults of PyTorch's optimizers, and by what is done to the model that `watch`
is given. Each training gets `--faults` of them, in an order by a hash of both names, beginning
behind the first `--skip`. A mistake that does no harm is not counted: the score has to be worse
than that of all three seeds of the healthy training by a quarter of it. With `--harmless` small
changes are made instead, which nobody chose either; where the score is as good as before, to a
tenth, any alarm is a false one.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from diagnosis import findings_of, rules_that_alarm
from realistic.trials import TRIALS, Watch, watcher_of
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hookkit.records import Run

# A training that hangs ends after so many seconds
_LIMIT = 90

Change = Callable[[nn.Module], object]


def of_optimizers(key: str, change: Callable[[float], float]) -> None:
    """From now on each optimizer is made with another value of one of its options."""
    plain = Optimizer.__init__

    def changed(given: dict[str, Any]) -> dict[str, Any]:
        known = isinstance(given.get(key), int | float)
        return {**given, key: change(given[key])} if known else dict(given)

    def init(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        groups = [changed(p) if isinstance(p, dict) else p for p in params]
        plain(self, groups, changed(defaults))

    Optimizer.__init__ = init  # type: ignore[method-assign]


def without_zeroing() -> None:
    """`zero_grad` does nothing from now on."""
    for kind in (Optimizer, nn.Module):
        kind.zero_grad = lambda self, set_to_none=True: None  # type: ignore[method-assign]


def clipped(norm: float) -> None:
    """All gradients are clipped before each step."""

    def clip(opt: Optimizer, args: Any, kwargs: Any) -> None:
        params = (p for group in opt.param_groups for p in group["params"])
        nn.utils.clip_grad_norm_([p for p in params if p.grad is not None], norm)

    register_optimizer_step_pre_hook(clip)


@torch.no_grad()
def scale_weights(model: nn.Module, times: float) -> None:
    for m in model.modules():
        if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d | nn.Embedding):
            m.weight *= times if m.weight.requires_grad else 1


def scale_inputs(model: nn.Module, times: float) -> None:
    def scaled(x: Any) -> Any:
        return x * times if isinstance(x, Tensor) and x.is_floating_point() else x

    model.register_forward_pre_hook(lambda model, args: tuple(map(scaled, args)))


def drop_most(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.95


BAD_INIT = {"bad_init"}

OF_LOOP: dict[str, tuple[Callable[[], None], set[str]]] = {
    "learning rate × 30": (lambda: of_optimizers("lr", lambda x: x * 30), {"lr_too_high"}),
    "learning rate × 300": (lambda: of_optimizers("lr", lambda x: x * 300), {"lr_too_high"}),
    "learning rate / 100": (lambda: of_optimizers("lr", lambda x: x / 100), {"lr_too_low"}),
    "learning rate / 1000": (lambda: of_optimizers("lr", lambda x: x / 1000), {"lr_too_low"}),
    "weight decay of 10": (lambda: of_optimizers("weight_decay", lambda x: 10.0), {"weight_decay"}),
    "no zero_grad": (without_zeroing, {"grads_pile_up"}),
    "gradients clipped to 1e-6": (lambda: clipped(1e-6), {"clipping"}),
}
OF_MODEL: dict[str, tuple[Change, set[str]]] = {
    "first weights × 5": (lambda m: scale_weights(m, 5.0), BAD_INIT),
    "first weights × 20": (lambda m: scale_weights(m, 20.0), BAD_INIT),
    "first weights / 20": (lambda m: scale_weights(m, 0.05), {"bad_init"}),
    "inputs × 100": (lambda m: scale_inputs(m, 100.0), {"input_scale"}),
    "dropout of 0.95": (drop_most, {"dropout"}),
}
NAMES = {fault: names for fault, (_, names) in [*OF_LOOP.items(), *OF_MODEL.items()]}

_SMALL_LOOP: dict[str, Callable[[], None]] = {
    "learning rate × 3": lambda: of_optimizers("lr", lambda x: x * 3),
    "learning rate / 3": lambda: of_optimizers("lr", lambda x: x / 3),
    "weight decay of 0.01": lambda: of_optimizers("weight_decay", lambda x: 0.01),
}
_SMALL_MODEL: dict[str, Change] = {
    "first weights × 1.7": lambda m: scale_weights(m, 1.7),
    "first weights / 1.7": lambda m: scale_weights(m, 1 / 1.7),
    "inputs × 3": lambda m: scale_inputs(m, 3.0),
    "inputs / 3": lambda m: scale_inputs(m, 1 / 3),
}
HARMLESS = [*_SMALL_LOOP, *_SMALL_MODEL]
OF_LOOP |= {what: (change, set()) for what, change in _SMALL_LOOP.items()}
OF_MODEL |= {what: (change, set()) for what, change in _SMALL_MODEL.items()}


def watch_changed(runs: list[Run], change: Change) -> Watch:
    """A `watch` whose model has been changed first."""
    inner = watcher_of(runs)

    @contextmanager
    def watch(model: Any, *args: Any, **options: Any) -> Iterator[Any]:
        for m in model if isinstance(model, list | tuple) else [model]:
            change(m)
        with inner(model, *args, **options) as w:
            yield w

    return watch


def train(job: tuple[str, str, Path]) -> None:
    """Trains one case with a fault, in a process of its own, and saves its runs."""
    name, fault, folder = job
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runs: list[Run] = []
    if fault in OF_LOOP:
        OF_LOOP[fault][0]()
    watch = watch_changed(runs, OF_MODEL[fault][0]) if fault in OF_MODEL else watcher_of(runs)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(_LIMIT)
    score = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(Exception, KeyboardInterrupt):  # some cannot go on: that is harm, too
            score = float(TRIALS[name].train(watch))
    signal.alarm(0)
    for i, run in enumerate(runs):
        run.save(folder / f"{name}.{_slug(fault)}.{i}.run")
    facts = {"score": score, "runs": len(runs)}
    (folder / f"{name}.{_slug(fault)}.json").write_text(json.dumps(facts))


def _slug(fault: str) -> str:
    words = fault.replace("×", "times").replace("/", "over")
    return "".join(c if c.isalnum() else "_" for c in words)


def did_harm(name: str, score: float, healthy: Path, by: float = 0.25) -> bool:
    """Whether a score is worse than that of all healthy seeds by a quarter."""
    files = healthy.glob(f"{name}.[0-9].json")
    worst = max(json.loads(file.read_text())["score"] for file in files)
    return not math.isfinite(score) or score > worst + by * abs(worst)


def alarms(name: str, fault: str, n_runs: int, folder: Path) -> list[str]:
    """Rules that alarm, as a user reads them."""
    files = [folder / f"{name}.{_slug(fault)}.{i}.run" for i in range(n_runs)]
    return rules_that_alarm(findings_of(files))


def print_false_alarms(jobs: list[tuple[str, str, Path]], healthy: Path, verbose: bool) -> None:
    """A row for each small change: the trainings that do as well, and those of them alarmed."""
    print("\n| change | trainings that do as well | alarmed |\n|---|---|---|")
    total = [0, 0]
    for change in HARMLESS:
        counts = [0, 0]
        for name, folder in ((name, folder) for name, own, folder in jobs if own == change):
            facts = json.loads((folder / f"{name}.{_slug(change)}.json").read_text())
            if did_harm(name, facts["score"], healthy, by=0.1):
                continue
            found = alarms(name, change, facts["runs"], folder)
            counts = [counts[0] + 1, counts[1] + bool(found)]
            if verbose and found:
                print(f"{name}: {found}")
        total = [a + b for a, b in zip(total, counts, strict=True)]
        print(f"| {change} | {counts[0]} | {counts[1]} |")
    print(f"| all | {total[0]} | {total[1]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, metavar="DIR", help="recordings of diagnosis.py")
    parser.add_argument("--faulty", type=Path, metavar="DIR", help="where recorded runs are kept")
    parser.add_argument("--faults", type=int, default=2, help="of each training")
    parser.add_argument("--skip", type=int, default=0, help="leaves the first ones out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="those that are not named first")
    parser.add_argument("--harmless", action="store_true", help="small changes: false alarms")
    o = parser.parse_args()
    o.faulty.mkdir(parents=True, exist_ok=True)
    jobs = []
    for name in (t.name for t in TRIALS.values() if not t.wrong):
        which = HARMLESS if o.harmless else NAMES
        order = sorted(which, key=lambda fault: crc32(f"{fault} {name}".encode()))
        jobs += [(name, fault, o.faulty) for fault in order[o.skip :][: o.faults]]
    todo = [job for job in jobs if not (o.faulty / f"{job[0]}.{_slug(job[1])}.json").exists()]
    # forked, since each process changes PyTorch for itself alone
    with multiprocessing.get_context("fork").Pool(o.workers, maxtasksperchild=1) as pool:
        for i, _ in enumerate(pool.imap_unordered(train, todo), 1):
            print(f"\r{i} of {len(todo)} trained", end="", flush=True)
    if o.harmless:
        print_false_alarms(jobs, o.runs, o.verbose)
        return
    print(
        "\n| fault | trainings it harms | named first | later | no alarm |\n|---|---|---|---|---|"
    )
    total = [0] * 4
    for fault, names in NAMES.items():
        counts = [0] * 4
        for name in (name for name, own, _ in jobs if own == fault):
            facts = json.loads((o.faulty / f"{name}.{_slug(fault)}.json").read_text())
            if not did_harm(name, facts["score"], o.runs):
                continue
            found = alarms(name, fault, facts["runs"], o.faulty)
            first, later = bool(set(found[:1]) & names), bool(set(found[1:]) & names)
            seen = (True, first, later and not first, not found)
            counts = [n + hit for n, hit in zip(counts, seen, strict=True)]
            if o.verbose and not first:
                print(f"{name}: {found}")
        total = [a + b for a, b in zip(total, counts, strict=True)]
        print(f"| {fault} | {' | '.join(map(str, counts))} |")
    print(f"| all | {' | '.join(map(str, total))} |")


if __name__ == "__main__":
    main()
