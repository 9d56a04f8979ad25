"""How often is `diagnose` right? Healthy runs falsely alarmed, failing runs whose cause is named.

    python benchmarks/diagnosis.py [--seeds 3] [--half tune|held|all] [--only NAME] [--verbose]
                                   [--write FILE] [--against benchmarks/baselines/findings.csv]

Trains every case of `trainings.py` (healthy), `failing_trainings.py` and `more_trainings.py` (both)
with three seeds, recorded by `watch`, and prints a markdown table. Each list is split once and for
all: cases at even places were looked at while the rules were made ("tune"), those at odd places
only afterwards ("held").

`--write` saves all findings as CSV, in their order: training, seed, rule, severity (0 a note, 1 a
warning, 2 an error), layers, first and last step. `--against` compares with such a file and exits
with 1 if anything differs: it is how a change of the rules' code is shown to change no finding.
"""

import argparse
import csv
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import failing_trainings  # noqa: F401  (registers the failing cases)
import more_trainings  # noqa: F401  (and more of both)
import torch
from trainings import FAILING, HEALTHY, Case, Setup, run_steps

from hookkit.health import Diagnosis, diagnose
from hookkit.health.diagnosis import SEVERITIES
from hookkit.records import Run

ALARM = {"warning", "error"}

COLUMNS = ("training", "seed", "rule", "severity", "layers", "first_step", "last_step")

Row = tuple[str, ...]


def recorded(s: Setup) -> Run:
    """Train `s` and give what was recorded."""
    from hookkit.stats import ActivationStats, GradientStats, ParamStats
    from hookkit.watching import watch

    stats = ActivationStats(include_paramless=True, units=True), GradientStats(), ParamStats()
    with watch(s.model, s.opt, *stats) as w:
        for loss in run_steps(s):
            w.loss(loss)
    w.info.update(n_classes=s.n_classes, loss_func=s.loss_name)
    w.info["momentum"] = [g.get("momentum", 0.0) for g in s.opt.param_groups]
    return w.run_record()


def judge(case: Case, seed: int) -> Diagnosis:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return diagnose(recorded(case.make()))


def right(case: Case, d: Diagnosis) -> bool:
    """No alarm for a healthy case; for a failing one an alarm by a rule that names its cause."""
    alarms = {f.rule for f in d if f.severity in ALARM}
    return bool(alarms & case.cause) if case.cause else not alarms


def half(cases: list[Case], which: str) -> list[Case]:
    return {"all": cases, "tune": cases[::2], "held": cases[1::2]}[which]


def rows_of(case: Case, seed: int, d: Diagnosis) -> list[Row]:
    """The findings of one run as rows of a CSV file."""
    return [
        (case.name, str(seed), f.rule, str(SEVERITIES.index(f.severity)), " ".join(f.layers),
         str(f.steps[0]), str(f.steps[1]))
        for f in d
    ]  # fmt: skip


def write(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def differences(rows: list[Row], path: Path, ran: set[tuple[str, str]]) -> list[str]:
    """A line for each run of `ran` whose findings, or their order, are not those in the file."""
    with path.open(newline="") as file:
        before = [tuple(row) for row in csv.reader(file)][1:]
    found = []
    for run in sorted(ran):
        old, new = ([r[2:] for r in table if r[:2] == run] for table in (before, rows))
        if old != new:
            found.append(f"{run[0]} seed {run[1]}\n  was {old}\n  is  {new}")
    return found


def measure(
    cases: list[Case], seeds: int, verbose: bool, rows: list[Row]
) -> tuple[int, int, list[str]]:
    """Right answers, runs, and a line for each wrong one; findings are appended to `rows`."""
    good, lines = 0, []
    for case in cases:
        for seed in range(seeds):
            d = judge(case, seed)
            rows += rows_of(case, seed, d)
            ok = right(case, d)
            good += ok
            alarms = [f"{f.rule} ({f.severity})" for f in d if f.severity in ALARM]
            if verbose or not ok:
                mark = "ok   " if ok else "WRONG"
                lines.append(f"{mark} {case.name} seed {seed}: {', '.join(alarms) or d.headline}")
                print(lines[-1], flush=True)
            if verbose and not ok:
                print(d)
    return good, len(cases) * seeds, [line for line in lines if line.startswith("WRONG")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--half", choices=("tune", "held", "all"), default="all")
    parser.add_argument("--only", default="")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE")
    o = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows: list[str] = []
    found: list[Row] = []
    ran: set[tuple[str, str]] = set()
    for which in ("tune", "held") if o.half == "all" else (o.half,):
        healthy, failing = (
            [c for c in half(cases, which) if o.only in c.name] for cases in (HEALTHY, FAILING)
        )
        ran |= {(c.name, str(seed)) for c in healthy + failing for seed in range(o.seeds)}
        well, n_well, _ = measure(healthy, o.seeds, o.verbose, found)
        named, n_failing, _ = measure(failing, o.seeds, o.verbose, found)
        rows.append(
            f"| {which} | {n_well - well} of {n_well} ({len(healthy)} trainings) "
            f"| {named} of {n_failing} ({len(failing)} trainings) |"
        )
    print(f"\n{o.seeds} seeds, torch {torch.__version__}, {time.perf_counter() - start:.0f} s\n")
    print("| half | healthy runs falsely alarmed | failing runs whose true cause is named |")
    print("|---|---|---|", *rows, sep="\n")
    if o.write:
        write(found, o.write)
    if o.against and (changed := differences(found, o.against, ran)):
        sys.exit("\n".join([f"\n{len(changed)} of {len(ran)} runs have other findings", *changed]))


if __name__ == "__main__":
    main()
