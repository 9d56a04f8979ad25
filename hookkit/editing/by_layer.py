"""Edits that depend on the layer: a dict of edits by name, and functions that take a `name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
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

    def __init__(self, who: str, f: Callable[..., Any], *arguments: str) -> None:
        self.f = f
        self.of_last = isinstance(check_function(who, partial(f, name=""), *arguments), OfLast)

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> Any:
        """What `f` gives for this layer."""
        name = hook.label if hook.name is None else hook.name
        return self.f(*(seen[-1:] if self.of_last else (module, *seen)), name=name)


def takes_name(f: Any) -> bool:
    """Whether `f` has a parameter `name` beside others."""
    try:
        parameters = signature(f).parameters
    except (TypeError, ValueError):
        return False
    return "name" in parameters and len(parameters) > 1


def edited_layers(
    who: str, modules: Any, edits: Mapping[str, Any]
) -> tuple[list[Named], dict[str, Any]]:
    """The modules that `edits` names, and the edit of each by its name in `modules`.

    Of a model a key selects as in `select`; of a selection it is one of its names.
    """
    if not edits:
        raise OptionError(f"{who}: the dict of edits is empty. Give {{name: edit}}.")
    if not isinstance(modules, nn.Module):
        names = {str(named[0]): named for named in named_modules_of(modules, who)}
        if unknown := [key for key in edits if key not in names]:
            raise OptionError(
                f"{who}: there is an edit for {unknown[0]!r}, and no layer of that name among the "
                f"{len(names)} given. Nearest: {nearest(str(unknown[0]), names)}. Give the model, "
                "or what select(model, …) returns, and its names."
            )
        return [names[key] for key in edits], dict(edits)
    layers, by_name = list[Named](), dict[str, Any]()
    for key, edit in edits.items():
        for named in named_modules_of(select(modules, key), who):
            if (name := str(named[0])) in by_name:
                raise OptionError(f'{who}: two keys mean the layer "{name}". Give it one edit.')
            by_name[name] = edit
            layers.append(named)
    return layers, by_name
