"""The parameters of a model by name, and those that a step left alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from hookkit.callbacks.optimizers import ids_of
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
    """Return the ids of those of `parameters` that no optimizer of the last step holds.

    Their `.grad` is of another step, of another loss (a GAN's other player), or adds up for ever.
    """
    ids, held = {id(p) for p in parameters}, ids_of(learn.stepped_opts)
    return ids - held if ids & held else set()  # else the optimizer has copies of the weights
