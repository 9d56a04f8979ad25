"""What a summary costs, the first one of a process and a later one, beside torchinfo and PyTorch's
`FlopCounterMode`.

Bare is one forward of the model; times are CPU seconds in one thread, medians of interleaved
rounds. Each computes what it can: hookkit shapes, calls, MACs, saved bytes and warnings; torchinfo
all its columns at full depth. Each model and tool has a fresh process of its own, which has
imported torch and hookkit and has never run a model; so a first call pays for all that it loads.
`--full` takes all models instead of six.
"""

import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rows import Row, main, seconds
from summary_cases import CASES, GPT
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hookkit.inspection import summary

Step = Callable[[], object]
TOOLS = ("hookkit", "torchinfo", "FlopCounterMode")
FIRST, LATER = "first summary", "later summary"
SCANS = ("gru cell, 128 steps", "state space, 128 steps")
TARGETS = {
    ("resnet50", FIRST, "bare"): 2.5,
    ("gpt2-small", FIRST, "bare"): 1.5,
    **{(scan, FIRST, "bare"): 10.0 for scan in SCANS},
}
FEW = ("resnet50", "gpt2-small", *SCANS, "llama", "rwkv")


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


def huge() -> Row:
    with torch.device("meta"):
        model = GPT(8160, 80, 85, 2048)
    ids = torch.zeros(1, 2048, dtype=torch.long)
    took = seconds(lambda: summary(model, ids))
    return Row("64 B parameters on meta", "a summary", took, "target", 3.0, 1.0, "s")


def many_modules(n: int) -> Row:
    summary(nn.Linear(4, 4), torch.ones(1, 4))  # the imports of a first call are counted in `kinds`
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))
    took = seconds(lambda: str(summary(model, torch.ones(1, 4))))
    return Row(f"{n} modules", "time for each module", 1e3 * took / n, "target", 0.8, 1.0, "ms")


def step_of(tool: str, model: nn.Module, given: dict[str, Any]) -> Step | None:
    def counted() -> None:
        with FlopCounterMode(display=False):
            model(**given)

    if tool == "torchinfo":
        return torchinfo_of(model, given)
    return {"hookkit": lambda: summary(model, **given), "FlopCounterMode": counted}[tool]


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
    fresh = multiprocessing.get_context("spawn")
    receive, send = fresh.Pipe(duplex=False)
    process = fresh.Process(target=timed, args=(name, tool, send))
    process.start()
    send.close()
    try:
        found: tuple[float, float, float] = receive.recv()
    except EOFError:
        return None
    finally:
        process.join()
    return found


def kinds(full: bool) -> Iterator[Row]:
    """First and warm calls of each tool, over a forward."""
    cases = CASES
    if importlib.util.find_spec("transformers") is None:
        cases = {name: case for name, case in CASES.items() if not isinstance(case, partial)}
    chosen = cases if full else {name: cases[name] for name in FEW if name in cases}
    found: dict[str, list[tuple[float, float]]] = {tool: [] for tool in TOOLS}
    for name in chosen:
        times = {tool: t for tool in TOOLS if (t := in_a_process(name, tool))}
        bare = statistics.median(forward for _, _, forward in times.values())
        over = {tool: (first / bare, warm / bare) for tool, (first, warm, _) in times.items()}
        for tool, pair in over.items():
            found[tool].append(pair)
        yield from calls(name, over)
    over = {
        tool: tuple(statistics.median(column) for column in zip(*pairs, strict=True))
        for tool, pairs in found.items()
        if pairs
    }
    yield from calls(f"median of {len(chosen)} models", over)


def calls(case: str, over: dict[str, tuple[float, ...]]) -> Iterator[Row]:
    for i, call in enumerate((FIRST, LATER)):
        if target := TARGETS.get((case, call, "bare")):
            yield Row(case, call, over["hookkit"][i], "bare", 1.0, target)
        for tool in TOOLS[1:]:
            theirs = over[tool][i] if tool in over else None
            slowest = 1.0 if tool == "FlopCounterMode" and call == LATER else None
            yield Row(case, call, over["hookkit"][i], tool, theirs, slowest)


def rows(full: bool, device: str) -> Iterator[Row]:
    yield from kinds(full)
    yield huge()
    for n in (1250, 5000):
        yield many_modules(n)


if __name__ == "__main__":
    main(__doc__ or "", rows)
