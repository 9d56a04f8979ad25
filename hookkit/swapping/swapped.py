"""Other modules in the place of a model's own, for the time of a `with`.

Built on `select`, which says which, and `edges`, which says where: each registration of a module
is a place, so a shared module is replaced wherever it stands. What to put there is in `wrapping`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from warnings import warn

import torch
from torch import nn

from hookkit.errors import ArgumentError, HookError, NeverFiredWarning, OptionError
from hookkit.hooks.compiling import enter_eager, leave_eager
from hookkit.interrupts import block
from hookkit.modules import edges, inner_key, unwrap
from hookkit.selecting import select
from hookkit.swapping.wrapping import Catcher, GramWrapper, Wrapper

__all__ = ["Catcher", "GramWrapper", "Wrapper", "swap"]

Replacement = nn.Module | Callable[[nn.Module], nn.Module]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_Place = tuple[nn.Module, str, nn.Module, nn.Module]  # parent, key, original, replacement


@block
def swap(
    model: nn.Module, replacements: Mapping[Any, Replacement]
) -> Iterator[dict[str, nn.Module]]:
    """Runs the `with` block with other modules in the place of some of the model's.

    The originals are back in their places when the block ends, also by an error, and all or none
    are replaced. A shared module is replaced at each of its places, by one replacement. What a
    model refers to outside its registered children (a plain list of layers) is not replaced, and
    said if a `Catcher` or `GramWrapper` was never called. Compiled models run eagerly in the block.

    Args:
        model: the model; its root cannot be replaced.
        replacements: selector (as in `select`: name, glob, class, module …) → a module, or what
            makes one from the original: a class such as `Catcher`, or a function. Modules that it
            makes get the original's `training` mode. A selector can match several modules.

    Returns:
        name → replacement for the `as` of the `with`, in the model's names; usable afterwards.

    Raises:
        SelectionError: a selector matches nothing.
        OptionError: two selectors match the same module.
        ArgumentError: a replacement is no module and makes none.
        HookError: a place cannot be swapped; or, at the end, somebody else put another module
            there (the others are put back).

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Linear(3, 2))
    >>> with swap(net, {nn.Dropout: nn.Identity(), "2": Catcher}) as new:
    ...     _ = net(torch.ones(2, 4))
    >>> net[1], new["2"].n_calls
    (Dropout(p=0.5, inplace=False), 1)
    """
    places, new = _planned(model, replacements)
    try:
        enter_eager(places)
        for parent, key, _, made in places:
            parent._modules[key] = made
        yield new
    except BaseException as e:
        if lost := _put_back(places):
            e.add_note(lost)
        raise
    finally:
        leave_eager(places)
    if lost := _put_back(places):
        raise HookError(lost)
    _report_uncalled(new)


def _planned(
    model: nn.Module, replacements: Mapping[Any, Replacement]
) -> tuple[list[_Place], dict[str, nn.Module]]:
    """Every place to change, and the replacements by name; nothing is changed yet."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"swap needs a model (nn.Module) first, found {type(model).__name__}. "
            f'Write swap(model, {{"layer1": Catcher}}).'
        )
    if not isinstance(replacements, Mapping):
        raise ArgumentError(
            f"swap needs a dict {{what: replacement}}, found {type(replacements).__name__}. "
            f'Write swap(model, {{"layer1": Catcher}}).'
        )
    ids, wanted = _asked(model, replacements)
    held = [edge for edge in edges(model) if inner_key(edge[0]) != edge[1]]
    new: dict[int, nn.Module] = {}
    places = []
    for parent, key, child in held:
        if (i := id(unwrap(child))) in wanted:
            name, replacement = wanted[i]
            if i not in new:
                new[i] = _made(name, child, replacement)
            if isinstance(parent, torch.jit.ScriptModule):
                raise HookError(
                    f'swap: "{name}" is inside a scripted module, which cannot be changed. Swap in '
                    f"the model that it was scripted from."
                )
            places.append((parent, key, child, new[i]))
    return places, {name: new[i] for name, i in ids.items() if i in new}


