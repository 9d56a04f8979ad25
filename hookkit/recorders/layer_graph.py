"""Read facts about a model from its autograd graph: which activation reads each layer, the order of
weights, and weights that are not registered. `dropouts` reads rates from the modules instead.

A ReLU has no parameters and is often a function, so no record has it, but the graph of a forward
does. There, a layer is found by its weight: the operation that uses the weight, then the users of
its result. `users_of` walks the graph once; all functions here read its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hookkit._core.graph import PARTS, SAME_VALUES, inputs_of, op_name, saved, walk
from hookkit._core.modules import join, walk as walk_modules

_POOLS = {"MaxPool2DWithIndices", "MaxPool3DWithIndices", "NativeDropout"}
_PASSES_ON = SAME_VALUES | PARTS | _POOLS
"""Operations that keep a unit that is never above 0 at or below 0."""

Users = dict[Any, list[Any]]

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def consumers(model: nn.Module, users: Users) -> dict[str, str | None]:
    """Return module with a weight → class of the activation that alone reads its output.

    The class is `"ReLU"` or `"ReLU6"`; `""` if another operation reads the output, or several do;
    None if the graph does not show it (frozen, compiled, checkpointed, not run).

    >>> import torch
    >>> from hookkit._core.graph import users_of
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> consumers(net, users_of(net(torch.ones(4, 2))))
    {'0': 'ReLU', '2': ''}
    """
    names = dict[int, str]()
    for name, m, first in walk_modules(model):
        weight = dict(m.named_parameters(recurse=False)).get("weight") if first else None
        if weight is not None:
            names[id(weight)] = name
    found: dict[str, str | None] = dict.fromkeys(names.values())
    for leaf in _leaves(users):
        if id(leaf.variable) in names:
            kinds = {_kind(end) for op in _ends(users, leaf) for end in _ends(users, op)}
            found[names[id(leaf.variable)]] = kinds.pop() if len(kinds) == 1 else ""
    return found


def predecessors(model: nn.Module, users: Users) -> dict[str, str]:
    """Return matrix → the matrix whose output it reads, by name; "" if it reads the data.

    If there are several, take the one at the end of the longest chain. Following predecessors then
    gives the path of a gradient to the input. Matrices are parameters with two or more dimensions.
    Matrices that the graph does not show (frozen, compiled, not run) are left out.

    >>> import torch
    >>> from hookkit._core.graph import users_of
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> predecessors(net, users_of(net(torch.ones(4, 2))))
    {'0.weight': '', '2.weight': '0.weight'}
    """
    names = {id(p): name for name, p in model.named_parameters() if p.ndim > 1}
    used: dict[Any, list[str]] = {}  # operation → its matrices, several in a recurrent one
    for leaf in _leaves(users):
        if (name := names.get(id(leaf.variable))) is not None:
            for op in _ends(users, leaf):
                if not op_name(op).startswith("Compiled"):  # one node has all weights, unordered
                    used.setdefault(op, []).append(name)
    depth: dict[str, int] = {}
    found: dict[str, str] = {}
    deepest: dict[Any, tuple[int, str]] = {}  # node → length and end of the longest chain
    for node in _in_order(users):
        n, last = max((deepest[b] for b in inputs_of(node)), default=(0, ""))
        for name in used.get(node, ()):
            if n < depth.get(name, n + 1):  # of several calls, the first counts
                depth[name], found[name] = n, last
        ends = [(depth[name] + 1, name) for name in used.get(node, ())]
        deepest[node] = max(ends, default=(n, last))
    return found


def unregistered(model: nn.Module, opts: Iterable[Optimizer], users: Users) -> list[str]:
    """Return the names of used weights in plain lists and dicts that are in no optimizer.

    They are not in `model.parameters()`, and are never trained.

    >>> import torch
    >>> from hookkit._core.graph import users_of
    >>> net = nn.Sequential(nn.Linear(2, 3))
    >>> net.extra = [nn.Linear(3, 1, bias=False)]
    >>> unregistered(net, [], users_of(net.extra[0](net(torch.ones(4, 2)))))
    ['extra[0].weight']
    """
    known = {id(p) for p in model.parameters()}
    known |= {id(p) for opt in opts for group in opt.param_groups for p in group["params"]}
    used = {id(leaf.variable) for leaf in _leaves(users)}
    return [name for name, p in _hidden(model) if id(p) in used - known]


def dropouts(model: nn.Module) -> dict[str, float]:
    """Return layer → the fraction of values that it drops, for layers in training mode.

    >>> dropouts(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9), nn.LSTM(2, 2, 2, dropout=0.1)))
    {'1': 0.9, '2': 0.1}
    """
    rates: dict[str, float] = {}
    for name, m, first in walk_modules(model):
        rate = m.p if isinstance(m, _DROPOUTS) else 0.0
        if isinstance(m, nn.MultiheadAttention) or (isinstance(m, nn.RNNBase) and m.num_layers > 1):
            rate = m.dropout
        if first and m.training and rate > 0:
            rates[name] = float(rate)
    return rates


def _hidden(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for place, module, first in walk_modules(model):
        for key, held in vars(module).items() if first else ():
            if key.startswith("_") or not isinstance(held, (list, tuple, dict)):
                continue
            for i, x in held.items() if isinstance(held, dict) else enumerate(held):
                name = join(place, f"{key}[{i!r}]")
                if isinstance(x, nn.Module):
                    yield from ((f"{name}.{n}", p) for n, p in x.named_parameters())
                elif isinstance(x, nn.Parameter):
                    yield name, x


def _leaves(users: Users) -> list[Any]:
    """Return the nodes that accumulate gradients of parameters."""
    return [node for node in users if hasattr(node, "variable")]


def _in_order(users: Users) -> Iterator[Any]:
    """Yield the nodes in topological order: each after the nodes that it reads."""
    waits = {node: len({*inputs_of(node)}) for node in users}
    ready = [node for node, n in waits.items() if not n]
    while ready:
        node = ready.pop()
        yield node
        for user in dict.fromkeys(users[node]):
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)


def _ends(users: Users, node: Any) -> list[Any]:
    """Return the users of `node`, skipping operations of `_PASSES_ON`; `[node]` without users."""

    def passes_on(other: Any) -> bool:
        return other is node or op_name(other) in _PASSES_ON

    reached = walk([node], passes_on, after=users.__getitem__)
    return [end for end, _ in reached if not passes_on(end)] or [node]


def _kind(node: Any) -> str | None:
    name = op_name(node)
    # If `min_val` is not known, a ReLU6 counts as another activation.
    if name == "Hardtanh" and saved(node, "min_val") == 0:
        return "ReLU6"
    if name == "CopySlices":  # an unknown operation wrote into a view
        return None
    return "ReLU" if name == "Relu" else ""
