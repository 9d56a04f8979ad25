"""All benchmarks with peers in one run, as one table: `python benchmarks`, or `make bench`.

Writes `TABLE.md` and `table.json` beside this file (with `--device cuda` `TABLE_cuda.md` and
`table_cuda.json`), with what hookkit loses first. Each benchmark has a process of its own. What is
measured, and how, is at the top of each script.
"""

from __future__ import annotations

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
SCRIPTS = (*ON_DEVICE, "loop", "watching", "memory", "summary", "collect")


def page(found: dict[str, list[Row]], head: str) -> str:
    lost = [r for rows in found.values() for r in rows if r.verdict in ("missed", "worse")]
    parts = [f"# Benchmarks\n\n{head}\n\n## What hookkit loses\n\n{markdown(lost)}"]
    parts += [f"## `python benchmarks/{name}.py`\n\n{markdown(r)}" for name, r in found.items()]
    return "\n\n".join(parts) + "\n"


def write(found: dict[str, list[Row]], full: bool, device: str) -> None:
    command = f"python benchmarks{' --full' * full}{f' --device {device}' * (device != 'cpu')}"
    head = f"{date.today()}, `{command}`: {environment(device)}. Medians over rounds in turn."
    name, folder = "" if device == "cpu" else f"_{device}", Path(__file__).parent
    (folder / f"TABLE{name}.md").write_text(page(found, head))
    values = {s: [asdict(r) | {"verdict": r.verdict} for r in rows] for s, rows in found.items()}
    (folder / f"table{name}.json").write_text(
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
