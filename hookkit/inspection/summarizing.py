"""`summary(model, *inputs)`: checks, the run, and the `Summary` that is built from it.

Builds on the model's `Tree` and its `Trace`, and on `summary_rows` and `summary_result`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookkit._core.checks import check_flag, check_module, check_number, kind_of
from hookkit._core.modules import BATCH_NORMS
from hookkit._core.pytree import Inputs, describe, tree_leaves
from hookkit.errors import ArgumentError, OptionError
from hookkit.inspection.summary_drawing import checked_columns
from hookkit.inspection.summary_result import Summary
from hookkit.inspection.summary_rows import rows_of
from hookkit.inspection.tracer import Trace
from hookkit.inspection.tracing import trace
from hookkit.inspection.tree import Tree, dtype_name, numel, storage_of

_BATCH_OF_ONE = "Expected more than 1 value per channel when training"
_EVALUATED = "Run in evaluation mode: in training mode BatchNorm refuses a single value a channel."
_NUMBER = int | float | Tensor

ModelInput = Tensor | Sequence[Any] | Mapping[str, Any] | bool | str | None
"""A keyword input, for type checkers, which then see a misspelt option; others: `model_kwargs`."""


def summary(
    model: nn.Module,
    *args: Any,
    opt: Optimizer | None = None,
    fold: bool = True,
    depth: int | None = None,
    columns: Iterable[str] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    **kwargs: ModelInput,
) -> Summary:
    """Return parameters, output shapes, compute and memory of `model`, which stays as it is.

    One forward of the model itself is run and the model put back: modes, parameters, buffers,
    hooks, random states, and attributes with the containers, arrays and objects in them. The last
    line names attributes and globals that have changed and could not be put back (see
    `Summary.not_restored`). Beyond 20 G multiply-accumulates, or if memory runs out, it is run on
    PyTorch's fake tensors instead, which compute nothing, unless hooks of yours are on the model or
    it needs values. On `meta` nothing is computed. Works for compiled models and those wrapped for
    parallel training; before `fully_shard`, not after.

    Your hooks on the model and edits around the call are part of what it computes, and run;
    captures and other recorders see nothing of it, also one that the forward itself reads.

    Args:
        model: any module.
        *args: what its forward takes, of any structure. Nothing: names and parameters only. One
            tuple of ints, `(3, 224, 224)`: a float batch of one of that size.
        **kwargs: its keyword inputs.
        opt: its optimizer: adds its groups, the bytes of its state and parameters that it misses.
        fold: draw equal siblings once (`h.0..11 ×12`).
        depth: draw modules down to this depth.
        columns: names of the columns to draw: see `Summary.text`.
        model_kwargs: more keyword inputs, for a forward with inputs named like options above.

    Returns:
        A `Summary`: a value with rows, totals, text and HTML.

    Raises:
        OptionError, ArgumentError: an argument cannot work.
        ModelRunError: the forward has stored a fake tensor outside of the model's modules.
        Exception: the model's own error, with a note that shows the table so far and the layer.

    >>> s = summary(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(5, 4))
    >>> s.n_params, s.macs, s.saved_bytes, s["2"].outputs
    (58, 240, 240, ('5×2',))
    """
    if not isinstance(model, nn.Module):
        holds = isinstance(getattr(model, "model", None), nn.Module)
        hint = "It holds a model: use learn.summary(), or summary(learn.model, x)." if holds else ""
        check_module("summary", model, hint)
    if opt is not None and (isinstance(opt, type) or not hasattr(opt, "param_groups")):
        raise ArgumentError(
            f"summary: opt must be an optimizer, found {kind_of(opt)}. Give one with param_groups."
        )
    if depth is not None:
        check_number("summary", "depth", depth, 0, whole=True)
    columns = checked_columns(columns, True) if columns is not None else None
    view = {"fold": check_flag("summary", "fold", fold), "depth": depth, "columns": columns}
    tree, size = Tree(model), args[0] if len(args) == 1 else None
    if isinstance(size, tuple) and size and all(type(n) is int for n in size):
        if min(size) < 1:
            raise OptionError(f"size {tuple(size)}: sizes are whole numbers from 1")
        p = next((p for _, p in tree.params if p.is_floating_point()), torch.empty(0, device="cpu"))
        generator = torch.Generator("cpu").manual_seed(0)
        args = (torch.randn(1, *size, generator=generator, device="cpu").to(p),)
    inputs = Inputs(args, {**kwargs, **(model_kwargs or {})})
    if not inputs and not inputs.kwargs:
        return build(tree, None, opt, view)
    return run_summary(tree, inputs, opt, view)


def run_summary(
    tree: Tree,
    inputs: Inputs,
    opt: Optimizer | None,
    view: Mapping[str, Any],
    *,
    training: bool | None = None,
    notes: tuple[str, ...] = (),
    who: str = "hookkit.summary",
) -> Summary:
    """Return the summary of one run; raise the model's own error, the table so far as a note."""

    def read(trace: Trace) -> tuple[Summary, Trace]:
        dtypes = ", ".join(dict.fromkeys(map(dtype_name, tree_leaves(inputs))))
        text = f"{describe(inputs)} {dtypes}".rstrip()  # `1×128 int64`
        return build(tree, trace, opt, view, text, notes), trace

    result, seen = trace(tree, inputs, read, training=training)
    error = seen.error
    if error is not None and _BATCH_OF_ONE in str(error) and training is not False:
        notes = (*notes, _EVALUATED)
        return run_summary(tree, inputs, opt, view, training=False, notes=notes, who=who)
    if error is not None:
        error.add_note(f"\nin {who}, up to the error:\n{result.text(width=100)}")
        raise error
    return replace(result, not_restored=tuple(seen.not_restored))


