"""How often is `diagnose` right? 24 healthy trainings, 48 failing ones, of the kinds people run.

    python benchmarks/diagnosis.py --runs DIR [--only WORD …] [--seeds 3] [--workers 2] [--verbose]

Trains what is registered in `realistic/` with each seed, one thread each, and saves the recorded
runs in DIR. What lies there is not trained again, so that a run that was cut goes on, and is judged
again in seconds. The trainings are a check for false alarms and for causes that are named: none of
their numbers is a rule's, and no rule is changed for one of them.

A healthy run counts as alarmed if any finding is a warning or an error; a failing one as named
first if its first alarm is by a rule of which its author said, before any run, that it names the
cause.
"""

import argparse
import json
import multiprocessing
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

os.environ.setdefault("OMP_NUM_THREADS", "1")
import realistic
import torch
from realistic.trials import TRIALS, Trial, watcher_of

from hookkit.diagnosis import RULES, Finding, diagnose
from hookkit.records import Run

VARIANTS = {
    **dict.fromkeys(("no_gradient", "not_in_optimizer", "unregistered", "no_step"), "unmoved"),
    "schedule_over": "lr_too_low",
}
"""Names of findings → the authors' word: for what never moves, and rates that end."""

for _module in iter_modules(realistic.__path__):
    import_module(f"realistic.{_module.name}")

_ORDER = [rule.name for rule in RULES]


@dataclass(frozen=True)
class Verdict:
    """What was found in one training with one seed.

    Args:
        trial: the training.
        seed: of torch's generator.
        findings: of all its runs, as a user reads them.
        score: what the training function returned; lower is better.
    """

    trial: Trial
    seed: int
    findings: tuple[Finding, ...]
    score: float

    @property
    def alarms(self) -> list[str]:
        """Rules of warnings and errors, in the order in which a user reads them."""
        return rules_that_alarm(self.findings)

    @property
    def is_right(self) -> bool:
        """No alarm in a healthy run, the cause first in a failing one."""
        first = set(self.alarms[:1])
        names = {VARIANTS.get(name, name) for name in self.trial.names}
        return bool(first & names) if self.trial.wrong else not first

    def __str__(self) -> str:
        found = ", ".join(f"{f.rule} ({f.severity})" for f in self.findings) or "no finding"
        wrong = f" [{self.trial.wrong}: {' or '.join(sorted(self.trial.names)) or 'no rule'}]"
        mark = "ok   " if self.is_right else "WRONG"
        name = f"{self.trial.name} seed {self.seed}{wrong * bool(self.trial.wrong)}"
        return f"{mark} {name} score {self.score:.3g}: {found}"


def rules_that_alarm(findings: Iterable[Finding]) -> list[str]:
    """Rules of warnings and errors, by the authors' words."""
    return [VARIANTS.get(f.rule, f.rule) for f in findings if f.severity != "note"]


def findings_of(files: Iterable[Path]) -> tuple[Finding, ...]:
    """What is found now in runs that were saved; those of several runs, in the rules' order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [f for file in files for f in diagnose(Run.load(file))]
    return tuple(sorted(found, key=lambda f: (f.severity == "note", _ORDER.index(f.rule))))


def train(job: tuple[str, int, Path]) -> None:
    """Trains one case and saves its runs; the small file that says so is written last."""
    name, seed, folder = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    runs: list[Run] = []
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        score = TRIALS[name].train(watcher_of(runs))
    facts = {"score": float(score), "seconds": time.perf_counter() - start, "runs": len(runs)}
    for i, run in enumerate(runs):
        run.save(folder / f"{name}.{seed}.{i}.run")
    (folder / f"{name}.{seed}.json").write_text(json.dumps(facts))


def judge(trial: Trial, seed: int, folder: Path) -> Verdict:
    """What is found now in the runs that were saved."""
    facts = json.loads((folder / f"{trial.name}.{seed}.json").read_text())
    files = (folder / f"{trial.name}.{seed}.{i}.run" for i in range(facts["runs"]))
    return Verdict(trial, seed, findings_of(files), facts["score"])


def table(verdicts: list[Verdict]) -> Iterable[str]:
    """The result as a table, and each rule's first alarms: right ones, wrong ones, false ones."""
    well = [v for v in verdicts if not v.trial.wrong]
    traced = [v for v in verdicts if v.trial.wrong and v.trial.trace]
    wrong = [v for v in traced if v.alarms and not v.is_right]
    yield "| healthy alarmed | failing with a trace, named first | another rule first | no alarm |"
    yield "|---|---|---|---|"
    yield (
        f"| {sum(not v.is_right for v in well)} of {len(well)} "
        f"| {sum(v.is_right for v in traced)} of {len(traced)} | {len(wrong)} "
        f"| {sum(not v.alarms for v in traced)} |"
    )
    counts = [
        Counter(v.alarms[0] for v in part if v.alarms)
        for part in ([v for v in traced if v.is_right], wrong, well)
    ]
    yield "\n| rule | first and right | first and wrong | healthy alarmed |\n|---|---|---|---|"
    for rule in sorted({rule for count in counts for rule in count}):
        yield f"| {rule} | {' | '.join(str(count[rule] or '') for count in counts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, metavar="DIR", required=True)
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="all lines, with their findings")
    parser.add_argument("--train", action="store_true", help="trains and does not judge")
    o = parser.parse_args()
    chosen = [t for t in TRIALS.values() if any(word in t.name for word in o.only)]
    o.runs.mkdir(parents=True, exist_ok=True)
    jobs = [(t.name, seed, o.runs) for t in chosen for seed in range(o.seeds)]
    todo = [job for job in jobs if not (o.runs / f"{job[0]}.{job[1]}.json").exists()]
    with multiprocessing.get_context("spawn").Pool(o.workers, maxtasksperchild=20) as pool:
        for i, _ in enumerate(pool.imap_unordered(train, todo), 1):
            print(f"\r{i} of {len(todo)} trained", end="", flush=True)
    if o.train:
        return
    verdicts = [judge(TRIALS[name], seed, o.runs) for name, seed, _ in jobs]
    for v in verdicts:
        if o.verbose or not v.is_right:
            print(v, *(v.findings if o.verbose else ()), sep="\n")
    print("", *table(verdicts), sep="\n")


if __name__ == "__main__":
    main()
