"""`summary(model, *inputs)`: parameters, shapes, compute and memory of a model, by module.

Builds on `modelinfo` for the model's `Tree` and its `Trace`, and on `rows` and `drawing`. A
`Summary` is a value: plain numbers and text, with no reference to the model.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookkit.checks import check_flag, check_module, check_number, kind_of
from hookkit.errors import ArgumentError, OptionError, SelectionError, nearest
from hookkit.modelinfo.tracing import Trace, trace
from hookkit.modelinfo.tree import Tree, dtype_name, numel, storage_of
from hookkit.nested import Inputs, describe, leaves
from hookkit.records.frames import pandas
from hookkit.summaries.drawing import as_html, as_text, checked_columns
from hookkit.summaries.rows import Row, Totals, rows_of
from hookkit.texts import nbytes, si

if TYPE_CHECKING:
    from pandas import DataFrame

_WRAPPED = re.compile(r"^((module|_orig_mod|_fsdp_wrapped_module)(\.|$))+")
_BATCH_OF_ONE = "Expected more than 1 value per channel when training"
_EVALUATED = "Run in evaluation mode: in training mode BatchNorm refuses a single value a channel."
_NO_SAVED = "torch.func runs in the forward: saved bytes are unknown, and left out of the sums."
_RUNS = {
    "real": "One forward was run, and the model put back as it was.",
    "fake": "Run on fake tensors, since it is large: nothing computed, nothing changed.",
    "meta": "Run on meta: nothing computed, nothing changed.",
    "none": "No input given: nothing was run.",
}
# Copies of a parameter in the state of the common optimizers, which their options decide.
_COPIES = {
    "SGD": lambda g: bool(g.get("momentum")),
    "Adam": lambda g: 2 + bool(g.get("amsgrad")),
    "AdamW": lambda g: 2 + bool(g.get("amsgrad")),
    "RMSprop": lambda g: 1 + bool(g.get("momentum")) + bool(g.get("centered")),
}
# Private, in torch 2.11 to 2.13: the common base of all BatchNorms, which has no public name.
_BatchNorm = nn.modules.batchnorm._BatchNorm

ModelInput = Tensor | Sequence[Any] | Mapping[str, Any] | bool | str | None
"""A keyword input, for type checkers, which then see a misspelt option; others: `model_kwargs`."""


@dataclass(frozen=True, repr=False)
class Summary:
    """A model at a glance. Prints as a table, folds in notebooks.

    Iterating gives the rows in execution order; `s["layer1.0"]` finds one by name.

    Attributes:
        dtype: the dtype of most parameters.
        grad_bytes: bytes of the gradients of one backward pass.
        run: "real", "fake" or "meta" (on tensors without values), or "none" (no input).
        uncounted: operations for which no MAC formula is known, with how often each ran.
        optimizer: name, groups and state of the optimizer that was given.
        failed: names of the modules that were running when the model raised, outermost first.
        view: how it is drawn by default: `fold`, `depth` and `columns`.
    """

    rows: tuple[Row, ...]
    inputs: str = ""
    output: str = ""
    dtype: str = ""
    grad_bytes: int = 0
    run: str = "none"
    uncounted: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    optimizer: dict[str, Any] | None = None
    failed: tuple[str, ...] = ()
    view: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> Totals:
        """All sums at once."""
        return self.rows[0].total

    @property
    def n_params(self) -> int:
        """Distinct parameters, in elements."""
        return self.total.n_params

    @property
    def n_trainable(self) -> int:
        """Distinct parameters with `requires_grad`, in elements."""
        return self.total.n_trainable

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward."""
        return self.total.macs

    @property
    def saved_bytes(self) -> int:
        """Bytes of the tensors that autograd saves for the backward pass of one forward."""
        return self.total.saved_bytes

    @property
    def param_bytes(self) -> int:
        """Bytes of the distinct storages of the parameters."""
        return self.total.param_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the distinct storages of the buffers."""
        return self.total.buffer_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of a training step: parameters, buffers, gradients, optimizer, saved tensors.

        Without passing intermediates and workspaces that autograd does not save.
        """
        state = int((self.optimizer or {}).get("state_bytes") or 0)
        return self.param_bytes + self.buffer_bytes + self.grad_bytes + state + self.saved_bytes

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, name: object) -> bool:
        return any(r.name == name for r in self.rows)

    def __getitem__(self, name: str | int) -> Row:
        if isinstance(name, int):
            return self.rows[name]
        for known in (name, _WRAPPED.sub("", str(name))):  # also as a wrapped model names it
            for row in self.rows:
                if row.name == known:
                    return row
        near = ", ".join(nearest(str(name), (r.name for r in self.rows)))
        hint = f"Nearest: {near}" if near else "list(s) gives all rows"
        raise SelectionError(f'no row "{name}" among {len(self.rows)}. {hint}')

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, numbers and text, ready for JSON."""
        plain = asdict(self)
        del plain["view"]
        for row, values in zip(self.rows, plain["rows"], strict=True):
            values["total"] = row.total._asdict()
        return {**plain, "totals": self.total._asdict(), **self.total._asdict()}

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def to_df(self) -> DataFrame:
        """The rows as a pandas DataFrame, one row each, indexed by name.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        skip = ("shape", "in_shape", "total")
        rows = [{k: v for k, v in vars(r).items() if k not in skip} for r in self.rows]
        return pandas().DataFrame(rows).set_index("name")

    def text(
        self,
        *,
        width: int | None = None,
        fold: bool | None = None,
        depth: int | None = None,
        columns: Any = None,
    ) -> str:
        """The table as text, at most `width` columns wide (that of the terminal by default).

        Args:
            width: in characters; outputs, types, names and notes that do not fit are cut.
            fold: draw equal siblings once, as `0..11 ×12`.
            depth: show modules down to this depth; those at it carry what is below them.
            columns: names of columns, in the order drawn: type, input, output, params, train,
                macs, saved, bytes, calls, dtype.

        Raises:
            OptionError: there is no such column.
        """
        return as_text(self, **self._viewed(fold, depth, columns), width=width)

    def html(
        self, *, fold: bool | None = None, depth: int | None = None, columns: Any = None
    ) -> str:
        """The table as one piece of HTML that folds; arguments as for `text`."""
        return as_html(self, **self._viewed(fold, depth, columns))

    def _viewed(self, fold: bool | None, depth: int | None, columns: Any) -> dict[str, Any]:
        chosen = {"fold": fold, "depth": depth, "columns": columns}
        return {**self.view, **{k: v for k, v in chosen.items() if v is not None}}

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__  # the prompt shows the table

    def _repr_html_(self) -> str:
        return self.html()

    def heading(self) -> str:
        """The model's class, what went in, and what came out."""
        output = self.output or ("✗" if self.failed else "–")
        flow = f"   {self.inputs} → {output}" if self.run != "none" else ""
        return f"{self.rows[0].type}{flow}"

    def footer(self) -> list[list[str]]:
        """The facts below the table, by line: totals, memory and how the numbers were found."""
        held = f"{self.n_params:,} params, {nbytes(self.param_bytes)} {self.dtype}".rstrip()
        buffers = f"buffers {nbytes(self.buffer_bytes)}" if self.buffer_bytes else "no buffers"
        trainable = f"{self.n_trainable:,} trainable"
        parts = [[held if self.n_params else "no params", trainable, buffers]]
        if self.run != "none" and not self.failed:
            parts.append(
                [f"{si(self.macs)} MACs forward", f"{nbytes(self.saved_bytes)} saved for backward"]
            )
            if self.n_trainable:
                with_state = "before the optimizer's state"
                if self.optimizer:
                    unknown = " (state unknown)" * (self.optimizer["state_bytes"] is None)
                    with_state = f"with {self.optimizer['name']}{unknown}"
                parts[-1].append(f"training step ≈ {nbytes(self.step_bytes)} {with_state}")
        parts += _optimizer_lines(self.optimizer) if self.optimizer else []
        if self.failed:
            row = self[self.failed[-1]]
            what = f"{row.type}({row.extra})" if row.extra else row.type
            parts.append([f"✗ {row.name or '(itself)'} got {row.inputs or 'nothing'}, is {what}"])
        if self.uncounted:
            listed = [f"{name} ×{k}" for name, k in self.uncounted.items()]
            parts.append([f"MACs not counted: {listed[0]}", *listed[1:]])
        return [*parts, *([note] for note in self.notes), [_RUNS[self.run]]]


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
    """Parameters, output shapes, compute and memory of `model`, which stays as it is.

    One forward of the model itself is run and everything put back: modes, parameters, buffers,
    attributes, hooks and random states; what objects hold that are no modules, such as a cache of
    your own class, is not. Beyond 20 G multiply-accumulates or 1 GiB saved for backward it is run
    on PyTorch's fake tensors instead, which compute nothing, unless hooks of yours are on the model
    or it needs values. On `meta` nothing is computed. Works for compiled models and those wrapped
    for parallel training; before `fully_shard`, not after.

    Your hooks on the model and edits around the call are part of what it computes, and run;
    captures and other recorders see nothing of it.

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
        Exception: the model's own error, with a note that shows the table so far and the layer.

    >>> s = summary(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(5, 4))
    >>> s.n_params, s.macs, s.saved_bytes, s["2"].outputs
    (58, 240, 240, ('5×2',))
    """
    view = _checked(model, opt, fold, depth, columns)
    tree = Tree(model)
    inputs = Inputs(_sized(tree, args), {**kwargs, **(model_kwargs or {})})
    if not inputs and not inputs.kwargs:
        return build(tree, None, opt, view)
    return run_summary(tree, inputs, opt, view)


