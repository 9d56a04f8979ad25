"""`swap` replaces modules of a model inside a `with`; `Wrapper` is the base of such replacements.

A hook sees the inputs and the output of a module; a `Wrapper` decides what happens in between:
call it, call it twice, call something else. `Catcher` records calls, `GramWrapper` sums XᵀX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookkit._core.checks import check_module, kind_of
from hookkit._core.messages import warn
from hookkit._core.modules import submodules, unwrap
from hookkit._core.pytree import Inputs, tree_map
from hookkit.errors import ArgumentError, HookError, NeverFiredWarning, OptionError
from hookkit.hooks.attach import attach
from hookkit.hooks.calls import recomputing
from hookkit.hooks.eager import layer_by_layer
from hookkit.hooks.selection import select
from hookkit.hooks.values import snapshot

Replacement = nn.Module | Callable[[nn.Module], nn.Module]


@contextmanager
def swap(
    model: nn.Module, replacements: Mapping[Any, Replacement]
) -> Iterator[dict[str, nn.Module]]:
    """Replace modules of a model by other modules inside a `with` block.

    All are replaced or none, and the originals are restored when the block ends, also by an error.
    A shared module is replaced in each of its places, by one replacement. Modules that a model
    holds outside its registered children (in a plain list) are not replaced. A warning names
    wrappers that were not called, and places where other code put a module, which then stays.
    Compiled models run eagerly in the block, and PyTorch's transformer layers call their parts.
    Activation checkpointing calls layers again in the backward pass: run that inside the block too.

    Args:
        model: the model; its root cannot be replaced.
        replacements: selector (as in `select`: name, glob, class, module …) → a module, or a
            function that makes one from the original, such as a `Wrapper` class. Modules made so
            get the original's `training` mode. A selector can match several modules.

    Returns:
        For `as`, a dict of the names in the model → the replacements; they stay usable afterwards.

    Raises:
        SelectionError: a selector matches nothing.
        OptionError: two selectors with other replacements match the same module.
        ArgumentError: a replacement is no module and makes none.
        HookError: the model itself would be replaced.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Linear(3, 2))
    >>> with swap(net, {nn.Dropout: nn.Identity(), "2": Wrapper}) as new:
    ...     y = net(torch.ones(2, 4))
    ...     print(net[1], net[2] is new["2"], new["2"].in_features)
    Identity() True 3
    >>> net[1]
    Dropout(p=0.5, inplace=False)
    """
    chosen, wanted = _wanted(model, replacements)
    places = [
        (parent, key, child)
        for parent in model.modules()
        if unwrap(parent) is parent  # what a wrapper wraps is replaced with it
        for key, child in submodules(parent).items()
        if unwrap(child) in wanted
    ]
    made: dict[nn.Module, nn.Module] = {}
    for _, _, child in places:
        if (original := unwrap(child)) not in made:
            made[original] = _make_replacement(child, wanted[original])
    new = {name: made[original] for name, original in chosen.items()}
    called, wrappers = set[nn.Module](), [m for m in made.values() if isinstance(m, Wrapper)]
    with ExitStack() as stack:
        stack.enter_context(layer_by_layer())
        for m in wrappers:
            stack.callback(attach(m, lambda m, *_: called.add(m), pre=True).remove)
        for parent, key, child in places:
            stack.callback(_restore, parent, key, child, made[unwrap(child)], parent.training)
            # Private by its name: `Module._modules`, since torch 0.1. The public `setattr` runs
            # code of the user's class and cannot be undone.
            parent._modules[key] = made[unwrap(child)]
        yield new
    idle = [f'"{name}"' for name, m in new.items() if m in wrappers and m not in called]
    if idle:
        warn(
            f"swap: never called: {', '.join(idle[:5])} ({len(idle)} of {len(new)}). "
            "The model did not run these layers, or it reads their weights without calling them, "
            "or it holds them in a list: hook_outputs follows a module wherever it is called.",
            NeverFiredWarning,
        )


def _wanted(
    model: nn.Module, replacements: Mapping[Any, Replacement]
) -> tuple[dict[str, nn.Module], dict[nn.Module, Replacement]]:
    """Return the selected modules by name, and the replacement of each."""
    root = unwrap(check_module("swap", model, 'Write swap(model, {"layer1": nn.Identity()}).'))
    names: dict[str, nn.Module] = {}
    wanted: dict[nn.Module, Replacement] = {}
    for what, replacement in replacements.items():
        for name, module in select(model, what).items():
            if module is root:
                raise HookError(
                    "swap: the model itself has no place in which it could be replaced. Call the "
                    "replacement instead of it, or swap modules inside."
                )
            if wanted.setdefault(module, replacement) is not replacement:
                raise OptionError(
                    f'swap: two entries have a replacement for "{name}", {what!r} and one before '
                    "it. Let one of them match it."
                )
            names[name] = module
    return names, wanted


def _make_replacement(original: nn.Module, replacement: Any) -> nn.Module:
    """Return `replacement` if it is a module; otherwise make one from `original`, in its mode."""
    if isinstance(replacement, nn.Module):
        return replacement
    kind, label = type(original).__name__, getattr(replacement, "__name__", repr(replacement))
    if getattr(replacement, "__module__", "").startswith("torch.nn.modules."):
        # nn.ReLU(original) would be a ReLU that works in place
        raise ArgumentError(
            f"swap: the class {label} would be called with the layer that is there, "
            f"{label}({kind}), and it takes no layer. Give a module, {label}(…), or a function "
            f"that makes one: lambda old: {label}(…)."
        )
    made = replacement(original) if callable(replacement) else replacement
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f"swap: the replacement of a {kind} is {label}, which gives {kind_of(made)}. Give a "
            "module, or a function or class that makes one from the original."
        )
    old = set(original.modules())
    for m in made.modules():
        if m not in old:
            m.training = original.training
    return made


def _restore(
    parent: nn.Module, key: str, original: nn.Module, made: nn.Module, training: bool
) -> None:
    """Put `original` back, unless its replacement is no longer there.

    If the block changed the mode of `parent`, which was `training` before, the original follows.
    """
    now = parent._modules[key]
    if now is made:
        parent._modules[key] = original
        if parent.training != training:
            original.train(parent.training)
    elif now is not original:
        warn(
            f'swap: inside the block other code put a {type(now).__name__} in the place of "{key}" '
            f"of the {type(parent).__name__}, which was not changed. End blocks in the reverse "
            "order of their beginning.",
        )


class Wrapper(nn.Module):
    """Takes the place of another module, which it holds as `wrapped` and by default just calls.

    Derive from it: override `forward`, call `self.wrapped`. Attributes that it does not have are
    those of `wrapped` (`wrapper.in_features`). In a state dict the keys of `wrapped` begin with
    `wrapped.`, so save and load a model outside the block.

    >>> import torch
    >>> class Doubled(Wrapper):
    ...     def forward(self, *args, **kwargs):
    ...         return 2 * self.wrapped(*args, **kwargs)
    >>> net = nn.Sequential(nn.Identity())
    >>> with swap(net, {"0": Doubled}):
    ...     net(torch.ones(2))
    tensor([2., 2.])
    """

    wrapped: nn.Module

    def __init__(self, wrapped: nn.Module):
        super().__init__()
        self.wrapped = check_module(type(self).__name__, wrapped)
        self.training = wrapped.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `wrapped` and return its output."""
        return self.wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = self.__dict__.get("_modules", {})
            if name.startswith("__") or "wrapped" not in held:
                raise
            return getattr(held["wrapped"], name)