def build(
    tree: Tree,
    trace: Trace | None,
    opt: Optimizer | None,
    view: Mapping[str, Any],
    inputs: str = "",
    notes: tuple[str, ...] = (),
) -> Summary:
    """Return the `Summary` of a run; of the model alone if `trace` is None."""
    trace, rows = trace or Trace("none"), rows_of(tree, trace)
    call = trace.calls.get("")
    output = f"{' | '.join(call.outputs[:3])} {', '.join(call.dtypes)}".strip() if call else ""
    sizes: Counter[str] = Counter()
    for _, p in tree.params:
        sizes[dtype_name(p)] += numel(p)
    return Summary(
        **asdict(rows[0].total),
        rows=rows,
        inputs=inputs,
        output=output,
        dtype=max(sizes, key=lambda k: sizes[k]) if sizes.total() else "",
        grad_bytes=sum(_bytes(p) for _, p in tree.params if p.requires_grad),
        run=trace.run,
        uncounted=dict(trace.uncounted),
        warnings=tuple(_warnings(tree, trace, opt)),
        notes=notes,
        optimizer=_read(opt) if opt is not None else None,
        failed=() if trace.error is None else trace.failed or ("",),
        view=dict(view),
    )


def _warnings(tree: Tree, trace: Trace, opt: Optimizer | None) -> Iterator[str]:
    """Yield the likeliest mistakes in a model and its optimizer."""
    if opt is not None:
        held = {id(p) for group in opt.param_groups for p in group["params"]}
        if lost := [name for name, p in tree.params if p.requires_grad and id(p) not in held]:
            yield f"{_count(lost, 'trainable parameter')} in no optimizer group: {_some(lost)}"
    if trace.error is None and trace.unused:
        # another run may draw other layers, or choose them by other values
        what = f"{_count(trace.unused, 'trainable parameter')} not part of the output of this run"
        yield f"{what}, and would get no gradient: {_some(trace.unused)}"
    if tree.model.training:
        norms = [place for place in tree.firsts if isinstance(place.module, BATCH_NORMS)]
        if frozen := [place.name for place in norms if not place.module.training]:
            what = _count(frozen, "BatchNorm layer")
            yield f"{what} in evaluation mode in a model that trains: {_some(frozen)}"


def _some(names: Sequence[str], n: int = 4) -> str:
    """List the first `n` names, and say how many more there are."""
    more = f" and {len(names) - n} more" if len(names) > n else ""
    return ", ".join(names[:n]) + more


def _count(names: Sequence[str], what: str) -> str:
    """Say how many: `1 trainable parameter is`, `2 trainable parameters are`."""
    return f"{len(names)} {what} is" if len(names) == 1 else f"{len(names)} {what}s are"


# --- the optimizer


def _bytes(p: Tensor) -> int:
    return numel(p) * p.element_size() if numel(p) else 0


def _read(opt: Optimizer) -> dict[str, Any]:
    """Return the name, the groups and the bytes of state of `opt`.

    Before the first step the state of SGD, Adam and AdamW is predicted; that of others is None.
    """
    kind, groups, predicted = type(opt).__name__, [], 0
    for i, group in enumerate(opt.param_groups):
        trained = [p for p in group["params"] if p.requires_grad]
        copies = bool(group.get("momentum")) if kind == "SGD" else 2 + bool(group.get("amsgrad"))
        predicted += copies * sum(map(_bytes, trained))
        numbers = {k: x for k in ("lr", "weight_decay") if isinstance(x := group.get(k), _NUMBER)}
        groups.append(
            {
                "index": i,
                "name": str(group.get("name", "")),
                "n_params": sum(map(numel, group["params"])),
                "n_trainable": sum(map(numel, trained)),
                **{k: float(x) for k, x in numbers.items()},
            }
        )
    held = {storage_of(t) for state in opt.state.values() for t in tree_leaves(dict(state))}
    is_known = held or kind in ("SGD", "Adam", "AdamW")
    return {
        "name": kind,
        "state_bytes": (sum(n for _, n in held) or predicted) if is_known else None,
        "state_from": " (after the first step)" if is_known and not held else "",
        "groups": groups,
    }
