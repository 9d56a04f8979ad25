"""How a hook receives the gradient of one use of a tensor without a change to the run.

A hook on a tensor (`Tensor.register_hook`) belongs to one node of autograd's graph and receives the
gradient of every use that goes through that node. For an output, that can be the wrong gradient for
two reasons (a third is in `views`):

- The tensor has other uses that must not count: a module returns its own input, a parameter, or
  one tensor twice. `alias` makes a view of it, which has a node of its own and is returned instead.
  The view shares the memory, and autograd tracks that. So an in-place operation on one of the two
  changes the other, in values and in gradients, as it does without the hook. With a copy it would
  not, so a copy would change the run.
- The module has used the tensor itself, for another of its outputs. `own_node` gives the tensor a
  new node in place: earlier uses keep the old node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookkit.hooks.entries import is_compiling
from hookkit.hooks.snapshot import is_transformed, lazy_clone
from hookkit.hooks.views import is_plain, listen
from hookkit.nested import leaves, pick, put, tmap

Receive = Callable[[int, Tensor], Any]

# Private: `torch.autograd._unsafe_preserve_version_counter` restores a tensor's version number
# after an operation that wrote nothing (since 2.1). Without it autograd would raise after
# `own_node`, as if the values that it saved of the tensor had been changed. If it is missing,
# `alias` is used instead; uses of the output by hooks that ran earlier then do not count.
#
# Also private, in this file: `_version`, `_base` and `_is_view()` of a tensor, see `snapshot`.
_keep_version: Any = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)


def on_grad(
    output: Any,
    receive: Receive,
    versions: dict[int, int] | None = None,
    leaf: str = "",
    aliased: bool = False,
    given: Any = (),
) -> Any:
    """Calls `receive(i, grad)` in each backward pass for each leaf `i` of `output`.

    Args:
        output: what the module returned. Leaves that require no gradient are skipped.
        receive: gets the leaf's number in `leaves(output)` and its gradient, which it must not
            write. What it returns, unless None, replaces the gradient. The graph holds it.
        versions: `{id: version}` of the module's inputs before it ran (see `versions_of`).
        leaf: path of the part of `output` that is meant; numbers count the leaves of that part.
        aliased: `with_aliases` has made aliases in this output already; they are hooked as is.
        given: what the module was called with; read in a graph of torch.compile only.

    Returns:
        What the forward has to return: `output` itself, or, where a leaf needed an alias, the
        same structure with that leaf replaced.
    """
    if not torch.is_grad_enabled():
        return output  # an alias made here would require no gradient, and could not be hooked
    part = pick(output, leaf)
    needs = None if is_compiling() else _Needs(output, versions)
    numbers = iter(range(len(leaves(part))))

    def one(t: Tensor) -> Tensor:
        i = next(numbers)
        if not t.requires_grad:
            return t
        if needs is None:
            t = separated_in_graph(t, leaves(given))
        elif not (aliased and needs.has_alias(t)):
            t = needs.separated(t)
        listen(t, partial(receive, i))
        return t

    new = tmap(one, part)
    return output if new is part else put(output, leaf, new)


def with_aliases(output: Any, versions: dict[int, int] | None = None, leaf: str = "") -> Any:
    """`output`, with an alias in the place of each leaf that `on_grad` would replace.

    For a hook that runs before all others: they then keep the aliases, and their uses count too.
    """
    if not torch.is_grad_enabled():
        return output
    part, needs = pick(output, leaf), _Needs(output, versions)
    new = tmap(lambda t: alias(t) if t.requires_grad and needs.alias(t) else t, part)
    return output if new is part else put(output, leaf, new)


class _Needs:
    """Which tensors of one output need an alias or a new node before they are hooked.

    Decided from the whole output, also where a part of it is hooked.
    """

    __slots__ = ("several", "times", "versions")

    def __init__(self, output: Any, versions: dict[int, int] | None) -> None:
        found = [t for t in leaves(output) if t.requires_grad]
        self.several, self.versions = len(found) > 1, versions or {}
        self.times = Counter(map(id, found)) if self.several else Counter[int]()

    def separated(self, t: Tensor) -> Tensor:
        """The tensor to return and to hook in the place of `t`; `t` itself where it can be."""
        if self.alias(t):
            return alias(t)
        return own_node(t) if self.several else t

    def alias(self, t: Tensor) -> bool:
        """Whether `t` needs an alias, since it has uses that are not uses of the output."""
        if t.is_leaf or self.times[id(t)] > 1:
            return True
        if self.versions.get(id(t)) == t._version:  # an input, unchanged
            return True
        return self.several and not can_own_node(t)

    def has_alias(self, t: Tensor) -> bool:
        """Whether `t` is an alias already, made by an earlier hook."""
        return self.times[id(t)] < 2 and is_alias(t)


def versions_of(*inputs: Any) -> dict[int, int]:
    """`{id: version}` of the tensors in `inputs`, to recognize an input that is returned as is."""
    return {id(t): t._version for x in inputs for t in leaves(x) if not t.is_inference()}


def tap(t: Tensor) -> Tensor:
    """A tensor of its own with the values and the gradient of `t`; not a view of it.

    A lazy clone where one is possible (see `snapshot`): not of a tensor that the user made, nor of
    a quantized one, whose lazy clone crashes torch 2.13 when it is read.
    """
    root = t if is_compiling() or t._base is None else t._base
    plain = t.is_cpu and not t.is_quantized and not (root.is_leaf and root.requires_grad)
    if plain and not is_compiling() and not is_transformed(t):  # vmap has no lazy clone
        try:
            return lazy_clone(t)
        except RuntimeError:
            pass
    return t.clone()


def alias(t: Tensor) -> Tensor:
    """A view of all of `t`, with a node of its own; `t` itself if it has no views (sparse)."""
    try:
        view: Tensor = t[...]
    except (RuntimeError, NotImplementedError, TypeError):
        return t
    return view


def is_alias(t: Tensor) -> bool:
    """Whether `alias` made `t`, and no in-place operation has changed its node since."""
    return t._is_view() and t.grad_fn is not None and t.grad_fn.name() == "AliasBackward0"


def can_own_node(t: Tensor) -> bool:
    """Whether `own_node` takes `t`: a plain tensor that an operation has made.

    Not one whose `.grad` the user retains, since that gradient would move to the new node.
    """
    if _keep_version is None or t.is_leaf or t._is_view():
        return False
    return is_plain(t) and not t.retains_grad


def own_node(t: Tensor) -> Tensor:
    """`t` itself, with a new node in the graph for later uses; earlier uses keep the old one.

    It swaps a dimension with itself in place, which reads and writes no memory.
    """
    with _keep_version(t):
        t.transpose_(0, 0)
    # Private: `Tensor._backward_hooks`, the dict of the hooks on the tensor (since before 2.0).
    # Other in-place operations reset it, this one does not. Without this line `register_hook` would
    # add to the hooks of the old node. There is no public way and no fallback.
    t._backward_hooks = None
    return t


def separated_in_graph(t: Tensor, given: Iterable[Tensor]) -> Tensor:
    """The tensor to return and to hook in the place of `t` in a graph of torch.compile.

    A copy, since versions cannot be read in a graph, and the next in-place operation would drop a
    hook on a view. But a view if `t` is a parameter or shares memory with one of the module's
    inputs, `given`, where a copy could change the run.
    """
    base = t if t._base is None else t._base
    if base.is_leaf or any(base is (x if x._base is None else x._base) for x in given):
        return alias(t)
    return t.clone()
