"""`select_params`: parameters by name, their gradients, and edits of them in a `with`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hookkit.checks import check_function, check_module, shown
from hookkit.editing.edits import check_edit
from hookkit.errors import HookError, NeverFiredWarning, SelectionError, nearest, warn
from hookkit.hooks.block import Block
from hookkit.hooks.hook import Hook
from hookkit.modules import join, unwrap
from hookkit.nested import describe
from hookkit.selecting import expand, glob, select

_Place = tuple[str, nn.Module, nn.Parameter]
"""A parameter's name, the module that has it, and the parameter."""


class ParamSelection(dict[str, nn.Parameter]):
    """Parameters by name, in the model's order, each once. What `select_params` gives."""

    def __init__(self, places: list[_Place]) -> None:
        super().__init__((name, p) for name, _, p in places)
        self._owners = {name: module for name, module, _ in places}

    @contextmanager
    def grads(self) -> Iterator[dict[str, Tensor | None]]:
        """Captures the gradients of a `with` block, by name; `.grad` is left as it is.

        They are detached copies: the sum of what backward passes bring in the block; None where
        none came, of which it warns.

        >>> import torch
        >>> net = nn.Linear(2, 1)
        >>> with select_params(net, "weight").grads() as grads:
        ...     net(torch.ones(3, 2)).sum().backward()
        >>> grads
        {'weight': tensor([[3., 3.]])}
        """
        found: dict[str, Tensor | None] = dict.fromkeys(self)

        def receive(name: str, grad: Tensor) -> None:
            before, grad = found[name], grad.detach()
            found[name] = grad.clone() if before is None else before + grad

        with ExitStack() as stack:
            for name, p in self.items():
                if p.requires_grad:
                    handle = p.register_hook(lambda g, name=name: receive(name, g))  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            yield found
        idle = [name for name, grad in found.items() if grad is None]
        if idle:
            few = ", ".join(f'"{name}"' for name in idle[:5]) + (" …" if idle[5:] else "")
            warn(
                f"select_params: no gradient came to {len(idle)} of {len(self)} parameters: {few}. "
                "Run forward and backward inside the block, or select others.",
                NeverFiredWarning,
            )

    @contextmanager
    def edit(self, f: Callable[..., Any]) -> Iterator[ParamSelection]:
        """Changes the parameters for a `with` block; at its end they have their values again.

        They are written in place, so all that shares them sees it, optimizers too; what the block
        itself writes into them (a step) is lost. A backward pass needs the values of its forward,
        so run both inside the block or both outside, or PyTorch raises an error.

        Args:
            f: `f(module, parameter)`, or `f(parameter)`: gets a copy, and gives a tensor of its
                shape, or None to leave it. Or a ready-made edit: `zero(at=…)`, `scale`, `add`,
                `replace`, `patch_from(other.state_dict())`. All are called before any is written.

        Raises:
            ArgumentError: `f` is no function.
            HookError: a replacement does not fit; no parameter is changed then.

        >>> import torch
        >>> from hookkit.editing import zero
        >>> net = nn.Linear(2, 2)
        >>> with torch.no_grad(), select_params(net, "*").edit(zero()):
        ...     net(torch.ones(2))
        tensor([0., 0.])
        """
        f = check_edit("edit", f, "module", "parameter")
        new = {name: _new(name, self._owners[name], p, f) for name, p in self.items()}
        old = {name: self[name].detach().clone() for name, v in new.items() if v is not None}
        try:
            for name in old:
                self[name].detach().copy_(new[name])
            yield self
        finally:
            for name, value in old.items():
                self[name].detach().copy_(value)


def _new(name: str, module: nn.Module, p: nn.Parameter, f: Callable[..., Any]) -> Any:
    """What `f` gives for one parameter."""
    copied = p.detach().clone()
    if getattr(f, "wants_hook", False):  # a ready-made edit asks for a name and a label
        block = Block("select_params", keep="none")
        new = f(module, copied, hook=Hook.of(module, block, name))
    else:
        new = f(module, copied)
    if new is not None and (not isinstance(new, Tensor) or new.shape != p.shape):
        raise HookError(
            f"edit of the parameter '{name}': the replacement is {describe(new)}, the parameter is "
            f"{describe(p)}. Return a tensor of that shape, or None to leave it."
        )
    return None if new is None else new.detach()


def select_params(model: nn.Module, *what: Any) -> ParamSelection:
    """The parameters of `model` that the selectors `what` match, by name: a dict, with two blocks.

    `with select_params(…).grads() as g:` captures their gradients, `.edit(f)` changes them for a
    while. A tied parameter is there once, under the first name that matches.

    Args:
        model: any model.
        what: as in `select`, for names of parameters: `"fc.weight"`, `"blocks.*.mlp.**"`,
            `"**.bias"`, a compiled regex, a function `f(name, parameter)` or `f(parameter)`; or
            what selects modules (a class, a module, a Selection), for all parameters in these. A
            list of several. Without any: all parameters.

    Returns:
        A `ParamSelection`, name → parameter, with `.grads()` and `.edit(f)`.

    Raises:
        SelectionError: nothing matches; the message has names that are near.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.PReLU(), nn.Linear(3, 2))
    >>> list(select_params(net, "*.bias", nn.PReLU))
    ['0.bias', '2.bias', '1.weight']
    """
    root = unwrap(check_module("select_params", model, "The model comes first."))
    every = [
        (join(name, key), module, p)
        for name, module in root.named_modules(remove_duplicate=False)
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    found: dict[int, _Place] = {}
    for each in what or ["**"]:
        for place in _matched(root, every, each):
            found.setdefault(id(place[2]), place)
    return ParamSelection(list(found.values()))


def _matched(root: nn.Module, every: list[_Place], what: Any) -> list[_Place]:
    """What one selector matches of `every` parameter."""
    if isinstance(what, list | tuple):
        return [place for each in what for place in _matched(root, every, each)]
    if isinstance(what, str):
        globs = [glob(pattern) for pattern in expand(what)]
        hits = [x for x in every if x[0] == what or any(g.fullmatch(f"{x[0]}.") for g in globs)]
    elif isinstance(what, re.Pattern):
        hits = [x for x in every if what.search(x[0])]
    elif callable(what) and not isinstance(what, type | nn.Module):
        test = check_function("select_params", what, "name", "parameter", name="predicate")
        hits = [x for x in every if test(x[0], x[2])]
    else:
        inside = {id(p) for m in select(root, what).values() for p in m.parameters()}
        hits = [x for x in every if id(x[2]) in inside]
    if not hits:
        names = [name for name, _, _ in every]
        near = ", ".join(map(repr, nearest(str(what), names) or names[:3]))
        raise SelectionError(
            f"no parameter matches {shown(what)}. Nearest: {near}. select_params(model) has all of "
            f'them; those in a module "fc" are "fc.**".'
        )
    return hits
