"""The parameters of a model by name: walked once, and again when the model has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from hookkit.modules import is_parametrization, join, submodules, walk
from hookkit.moments.moments import has_numbers
from hookkit.recording.recording import Parts

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
                yield join(place, key), type(module).__name__, p


def _is_empty(p: nn.Parameter) -> bool:
    if isinstance(p, nn.parameter.UninitializedParameter) or p.is_meta:
        return True
    return not (p.is_quantized or has_numbers(p.dtype))  # packed into a dtype of their own


def idle_parameters(learn: Any, parameters: Iterable[nn.Parameter]) -> set[int]:
    """Ids of those of `parameters` whose optimizers made no part of the last step.

    What stands in their `.grad` is of another step, or of another loss (a GAN's other player).
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
    """`named_parameters` of one model, for who asks at each step: a walk costs 10 µs a module.

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
        self._parts, self._listed = Parts(self.model), list(named_parameters(self.model))
        tables = (module._parameters for module in self.model.modules())
        self._tables = [table for table in tables if isinstance(table, dict)]
        self._held = list(chain.from_iterable(map(dict.values, self._tables)))
        self._keys = list(chain.from_iterable(self._tables))
        some = [p for p in self._held if p is not None]
        # what has no values may have some soon; a script's parameters are not in a table
        n = len({id(p) for p in some})
        self._stays = n == len(self._listed) and not any(map(_is_empty, some))

    @property
    def now(self) -> list[Named]:
        """(name, class of the owning module, parameter) of each; the same list while all stays."""
        if not self._stays or self._parts.changed() or self._moved():
            self._walk()
        return self._listed

    def _moved(self) -> bool:
        held = list(chain.from_iterable(map(dict.values, self._tables)))
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            return True
        return list(chain.from_iterable(self._tables)) != self._keys  # the same, called otherwise
