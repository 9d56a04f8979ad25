"""`swap`: other modules in the place of a model's own during a `with`; and what to put there.

A hook sees what goes into a module and what comes out; a wrapper decides what happens in between:
call it, call it twice, call something else. `Wrapper` is the base class for that, `Catcher` records
calls, `GramWrapper` sums XᵀX.

Each registration of a module is a place of it, so a shared module is replaced everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_flag, check_module
from hookkit.errors import ArgumentError, HookError, NeverFiredWarning, OptionError, warn
from hookkit.hooks.attach import attach, is_compiling, is_tracing, recomputing
from hookkit.hooks.calls import owned
from hookkit.hooks.eager import layer_by_layer
from hookkit.hooks.snapshot import copied_containers, snapshot
from hookkit.modules import inner_key, submodules, unwrap
from hookkit.nested import Inputs, describe, tmap
from hookkit.selecting import select

Replacement = nn.Module | Callable[[nn.Module], nn.Module]
_Place = tuple[nn.Module, str, nn.Module, nn.Module]  # parent, key, original, replacement


@contextmanager
def swap(
    model: nn.Module, replacements: Mapping[Any, Replacement]
) -> Iterator[dict[str, nn.Module]]:
    """Runs the `with` block with other modules in the place of some of the model's.

    All are replaced or none, and the originals are restored when the block ends, also by an error.
    A shared module is replaced in each of its places, by one replacement. Modules that a model
    holds outside its registered children (in a plain list) are not replaced; a warning says so if
    a `Wrapper` was not called though the model ran; another says if code in the block put a module
    of its own in such a place, which stays. Compiled models run eagerly in the block, and
    PyTorch's transformer layers call their parts.

    Args:
        model: the model; its root cannot be replaced.
        replacements: selector (as in `select`: name, glob, class, module …) → a module, or a
            class such as `Catcher` or a function that makes one from the original. Modules made
            so get the original's `training` mode. A selector can match several modules.

    Returns:
        name → replacement for the `as` of the `with`, in the model's names; usable afterwards.

    Raises:
        SelectionError: a selector matches nothing.
        OptionError: two selectors match the same module.
        ArgumentError: a replacement is no module and makes none.
        HookError: a place cannot be swapped: the model itself, or inside a scripted module.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Linear(3, 2))
    >>> with swap(net, {nn.Dropout: nn.Identity(), "2": Catcher}) as new:
    ...     _ = net(torch.ones(2, 4))
    >>> net[1], new["2"].n_calls
    (Dropout(p=0.5, inplace=False), 1)
    """
    # Places are written through `Module._modules`, private by its name, since torch 0.1: the
    # public `setattr` and `register_module` run code of the user's class and cannot be undone.
    places, new = _planned(model, replacements)
    called, wrappers = set[nn.Module](), [m for m in new.values() if isinstance(m, Wrapper)]
    watched = [m for m in {unwrap(model), *wrappers} if not isinstance(m, torch.jit.ScriptModule)]
    with ExitStack() as stack:
        stack.callback(_restore, places)
        for m in watched:
            stack.callback(attach(m, lambda m, *_: called.add(m), pre=True).remove)
        stack.enter_context(layer_by_layer())
        for parent, key, _, made in places:
            parent._modules[key] = made
        yield new
    idle = [n for n, m in new.items() if m in wrappers and m not in called]
    if called and idle:
        few = ", ".join(f'"{name}"' for name in idle[:5])
        warn(
            f"swap: never called: {few} ({len(idle)} of {len(new)}). "
            "The model did not run these layers, or it reads their weights without calling them, "
            "or it holds them in a list: hook_outputs follows a module wherever it is called.",
            NeverFiredWarning,
        )


def _planned(
    model: nn.Module, replacements: Mapping[Any, Replacement]
) -> tuple[list[_Place], dict[str, nn.Module]]:
    """Every place to change, and the replacements by name; nothing is changed yet."""
    cure = 'Write swap(model, {"layer1": Catcher}).'
    root = unwrap(check_module("swap", model, cure))
    if not isinstance(replacements, Mapping):
        raise ArgumentError(
            f"swap needs a dict {{what: replacement}}, found {type(replacements).__name__}. {cure}"
        )
    names: dict[str, nn.Module] = {}  # a module that has two names can be matched by both
    wanted: dict[int, tuple[str, Replacement]] = {}
    for what, replacement in replacements.items():
        for name, module in select(model, what).items():
            if module is root:
                raise HookError(
                    "swap: the model itself has no place in which it could be replaced. Call the "
                    "replacement instead of it, or swap modules inside."
                )
            first, known = wanted.setdefault(id(module), (name, replacement))
            if name in names or known is not replacement:
                same = "" if first == name else f', which is the module "{first}"'
                raise OptionError(
                    f'swap: two entries match "{name}", {what!r} and one before it{same}. Let one '
                    "of them match it."
                )
            names[name] = module
    new: dict[int, nn.Module] = {}
    places = []
    # wrappers and what is inside them too
    edges = [(p, key, child) for p in model.modules() for key, child in submodules(p).items()]
    for parent, key, child in edges:
        if inner_key(parent) != key and (i := id(unwrap(child))) in wanted:
            name, replacement = wanted[i]
            if isinstance(parent, torch.jit.ScriptModule):
                raise HookError(
                    f'swap: "{name}" is inside a scripted module, which cannot be changed. Swap in '
                    "the model that it was scripted from."
                )
            if i not in new:
                new[i] = _made(name, child, replacement)
            places.append((parent, key, child, new[i]))
    return places, {name: new[id(m)] for name, m in names.items() if id(m) in new}


def _made(name: str, original: nn.Module, replacement: Any) -> nn.Module:
    """The module to put in the place of `original`: as given, or made from it, in its mode."""
    if isinstance(replacement, nn.Module):
        return replacement
    kind, label = type(original).__name__, getattr(replacement, "__name__", repr(replacement))
    if not callable(replacement):
        raise ArgumentError(
            f'swap: the replacement of "{name}" is of type {type(replacement).__name__}. Give a '
            "module, or a function or class that makes one from the original, such as Catcher."
        )
    of_torch = getattr(replacement, "__module__", "").startswith("torch.nn.modules.")
    if of_torch and replacement not in (nn.Sequential, nn.Identity):
        raise ArgumentError(
            f'swap: for "{name}" the class {label} would be called with the present layer, '
            f"{label}({kind}), and it takes no layer. Give a module, {label}(…), or a function "
            f"that makes one: lambda old: {label}(…)."
        )
    try:
        made = replacement(original)
    except Exception as e:
        e.add_note(f'hookkit: raised in swap by the replacement of "{name}" ({kind})')
        raise
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f'swap: for "{name}" {label} made {type(made).__name__}, not a module. Return an '
            "nn.Module from it."
        )
    old = {id(m) for m in original.modules()}
    for m in made.modules():
        if id(m) not in old:
            m.training = original.training
    return made


def _restore(places: list[_Place]) -> None:
    """Puts every original back that its replacement still replaces; warns of the other places."""
    lost = []
    for parent, key, original, made in reversed(places):
        if parent._modules.get(key) is made:
            parent._modules[key] = original
        elif parent._modules.get(key) is not original:
            now = type(parent._modules.get(key)).__name__
            lost.append(f'"{key}" of the {type(parent).__name__} (now {now})')
    if lost:
        warn(
            "swap: inside the block other code put another module in the place of "
            f"{', '.join(lost)}, which was not changed. End blocks in the reverse order of their "
            "beginning.",
        )


def _again() -> bool:
    """Whether this call repeats one: by a checkpoint, or in torch.jit.trace."""
    return recomputing() or (not is_compiling() and is_tracing())


class Wrapper(nn.Module):
    """A module in the place of another, which it holds as `wrapped` and by default just calls.

    Derive from it: override `forward`, call `self.wrapped`. Attributes that it does not have are
    those of `wrapped` (`wrapper.in_features`). In a state dict the keys of `wrapped` begin with
    `wrapped.`, so save and load a model outside the block.

    Args:
        wrapped: the module in whose place it stands.

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
        """What `wrapped` returns."""
        return self.wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = self.__dict__.get("_modules", {})
            if name.startswith("__") or "wrapped" not in held:
                raise
            return getattr(held["wrapped"], name)


