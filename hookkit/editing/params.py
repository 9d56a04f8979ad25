"""`select_params`: parameters by name, their gradients, and edits of them in a `with`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hookkit.checks import check_function, check_module, shown
from hookkit.editing.edit import Edit
from hookkit.errors import HookError, NeverFiredWarning, SelectionError, nearest, warn
from hookkit.hooks.block import Block
from hookkit.hooks.hook import Hook
from hookkit.modules import unwrap
from hookkit.nested import describe
from hookkit.selecting import expand, glob, select


class ParamSelection(dict[str, nn.Parameter]):
    """Parameters by name, in the order of the selectors, each once. What `select_params` gives."""

    @contextmanager
    def grads(self) -> Iterator[dict[str, Tensor | None]]:
        """Captures the gradients of a `with` block, by name; backward fills `.grad` as always.

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
            f: gets a copy of a parameter, and gives a tensor of its shape, or None to leave it; it
                may also take the parameter's `name`. Or a ready-made edit: `zero(at=…)`, `scale`,
                `add`, `replace`, `patch_from(other.state_dict())`. All are called before any is
                written.

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
        edit, new = Edit("edit", f, "parameter"), dict[str, Tensor]()
        for name, p in self.items():
            at: Any = p  # in the place of a module, for a ready-made edit's messages
            value = edit(at, p.detach().clone(), hook=Hook.of(at, Block("edit"), name))
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.shape != p.shape:
                raise HookError(
                    f"edit of the parameter '{name}': the replacement is {describe(value)}, the "
                    f"parameter is {describe(p)}. Return a tensor of that shape, or None to leave "
                    "it."
                )
            new[name] = value.detach()
        old = {name: self[name].detach().clone() for name in new}
        try:
            for name, value in new.items():
                self[name].detach().copy_(value)
            yield self
        finally:
            for name, value in old.items():
                self[name].detach().copy_(value)


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
    every = list(root.named_parameters(remove_duplicate=False))
    found = dict[nn.Parameter, str]()
    for each in _flat(what) if what else ["**"]:
        test = _test(root, each)
        hits = [(name, p) for name, p in every if test(name, p)]
        if not hits:
            names = [name for name, _ in every]
            near = nearest(str(each), names) or names[:3]
            raise SelectionError(
                f"no parameter matches {shown(each)}. Nearest: {', '.join(map(repr, near))}. "
                'select_params(model) has all of them; those in a module "fc" are "fc.**".'
            )
        for name, p in hits:
            found.setdefault(p, name)
    return ParamSelection({name: p for p, name in found.items()})


def _flat(what: Any) -> Iterator[Any]:
    """The selectors in lists of them."""
    for each in what:
        yield from _flat(each) if isinstance(each, list | tuple) else [each]


def _test(root: nn.Module, what: Any) -> Any:
    """`f(name, parameter)`: whether a selector matches the parameter."""
    if isinstance(what, str):
        globs = [glob(pattern) for pattern in expand(what)]
        return lambda name, _: name == what or any(g.fullmatch(f"{name}.") for g in globs)
    if isinstance(what, re.Pattern):
        return lambda name, _: what.search(name)
    if callable(what) and not isinstance(what, type | nn.Module):
        return check_function("select_params", what, "name", "parameter", name="predicate")
    inside = {id(p) for m in select(root, what).values() for p in m.parameters()}
    return lambda _, p: id(p) in inside
