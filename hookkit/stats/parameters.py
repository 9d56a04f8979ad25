"""The parameters of a model by name, and those that a step left alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from hookkit.modules import class_name, is_parametrization, join, submodules, walk
from hookkit.moments.rows import has_numbers

Named = tuple[str, str, nn.Parameter]


def named_parameters(model: nn.Module) -> Iterator[Named]:
    """(name, class of the owning module, parameter) of each parameter with values, once.

    >>> [(name, kind) for name, kind, _ in named_parameters(nn.Sequential(nn.Linear(2, 2)))]
    [('0.weight', 'Linear'), ('0.bias', 'Linear')]
    """
    seen: set[int] = set()
    for place, module, first in walk(model):
        held = list(module.named_parameters(recurse=False)) if first else []
        rules = submodules(module).get("parametrizations") if first else None
        if rules is not None and is_parametrization("parametrizations", rules):
            held += [(f"parametrizations.{key}", p) for key, p in rules.named_parameters()]
        for key, p in held:
            if id(p) not in seen and not _is_empty(p):
                seen.add(id(p))
                yield join(place, key), class_name(module), p


def _is_empty(p: nn.Parameter) -> bool:
    if isinstance(p, nn.parameter.UninitializedParameter) or p.is_meta:
        return True
    return not (p.is_quantized or has_numbers(p.dtype))  # packed into a dtype of their own


def idle_parameters(learn: Any, parameters: Iterable[nn.Parameter]) -> set[int]:
    """Ids of those of `parameters` whose optimizers made no part of the last step.

    Their `.grad` is of another step, or of another loss (a GAN's other player).
    Where optimizers are found as they step, also of those whose has not been found yet.
    """
    made_it = learn.stepped_opts
    if not made_it:
        return set()  # steps are not seen
    if learn.finds_opts:
        return {id(p) for p in parameters} - _held(made_it)
    idle = [opt for opt in learn.opts if all(opt is not one for one in made_it)]
    return _held(idle) - _held(made_it) if idle else set()


def _held(opts: Iterable[Any]) -> set[int]:
    return {id(p) for opt in opts for group in opt.param_groups for p in group["params"]}
