"""`summary(model, *inputs)`: checks, the run, and what is built from it.

Builds on `modelinfo` for the model's `Tree` and its `Trace`, and on `rows`, `optimizer`, `result`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookkit.checks import check_flag, check_module, check_number, kind_of
from hookkit.errors import ArgumentError, OptionError, nearest
from hookkit.modelinfo.hook_copies import n_on_wrappers
from hookkit.modelinfo.tracer import Trace
from hookkit.modelinfo.tracing import trace
from hookkit.modelinfo.tree import Place, Tree, dtype_name, numel
from hookkit.nested import Inputs, describe, leaves
from hookkit.summaries import optimizer
from hookkit.summaries.columns import as_columns, check_counted
from hookkit.summaries.lines import View
from hookkit.summaries.optimizer import count, some
from hookkit.summaries.result import Summary
from hookkit.summaries.rows import rows_of

_OPTIONS = ("opt", "fold", "depth", "columns", "macs", "model_kwargs")
_SIZE = "Give inputs, or the size of one image: summary(model, x), summary(model, (3, 224, 224))"
# the names of options in torchinfo and its like
_ELSEWHERE = {
    "input_size": _SIZE,
    "input_shape": _SIZE,
    "input_data": "Give the inputs as the model takes them: summary(model, x)",
    "col_names": 'Name the columns: columns=("output", "params", "macs")',
}

_BATCH_OF_ONE = "Expected more than 1 value per channel when training"
_EVALUATED = "Run in evaluation mode: in training mode BatchNorm refuses a single value a channel."
# Private, in torch 2.11 to 2.13: the common base of all BatchNorms, which has no public name.
_BatchNorm = nn.modules.batchnorm._BatchNorm


ModelInput = Tensor | Sequence[Any] | Mapping[str, Any] | bool | str | None
"""A keyword input, for type checkers, which then see a misspelt option; others: `model_kwargs`."""


def summary(
    model: nn.Module,
    *args: Any,
    opt: Optimizer | None = None,
    fold: bool = True,
    depth: int | None = None,
    columns: Iterable[str] | None = None,
    macs: bool = True,
    model_kwargs: Mapping[str, Any] | None = None,
    **kwargs: ModelInput,
) -> Summary:
    """Parameters, output shapes, compute and memory of `model`, which stays as it is.

    One run on fake tensors (no compute, no memory), on a real copy if the model needs values.
    Works on any device, on `meta` too, for compiled models and those wrapped for parallel training;
    before `fully_shard`, not after.

    Hooks on the model and edits around the call are part of what it computes: they run, perhaps
    more than once, and on fake tensors if they can. What a hook writes on the model, it writes on
    the copy; what it counts or prints is not undone. Captures see nothing of the run. A real run
    that draws random numbers restores PyTorch's generators, also for threads that draw from them
    meanwhile; Python's and NumPy's are restored unless another thread is alive.

    Memory is that of tensors: workspaces of kernels (cuDNN's, an LSTM's on CPU) are not counted.

    Args:
        model: any module.
        *args: what its forward takes, of any structure. Nothing: names and parameters only. One
            tuple of ints, `(3, 224, 224)`: a float batch of one of that size.
        **kwargs: its keyword inputs.
        opt: its optimizer: adds its groups, the bytes of its state and parameters that it misses.
        fold: draw equal siblings once (`h.0..11 ×12`).
        depth: draw modules down to this depth.
        columns: names of the columns to draw: see `Summary.text`.
        macs: count multiply-accumulates; False saves up to a tenth of the time; they are None.
        model_kwargs: more keyword inputs, for a forward with inputs named like options above.

    Returns:
        A `Summary`: a value with rows, totals, text, HTML and `diff`.

    Raises:
        OptionError, ArgumentError: an argument cannot work.
        Exception: the model's own error, with a note that shows the table so far and the layer.

    >>> s = summary(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(5, 4))
    >>> s.n_params, s.macs, s.saved_bytes, s["2"].outputs
    (58, 240, 240, ('5×2',))
    """
    columns = as_columns(columns)
    _check(model, opt, depth, model_kwargs)
    check_counted(check_flag("summary", "macs", macs), columns, 'the column "macs"')
    view = View(check_flag("summary", "fold", fold), depth, columns)
    tree = Tree(model)
    _check_names(tree.model, {**kwargs, **(model_kwargs or {})})
    given = Inputs(_sized(tree, args), {**kwargs, **(model_kwargs or {})})
    if not given and not given.kwargs:
        return build(tree, None, opt, view)
    try:
        return run_summary(tree, given, opt, view, macs=macs)
    except Exception as error:
        if hint := _hint(args, given):
            error.add_note(f"hookkit: {hint}")
        raise


def _check(model: Any, opt: Any, depth: Any, model_kwargs: Any) -> None:
    if not isinstance(model, nn.Module):
        own = "learn.summary(), or " if callable(getattr(model, "summary", None)) else ""
        holds = isinstance(getattr(model, "model", None), nn.Module)
        hint = f"It holds a model: use {own}summary(learn.model, x)." if holds else ""
        check_module("summary", model, hint)
    if opt is not None and (isinstance(opt, type) or not hasattr(opt, "param_groups")):
        raise ArgumentError(
            f"summary: opt must be an optimizer, found {kind_of(opt)}. Give one with param_groups."
        )
    if depth is not None:
        check_number("summary", "depth", depth, 0, whole=True)
    keyed = isinstance(model_kwargs, Mapping) and all(isinstance(k, str) for k in model_kwargs)
    if model_kwargs is not None and not keyed:
        raise ArgumentError(
            f"summary: model_kwargs={model_kwargs!r:.60} is of type {type(model_kwargs).__name__}. "
            "Give a dict of keyword inputs by name, {'mask': mask}."
        )


def _check_names(model: nn.Module, names: Iterable[str]) -> None:
    """A misspelt option would be passed to the model's forward, and raise its TypeError."""
    try:
        params = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # written in C, or scripted
        return
    if any(p.kind is p.VAR_KEYWORD for p in params.values()):
        return
    for name in names:
        if name not in params:
            near = nearest(name, [*params, *_OPTIONS], n=1)
            hint = f'Did you mean "{near[0]}"?' if near else f"It takes {', '.join(params)}"
            raise OptionError(
                f'"{name}" is neither an option of summary nor an input of '
                f"{type(model).__name__}.forward. {_ELSEWHERE.get(name, hint)}"
            )


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


