"""How often is `diagnose` right? Healthy trainings falsely alarmed, sick ones whose cause is named.

    python benchmarks/diagnosis.py [--seeds 3] [--half tune|held|all] [--only NAME] [--verbose]

Trains every case of `trainings.py` (healthy), `ailments.py` (sick) and `attentions.py` (both) with
three seeds, recorded by `watch`, and prints a markdown table. Each list is split once and for all:
cases at even places were looked at while the rules were made ("tune"), those at odd places only
afterwards ("held").
"""

import argparse
import os
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
import ailments  # noqa: F401  (registers the sick cases)
import attentions  # noqa: F401  (and more of both)
import torch
from trainings import HEALTHY, SICK, Case, Setup, run_steps

from hookkit.health import Diagnosis, diagnose
from hookkit.records import Run

ALARM = {"warning", "error"}


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
    return w.run()


def judge(case: Case, seed: int) -> Diagnosis:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return diagnose(recorded(case.make()))


def right(case: Case, d: Diagnosis) -> bool:
    """No alarm for a healthy case; for a sick one an alarm by a rule that names its cause."""
    alarms = {f.rule for f in d if f.severity in ALARM}
    return bool(alarms & case.cause) if case.cause else not alarms


def half(cases: list[Case], which: str) -> list[Case]:
    return {"all": cases, "tune": cases[::2], "held": cases[1::2]}[which]


def measure(cases: list[Case], seeds: int, verbose: bool) -> tuple[int, int, list[str]]:
    """Right answers, runs, and a line for each wrong one."""
    good, lines = 0, []
    for case in cases:
        for seed in range(seeds):
            d = judge(case, seed)
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
    o = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows = []
    for which in ("tune", "held") if o.half == "all" else (o.half,):
        healthy, sick = (
            [c for c in half(cases, which) if o.only in c.name] for cases in (HEALTHY, SICK)
        )
        well, n_well, _ = measure(healthy, o.seeds, o.verbose)
        named, n_sick, _ = measure(sick, o.seeds, o.verbose)
        rows.append(
            f"| {which} | {n_well - well} of {n_well} ({len(healthy)} trainings) "
            f"| {named} of {n_sick} ({len(sick)} trainings) |"
        )
    print(f"\n{o.seeds} seeds, torch {torch.__version__}, {time.perf_counter() - start:.0f} s\n")
    print("| half | healthy runs falsely alarmed | sick runs whose true cause is named |")
    print("|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
