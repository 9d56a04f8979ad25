"""A module of the second model called alone, on what the first model's module received.

Builds on `sides` and `preserve_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import copy_context
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from hookkit._core.modules import find, unwrap
from hookkit._core.pytree import Inputs, Parts, tree_leaves_of_objects, tree_map
from hookkit.inspection.preserve import preserve_state, real_inputs
from hookkit.inspection.sides import Alone, copied_parts


def alone(a: nn.Module, b: nn.Module, partners: Mapping[str, str]) -> Alone:
    """A function that calls the partner of a module of `a` in `b`, with the inputs of that.

    It gives what that returns, and a note if it was called without some inputs, or failed. The
    partner begins with the random states as they are, and is as before afterwards. It runs in the
    context of this call: libraries collect what layers give in a context variable, and would take
    it for what the first model's gave.
    """
    outside = copy_context()

    def called(name: str, inputs: Inputs) -> tuple[Parts, str]:
        place = find(unwrap(b), partners[name])
        if place is None:
            return [], ""
        accepted, left_out = _accepted(place[1], fitted(inputs, a, b))
        try:
            copied = real_inputs(accepted)
            with preserve_state(place[1]), torch.no_grad():
                out = outside.copy().run(place[1], *copied, **copied.kwargs)
                parts = copied_parts(tree_leaves_of_objects(out))
        except Exception as error:  # of any kind: it is called as its model does not call it
            return [], f"no own error: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return parts, f"called without {', '.join(left_out)}" if left_out else ""

    return called


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


def fitted(inputs: Inputs, a: Any, b: nn.Module) -> Inputs:
    """`inputs` on the device of `b`, and what has the dtype of `a` in that of `b`.

    By their first floating point parameter; `a` has none where it is a file. Finite values stay
    finite: an attention mask holds the lowest value of its dtype.
    """
    old, new = (
        next((p for p in m.parameters() if p.is_floating_point()), None)
        if isinstance(m, nn.Module)
        else None
        for m in (a, b)
    )
    if new is None:
        return inputs

    def one(t: Tensor) -> Tensor:
        if old is None or t.dtype != old.dtype:
            return t.to(new.device)
        most = torch.finfo(new.dtype).max
        if most < torch.finfo(t.dtype).max:
            t = torch.where(t.isfinite(), t.clamp(-most, most), t)
        return t.to(new.device, new.dtype)

    moved: Inputs = tree_map(one, inputs)
    return moved
