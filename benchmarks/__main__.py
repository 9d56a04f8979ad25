"""All benchmarks with peers in one run, as one table: `python benchmarks`, or `make bench`.

Writes `TABLE.md` and `table.json` beside this file (with `--device cuda` `TABLE_cuda.md` and
`table_cuda.json`), with what hookkit loses first. Each benchmark has a process of its own. What is
measured, and how, is at the top of each script.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
from rows import Row, environment, markdown, measured, options

ON_DEVICE = ("capture", "functions", "stats")
FOLDER = Path(__file__).parent
SCRIPTS = (*ON_DEVICE, "loop", "watching", "memory", "summary", "collect")


HOW = """\
Each figure is a multiple of the bare run or has a unit, the median over rounds in which methods
take turns. Less is better. `ratio` is hookkit's figure over the one beside it. `bare again` is one
more bare run: what it differs by from 1, it does for no reason. The first column says

- **missed** or met: the ratio aimed at, in brackets;
- **worse**, better or level: over, under or within 5 % of another way to do it;
- cost: what is added to the bare run, where nothing is aimed at;
- not measured: the other library was not installed."""


def about(script: str) -> tuple[str, str]:
    """What the benchmark asks, and how it finds that: the text at its top."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{script}.py").read_text())) or ""
    question, _, how = text.partition("\n\n")
    return " ".join(question.split()), how


def losses(found: dict[str, list[Row]]) -> str:
    """Everything that hookkit loses, as sentences."""
    rows = [r for each in found.values() for r in each]
    judged = [r for r in rows if r.verdict not in ("cost", "not measured")]
    n = sum(r.lost for r in judged)
    parts = [f"## What hookkit loses\n\n{n} of {len(judged)} comparisons."]
    for script, each in found.items():
        if lost := [f"- {r.sentence}" for r in each if r.lost]:
            parts.append("\n".join([f"**{about(script)[0]}**", "", *lost]))
    return "\n\n".join(parts)


def page(found: dict[str, list[Row]], head: str) -> str:
    parts = [f"# Benchmarks\n\n{head}\n\n{HOW}", losses(found)]
    for script, rows in found.items():
        question, how = about(script)
        asked = f"{question} `python benchmarks/{script}.py`"
        parts += [f"## `{script}.py`", asked, how, markdown(rows)]
    return "\n\n".join(parts) + "\n"


def write(found: dict[str, list[Row]], full: bool, device: str) -> None:
    command = f"python benchmarks{' --full' * full}{f' --device {device}' * (device != 'cpu')}"
    head = f"{date.today()}, `{command}`: {environment(device)}."
    name = "" if device == "cpu" else f"_{device}"
    (FOLDER / f"TABLE{name}.md").write_text(page(found, head))
    values = {s: [asdict(r) | {"verdict": r.verdict} for r in rows] for s, rows in found.items()}
    (FOLDER / f"table{name}.json").write_text(
        json.dumps({"run": head, "rows": values}, indent=1, ensure_ascii=False) + "\n"
    )


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--only", nargs="*", choices=SCRIPTS, help="these; nothing is written")
    o = parser.parse_args()
    found: dict[str, list[Row]] = {}
    for script in o.only or (SCRIPTS if o.device == "cpu" else ON_DEVICE):
        start = time.perf_counter()
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=fresh) as pool:
            found[script] = pool.submit(measured, script, o.full, o.device).result()
        print(f"{script}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        if o.only:
            print(markdown(found[script]) + "\n", flush=True)
        else:  # after each: what was measured is kept where the run is cut short
            write(found, o.full, o.device)


if __name__ == "__main__":
    main()