def _checked(model: Any, opt: Any, fold: Any, depth: Any, columns: Any) -> dict[str, Any]:
    """The view, all arguments checked."""
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
    return {"fold": check_flag("summary", "fold", fold), "depth": depth, "columns": columns}


def _sized(tree: Tree, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`(3, 224, 224)` as one float image batch of that size; other arguments as they are."""
    size = args[0] if len(args) == 1 else None
    if not isinstance(size, tuple) or not size or not all(type(n) is int for n in size):
        return args
    if min(size) < 1:
        raise OptionError(f"size {tuple(size)}: sizes are whole numbers from 1")
    floats = (p for _, p in tree.params if p.is_floating_point())
    p = next(floats, torch.empty(0, device="cpu"))
    x = torch.randn(1, *size, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return (x.to("cpu" if p.device.type == "meta" else p.device, p.dtype),)


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
    """The summary of one run; the model's own error is raised, with the table so far as a note."""

    def read(trace: Trace) -> tuple[Summary, Exception | None]:
        shown = (*notes, *([] if trace.saves else [_NO_SAVED]))
        return build(tree, trace, opt, view, _inputs_text(inputs), shown), trace.error

    result, error = trace(tree, inputs, read, training=training)
    if error is not None and _BATCH_OF_ONE in str(error) and training is not False:
        notes = (*notes, _EVALUATED)
        return run_summary(tree, inputs, opt, view, training=False, notes=notes, who=who)
    if error is not None:
        error.add_note(f"\nin {who}, up to the error:\n{result.text(width=100)}")
        raise error
    return result


def _inputs_text(inputs: Inputs) -> str:
    """Shapes and dtypes of the inputs, `1×128 int64`."""
    text = describe(inputs[0] if len(inputs) == 1 and not inputs.kwargs else inputs)
    return " ".join([text, ", ".join(dict.fromkeys(map(dtype_name, leaves(inputs))))]).rstrip()


def build(
    tree: Tree,
    trace: Trace | None,
    opt: Optimizer | None,
    view: Mapping[str, Any],
    inputs: str = "",
    notes: tuple[str, ...] = (),
) -> Summary:
    """The value of a run, or of no run."""
    call = trace.calls.get("") if trace else None
    output = f"{' | '.join(call.outputs[:3])} {', '.join(call.dtypes)}".strip() if call else ""
    sizes: Counter[str] = Counter()
    for _, p in tree.params:
        sizes[dtype_name(p)] += numel(p)
    return Summary(
        rows=rows_of(tree, trace),
        inputs=inputs,
        output=output,
        dtype=max(sizes, key=lambda k: sizes[k]) if sizes.total() else "",
        grad_bytes=sum(_bytes(p) for _, p in tree.params if p.requires_grad),
        run=trace.run if trace else "none",
        uncounted=dict(trace.uncounted) if trace else {},
        warnings=tuple(_warnings(tree, trace, opt)),
        notes=notes,
        optimizer=_read(opt) if opt is not None else None,
        failed=(trace.failed or ("",)) if trace and trace.error is not None else (),
        view=dict(view),
    )


def _warnings(tree: Tree, trace: Trace | None, opt: Optimizer | None) -> Iterator[str]:
    """The likeliest mistakes in a model and its optimizer."""
    if opt is not None:
        held = {id(p) for group in opt.param_groups for p in group["params"]}
        if lost := [name for name, p in tree.params if p.requires_grad and id(p) not in held]:
            yield f"{_count(lost, 'trainable parameter')} in no optimizer group: {_some(lost)}"
    if trace is not None and trace.error is None and trace.unused:
        # another run may draw other layers, or choose them by other values
        what = f"{_count(trace.unused, 'trainable parameter')} not part of the output of this run"
        yield f"{what}, and would get no gradient: {_some(trace.unused)}"
    if tree.model.training:
        norms = [place for place in tree.firsts if isinstance(place.module, _BatchNorm)]
        if frozen := [place.name for place in norms if not place.module.training]:
            what = _count(frozen, "BatchNorm layer")
            yield f"{what} in evaluation mode in a model that trains: {_some(frozen)}"
    kinds: dict[str, list[str]] = {}
    for name, p in tree.params:
        if p.is_floating_point():
            kinds.setdefault(dtype_name(p), []).append(name)
    if len(kinds) > 1:
        rare = min(kinds, key=lambda k: len(kinds[k]))
        yield f"parameters of mixed dtypes {', '.join(kinds)}; {rare}: {_some(kinds[rare])}"


def _some(names: Sequence[str], n: int = 4) -> str:
    """The first `n` names and how many more there are."""
    more = f" and {len(names) - n} more" if len(names) > n else ""
    return ", ".join(names[:n]) + more


def _count(names: Sequence[str], what: str) -> str:
    """How many, in words that agree: `1 trainable parameter is`, `2 trainable parameters are`."""
    return f"{len(names)} {what} is" if len(names) == 1 else f"{len(names)} {what}s are"


# --- the optimizer


def _bytes(p: Tensor) -> int:
    return numel(p) * p.element_size() if numel(p) else 0


def _read(opt: Optimizer) -> dict[str, Any]:
    """Name, groups and state of `opt`: what is there, or will be after the first step.

    `state_bytes` are None before the first step of an optimizer whose state is not known.
    """
    held = {storage_of(t) for state in opt.state.values() for t in leaves(dict(state))}
    size: int | None = sum(n for _, n in held)
    copies = _COPIES.get(type(opt).__name__)
    trained = [(g, p) for g in opt.param_groups for p in g["params"] if p.requires_grad]
    if not held:
        size = None if copies is None else sum(int(copies(g)) * _bytes(p) for g, p in trained)
    return {
        "name": type(opt).__name__,
        "state_bytes": size,
        "state_from": "" if held or size is None else " (after the first step)",
        "groups": [_group(i, g) for i, g in enumerate(opt.param_groups)],
    }


def _group(i: int, group: dict[str, Any]) -> dict[str, Any]:
    numbers = {
        k: float(group[k])
        for k in ("lr", "weight_decay")
        if isinstance(group.get(k), int | float | Tensor)
    }
    return {
        "index": i,
        "name": str(group.get("name", "")),
        "n_params": sum(map(numel, group["params"])),
        "n_trainable": sum(numel(p) for p in group["params"] if p.requires_grad),
        **numbers,
    }


def _optimizer_lines(opt: dict[str, Any]) -> list[list[str]]:
    """One line for the optimizer and one for each of its parameter groups."""
    state = opt["state_bytes"]
    about = "" if state is None else f"   state {nbytes(state)}{opt['state_from']}"
    out = [[f"Optimizer {opt['name']}{about}"]]
    for g in opt["groups"]:
        free, n = g["n_trainable"], g["n_params"]
        trains = f"{free:,} of {n:,} trainable" if free else f"frozen ({n:,})" if n else "empty"
        what = [f"{k} {g[k]:g}" for k in ("lr", "weight_decay") if k in g]
        name = f" {g['name']}" if g["name"] else ""
        out.append([f"  group {g['index']}{name}: {trains}", *what])
    return out