def _hint(args: tuple[Any, ...], given: Inputs) -> str:
    """The cure for a model that was given a size with a batch, or no tensor at all."""
    if given and not leaves(args) and leaves(given):
        size, batch = tuple(args[0]), tuple(given[0].shape)
        return (
            f"summary(model, {size}) takes {size} for the size of one sample, and makes a batch "
            f"of one of it: {batch}. Leave the batch dimension out, summary(model, {size[1:]}), or "
            f"give the input itself, summary(model, torch.zeros({size}))."
        )
    if not leaves(given):
        return (
            "there is no tensor among the inputs. Give the inputs as the model takes them, "
            "summary(model, x), or the size of one sample, summary(model, (3, 224, 224))."
        )
    return ""


def run_summary(
    tree: Tree,
    given: Inputs,
    opt: Optimizer | None,
    view: View,
    *,
    training: bool | None = None,
    macs: bool = True,
    who: str = "hookkit.summary",
) -> Summary:
    """The summary of one run; the model's own error is raised, with the table so far as a note."""
    done = trace(tree, given, training=training, macs=macs)
    notes: tuple[str, ...] = ()
    if done.error is not None and _BATCH_OF_ONE in str(done.error):
        again = trace(tree, given, training=False, macs=macs)
        if again.error is None:
            done, notes = again, (_EVALUATED,)
    made = build(tree, done, opt, view, _inputs_text(given), notes)
    if done.error is not None:
        done.error.add_note(f"\nin {who}, up to the error:\n{made.text(width=100)}")
        raise done.error
    return made


def _inputs_text(given: Inputs) -> str:
    """Shapes and dtypes of the inputs, `1×128 int64`."""
    text = describe(given[0] if len(given) == 1 and not given.kwargs else given)
    kinds = dict.fromkeys(map(dtype_name, leaves(given)))
    return f"{text} {', '.join(kinds)}".rstrip()


