"""How a hook gets the gradient of one use of a tensor, without a change to the run.

A hook on a tensor (`Tensor.register_hook`) belongs to one node of autograd's graph and receives the
gradient of every use that goes through that node. Two things can make that the wrong gradient of
an output (the third is in `views`):

- The tensor has other uses that must not count: a module returns its own input, a parameter, or
  one tensor twice. `alias` makes a view of it, a node of its own, to return instead. A view shares
  the memory and autograd knows it, so an in-place operation on either reaches the other, in values
  and in gradients, as it does without the hook. (A copy would not: it changes the run.)
- The module has used the tensor itself, for another of its outputs. `own_node` gives the tensor a
  new node in place: what used it before keeps the old one.
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

# Private: gives a tensor its version number back after an operation that wrote nothing. Without it
# `own_node` would make autograd refuse the values that it has saved of the tensor; `alias` is used
# instead, which hooks that ran earlier do not see. Since torch 2.1.
_keep_version: Any = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)


def on_grad(
    output: Any,
    receive: Receive,
    versions: dict[int, int] | None = None,
    leaf: str = "",
    aliased: bool = False,
    given: Any = (),
) -> Any:
    """Has `receive(i, grad)` called in each backward pass for leaf `i` of `output`.

    Args:
        output: what the module returned. Leaves that need no gradient are passed over.
        receive: gets the leaf's number in `leaves(output)` and its gradient, to be read, not
            written. What it returns, unless None, replaces the gradient. The graph holds it.
        versions: `{id: version}` of the module's inputs before it ran (see `versions_of`).
        leaf: path of the part of `output` that is meant; numbers count the leaves of that part.
        aliased: `with_aliases` has seen this output; the aliases in it are taken as they are.
        given: what the module was called with; read in a graph of torch.compile only.

    Returns:
        What the forward has to return: `output` itself, or, where a leaf needed an alias, the
        same structure with that leaf replaced.
    """
    if not torch.is_grad_enabled():
        return output  # an alias made here would have no gradient to be hooked for
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
    """`output` with an alias for each leaf that `on_grad` would replace, if there are any.

    For a hook that runs before all others, so that what they keep of the output counts too.
    """
    if not torch.is_grad_enabled():
        return output
    part, needs = pick(output, leaf), _Needs(output, versions)
    new = tmap(lambda t: alias(t) if t.requires_grad and needs.alias(t) else t, part)
    return output if new is part else put(output, leaf, new)


class _Needs:
    """What the tensors of one output need, so that a hook receives the gradient of that use alone.

    Judged by the whole output, whichever part of it is meant.
    """

    __slots__ = ("several", "times", "versions")

    def __init__(self, output: Any, versions: dict[int, int] | None) -> None:
        found = [t for t in leaves(output) if t.requires_grad]
        self.several, self.versions = len(found) > 1, versions or {}
        self.times = Counter(map(id, found)) if self.several else Counter[int]()

    def separated(self, t: Tensor) -> Tensor:
        """The tensor to return and to hook in the place of `t`: `t` itself where that is right."""
        if self.alias(t):
            return alias(t)
        return own_node(t) if self.several else t

    def alias(self, t: Tensor) -> bool:
        """Whether `t` has uses that are not the output's, so that an alias has to stand for it."""
        if t.is_leaf or self.times[id(t)] > 1:
            return True
        if self.versions.get(id(t)) == t._version:  # an input, as it was
            return True
        return self.several and not can_own_node(t)

    def has_alias(self, t: Tensor) -> bool:
        """Whether `t` is an alias already, made by a hook that ran before."""
        return self.times[id(t)] < 2 and is_alias(t)


def versions_of(*inputs: Any) -> dict[int, int]:
    """`{id: version}` of the tensors in `inputs`: a returned input has it still."""
    return {id(t): t._version for x in inputs for t in leaves(x) if not t.is_inference()}


def tap(t: Tensor) -> Tensor:
    """A tensor of its own with the values and the gradient of `t`; not a view of it.

    A lazy clone where that can be (see `snapshot`): not of what the user made, nor of quantized
    tensors, which torch 2.13 cannot read then.
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
    """A view of all of `t`, with a node of its own; `t` itself where there is none (sparse)."""
    try:
        view: Tensor = t[...]
    except (RuntimeError, NotImplementedError, TypeError):
        return t
    return view


def is_alias(t: Tensor) -> bool:
    """Whether `alias` made `t`, and nothing was written since."""
    return t._is_view() and t.grad_fn is not None and t.grad_fn.name() == "AliasBackward0"


def can_own_node(t: Tensor) -> bool:
    """Whether `own_node` takes `t`: a plain tensor that an operation has made.

    Not one whose `.grad` the user retains, since that gradient would move to the new node.
    """
    if _keep_version is None or t.is_leaf or t._is_view():
        return False
    return is_plain(t) and not t.retains_grad


def own_node(t: Tensor) -> Tensor:
    """`t` itself, with a new node in the graph: later uses go through it, earlier ones do not.

    The operation exchanges a dimension with itself: it reads and writes no memory.
    """
    with _keep_version(t):
        t.transpose_(0, 0)
    # Private: the dict of the hooks on the tensor. Other in-place operations reset it; where it
    # stays, `register_hook` adds to the hooks of the old node.
    t._backward_hooks = None
    return t


def separated_in_graph(t: Tensor, given: Iterable[Tensor]) -> Tensor:
    """What is returned and hooked for `t` in a graph of torch.compile.

    A copy, since a graph knows no versions and a hook on a view is lost with the next in-place
    operation. But a view where `t` is a parameter or shares the memory of a module's input, one of
    `given`: there a copy could change the run.
    """
    base = t if t._base is None else t._base
    if base.is_leaf or any(base is (x if x._base is None else x._base) for x in given):
        return alias(t)
    return t.clone()
