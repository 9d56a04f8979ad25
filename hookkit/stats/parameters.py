"""The parameters of a model: by name, those that a step left alone, and whether they have moved.

Whether a parameter has moved is decided by a checksum of its bits, since a norm of the same values
differs in its last digits with the order of the sum: with the number of threads, the library, the
machine code. A sum of integers does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.modules import Parts, class_name, is_parametrization, join, submodules, walk
from hookkit.moments.moments import has_numbers
from hookkit.stats.param_norms import local_values

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


# --- whether they moved


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18  # 2 MiB of int64: stays in a CPU's cache


def checksum(t: Tensor) -> Tensor:
    """0-d int64 on the device of `t`: equal for equal values, whatever computes it.

    The sum of the values' bits, each times an odd number of its place, modulo 2**64: two changes
    do not make up for each other, and the order of the sum does not matter. -0.0 counts as 0.0.
    Costs a read of `t`, about 5 ns a value on a CPU; no wait for a GPU.

    >>> a = torch.tensor([1.0, 0.0, 3.0])
    >>> bool(checksum(a) == checksum(a.clone())), bool(checksum(a) == checksum(a.flip(0)))
    (True, False)
    >>> bool(checksum(a) == checksum(a * torch.tensor([1.0, -1.0, 1.0])))
    True
    """
    t = torch.view_as_real(t) if t.is_complex() else t
    values = t.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    place = torch.arange(1, 2 * min(len(values), _CHUNK) + 1, 2, device=t.device)
    for i, part in enumerate(torch.split(values, _CHUNK)):
        if part.is_floating_point() and part.element_size() > 1:  # float8 has no sum
            part = part + 0
        bits = part.view(_BITS[part.element_size()]).long()
        total += (bits * (place[: len(bits)] + 2 * i * _CHUNK)).sum()
    return total


class Bits:
    """Which parameters have other values than when each was first seen.

    >>> net, seen = nn.Linear(2, 2), Bits()
    >>> seen.first(net.named_parameters())
    >>> _ = net.bias.data.add_(1e-6)
    >>> seen.again(net.named_parameters())
    >>> {name: bool(moved) for name, moved in seen.moved.items()}
    {'weight': False, 'bias': True}
    """

    def __init__(self) -> None:
        self.moved: dict[str, Any] = {}
        self._first: dict[str, Tensor] = {}

    def first(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Notes the values of those that were not seen since `forget`."""
        with torch.no_grad():
            new = {n: checksum(local_values(p)) for n, p in named if n not in self._first}
        self._first = {**self._first, **new}

    def again(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Compares their values now with those; the answers stay on the device."""
        self.moved = self.compared(named)

    def compared(self, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Any]:
        """What `moved` would be after `again`."""
        found = {}
        with torch.no_grad():
            for name, p in named:
                if (first := self._first.get(name)) is not None:
                    now = checksum(local_values(p)).to(first.device)
                    found[name] = (now != first) | self.moved.get(name, False)
        return {**self.moved, **found}

    def forget(self) -> None:
        """Another fit begins, which may start from other values."""
        self._first = {}

    def __getstate__(self) -> dict[str, Any]:
        moved = {name: bool(flag) for name, flag in self.moved.items()}  # sync: when pickled
        return {"moved": moved, "_first": {}}
