"""The parameters of a model by name, and which of them a step, or `every`, leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from hookkit.callbacks.optimizers import ids_of
from hookkit.errors import warn
from hookkit.modules import class_name, is_parametrization, join, submodules, walk
from hookkit.recorders.moments import has_numbers

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


class Turns:
    """Which optimizers' steps a recorder with `every` meets, and which it passes over."""

    def __init__(self) -> None:
        self._n, self._met, self._missed = 0, set[int](), dict[int, str]()

    def see(self, recorder: Any, recorded: bool) -> None:
        """Note a step; warn once, after 8 records, of an optimizer that steps in none of them."""
        learn, every = recorder.learn, recorder.every or 1
        if every == 1 or len(learn.opts) < 2 or self._n > 8:
            return
        steps = {id(opt): type(opt).__name__ for opt in learn.stepped_opts}
        self._n += recorded
        if recorded:
            self._met |= steps.keys()
        else:
            self._missed |= steps
        if self._n == 8 and recorded and (unmet := self._missed.keys() - self._met):
            names = ", ".join(sorted(self._missed[one] for one in unmet))
            better = next(n for n in range(every + 1, every + 31) if math.gcd(n, 30) == 1)
            who = type(recorder).__name__
            warn(
                f"{who}(every={every}) has recorded 8 steps, and none of {names}, which steps in "
                f"turns with another: its steps always fall between. Use {who}(every={better}).",
            )