class Call(NamedTuple):
    """Holds one call: `inputs` (positional by index, keyword by name) and `output`."""

    inputs: Inputs
    output: Any


class Catcher(Wrapper):
    """Records the inputs and the output of each call of a module, as detached copies.

    Attributes:
        calls: a `Call` for each call, without those that activation checkpointing repeats.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> with swap(net, {"1": Catcher}) as caught:
    ...     _ = net(torch.ones(2, 4))
    >>> caught["1"].calls[0].inputs[0].shape
    torch.Size([2, 3])
    """

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__(wrapped)
        self.calls: list[Call] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `wrapped`; record its inputs and its output; return the output."""
        inputs = tree_map(snapshot, Inputs(args, kwargs))  # before the call, which may write them
        output = self.wrapped(*args, **kwargs)
        if not recomputing():
            self.calls.append(Call(inputs, tree_map(snapshot, output)))
        return output


class GramWrapper(Wrapper):
    """Sums XᵀX over the inputs X of a layer, each flattened to rows of its last dimension.

    Layer-wise quantisation and pruning need this sum: GPTQ's Hessian is 2 XᵀX (Frantar et al. 2022,
    arXiv:2210.17323, eq. 3). It wraps layers whose first input is (..., n_features), such as a
    Linear. For a convolution, whose channels are in another dimension, it raises an OptionError.

    Attributes:
        gram: (n_features, n_features), fp32 or fp64, on the inputs' device; None before a call.
        n_rows: how many rows were summed, so `gram / n_rows` is the second moment.

    >>> net = nn.Sequential(nn.Linear(3, 2))
    >>> with swap(net, {"0": GramWrapper}) as seen:
    ...     _ = net(torch.ones(5, 3))
    >>> seen["0"].gram[0], seen["0"].n_rows
    (tensor([5., 5., 5.]), 5)
    """

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__(wrapped)
        if hasattr(unwrap(wrapped), "kernel_size"):
            raise OptionError(
                "GramWrapper sums over the last dimension of its inputs, and a "
                f"{type(unwrap(wrapped)).__name__} has its channels in another. Derive your own "
                "from Wrapper."
            )
        self.gram: Tensor | None = None
        self.n_rows = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add the first input to the sum; call `wrapped` and return its output."""
        x = (args or tuple(kwargs.values()))[0].detach()
        if not recomputing():
            rows = x.reshape(-1, x.shape[-1]).to(torch.promote_types(x.dtype, torch.float32))
            with torch.autocast(x.device.type, enabled=False):
                self.gram = rows.T @ rows + (0 if self.gram is None else self.gram)
            self.n_rows += len(rows)
        return self.wrapped(*args, **kwargs)
