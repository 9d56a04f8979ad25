"""From a run to a `Summary`: rows, totals, what is told of the optimizer, and the warnings.

Builds on `tracing` and `inventory`; the doors to it are `summaries` and `learnerview`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from hookkit.modelinfo import hooked
from hookkit.modelinfo.sandbox import is_sharded
from hookkit.modelinfo.tracing import Trace, trace
from hookkit.modules import inner_key, submodules, walk
from hookkit.nested import Inputs, describe, leaves
from hookkit.summaries import optimizer_info
from hookkit.summaries.result import Summary, View
from hookkit.summaries.rows import rows_of

_BATCH_OF_ONE = "Expected more than 1 value per channel when training"
_BN = nn.modules.batchnorm._BatchNorm


def run(model: nn.Module, given: Inputs, training: bool | None = None) -> tuple[Trace, list[str]]:
    """One run of a stand-in, and what must be said about it."""
    done = trace(model, tuple(given), given.kwargs, training=training)
    if done.error is not None and _BATCH_OF_ONE in str(done.error):
        again = trace(model, tuple(given), given.kwargs, training=False)
        note = (
            "Run in evaluation mode: in training mode BatchNorm refuses a single value a channel."
        )
        if again.error is None:
            return again, [note]
    return done, []


def wrappers_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the wrappers around `model`, outermost first."""
    found = []
    while (key := inner_key(model)) is not None:
        found.append(type(model).__name__)
        model = submodules(model)[key]
    if getattr(model, "_compiled_call_impl", None) is not None:
        found.append("compiled in place")
    if any(is_sharded(m) for m in model.modules()):
        found.append("FSDP")
    return tuple(found)


def wrapper_notes(model: nn.Module) -> list[str]:
    """What is to be said of hooks on the wrappers, which the run leaves aside."""
    n = hooked.n_on_wrappers(model)
    return [f"Hooks on its wrapper that did not run: {n}."] if n else []


def arrivals(given: Inputs) -> str:
    """Shapes and types of the inputs, `1×128 int64`."""
    text = describe(given[0] if len(given) == 1 and not given.kwargs else given)
    kinds = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in leaves(given))
    return f"{text} {', '.join(kinds)}".rstrip()


def build(
    model: nn.Module,
    done: Trace | None,
    opt: Optimizer | None,
    view: View,
    wrappers: tuple[str, ...],
    inputs: str,
    notes: Iterable[str] = (),
) -> Summary:
    """The value of a run, or of no run."""
    seen = done.model if done is not None and _grew(model, done.model) else model
    rows = rows_of(seen, done)
    call = done.calls.get("") if done else None
    output = " | ".join(call.outputs[:3]) + f" {', '.join(call.dtypes)}" if call else ""
    told = optimizer_info.describe(opt) if opt is not None else None
    made = Summary(
        rows=rows,
        inputs=inputs,
        output=output.strip(),
        dtype=_main_dtype(seen),
        grad_bytes=optimizer_info.grad_bytes(seen),
        run=done.how if done else "none",
        why=done.why if done else "",
        wrappers=wrappers,
        uncounted=dict(done.uncounted) if done else {},
        warnings=tuple(_warnings(seen, done, opt)),
        footnotes=(*notes, *_hooked(done), *_scripted(seen, done)),
        optimizer=told,
        failed=(done.failed or ("",)) if done and done.error is not None else (),
        error=f"{type(done.error).__name__}: {done.error}" if done and done.error else "",
        view=view,
    )
    return made


def _grew(model: nn.Module, ran: nn.Module) -> bool:
    """True if the copy that ran got layers or shapes that the model does not have yet."""
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        return True
    mine, its = ([name for name, _, _ in walk(m)] for m in (model, ran))
    return mine != its


def _hooked(done: Trace | None) -> list[str]:
    if done is None or not done.n_hooks:
        return []
    return [f"Hooks on the model that ran: {done.n_hooks}."]


def _scripted(model: nn.Module, done: Trace | None) -> list[str]:
    if done is None or not any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        return []
    return ["Memory saved for backward is unknown inside scripted modules."]


def _main_dtype(model: nn.Module) -> str:
    """The type of most parameters."""
    sizes: dict[str, int] = {}
    for p in model.parameters():
        if not nn.parameter.is_lazy(p):
            kind = str(p.dtype).removeprefix("torch.")
            sizes[kind] = sizes.get(kind, 0) + p.numel()
    return max(sizes, key=lambda k: sizes[k]) if sizes else ""


def _warnings(model: nn.Module, done: Trace | None, opt: Optimizer | None) -> Iterable[str]:
    """Where people trip."""
    if opt is not None:
        yield from optimizer_info.warnings_of(model, opt)
    if done is not None and done.error is None and done.unused:
        what = optimizer_info.count(list(done.unused), "trainable parameter")
        listed = optimizer_info.some(list(done.unused))
        yield f"{what} not part of the output, and will get no gradient: {listed}"
    if model.training:
        still = [n for n, m, _ in walk(model) if isinstance(m, _BN) and not m.training]
        if still:
            what = optimizer_info.count(still, "BatchNorm layer")
            yield f"{what} in evaluation mode in a model that trains: {optimizer_info.some(still)}"
    kinds: dict[str, list[str]] = {}
    for name, p in model.named_parameters():
        if p.is_floating_point():
            kinds.setdefault(str(p.dtype).removeprefix("torch."), []).append(name)
    if len(kinds) > 1:
        rare = min(kinds, key=lambda k: len(kinds[k]))
        listed = optimizer_info.some(kinds[rare])
        yield f"parameters of mixed types {', '.join(kinds)}; {rare}: {listed}"
