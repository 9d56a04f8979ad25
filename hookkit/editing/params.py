"""`select_params`: parameters by name, their gradients, and edits of them in a `with`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from threading import RLock
from typing import Any

from torch import Tensor, nn

from hookkit.checks import check_function, check_module, shown
from hookkit.editing.edits import check_edit
from hookkit.editing.setting import Where
from hookkit.errors import HookError, NeverFiredWarning, SelectionError, nearest
from hookkit.hooks.calls import call
from hookkit.interrupts import block
from hookkit.modules import find, is_parametrization, join, submodules, unwrap, walk
from hookkit.nested import describe
from hookkit.selecting import select
from hookkit.selecting.patterns import expand, parts

_Place = tuple[str, nn.Module, nn.Parameter]  # its name, the module that has it, the parameter
_Values = dict[int, tuple[nn.Parameter, Tensor]]  # the parameters that a block edits, by id

# What the parameters of each open `edit` block of all threads were before it, the oldest first:
# blocks need not end in the reverse order of their beginning. A lock that its thread can take
# twice, since the garbage collector ends a block that was abandoned, wherever it runs.
_lock = RLock()
_open: list[_Values] = []


class ParamSelection(dict[str, nn.Parameter]):
    """Parameters by name, in the model's order, each once. What `select_params` gives."""

    def __init__(self, places: Iterable[_Place]) -> None:
        places = list(places)
        super().__init__((name, p) for name, _, p in places)
        self._where = {name: Where(module, name) for name, module, _ in places}

    @block
    def grads(self) -> Iterator[dict[str, Tensor | None]]:
        """Captures the gradients of a `with` block, by name; `.grad` is left as it is.

        They are detached copies: the sum of what backward passes bring in the block, as in `.grad`;
        with DistributedDataParallel this rank's, before they are averaged. None until one comes,
        with FSDP2 always, which writes `.grad` itself. At the end it warns of parameters to which
        none came.

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

        handles: list[Any] = []
        try:
            for name, p in self.items():
                if p.requires_grad:
                    handles.append(p.register_hook(partial(receive, name)))  # type: ignore[no-untyped-call]
            yield found
        finally:
            for handle in handles:
                handle.remove()
        self._report([name for name, grad in found.items() if grad is None])

    def _report(self, idle: list[str]) -> None:
        if not idle:
            return
        frozen = [name for name in idle if not self[name].requires_grad]
        few = ", ".join(f'"{name}"' for name in idle[:5]) + (" …" if idle[5:] else "")
        warnings.warn(
            f"select_params: no gradient came to {len(idle)} of {len(self)} parameters: {few}"
            f"{f' ({len(frozen)} frozen)' if frozen else ''}. Run forward and backward inside the "
            "block, or select others.",
            NeverFiredWarning,
            stacklevel=5,
        )

    @block
    def edit(self, f: Callable[..., Any]) -> Iterator[ParamSelection]:
        """Changes the parameters for a `with` block; at its end they have their values again.

        They are written in place, so all that shares them sees it, optimizers too; what the block
        itself writes into them (a step) is lost. Autograd notices: a backward pass needs the values
        of its forward, so run both inside the block or both outside, or PyTorch raises an error.
        Blocks that overlap can end in any order: what the newest one wrote stays until it ends.

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
        new = [(p, self._new(name, p, f)) for name, p in self.items()]
        old: _Values = {}
        try:
            with _lock:
                old.update({id(p): (p, p.detach().clone()) for p, v in new if v is not None})
                _open.append(old)
            _write(new)
            yield self
        finally:
            _restore(old)

    def _new(self, name: str, p: nn.Parameter, f: Callable[..., Any]) -> Tensor | None:
        """What `f` gives for one parameter."""
        where = self._where[name]
        new = call(where, f, where.module, p.detach().clone())
        if new is not None and (not isinstance(new, Tensor) or new.shape != p.shape):
            raise HookError(
                f"edit of the parameter {where.label}: the replacement is {describe(new)}, the "
                f"parameter is {describe(p)}. Return a tensor of that shape, or None to leave it."
            )
        return new


def _restore(old: _Values) -> None:
    """Ends a block: its parameters get their values from before it.

    Where a newer block has changed one too, that block gets them, to restore them at its own end.
    """
    with _lock:
        n = [i for i, each in enumerate(_open) if each is old]
        if not n:  # it was interrupted before it changed anything
            return
        del _open[n[0]]
        for key, (p, value) in old.items():
            newer = next((each for each in _open[n[0] :] if key in each), None)
            if newer is None:
                _write([(p, value)])
            else:
                newer[key] = p, value


def _write(values: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    # Detached, it shares values and version. A Ctrl-C in `no_grad` could leave gradients off.
    for p, value in values:
        if value is not None:
            p.detach().copy_(value.detach())


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
    places = list(_places(root))
    found: dict[int, _Place] = {}
    for each in what or ["**"]:
        for place in _matched(root, places, each):
            found.setdefault(id(place[2]), place)
    return ParamSelection(found.values())


def _places(root: nn.Module) -> Iterator[_Place]:
    """Each parameter under each name; of a module in a shared one, under the first."""
    for name, module, _ in walk(root):
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False):
            yield join(name, key), module, p
        for key, child in submodules(module).items():
            if is_parametrization(key, child):
                for inner, p in child.named_parameters(join(name, key)):
                    yield inner, module, p


def _matched(root: nn.Module, places: list[_Place], what: Any) -> list[_Place]:
    """The places that one selector matches."""
    if isinstance(what, list | tuple):
        return [place for each in what for place in _matched(root, places, each)]
    if isinstance(what, str):
        hits = _by_text(root, places, what)
    elif isinstance(what, re.Pattern):
        hits = [place for place in places if what.search(place[0])]
    elif callable(what) and not isinstance(what, type | nn.Module):
        test = check_function("select_params", what, "name", "parameter", name="predicate")
        hits = [(name, m, p) for name, m, p in places if test(name, p)]
    else:
        inside = {id(p) for m in select(root, what).values() for p in m.parameters()}
        hits = [place for place in places if id(place[2]) in inside]
    if not hits:
        raise SelectionError(
            f"no parameter matches {shown(what)}. select_params(model) has all of them."
        )
    return hits


def _by_text(root: nn.Module, places: list[_Place], text: str) -> list[_Place]:
    patterns = [parts(pattern) for pattern in expand(text)]
    hits = [x for x in places if any(_fits(words, x[0].split(".")) for words in patterns)]
    owner, _, key = text.rpartition(".")
    if not hits and (held := find(root, owner)) is not None:  # another name of a shared module
        hits = [(text, held[1], p) for k, p in held[1].named_parameters(recurse=False) if k == key]
    if hits or not places:
        return hits
    names = [name for name, _, _ in places]
    near = nearest(text, names)
    hint = f"{'Nearest' if near else 'Names are'}: {', '.join(map(repr, near or names[:3]))}. "
    if find(root, text) is not None:
        hint = f'It is a module: its parameters are "{join(text, "**")}". '
    raise SelectionError(
        f'no parameter matches "{text}". {hint}select_params(model) has all of them.'
    )


def _fits(words: list[str], keys: list[str]) -> bool:
    """Whether the parts `words` of a glob match the parts `keys` of a name."""
    if not words:
        return not keys
    if words[0] == "**":
        return any(_fits(words[1:], keys[i:]) for i in range(len(keys) + 1))
    return bool(keys) and fnmatchcase(keys[0], words[0]) and _fits(words[1:], keys[1:])