def _asked(
    model: nn.Module, replacements: Mapping[Any, Replacement]
) -> tuple[dict[str, int], dict[int, tuple[str, Replacement]]]:
    """The module's id of each name that is asked for; by that id, its first name and replacement.

    A module that has two names can be asked for by both, with the same replacement.
    """
    root = unwrap(model)
    ids: dict[str, int] = {}
    wanted: dict[int, tuple[str, Replacement]] = {}
    for what, replacement in replacements.items():
        for name, module in select(model, what).items():
            if module is root:
                raise HookError(
                    "swap: the model itself has no place in which it could be replaced. Call the "
                    "replacement in its stead, or swap modules inside."
                )
            first, known = wanted.setdefault(id(module), (name, replacement))
            if name in ids or known is not replacement:
                same = "" if first == name else f', which is the module "{first}"'
                raise OptionError(
                    f'swap: "{name}" is asked for twice, by {what!r} and by an entry before it'
                    f"{same}. Let one of them match it."
                )
            ids[name] = id(module)
    return ids, wanted


def _made(name: str, original: nn.Module, replacement: Replacement) -> nn.Module:
    """The module to stand in the place of `original`: as given, or made from it, in its mode."""
    if isinstance(replacement, nn.Module):
        return replacement
    if not callable(replacement):
        raise ArgumentError(
            f'swap: the replacement of "{name}" is of type {type(replacement).__name__}. Give a '
            f"module, or what makes one from the original, such as Catcher."
        )
    if isinstance(replacement, type) and _is_plain_layer(replacement):
        layer = replacement.__name__
        raise ArgumentError(
            f'swap: for "{name}" the class {layer} would be called with the layer that stands '
            f"there, {layer}({type(original).__name__}), which is none of its arguments. Give a "
            f"module, {layer}(…), or a function that makes one: lambda old: {layer}(…)."
        )
    try:
        made = replacement(original)
    except Exception as e:
        e.add_note(f'hookkit: raised in swap by what replaces "{name}" ({type(original).__name__})')
        raise
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f'swap: for "{name}" {getattr(replacement, "__name__", replacement)} made '
            f"{type(made).__name__}, not a module. Return an nn.Module from it."
        )
    if isinstance(made, Wrapper) and isinstance(unwrap(original), _CONTAINERS):
        raise HookError(
            f'swap: "{name}" is a {type(original).__name__}, which the model never calls, so a '
            f'{type(made).__name__} around it sees nothing. Swap its entries: "{name}.*".'
        )
    old = {id(m) for m in original.modules()}
    for m in made.modules():
        if id(m) not in old:
            m.training = original.training
    return made


def _is_plain_layer(kind: type) -> bool:
    """True for a layer of torch's own that is not made from a module: `nn.GELU`, `nn.Linear`."""
    torchs = kind.__module__.startswith("torch.nn.modules.")
    return torchs and not issubclass(kind, (nn.Sequential, nn.Identity))


def _put_back(places: list[_Place]) -> str:
    """Puts every original back where its replacement stands; says where something else does."""
    lost = []
    for parent, key, original, made in reversed(places):
        if parent._modules.get(key) is made:
            parent._modules[key] = original
        elif parent._modules.get(key) is not original:
            now = type(parent._modules.get(key)).__name__
            lost.append(f'"{key}" of the {type(parent).__name__} (now {now})')
    if not lost:
        return ""
    return (
        f"swap: somebody else put another module in the place of {', '.join(lost)} inside the "
        f"block, and it was left there. End blocks in the reverse order of their beginning."
    )


def _report_uncalled(new: dict[str, nn.Module]) -> None:
    idle = [n for n, m in new.items() if isinstance(m, Catcher | GramWrapper) and not m.n_calls]
    if idle:
        shown = ", ".join(f'"{name}"' for name in idle[:5]) + (" …" if len(idle) > 5 else "")
        warn(
            f"swap: never called: {shown} ({len(idle)} of {len(new)}). Either the model did not "
            f"run these layers, or it reaches them past its registered children: hook_outputs "
            f"follows a module wherever it is called.",
            NeverFiredWarning,
            stacklevel=6,
        )
