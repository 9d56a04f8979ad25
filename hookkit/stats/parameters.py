"""The parameters of a model by name, and those that a step left alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from hookkit.modules import class_name, is_parametrization, join, submodules, walk
from hookkit.moments.moments import has_numbers

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


class Parameters:
    """`named_parameters` of one model, to be read at each step: a walk costs 10 µs a module.

    Parameters and modules that come, go or take another's place are seen.

    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> parameters = Parameters(net)
    >>> parameters.now is parameters.now
    True
    >>> net[0].bias = None
    >>> [name for name, _, _ in parameters.now]
    ['0.weight']
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._walk()

    def _walk(self) -> None:
        self._named = list(named_parameters(self.model))
        # Private: `_parameters` and `_modules`, the dicts of a module (since 0.1; other objects in
        # a script's modules). Without them the model is walked at each step.
        tables = [table for m in self.model.modules() for table in (m._parameters, m._modules)]
        self._tables = [table for table in tables if isinstance(table, dict)]
        self._parts = self._held()
        # what has no values may have some soon
        some_empty = any(map(_is_empty, self.model.parameters()))
        self._stays = len(self._tables) == len(tables) and not some_empty

    def _held(self) -> list[tuple[str, int]]:
        return [(key, id(x)) for table in self._tables for key, x in table.items()]

    @property
    def now(self) -> list[Named]:
        """(name, class of the owning module, parameter) of each; the same list while all stays."""
        if not self._stays or self._held() != self._parts:
            self._walk()
        return self._named