def build(
    tree: Tree,
    done: Trace | None,
    opt: Optimizer | None,
    view: View,
    inputs: str = "",
    notes: tuple[str, ...] = (),
) -> Summary:
    """The value of a run, or of no run."""
    seen = done.tree if done is not None and _grew(tree, done.tree) else tree
    call = done.calls.get("") if done else None
    output = f"{' | '.join(call.outputs[:3])} {', '.join(call.dtypes)}".strip() if call else ""
    return Summary(
        rows=rows_of(seen, done),
        inputs=inputs,
        output=output,
        dtype=_main_dtype(seen),
        grad_bytes=optimizer.grad_bytes(p for _, p in seen.params),
        run=done.how if done else "none",
        why=done.why if done else "",
        wrappers=_wrappers(tree),
        uncounted=dict(done.uncounted) if done else {},
        warnings=tuple(_warnings(seen, done, opt)),
        footnotes=(*notes, *(_footnotes(tree, done) if done else ())),
        optimizer=optimizer.read(opt) if opt is not None else None,
        failed=(done.failed or ("",)) if done and done.error is not None else (),
        error=f"{type(done.error).__name__}: {done.error}" if done and done.error else "",
        view=view,
    )


def _grew(tree: Tree, ran: Tree) -> bool:
    """True if the copy that ran got layers or shapes that the model does not have yet."""
    lazy = any(nn.parameter.is_lazy(p) for _, p in tree.params)
    return lazy or [place.name for place in tree.places] != [place.name for place in ran.places]


def _wrappers(tree: Tree) -> tuple[str, ...]:
    names = [type(m).__name__ for m in tree.wrappers]
    # Private, in torch 2.11 to 2.13: set by `module.compile()`. Without it the footer is silent.
    if getattr(tree.model, "_compiled_call_impl", None) is not None:
        names.append("compiled in place")
    return tuple(names)


def _footnotes(tree: Tree, done: Trace) -> Iterator[str]:
    if n := n_on_wrappers(tree):
        yield f"Hooks on its wrapper that did not run: {n}."
    if done.n_hooks:
        yield f"Hooks on the model that ran: {done.n_hooks}."
    if done.how == "fake" and any(_has_workspace(place) for place in done.tree.firsts):
        yield "The workspace of an LSTM's kernel on CPU is not in the saved bytes."
    if not done.saves:
        yield "torch.func runs in the forward: saved bytes are unknown, and left out of the sums."
    if tree.scripted:
        yield "Scripted modules run as one: shapes and saved bytes inside them are unknown."


def _has_workspace(place: Place) -> bool:
    """True for an LSTM that oneDNN runs; autograd saves its workspace, ten times the rest."""
    if not isinstance(place.module, nn.LSTM) or place.module.proj_size:
        return False
    return any(p.requires_grad and p.device.type == "cpu" for p in place.params.values())


def _main_dtype(tree: Tree) -> str:
    """The dtype of most parameters."""
    sizes: Counter[str] = Counter()
    for _, p in tree.params:
        sizes[dtype_name(p)] += numel(p)
    return max(sizes, key=lambda k: sizes[k]) if sizes.total() else ""


def _warnings(tree: Tree, done: Trace | None, opt: Optimizer | None) -> Iterator[str]:
    """The likeliest mistakes in a model and its optimizer."""
    if opt is not None:
        yield from optimizer.warnings_of(tree.params, opt)
    if done is not None and done.error is None and done.unused:
        # another run may draw other layers, or choose them by other values
        what = f"{count(done.unused, 'trainable parameter')} not part of the output of this run"
        yield f"{what}, and would get no gradient: {some(done.unused)}"
    if done is not None and done.written:
        what = count(done.written, "parameter")
        yield (
            f"{what} changed by the forward, in the model itself: the copy that ran shares "
            f"parameters of more than 1 GiB. Load them again: {some(done.written)}"
        )
    if tree.model.training:
        norms = [place for place in tree.firsts if isinstance(place.module, _BatchNorm)]
        if frozen := [place.name for place in norms if not place.module.training]:
            what = count(frozen, "BatchNorm layer")
            yield f"{what} in evaluation mode in a model that trains: {some(frozen)}"
    kinds: dict[str, list[str]] = {}
    for name, p in tree.params:
        if p.is_floating_point():
            kinds.setdefault(dtype_name(p), []).append(name)
    if len(kinds) > 1:
        rare = min(kinds, key=lambda k: len(kinds[k]))
        yield f"parameters of mixed dtypes {', '.join(kinds)}; {rare}: {some(kinds[rare])}"
