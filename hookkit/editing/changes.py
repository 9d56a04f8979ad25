"""Ready-made edits: `zero`, `scale`, `add`, `replace`, `patch_from`, for all of a value or a part.

Each makes a `Change`: what to do with one tensor, done to every tensor of what a layer gives (or
takes, or gets as gradient), with the containers' types kept. The tensors of the run are read only:
a changed tensor is a new one, through which gradients flow. Builds on `setting`, which applies them
to a part (`at=`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from hookkit.editing.setting import Where, check_holds_tensors, part_of, with_part
from hookkit.errors import ArgumentError, HookError, OptionError
from hookkit.hooks import Hook, Hooks
from hookkit.hooks.entries import part_at, recomputing
from hookkit.hooks.taps import tap
from hookkit.nested import describe, named_leaves, tmap


class Change:
    """A ready-made edit: a function for `edit_output`, `Hook(…, edit=True)` and their like.

    Copied and pickled with what it holds, so that a steering vector that a model learns is that of
    the copied model.

    Called as `change(module, …, value)`. A hook adds itself as `hook=`: its layer's name and its
    count of calls, for messages and for `patch_from`.
    """

    wants_hook = True

    def __init__(self, text: str, new: Callable[[Any, Where], Any]):
        self._text, self._new = text, new

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> Any:
        """The last argument, changed: the output, the inputs, or a gradient.

        Containers keep their types.

        Raises:
            HookError: the change does not fit the value, or finds no tensor in it; names the layer.
        """
        where = Where(module) if hook is None else Where(module, hook.name, hook.leaf, hook.count)
        check_holds_tensors(seen[-1], self._text, where)
        return self._new(seen[-1], where)

    def __repr__(self) -> str:
        return self._text


def _check_number(who: str, k: Any) -> None:
    if not isinstance(k, (int, float, complex, Tensor)):
        raise ArgumentError(
            f"{who}({k!r}): {type(k).__name__} is no number. Give a number, or a tensor that "
            f"broadcasts."
        )


def zero(*, at: Any = None) -> Change:
    """Sets to zero: the ablation of a layer, a channel (`at=(slice(None), 3)`), a position.

    Args:
        at: what to act on, as in `tensor[at]`: an int, slice, tuple, mask, index tensor; default
            all. Of a structured output every tensor, unless a leaf was selected (`"lstm[0]"`).

    Returns:
        The edit, for `edit_output` and the like.

    >>> import torch
    >>> zero(at=(..., 0))(nn.Identity(), torch.ones(2, 2))
    tensor([[0., 1.],
            [0., 1.]])
    """
    return Change("zero()", partial(_replaced, t=0, at=at, word="zero"))


def scale(k: float | Tensor, *, at: Any = None) -> Change:
    """Multiplies what a layer returns by a number or a tensor.

    Args:
        k: the factor; a tensor has to broadcast.
        at: what to act on, as in `tensor[at]`; all by default. See `zero`.

    Returns:
        The edit, for `edit_output` and the like.

    >>> import torch
    >>> scale(3)(nn.Identity(), torch.ones(2))
    tensor([3., 3.])
    """
    _check_number("scale", k)
    new = partial(_combined, f=operator.mul, v=k, at=at, word="scale")
    return Change(f"scale({_short(k)})", new)


def add(v: float | Tensor, *, at: Any = None) -> Change:
    """Adds a number or a tensor, such as a steering vector, to what a layer returns.

    Args:
        v: what is added; a tensor has to broadcast. It is cast to the dtype and device of what it
            is added to, and can be trained.
        at: what to act on, as in `tensor[at]`; all by default. See `zero`.

    Returns:
        The edit, for `edit_output` and the like.

    >>> import torch
    >>> add(torch.tensor([1.0, 2.0]), at=0)(nn.Identity(), torch.zeros(2, 2))
    tensor([[1., 2.],
            [0., 0.]])
    """
    _check_number("add", v)
    return Change(f"add({_short(v)})", partial(_combined, f=operator.add, v=v, at=at, word="add"))


def replace(t: Any, *, at: Any = None) -> Change:
    """Puts `t` in the place of the value, or of the part `at`.

    Args:
        t: a number or tensor for a tensor (it may broadcast); for a structured value, a structure
            of the same containers, whose tensors take the places of its tensors.
        at: what to act on, as in `tensor[at]`; all by default. From a `t` that broadcasts to the
            full shape the same part is taken.

    Returns:
        The edit, for `edit_output` and the like.

    >>> import torch
    >>> replace(7.0, at=slice(1, None))(nn.Identity(), torch.zeros(3))
    tensor([0., 7., 7.])
    """
    if t is None or isinstance(t, (str, bytes)):
        raise ArgumentError(
            f"replace({t!r}): {type(t).__name__} is no value of a layer. Give a number, a tensor, "
            f"or a structure of the same containers with tensors in it."
        )
    return Change(f"replace({_short(t)})", partial(_replaced, t=t, at=at, word="replace"))


def patch_from(run: Hook | Hooks | Mapping[str, Any], *, at: Any = None) -> Change:
    """Puts in what another run had at the same layer: activation patching.

    Args:
        run: the hooks of that run (they have to live, not to be registered), or a dict of its
            values by layer name. A layer is found by its name, else as the same module. With
            `keep="all"`, call by call; else each call gets the last call's value.
        at: as in `zero`, to patch a position or a head only.

    Returns:
        The edit, for `edit_output` and the like.

    What the other run had is broadcast: one clean sample patches every sample of a batch.

    >>> import torch
    >>> from hookkit.hooks import hook_outputs
    >>> from hookkit.editing import edit_outputs
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    >>> with hook_outputs(net) as clean: y = net(torch.ones(1, 2))
    >>> with edit_outputs([net[0]], patch_from(clean)): patched = net(torch.zeros(1, 2))
    >>> torch.equal(y, patched)
    True
    """
    if not isinstance(run, Hook | Hooks | Mapping):
        raise ArgumentError(
            f"patch_from needs the hooks of another run, found {type(run).__name__}. Give what "
            f"hook_outputs(…) returned, or a dict of values by layer name; replace(…) puts in one "
            f"tensor."
        )

    if isinstance(run, Hooks | Mapping) and not len(run):
        raise OptionError(
            "patch_from was given a run without a single layer. Give what hook_outputs(…) "
            "returned, or a dict of values by layer name."
        )
    return Change("patch_from(…)", partial(_patched, run=run, at=at))


def _combined(
    value: Any, where: Where, *, f: Callable[..., Any], v: Any, at: Any, word: str
) -> Any:
    """`value` with `f(x[at], v)` in the place of `x[at]` for each tensor `x`."""

    def one(x: Tensor) -> Tensor:
        there = part_of(x, at, word, where)
        try:
            new = f(there, _like(v, there))
        except RuntimeError as e:
            raise HookError(
                f"{word} on {where.label}: {e}. There is {describe(there)}: give a number, or a "
                f"tensor that broadcasts to that shape."
            ) from e
        return with_part(x, at, new, word, where)

    return tmap(one, value)


def _patched(value: Any, where: Where, *, run: Hook | Hooks | Mapping[str, Any], at: Any) -> Any:
    """`value` with what the other run had there in its place."""
    return _replaced(value, where, t=_stored(run, where), at=at, word="patch_from")


def _replaced(value: Any, where: Where, *, t: Any, at: Any, word: str) -> Any:
    """`value` with the tensors of `t` in the place of its own, one to one."""
    old, new = named_leaves(value), named_leaves(t)
    if isinstance(t, int | float | complex):
        new = [(path, t) for path, _ in old]  # type: ignore[misc]
    if isinstance(value, Tensor) and isinstance(t, Tensor):
        pass
    elif [path for path, _ in old] != [path for path, _ in new]:
        raise HookError(
            f"{word} on {where.label}: {describe(t)} is of another structure than what is there, "
            f"{describe(value)}. Give the same structure, or select one tensor of it (as "
            f'"lstm[0]").'
        )
    values = iter(new)

    def one(x: Tensor) -> Tensor:
        v = next(values)[1]
        if isinstance(v, Tensor):
            if v.is_quantized and (at is not None or (v.shape, v.dtype) != (x.shape, x.dtype)):
                v = v.dequantize()  # PyTorch would take its integers, to be read by the scale of x
            if at is not None and _broadcasts(v, x):
                v = v.expand(x.shape)[at]
            v = _like(v, x)  # a copy, since what follows may write; of the user's own no lazy one
            v = v.clone() if word == "replace" else tap(v)
        part_of(x, at, word, where)
        return with_part(x, at, v, word, where)

    return tmap(one, value)


def _broadcasts(v: Tensor, x: Tensor) -> bool:
    """Whether `v` stands for all of `x`: the same dimensions, or 1 in the place of some."""
    return v.dim() == x.dim() and all(n in (1, m) for n, m in zip(v.shape, x.shape, strict=True))


def _stored(run: Hook | Hooks | Mapping[str, Any], where: Where) -> Any:
    """What the other run had at this layer."""
    if isinstance(run, Mapping):
        for name in where.names:
            if name is not None and name in run:
                return run[name]
        raise HookError(_absent(where, [str(name) for name in run]))
    hooks = [run] if isinstance(run, Hook) else list(run)
    same = [h for h in hooks if h.module is where.module]
    named = [h for h in hooks if h.name is not None and h.name in where.names]
    for h in [h for h in same if h.leaf == where.leaf] + named:
        return _value(h, where)
    for h in same:
        if not h.leaf:
            return part_at(_value(h, where), where.leaf, "patch_from", lambda: where.label)
    raise HookError(_absent(where, [h.label for h in hooks]))


def _value(hook: Hook, where: Where) -> Any:
    if hook._capture.options.keep == "all":
        calls = hook.calls
        if recomputing() and len(calls) > 1:
            raise HookError(
                f"patch_from on {where.label}: a checkpoint runs this layer again, and which of "
                f'its {len(calls)} calls that is cannot be known. Capture with keep="last".'
            )
        n_call = 0 if recomputing() else where.count
        if n_call >= len(calls):
            raise HookError(
                f"patch_from on {where.label}: call {n_call + 1} has no counterpart, the other "
                f'run called it {len(calls)} times. Capture with keep="last" to patch each call '
                f"with the last one's value."
            )
        return calls[n_call]
    if hook.stored is None:
        raise HookError(
            f"patch_from on {where.label}: the other run stored nothing there. Run the model "
            f"inside its `with` block first."
        )
    return hook.stored


def _absent(where: Where, names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    return (
        f"patch_from on {where.label}: the other run has no value of that layer, only of "
        f"{shown or 'none'} ({len(names)}). Capture it there, with the same select(model, …)."
    )


def _like(v: Any, x: Tensor) -> Any:
    """A tensor on the device of `x`, and in its dtype if that can hold it."""
    if not isinstance(v, Tensor):
        return v
    holds = x.is_complex() or (x.is_floating_point() and not v.is_complex())
    dtype = x.dtype if holds else v.dtype
    return v.to(device=x.device, dtype=dtype)


def _short(v: Any) -> str:
    return repr(v) if isinstance(v, int | float | complex) else describe(v)
