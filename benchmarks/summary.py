"""What a summary costs, in real forwards, with torchinfo and FlopCounterMode beside it in one run.

    python benchmarks/summary.py                 # torchinfo is timed if it is installed
    python benchmarks/summary.py --only gpt2
    python benchmarks/summary.py --only kinds    # first and warm calls of 24 architectures

Times are CPU seconds in one thread, medians of interleaved rounds; a busy machine disturbs them
less than the clock's. Each computes what it can: hookkit for shapes, calls, MACs, saved bytes and
warnings; torchinfo for all its columns at full depth.
Of `kinds`, each case and tool has a process of its own, forked from one that has imported torch
(and transformers, for its own models) and has never run a model; so a first call pays for all that
it loads and fills.
Architectures of transformers are left out where that is not installed. After a figure with a target
stands whether it is met.
"""

import argparse
import importlib.util
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from summary_cases import CASES, GPT, resnet50
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hookkit.summaries import summary

Step = Callable[[], object]
TOOLS = ("hookkit", "torchinfo", "FlopCounter")


def torchinfo_of(model: nn.Module, given: Any) -> Step | None:
    """One summary of torchinfo for an input, or for a dict of inputs by name."""
    try:
        import torchinfo
    except ImportError:
        return None
    columns = ("kernel_size", "input_size", "output_size", "num_params", "mult_adds", "trainable")
    return lambda: torchinfo.summary(
        model, input_data=given, col_names=columns, depth=99, verbose=0, cache_forward_pass=False
    )


def verdict(found: float, most: float) -> str:
    """Whether a target is met."""
    return f"target ≤ {most:g}: {'met' if found <= most else 'missed'}"


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each step, taken in turns so that a busy machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def against_forward(
    name: str, model: nn.Module, x: Tensor, rounds: int, most: float | None = None
) -> None:
    """hookkit's target is `most` forwards, or torchinfo's time."""
    steps: dict[str, Step] = {"forward": lambda: model(x), "hookkit": lambda: summary(model, x)}
    if peer := torchinfo_of(model, x):
        steps["torchinfo"] = peer
    found = medians(steps, rounds)
    bare = found.pop("forward")
    ratios = "   ".join(f"{peer} {t / bare:5.2f}" for peer, t in found.items())
    most = found.get("torchinfo", 0.0) / bare if most is None else most
    met = verdict(round(found["hookkit"] / bare, 2), round(most, 2))
    print(f"{name:<28} forward {bare:7.3f} s   summary / forward: {ratios}   {met}", flush=True)


def batch_sizes(rounds: int) -> None:
    model = resnet50()
    for n in (1, 16, 64):
        x = torch.randn(n, 3, 224, 224)
        t = medians({"summary": lambda x=x: summary(model, x)}, rounds)["summary"]
        print(f"resnet50, batch {n:<12} summary {t:7.3f} s", flush=True)


def huge() -> None:
    with torch.device("meta"):
        model = GPT(8160, 80, 85, 2048)
    ids = torch.zeros(1, 2048, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    s = summary(model, ids)
    took = time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    print(
        f"{s.n_params / 1e9:.1f} B parameters on meta    {took:5.2f} s, "
        f"+{grown:.0f} MB, {verdict(took, 3)}",
        flush=True,
    )


def many_modules() -> None:
    summary(nn.Linear(4, 4), torch.ones(1, 4))  # the imports of a first call are counted in `kinds`
    for n in (1250, 2500, 5000):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))
        start = time.process_time()
        str(summary(model, torch.ones(1, 4)))
        took = time.process_time() - start
        print(f"{n} modules{'':<17} {took:5.2f} s, {1e3 * took / n:.2f} ms a module, "
              f"{verdict(1e3 * took / n, 0.8)}", flush=True)  # fmt: skip


def step_of(tool: str, model: nn.Module, given: dict[str, Any]) -> Step | None:
    def counted() -> None:
        with FlopCounterMode(display=False):
            model(**given)

    if tool == "torchinfo":
        return torchinfo_of(model, given)
    return {"hookkit": lambda: summary(model, **given), "FlopCounter": counted}[tool]


def timed(name: str, tool: str, send: Any) -> None:
    """CPU seconds of the first call, a warm one and a forward, sent from a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        model, given = CASES[name]()
        step = step_of(tool, model, given)
        start = time.process_time()
        if step is not None:
            step()
            first = time.process_time() - start
            warm = medians({"step": step, "forward": lambda: model(**given)}, 3)
            send.send((first, warm["step"], warm["forward"]))
    finally:
        send.close()


def in_a_process(name: str, tool: str) -> tuple[float, float, float] | None:
    """What `timed` measures; None if it failed (its error is on stderr) or has no such tool."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=timed, args=(name, tool, send))
    process.start()
    send.close()
    try:
        found: tuple[float, float, float] = receive.recv()
    except EOFError:
        return None
    finally:
        process.join()
    return found


def kinds() -> None:
    """First and warm calls of each tool, as ratios to a forward."""
    cases = CASES
    if importlib.util.find_spec("transformers") is None:
        cases = {name: case for name, case in CASES.items() if not isinstance(case, partial)}
    heads = "".join(f"{tool:>18}" for tool in TOOLS)
    print(f"{'first / warm call, in forwards':<31}forward ms{heads}")
    found: dict[str, list[tuple[float, float]]] = {tool: [] for tool in TOOLS}
    for name, case in cases.items():
        if isinstance(case, partial):  # ours come first: transformers imports torch's compiler
            transformers = importlib.import_module("transformers")
            importlib.import_module("transformers.modeling_utils")
            transformers.logging.set_verbosity_error()
        times = {tool: t for tool in TOOLS if (t := in_a_process(name, tool))}
        bare = statistics.median(forward for _, _, forward in times.values())
        for tool, (first, warm, _) in times.items():
            found[tool].append((first / bare, warm / bare))
        cells = (pair(found[tool][-1:] if tool in times else []) for tool in TOOLS)
        print(f"{name:<31}{1e3 * bare:10.1f}{''.join(cells)}", flush=True)
    cells = (pair(found[tool]) for tool in TOOLS)
    print(f"{f'median of {len(cases)}':<41}{''.join(cells)}")
    first = statistics.median(first for first, _ in found["hookkit"])
    print(f"first call in forwards, in the median: {verdict(first, 3)}", flush=True)


def pair(times: list[tuple[float, float]]) -> str:
    """The medians of first and of warm calls."""
    if not times:
        return f"{'–':>18}"
    first, warm = (statistics.median(t) for t in zip(*times, strict=True))
    return f"{first:10.2f} /{warm:6.2f}"


def main() -> None:
    p = argparse.ArgumentParser(
        description="Time summaries against forwards and against torchinfo."
    )
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--only", choices=("kinds", "resnet50", "gpt2", "batch", "huge", "modules"))
    args = p.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
          f"torch {torch.__version__}, 1 thread, median of {args.rounds}")  # fmt: skip
    if args.only in (None, "kinds"):
        kinds()  # before anything runs in this process, from which it forks
    if args.only in (None, "resnet50"):
        against_forward(
            "resnet50, 1×3×224×224", resnet50(), torch.randn(1, 3, 224, 224), args.rounds
        )
    if args.only in (None, "gpt2"):
        against_forward(
            "gpt2-small, 1×128", GPT(), torch.zeros(1, 128, dtype=torch.long), args.rounds, 0.4
        )
    if args.only in (None, "batch"):
        batch_sizes(3)
    if args.only in (None, "huge"):
        huge()
    if args.only in (None, "modules"):
        many_modules()


if __name__ == "__main__":
    main()
