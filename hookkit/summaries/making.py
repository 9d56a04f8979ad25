"""A model at a glance: `summary(model, *inputs)`, and the same in fastai's layout for a Learner.

The pieces: `tracing` runs a stand-in once, `inventory` makes rows of what it saw, `outline` is the
value, `texttable` and `htmltable` draw it, `learnerview` is fastai's layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hookkit.checks import check_flag, check_number
from hookkit.errors import ArgumentError, OptionError, nearest
from hookkit.modules import unwrap
from hookkit.nested import Inputs, leaves
from hookkit.summaries.build import arrivals, build, run, wrapper_notes, wrappers_of
from hookkit.summaries.fastai_layout import layer_info, learner_summary, module_summary
from hookkit.summaries.result import Row, Summary, View
from hookkit.summaries.text import as_columns

__all__ = ["Row", "Summary", "layer_info", "learner_summary", "module_summary", "summary"]

_OPTIONS = ("opt", "fold", "depth", "columns", "model_kwargs")

_SIZE = "Give inputs, or the size of one image: summary(model, x), summary(model, (3, 224, 224))"
# what torchinfo and its like call it
_ELSEWHERE = {
    "input_size": _SIZE,
    "input_shape": _SIZE,
    "input_data": "Give the inputs as the model takes them: summary(model, x)",
    "col_names": 'Say which columns: columns=("output", "params", "macs")',
}


def summary(
    model: nn.Module,
    *args: Any,
    opt: Optimizer | None = None,
    fold: bool = True,
    depth: int | None = None,
    columns: Iterable[str] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Summary:
    """What `model` is made of and what it does to an input; the model stays as it is.

    One run on fake tensors (no compute, no memory), on a real copy if the model needs values.
    Works on models on any device, on `meta` too, compiled or wrapped for parallel training.

    Hooks on the model and edits around the call are part of what it computes: they run, perhaps
    more than once, and on fake tensors if they can. What a hook writes on the model, it writes on
    the copy; what it counts or prints is its own affair. Captures see nothing of the run. A real
    run that draws random numbers puts PyTorch's generators back, also for threads that draw from
    them meanwhile; Python's and NumPy's are restored unless another thread is alive.

    Args:
        model: any module.
        *args, **kwargs: what its forward takes, of any structure. Nothing: names and parameters
            only. One tuple of ints, `(3, 224, 224)`: a float batch of one of that size.
        opt: its optimizer, to tell groups, state bytes and parameters that it misses.
        fold: draw equal siblings once (`h.0..11 ×12`).
        depth: draw modules down to this depth.
        columns: which columns to draw, by name: see `texttable.COLUMNS`.
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
    view = View(check_flag("summary", "fold", fold), depth, columns)
    inner, wrappers = unwrap(model), wrappers_of(model)
    _check_names(inner, {**kwargs, **(model_kwargs or {})}, kwargs)
    given = Inputs(_sugar(inner, args), {**kwargs, **(model_kwargs or {})})
    if not given and not given.kwargs:
        return build(inner, None, opt, view, wrappers, "")
    done, notes = run(inner, given)
    notes += wrapper_notes(model)
    made = build(inner, done, opt, view, wrappers, arrivals(given), notes)
    if done.error is not None:
        error = done.error
        if hint := _hint(args, given):
            error.add_note(f"hookkit: {hint}")
        error.add_note(f"\nin hookkit.summary, up to the error:\n{made.text(width=100)}")
        raise error
    return made


def _check(model: Any, opt: Any, depth: Any, model_kwargs: Any) -> None:
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        cure = "give a model, an instance of nn.Module"
        if isinstance(getattr(model, "model", None), nn.Module):
            own = "learn.summary(), or " if callable(getattr(model, "summary", None)) else ""
            cure = f"it holds a model: use {own}summary(learn.model, x)"
        raise ArgumentError(f"summary of {kind}: {cure}")
    if opt is not None and (isinstance(opt, type) or not hasattr(opt, "param_groups")):
        kind = f"the class {opt.__name__}" if isinstance(opt, type) else type(opt).__name__
        raise ArgumentError(f"opt={kind}: give an optimizer, with its param_groups")
    if depth is not None:
        check_number("summary", "depth", depth, 0, whole=True)
    names = model_kwargs if isinstance(model_kwargs, Mapping) else () if model_kwargs else {}
    if names == () or not all(isinstance(name, str) for name in names):
        raise ArgumentError(
            f"summary: model_kwargs={model_kwargs!r:.60} is of type {type(model_kwargs).__name__}. "
            "Give a dict of keyword inputs by name, {'mask': mask}."
        )


def _hint(args: tuple[Any, ...], given: Inputs) -> str:
    """What to say beside the error of a model that got a size, or no tensor at all."""
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


def _check_names(model: nn.Module, asked: dict[str, Any], direct: dict[str, Any]) -> None:
    """A misspelt option would reach the model's forward, and fail there in the model's words."""
    try:
        params = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # written in C, or scripted
        return
    if any(p.kind is p.VAR_KEYWORD for p in params.values()):
        return
    for name in asked:
        if name not in params:
            near = nearest(name, [*params, *_OPTIONS], n=1)
            hint = f'Did you mean "{near[0]}"?' if near else f"It takes {', '.join(params)}"
            hint = _ELSEWHERE.get(name, hint)
            raise OptionError(
                f'"{name}" is neither an option of summary nor an input of '
                f"{type(model).__name__}.forward. {hint}"
            )


def _sugar(model: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`(3, 224, 224)` as one float image batch of that size; other arguments as they are."""
    size = args[0] if len(args) == 1 else None
    if not isinstance(size, tuple | torch.Size) or not size:
        return args
    if not all(type(n) is int for n in size):
        return args
    if min(size) < 1:
        raise OptionError(f"size {tuple(size)}: sizes are whole numbers from 1")
    p = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0, device="cpu"))
    mine = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, *size, generator=mine, device="cpu")
    return (x.to("cpu" if p.device.type == "meta" else p.device, p.dtype),)
