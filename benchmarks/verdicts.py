"""What `diagnose` says of trainings that people run: 40 and more healthy ones, 60 and more failing.

    python benchmarks/verdicts.py --runs DIR [--half tune|held|fresh|last|fifth|sixth|all]
                                  [--only WORD …] [--seeds 3] [--workers 2] [--verbose]
                                  [--scores] [--write] [--list]

Trains what is registered in `realistic/` with each seed, one thread each, and saves the recorded
runs in DIR. What lies there is not trained again, so that a run that was cut goes on, and changed
rules are judged in seconds. Prints a table for each part (`Trial.part`: two halves by a hash of the
name, and those of `LATER`, each written when the rules were done and judged once before any rule
was changed), and each rule's hits and false alarms; `--scores` trains, and prints how well each
training did, without judging it.

A healthy run counts as alarmed if any finding is a warning or an error; a failing one as named
first if its first alarm is by a rule of which its author said, before any run, that it names the
cause. From all parts `--write` makes `hookkit/health/rates.py`, by which a finding is "clear" or
"likely": of each rule, the trainings (in any seed) in which it came first and was right, and those
in which it came first and was not, or alarmed a healthy one.
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
from realistic.trials import LATER, TRIALS, Trial, watcher_of

from hookkit.health import Finding, diagnose
from hookkit.health import rates as rates_module
from hookkit.health.diagnosis import SEVERITIES
from hookkit.records import Run

VARIANTS = {
    **dict.fromkeys(("no_gradient", "not_in_optimizer", "never_ran", "unregistered"), "unmoved"),
    **dict.fromkeys(
        ("mode_collapse", "posterior_collapse", "constant_input"), "representation_collapse"
    ),
}
"""Names of findings, and words of authors, for what one rule is about.

