"""A module of the second model called alone, on what the first model's module received.

Builds on `modelinfo.untouched`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.comparing.measures import Parts, parts_in
from hookkit.comparing.sides import Alone, copied_parts
from hookkit.modelinfo.untouched import real_inputs, untouched
from hookkit.modules import find, unwrap
from hookkit.nested import Inputs, tmap


def alone(a: Any, b: Any, partners: Mapping[str, str]) -> Alone:
    """A function that calls the partner of a module of `a` in `b`, with the inputs of that."""
    fit = fitting(a, b)

    def called(name: str, inputs: Inputs) -> tuple[Parts, str]:
        place = find(unwrap(b), partners[name])
        return ([], "") if place is None else _called(place[1], fit(inputs))

    return called


def _called(m: nn.Module, inputs: Inputs) -> tuple[Parts, str]:
    """What `m` gives for `inputs`; a note if it was called without some of them, or failed.

    It begins with the random states as they are, and is as before afterwards.
    """
    inputs, left_out = _accepted(m, inputs)
    try:
        copied = real_inputs(inputs)
        with untouched(m), torch.no_grad():
            parts = copied_parts(parts_in(m(*copied, **copied.kwargs)))
    except Exception as error:  # of any kind: the module is called as its model does not call it
        return [], f"no own error: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return parts, f"called without {', '.join(left_out)}" if left_out else ""


def _accepted(m: nn.Module, inputs: Inputs) -> tuple[Inputs, list[str]]:
    """Those of `inputs` that `m.forward` takes, and the names of the others.

    Keyword inputs that it does not know are what it cannot be called without, in their order.
    """
    params = signature(m.forward).parameters.values()
    kinds, known = {p.kind for p in params}, {p.name for p in params}
    places = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    n = len(inputs) if Parameter.VAR_POSITIONAL in kinds else len(places)
    every = Parameter.VAR_KEYWORD in kinds
    kwargs = {k: v for k, v in inputs.kwargs.items() if every or k in known}
    others = {k: v for k, v in inputs.kwargs.items() if k not in kwargs}
    needed = [p.name for p in places[len(inputs) :]
              if p.default is Parameter.empty and p.name not in kwargs]  # fmt: skip
    for name, key in zip(needed, [*others], strict=False):
        kwargs[name] = others.pop(key)
    others = {**{f"input {i}": x for i, x in enumerate(inputs) if i >= n}, **others}
    left_out = [k for k, v in others.items() if v is not None and v is not False]
    return Inputs(inputs[:n], kwargs), left_out


def fitting(a: Any, b: Any) -> Callable[[Inputs], Inputs]:
    """A function that puts inputs on the device of `b`, and what has the dtype of `a` in its.

    By their first floating point parameter; a side that is a file has none.
    """
    old, new = (
        next((p for p in m.parameters() if p.is_floating_point()), None)
        if isinstance(m, nn.Module)
        else None
        for m in (a, b)
    )

    def fit(t: Tensor) -> Tensor:
        if new is None:
            return t
        return t.to(new.device, new.dtype if old is not None and t.dtype == old.dtype else t.dtype)

    return lambda inputs: tmap(fit, inputs)
