"""Ready-made edits: `zero`, `scale`, `add`, `replace`, `patch_from`, for all of a value or a part.

Each makes a `Change`, which does one thing to every tensor of an output (or of the inputs, or of a
gradient) and keeps the types of containers. The tensors of the run are only read: a changed tensor
is a new one, through which gradients flow.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hookkit._core.pytree import describe, tree_get, tree_leaves, tree_leaves_with_path, tree_map
from hookkit.errors import ArgumentError, HookError
from hookkit.hooks import Hook, Hooks, recomputing
from hookkit.hooks.attach import module_repr
from hookkit.hooks.functions import FunctionCall

New = Callable[[Tensor, Any], Any]
Operands = Callable[[Any, nn.Module, Any], list[Any]]


class Change:
    """Changes each tensor of a value: a function for `edit_output` and `Hook(…, edit=True)`.

    Args:
        text: how it was made, for messages: `scale(2)`.
        new: `new(part, operand)` returns the replacement of the part `at` of a tensor.
        at: the part of each tensor, as in `tensor[at]`; None is all of it.
        operands: `operands(value, module, hook)` returns the operand for each tensor of a value.
    """

    wants_hook = True

    def __init__(self, text: str, new: New, at: Any, operands: Operands) -> None:
        self.text, self.new, self.operands = text, new, operands
        self.at = ... if at is None else at

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> Any:
        """Return the last argument, changed: the output, the inputs, or a gradient.

        An error of PyTorch gains a note that names the layer.

        Raises:
            HookError: the change does not fit the value, or finds no tensor in it.
        """
        value = seen[-1]
        try:
            if not tree_leaves(value):
                raise HookError(
                    "hookkit finds no tensor in it. Give a function of the value that returns the "
                    "changed one (lambda value: …), or edit a layer before it."
                )
            others = iter(self.operands(value, module, hook))
            return tree_map(lambda x: self._one(x, next(others)), value)
        except Exception as e:
            label = module_repr(module) if hook is None else hook.label
            e.add_note(f"hookkit: raised by {self.text} on {label}. There is {describe(value)}.")
            raise

    def _one(self, x: Tensor, other: Any) -> Tensor:
        """Return a copy of tensor `x`, its part `at` changed by operand `other`."""
        if isinstance(other, Tensor):
            other = other.to(x.device)
        new = self.new(x if self.at is ... else x[self.at], other)
        is_tensor = isinstance(new, Tensor)
        is_complex = new.is_complex() if is_tensor else isinstance(new, complex)
        is_float = new.is_floating_point() if is_tensor else isinstance(new, float)
        if not x.is_complex() and (is_complex or (is_float and not x.is_floating_point())):
            what = "fractions" if is_float else "complex numbers"
            raise HookError(f"{describe(new)} of {what} does not go into a tensor of {x.dtype}")
        if is_tensor:
            new = new.to(x.dtype)  # an assignment at a list or mask of positions does not cast
        whole = self.at is ...
        if whole and isinstance(new, Tensor) and (x.is_nested or new.shape == x.shape):
            return new
        made = x.clone()
        if whole and not isinstance(new, Tensor):
            return made.fill_(new)  # not `made[...]`, which a nested tensor refuses
        made[self.at] = new
        return made

    def __repr__(self) -> str:
        return self.text


def zero(*, at: Any = None) -> Change:
    """Make an edit that sets to zero: a layer, a channel (`at=(slice(None), 3)`), a position.

    Args:
        at: the part to change, as in `tensor[at]`: an int, slice, tuple, mask or index tensor; all
            by default. In a structured output it applies to every tensor, unless one tensor was
            selected (`"lstm[0]"`).

    Returns:
        The edit, for `edit_output` and the like.

    >>> import torch
    >>> zero(at=(..., 0))(nn.Identity(), torch.ones(2, 2))
    tensor([[0., 1.],
            [0., 1.]])
    """
    return Change("zero()", lambda x, _: 0, at, _same_for_all(None))


def scale(k: float | Tensor, *, at: Any = None) -> Change:
    """Make an edit that multiplies the output by a number or a tensor.

    Args:
        k: the factor; a tensor has to broadcast.
        at: the part to change, as in `tensor[at]`; all by default. See `zero`.

    Returns:
        The edit, for `edit_output` and the like.

    >>> import torch
    >>> scale(3)(nn.Identity(), torch.ones(2))
    tensor([3., 3.])
    """
    return Change(f"scale({describe(k)})", operator.mul, at, _same_for_all(k))


def add(v: float | Tensor, *, at: Any = None) -> Change:
    """Make an edit that adds a number or a tensor, such as a steering vector.

    Args:
        v: a number, or a tensor that has to broadcast. It is cast to the dtype and device of the
            tensor that it is added to, and can be trained.
        at: the part to change, as in `tensor[at]`; all by default. See `zero`.

    Returns:
        The edit, for `edit_output` and the like.

    >>> import torch
    >>> add(torch.tensor([1.0, 2.0]), at=0)(nn.Identity(), torch.zeros(2, 2))
    tensor([[1., 2.],
            [0., 0.]])
    """
    return Change(f"add({describe(v)})", operator.add, at, _same_for_all(v))


def replace(t: Any, *, at: Any = None) -> Change:
    """Make an edit that puts `t` in the place of the value, or of the part `at`.

    Args:
        t: a number, or a tensor (it may broadcast); for a structured value, the same containers
            with other tensors.
        at: the part to replace, as in `tensor[at]`; all by default. `t` has the shape of that
            part, or broadcasts to it.

    Returns:
        The edit, for `edit_output` and the like.

    >>> import torch
    >>> replace(7.0, at=slice(1, None))(nn.Identity(), torch.zeros(3))
    tensor([0., 7., 7.])
    """

    def operands(value: Any, module: nn.Module, hook: Any) -> list[Any]:
        return [v for _, v in _pairs(value, t)]

    return Change(f"replace({describe(t)})", _put, at, operands)


def patch_from(
    run: Hook | Hooks | Mapping[str, Any], *, at: Any = None, from_at: Any = None
) -> Change:
    """Make an edit that puts in the value of another run at the same layer: activation patching.

    The other run's value is found by the module itself, or in another model by the module's name as
    `select` gives it, but never by its position in a list. It has the shape of the value that it
    replaces, or one sample, which then patches every sample of a batch.

    Args:
        run: the hooks of that run (alive, but not necessarily registered), or a dict of its values
            by layer name. Hooks with `keep="all"`, and hooks of functions, patch call by call;
            otherwise each call gets the last call's value.
        at: as in `zero`, to patch a position or a head only.
        from_at: the part of the other run's tensor to put there; by default the same part. To patch
            position 7 from position 4 of another prompt, give `at=(slice(None), 7)` and
            `from_at=(slice(None), 4)`.

    Returns:
        The edit, for `edit_output` and the like.

    >>> import torch
    >>> from hookkit.hooks import hook_outputs
    >>> from hookkit.edits import edit_outputs
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    >>> with hook_outputs(net) as clean: y = net(torch.ones(1, 2))
    >>> with edit_outputs([net[0]], patch_from(clean)): patched = net(torch.zeros(1, 2))
    >>> torch.equal(y, patched)
    True
    """
    if not isinstance(run, Hook | Hooks | Mapping):
        raise ArgumentError(
            f"patch_from needs the hooks of another run, found {type(run).__name__}. Give what "
            "hook_outputs(…) returned, or a dict of values by layer name; replace(…) puts in one "
            "tensor."
        )

    place = ... if at is None else at

    def one(x: Tensor, v: Tensor) -> Tensor:
        if from_at is not None:
            return _for_each_sample(v[from_at], x[place])
        whole = _for_each_sample(v, x)
        return whole if place is ... else whole[place]

    def operands(value: Any, module: nn.Module, hook: Any) -> list[Any]:
        return [one(x, v) for x, v in _pairs(value, _stored(run, module, hook))]

    return Change("patch_from(…)", _put, at, operands)


def _put(part: Tensor, new: Any) -> Any:
    """Return a copy of `new`, the replacement of `part`: the layers that follow may write to it."""
    return new.clone() if isinstance(new, Tensor) else new


def _same_for_all(v: Any) -> Operands:
    """Return operands that are `v` for every tensor."""
    return lambda value, module, hook: [v] * len(tree_leaves(value))


def _pairs(value: Any, t: Any) -> list[tuple[Tensor, Any]]:
    """Return each tensor of `value`, paired with the tensor of `t` in its place, or the number."""
    old, new = tree_leaves_with_path(value), tree_leaves_with_path(t)
    if isinstance(t, int | float | complex):
        return [(x, t) for _, x in old]
    if [path for path, _ in old] != [path for path, _ in new]:
        raise HookError(f"{describe(t)} is of another structure. Give the same containers.")
    return [(x, v) for (_, x), (_, v) in zip(old, new, strict=True)]


def _for_each_sample(v: Tensor, x: Tensor) -> Tensor:
    """Return `v` in the shape of `x`: `v` itself, or its one sample for all samples."""
    if x.is_nested or v.is_nested:  # compared sample by sample: a nested tensor has no one shape
        fits = x.is_nested and v.is_nested and [*map(len, x.unbind())] == [*map(len, v.unbind())]
    else:
        fits = v.shape == x.shape or (v.shape[:1] == (1,) and v.shape[1:] == x.shape[1:])
    if not fits:
        raise HookError(
            f"the other run had {describe(v)}, and {describe(x)} is there: one sample is patched "
            "into several, one position is not. Capture the same positions, in generate with "
            'keep="all", or use replace(…).'
        )
    return v if v.is_nested else v.expand(x.shape)


def _stored(run: Hook | Hooks | Mapping[str, Any], module: nn.Module, hook: Any) -> Any:
    """Return the other run's value of this layer.

    It is looked up by the module (for a function, by the same call in the same module), and then by
    name. The name of a function's call ends with the number of the call.

    Args:
        module: the layer that is edited; or a `FunctionCall`, which stands for one.
        hook: the edit's hook; None if the change is called without one.
    """
    # a checkpoint that runs the only call again repeats call 0, which was counted already
    n = 0 if hook is None or (recomputing() and hook.n_calls == 1) else hook.n_calls
    name = None if hook is None or hook.scope.names_are_positions else hook.name
    names = () if name is None else (name, f"{name}:{n}")
    if isinstance(run, Mapping):
        labels = list(run)
        values = [run[key] for key in names if key in run]
    else:
        hooks, path = [run] if isinstance(run, Hook) else list(run), getattr(hook, "path", "")
        labels = [h.label for h in hooks]
        same = [h for h in hooks if h.module is module or _is_same_call(h, module, n)]
        same = same or [h for h in hooks if h.name in names and not h.scope.names_are_positions]
        values = [_value(h, n) for h in same if h.path == path]
        # the whole output, if it was stored, has the part too
        values = values or [tree_get(_value(h, n), path) for h in same if not h.path]
    if not values:
        shown = ", ".join(labels[:4]) + (" …" if len(labels) > 4 else "")
        why = " A position in a list is no name." if name is None else ""
        raise HookError(
            f"the other run has no value of this layer, only of {shown or 'none'}.{why} Capture it "
            "there, with the same select(model, …)."
        )
    return values[0]


def _is_same_call(h: Hook, module: nn.Module, n: int) -> bool:
    """Return whether `h` stored the `n`-th call of the function of `module`, in the same module."""
    other = h.module
    if not isinstance(other, FunctionCall) or not isinstance(module, FunctionCall):
        return False
    ends = f"{module.name.rpartition('/')[2]}:{n}"
    return other.owner is module.owner and other.name.rpartition("/")[2] == ends


def _value(h: Hook, n: int) -> Any:
    """Return what `h` stored in call `n` (from 0) with keep="all", otherwise in the last call."""
    value = h.stored
    if h.options.keep == "all":
        if n and recomputing():
            raise HookError(
                "a checkpoint that runs a layer several times does not say which call this is, so "
                'the other run cannot be followed call by call. Capture with keep="last".'
            )
        if n >= len(h.calls):
            raise HookError(
                f"call {n + 1} has no counterpart among the {len(h.calls)} calls of the other run. "
                'Capture with keep="last" to patch each call alike.'
            )
        value = h.calls[n]
    if value is None:
        raise HookError(
            "the other run stored nothing there. Run the model inside its `with` block first."
        )
    return value