@dataclass(frozen=True)
class Call:
    """One call of a caught module: `inputs` (positional by index, keyword by name) and `output`."""

    inputs: Inputs
    output: Any

    def __repr__(self) -> str:
        return f"Call({describe(self.inputs)} → {describe(self.output)})"


class Catcher(Wrapper):
    """A wrapper that records what goes in and what comes out, call by call.

    Args:
        wrapped: the module to call.
        detach: stores detached snapshots, which no later in-place operation changes (on the CPU
            copied only if one tries); False stores the live tensors with their graph.

    Attributes:
        calls: a `Call` for each call, the inputs as they were before it. Calls that activation
            checkpointing repeats, and those of torch.jit.trace, are not recorded.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> with swap(net, {"1": Catcher}) as caught:
    ...     _ = net(torch.ones(2, 4))
    >>> caught["1"].calls[0].inputs[0].shape
    torch.Size([2, 3])
    """

    def __init__(self, wrapped: nn.Module, *, detach: bool = True) -> None:
        super().__init__(wrapped)
        self.detach = check_flag("Catcher", "detach", detach)
        self.calls: list[Call] = []

    @property
    def n_calls(self) -> int:
        """How many calls are recorded."""
        return len(self.calls)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `wrapped` returns, recorded with what it was given."""
        if _again():
            return self.wrapped(*args, **kwargs)
        given = owned(self.wrapped, args, kwargs)
        inputs = self._stored(Inputs(args, kwargs), given)
        output = self.wrapped(*args, **kwargs)
        self.calls.append(Call(inputs, self._stored(output, given)))
        return output

    def _stored(self, x: Any, given: Any) -> Any:
        if not self.detach:
            return copied_containers(x)
        return tmap(lambda t: snapshot(t, given), x)


class GramWrapper(Wrapper):
    """A wrapper that sums XᵀX over its inputs X, each flattened to rows of its last dimension.

    The statistic that layer-wise quantisation and pruning need (GPTQ's Hessian is 2 XᵀX, Frantar
    et al. 2022, arXiv:2210.17323, eq. 3), in memory that does not grow with the data.

    Args:
        wrapped: a layer whose first input is (..., n_features), such as a Linear.
        dtype: of the sum. fp32 inputs summed in fp32 err by about 1e-6 of the diagonal.

    Attributes:
        gram: (n_features, n_features), `dtype`, on the inputs' device; None before the first call.
        n_rows: how many rows were summed, so `gram / n_rows` is the second moment.

    Raises:
        OptionError: `wrapped` is a convolution, whose rows are not in the last dimension.

    >>> net = nn.Sequential(nn.Linear(3, 2))
    >>> with swap(net, {"0": GramWrapper}) as seen:
    ...     _ = net(torch.ones(5, 3))
    >>> seen["0"].gram[0], seen["0"].n_rows
    (tensor([5., 5., 5.]), 5)
    """

    def __init__(self, wrapped: nn.Module, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(wrapped)
        if hasattr(unwrap(wrapped), "kernel_size"):  # a convolution: silently wrong else
            raise OptionError(
                f"GramWrapper sums over the last dimension of its inputs, and a "
                f"{type(unwrap(wrapped)).__name__} has its channels in another. Derive from it, "
                f"and call add(patches) with inputs unfolded to rows."
            )
        self.dtype, self.n_rows = dtype, 0
        self.gram: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `wrapped` returns; its first input is summed before."""
        if not _again():
            self.add(args[0] if args else next(iter(kwargs.values())))
        return self.wrapped(*args, **kwargs)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Adds the rows of `x`, (..., n_features)."""
        rows = x.detach().reshape(-1, x.shape[-1]).to(self.dtype)
        if self.gram is None:
            with torch.inference_mode(False):  # else it could not be added to outside
                n = rows.shape[1]
                self.gram = torch.zeros(n, n, dtype=self.dtype, device=rows.device)
        with torch.autocast(rows.device.type, enabled=False):
            self.gram += rows.T @ rows
        self.n_rows += rows.shape[0]
