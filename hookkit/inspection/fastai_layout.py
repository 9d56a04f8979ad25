"""fastai's layout of a summary: `layer_info`, `module_summary` and a Learner's own.

Draws the rows of a `Summary`. Matches fastai 2.8.12 to the character where its numbers are right;
rows are in the order of execution, and the first dimension is the true one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from hookkit._core.batches import first_batch, split_batch
from hookkit._core.pytree import Inputs, tree_leaves, tree_map
from hookkit._core.text import escape_controls, percent
from hookkit.errors import ArgumentError, ModelRunError
from hookkit.inspection.preserve import preserve_state
from hookkit.inspection.summarizing import run_summary
from hookkit.inspection.summary_result import Summary
from hookkit.inspection.summary_rows import Row
from hookkit.inspection.tree import Tree

_RULE = 76 * "="  # fastai's width


class SummaryText(str):
    """Show a text unquoted at the prompt, and as the rich table in a notebook.

    Attributes:
        summary: the `Summary` that it was drawn from.
    """

    summary: Summary
    __repr__ = str.__str__

    def _repr_html_(self) -> str:
        return self.summary.html()


def layer_info(learn: Any, *xb: Any) -> list[tuple[str, int | str, Any, Any, bool]]:
    """List type, parameters, trainable, output shape, same as its input, of each innermost layer.

    Shapes are those of the first sample of the inputs `xb`, as in fastai: they begin with 1. ""
    stands for parameters and trainable where there are none, None for the shape of a layer that is
    not called. `learn` is a Learner, or anything with a `model`.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> layer_info(learn, *learn.dls.one_batch()[:1])[1]
    ('ReLU', '', '', [1, 3], True)
    """
    one = Inputs(tree_map(lambda t: t[:1] if t.dim() else t, x) for x in xb)
    return [_info(r) for r in _layers(_summary_of("layer_info", learn, one, training=False))]


def module_summary(learn: Any, *xb: Any) -> SummaryText:
    """Draw the layers of `learn.model` in fastai's layout, for the inputs `xb` of a batch.

    Returns a str that shows unquoted at the prompt and carries the `Summary` as `.summary`. `learn`
    is a Learner, or anything with a `model`.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> module_summary(learn, *learn.dls.one_batch()[:1]).summary.n_params
    10
    """
    return _drawn(_summary_of("module_summary", learn, Inputs(xb)), xb)


def learner_summary(learn: Any) -> SummaryText:
    """Draw `module_summary` of one training batch, with optimizer, loss, freezing and callbacks.

    No event is fired and nothing of the learner changes. The inputs are all but the last item of
    the batch, or as many as the DataLoaders say; a batch that is a mapping becomes keyword inputs.
    Raises a ModelRunError if there are no data.
    """
    train = getattr(getattr(learn, "dls", None), "train", None)
    if train is None:
        raise ModelRunError(
            "learn.summary() runs one training batch: this Learner has no data. Make it with "
            "DataLoaders(train, valid), or use module_summary(learn, xb)."
        )
    # a dataset may draw numbers, or call the model
    with preserve_state(learn.model, observers=True):
        batch = first_batch(train, "the training loader")
    if isinstance(batch, Mapping):
        xb = Inputs((), batch)
    else:
        xb = Inputs(split_batch(batch, getattr(learn.dls, "n_inp", None))[0])
    text = f"Optimizer used: {learn.opt_func}\nLoss function: {learn.loss_func}\n\n"
    if learn.opt is not None:
        at = getattr(learn, "frozen_idx", 0)
        text += f"Model frozen up to parameter group #{at}\n\n" if at else "Model unfrozen\n\n"
    names = [type(cb).__name__ for cb in sorted(learn.cbs, key=lambda cb: cb.order)]
    text += "Callbacks:\n" + "\n".join(f"  - {name}" for name in names)
    loss = getattr(learn.loss_func, "__name__", None) or str(learn.loss_func).partition("\n")[0]
    found = _summary_of("learn.summary", learn, xb)
    notes = (*found.notes, f"Loss {loss}", f"Callbacks {', '.join(names) or 'none'}")
    return _drawn(replace(found, notes=notes), xb, text)


def _summary_of(who: str, learn: Any, xb: Inputs, training: bool = True) -> Summary:
    """Summarise `learn.model`, by default as in training, whatever mode a fit has left."""
    model = getattr(learn, "model", None)
    if not isinstance(model, nn.Module) or not tree_leaves(xb):
        raise ArgumentError(
            f"{who} takes a Learner and the inputs of a batch, found {type(learn).__name__} and "
            f"{len(xb)} inputs. Write {who}(learn, x), or summary(model, x)."
        )
    tree, opt = Tree(model), getattr(learn, "opt", None)
    p = next((p for _, p in tree.params), None)
    if p is not None and not p.is_meta:
        xb = tree_map(lambda t: t.to(p.device), xb)
    opt = opt if hasattr(opt, "param_groups") else None
    mode = None if training and model.training else training  # None leaves each module's own
    return run_summary(tree, xb, opt, {}, training=mode, who="learn.summary")


def _layers(s: Summary) -> list[Row]:
    return [r for r in s if r.kind == "parameter" or (r.kind == "module" and r.leaf)]


def _info(r: Row) -> tuple[str, int | str, Any, Any, bool]:
    same = r.shape == r.in_shape
    if r.trainable is None:
        return r.type, "", "", r.shape, same
    free = r.trainable if isinstance(r.trainable, bool) else percent(r.trainable, 1)
    return r.type, r.n_params, free, r.shape, same


def _sizes(shape: Any) -> str:
    """Write a shape as `16 x 1`, several as fastai's list of texts."""
    if isinstance(shape, list) and all(isinstance(n, int) for n in shape):
        return " x ".join(map(str, shape))
    if isinstance(shape, dict):
        return str({k: _sizes(v) for k, v in shape.items()})
    return str([_sizes(s) for s in shape]) if isinstance(shape, list | tuple) else str(shape)


def _drawn(s: Summary, xb: Any, below: str = "") -> SummaryText:
    """Draw the table of `s`, for the inputs `xb`, with a text below it."""
    inputs = [list(t.shape) for t in tree_leaves(xb)]
    size = _sizes(inputs[0] if len(inputs) == 1 else inputs)
    lines = [
        f"{escape_controls(s.rows[0].type)} (Input shape: {size})",
        _RULE,
        f"{'Layer (type)':<20} {'Output Shape':<20} {'Param #':<10} {'Trainable':<10}",
        _RULE,
    ]
    previous: Any = None
    for r in _layers(s):
        kind, n, free, shape, same = _info(r)
        if r.kind == "module" and r.calls and shape is not None:
            if previous is None or not (same or shape == previous):
                lines += [_RULE.replace("=", "_")] * (previous is not None)
                lines.append(f"{'':<20} {_sizes(shape):<20}")
            previous = shape
        note = "" if not r.notes or r.notes[0].startswith("called") else r.notes[0]
        lines.append(
            f"{escape_controls(kind):<20} {escape_controls(note):<20} {n:<10} {free!s:<10}"
        )
    totals = f"""
Total params: {s.n_params:,}
Total trainable params: {s.n_trainable:,}
Total non-trainable params: {s.n_params - s.n_trainable:,}

"""
    text = SummaryText("\n".join([*lines, _RULE.replace("=", "_"), totals]) + below)
    text.summary = s
    return text