One rule reports three kinds of parameters that never move, and every collapse; that the inputs are
the same for all samples is the narrower name of one.
"""

PARTS = "tune", "held", *LATER

for _found in iter_modules(realistic.__path__):
    import_module(f"realistic.{_found.name}")


@dataclass(frozen=True)
class Verdict:
    """What was found in one training with one seed.

    Args:
        trial: the training.
        seed: of torch's generator.
        findings: of all its runs, the most severe first.
        headline: of its first run.
        score: what the training function returned; lower is better.
        seconds: how long it took.
    """

    trial: Trial
    seed: int
    findings: tuple[Finding, ...]
    headline: str
    score: float
    seconds: float

    @property
    def alarms(self) -> list[str]:
        """Rules of warnings and errors, in the order in which a user reads them."""
        return [VARIANTS.get(f.rule, f.rule) for f in self.findings if f.severity != "note"]

    @property
    def names(self) -> set[str]:
        """The rules that name the cause."""
        return {VARIANTS.get(name, name) for name in self.trial.names}

    @property
    def is_right(self) -> bool:
        """No alarm in a healthy run, the cause first in a failing one."""
        first = self.alarms[:1]
        return bool(set(first) & self.names) if self.trial.wrong else not first

    def __str__(self) -> str:
        found = ", ".join(f"{f.rule} ({f.severity})" for f in self.findings) or self.headline
        wrong = f" [{self.trial.wrong}: {' or '.join(sorted(self.names)) or 'no rule'}]"
        mark = "ok   " if self.is_right else "WRONG"
        return (
            f"{mark} {self.trial.name} seed {self.seed}{wrong * bool(self.trial.wrong)} "
            f"score {self.score:.3g}, {self.seconds:.0f} s: {found}"
        )


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = (folder / f"{trial.name}.{seed}.{i}.run" for i in range(facts["runs"]))
        found = [diagnose(Run.load(file)) for file in files]
    findings = sorted((f for d in found for f in d), key=lambda f: -SEVERITIES.index(f.severity))
    head = found[0].headline if found else "nothing was recorded"
    return Verdict(trial, seed, tuple(findings), head, facts["score"], facts["seconds"])


def scores(trial: Trial, seed: int, folder: Path) -> str:
    """How well one training did, without a verdict."""
    facts = json.loads((folder / f"{trial.name}.{seed}.json").read_text())
    what = trial.wrong or "healthy"
    return f"{trial.name:36} {seed} {facts['score']:9.3g} {facts['seconds']:5.0f} s  {what}"


def parts(verdicts: list[Verdict]) -> list[str]:
    """The parts that are to be shown."""
    return [part for part in PARTS if any(v.trial.part == part for v in verdicts)]


def table(verdicts: list[Verdict]) -> Iterable[str]:
    """A row for each part."""
    yield "| part | healthy alarmed | failing with a trace, named first | later | without a trace |"
    yield "|---|---|---|---|---|"
    for part in parts(verdicts):
        own = [v for v in verdicts if v.trial.part == part]
        well = [v for v in own if not v.trial.wrong]
        traced, other = (
            [v for v in own if v.trial.wrong and v.trial.trace is t] for t in (True, False)
        )
        later = [v for v in traced if not v.is_right and set(v.alarms) & v.names]
        yield (
            f"| {part} | {sum(not v.is_right for v in well)} of {len(well)} "
            f"| {sum(v.is_right for v in traced)} of {len(traced)} | {len(later)} "
            f"| {sum(v.is_right for v in other)} of {len(other)} |"
        )


def by_rule(verdicts: list[Verdict]) -> Iterable[str]:
    """Of each rule, by part: trainings where it came first and was right, was not; healthy ones."""
    names = parts(verdicts)
    yield "| rule |" + "".join(f" {part}: right | wrong | healthy |" for part in names)
    yield "|---|" + "---|---|---|" * len(names)
    by_part = [_counts(v for v in verdicts if v.trial.part == part) for part in names]
    for rule in sorted({rule for part in by_part for counts in part for rule in counts}):
        cells = (str(counts[rule] or "") for part in by_part for counts in part)
        yield f"| {rule} | {' | '.join(cells)} |"


def _counts(verdicts: Iterable[Verdict]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """By the rule of an alarm, trainings (not seeds): right, wrong, and healthy ones alarmed.

    Of a failing one with a trace the first alarm counts, of a healthy one all do.
    """
    seen: tuple[set[tuple[str, str]], ...] = (set(), set(), set())
    for v in verdicts:
        alarms = [f.rule for f in v.findings if f.severity != "note"]
        if not v.trial.wrong:
            seen[2].update((rule, v.trial.name) for rule in alarms)
        elif alarms and v.trial.trace:
            seen[0 if v.is_right else 1].add((alarms[0], v.trial.name))
    right, wrong, healthy = (Counter(rule for rule, _ in pairs) for pairs in seen)
    return right, wrong, healthy


def rates(verdicts: list[Verdict]) -> str:
    """The lines of `RATES` in `hookkit/health/rates.py`: how often each rule was right, or not."""
    right, wrong, healthy = _counts(verdicts)
    wrong += healthy
    rules = sorted({*right, *wrong})
    return "".join(f'    "{rule}": ({right[rule]}, {wrong[rule]}),\n' for rule in rules)


def check_rates(verdicts: list[Verdict], write: bool) -> None:
    """Compares the measured rates with those in the code, or writes them there."""
    path = Path(rates_module.__file__)
    head, rest = path.read_text().split("RATES: dict[str, tuple[int, int]] = {", 1)
    table, rest = rest.split("}", 1)
    new = rates(verdicts)
    if write:
        path.write_text(f"{head}RATES: dict[str, tuple[int, int]] = {{\n{new}}}{rest}")
    elif table.strip() != new.strip():
        print(f"{path.name} differs from what was measured: run with --write")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, metavar="DIR", help="where recorded runs are kept")
    parser.add_argument("--half", choices=(*PARTS, "all"), default="tune")
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="all lines, with their findings")
    parser.add_argument("--scores", action="store_true", help="scores only; nothing is judged")
    parser.add_argument("--write", action="store_true", help="with --half all: writes rates.py")
    parser.add_argument("--list", action="store_true", help="what there is; nothing is trained")
    o = parser.parse_args()
    chosen = [t for t in TRIALS.values() if any(word in t.name for word in o.only)]
    wanted = PARTS if o.half == "all" else (o.half,)
    chosen = [t for t in chosen if t.part in wanted]
    if o.list or not o.runs:
        for t in chosen:
            print(f"{t.part:5} {t.name:36} {t.wrong or 'healthy'}")
        return
    o.runs.mkdir(parents=True, exist_ok=True)
    jobs = [(t.name, seed, o.runs) for t in chosen for seed in range(o.seeds)]
    todo = [job for job in jobs if not (o.runs / f"{job[0]}.{job[1]}.json").exists()]
    with multiprocessing.get_context("spawn").Pool(o.workers, maxtasksperchild=20) as pool:
        for i, _ in enumerate(pool.imap_unordered(train, todo), 1):
            print(f"\r{i} of {len(todo)} trained", end="", flush=True)
    if o.scores:
        print("", *(scores(TRIALS[name], seed, o.runs) for name, seed, _ in jobs), sep="\n")
        return
    verdicts = [judge(TRIALS[name], seed, o.runs) for name, seed, _ in jobs]
    for v in verdicts:
        if o.verbose or not v.is_right:
            print(v)
            if o.verbose:
                print(*v.findings, sep="\n")
    print("", *table(verdicts), "", *by_rule(verdicts), sep="\n")
    if o.half == "all" and o.only == [""]:
        check_rates(verdicts, o.write)


if __name__ == "__main__":
    main()
