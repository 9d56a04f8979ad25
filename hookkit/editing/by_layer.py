"""Edits that depend on the layer: a dict of edits by name, and functions that take a `name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

from torch import nn

from hookkit.checks import OfLast, check_function
from hookkit.errors import OptionError, nearest
from hookkit.hooks.collection import Named, named_modules_of
from hookkit.selecting import select


def run_edit(f: Callable[..., Any], module: nn.Module, seen: tuple[Any, ...], hook: Any) -> Any:
    """What the edit `f` gives; those that ask for it get the hook."""
    if getattr(f, "wants_hook", False):
        return f(module, *seen, hook=hook)
    return f(module, *seen)


def edited_layers(
    who: str, modules: Any, edits: Mapping[str, Any]
) -> tuple[list[Named], dict[str, Any]]:
    """The modules that `edits` names, and the edit of each by its name in `modules`.

    Of a model every key selects as in `select`; of a selection it is one of its names.
    """
    if isinstance(modules, nn.Module):
        groups = {key: named_modules_of(select(modules, key), who) for key in edits}
    else:
        names = {name: (name, m, leaf) for name, m, leaf in named_modules_of(modules, who)}
        if unknown := [key for key in edits if key not in names]:
            near = nearest(str(unknown[0]), [n for n in names if n is not None])
            raise OptionError(
                f"{who}: there is an edit for {unknown[0]!r}, and no layer of that name among the "
                f"{len(names)} given. {f'Nearest: {near[0]!r}. ' if near else ''}Give the model, "
                "or what select(model, …) returns, and its names."
            )
        groups = {key: [names[key]] for key in edits}
    by_name, layers = dict[str, Any](), list[Named]()
    for key, found in groups.items():
        for layer in found:
            if (name := str(layer[0])) in by_name:
                raise OptionError(f'{who}: two keys mean the layer "{name}". Give it one edit.')
            by_name[name] = edits[key]
            layers.append(layer)
    if not layers:
        raise OptionError(f"{who}: the dict of edits is empty. Give {{name: edit}}.")
    return layers, by_name


class ByLayer:
    """Another edit for each layer, by the name of its hook."""

    wants_hook = True

    def __init__(self, edits: Mapping[str, Callable[..., Any]]) -> None:
        self.edits = edits

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> Any:
        """What the layer's edit gives."""
        return run_edit(self.edits[hook.name], module, seen, hook)


class WithName:
    """An edit that also takes the name of its layer: `f(output, name)`."""

    wants_hook = True

    def __init__(self, who: str, f: Callable[..., Any], arguments: tuple[str, ...]) -> None:
        self.f = f
        self.of_last = isinstance(check_function(who, partial(f, name=""), *arguments), OfLast)

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> Any:
        """What `f` gives for this layer."""
        name = hook.name if hook.name is not None else hook.label
        return self.f(*(seen[-1:] if self.of_last else (module, *seen)), name=name)


def takes_name(f: Any) -> bool:
    """Whether `f` has a parameter `name` beside others."""
    try:
        parameters = signature(f).parameters
    except (TypeError, ValueError):
        return False
    named = parameters.get("name")
    return len(parameters) > 1 and named is not None and named.kind is not Parameter.POSITIONAL_ONLY
