"""The modules of a model and their names: each name once, whatever wraps the model.

PyTorch's `named_modules` hides the second name of a shared module, or walks a cyclic model for
ever, and lets wrappers into the names (`_orig_mod.`, `module.`). Here a walk takes each edge of
the module graph once, so it ends on any graph and stays linear, and it steps through wrappers
without naming them. Only `_modules` is read: a module's `__getattr__`, `__len__` or
`__iter__` is never called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim.swa_utils import AveragedModel

from hookkit.checks import check_module

# Private: the names under which torch.compile (since 2.0), FSDP and checkpoint_wrapper (since 1.12)
# hold the module that they wrap. Without one of them, it would be part of all names inside.
_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
_WRAPPER_NAMES = ("DeepSpeedEngine",)  # classes of libraries that are not imported here
_OBSERVERS = ("ObserverBase", "FakeQuantizeBase", "FakeQuantizerBase")  # torch.ao's and torchao's
_MAX_NAMES = 64  # a net of shared blocks in shared blocks has exponentially many names


def join(name: str, key: str) -> str:
    """The dotted name of child `key` of the module called `name`.

    >>> join("", "conv1"), join("layer1", "0")
    ('conv1', 'layer1.0')
    """
    return f"{name}.{key}" if name else key


# Private by its name: `Module._modules`, key → child, since torch 0.1. The public
# `named_children()` gives each child once; second names and places can be read nowhere else.
def child_table(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The module's own table of direct children: not to be changed."""
    held: Mapping[str, nn.Module | None] | None = module.__dict__.get("_modules")
    if held is None:  # of a traced module it is an attribute, no entry of its dict
        held = getattr(module, "_modules", {})
    return held


def submodules(module: nn.Module) -> dict[str, nn.Module]:
    """The module's direct children as they are registered, wrappers included, without `None`."""
    return {key: child for key, child in child_table(module).items() if child is not None}


def inner_key(module: nn.Module) -> str | None:
    """The name under which a wrapper holds the module it wraps; None if it is no wrapper."""
    held = child_table(module)
    for key in _INNER:
        if key in held:
            return key
    wraps = isinstance(module, _WRAPPERS) or type(module).__name__ in _WRAPPER_NAMES
    return "module" if wraps and "module" in held else None


def wrappers(model: nn.Module) -> list[nn.Module]:
    """`model` and what it wraps (compile, DDP, DataParallel, FSDP), outermost first."""
    found = [model]
    while (key := inner_key(found[-1])) is not None:
        found.append(submodules(found[-1])[key])
    return found


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside compile, DDP, DataParallel, FSDP, checkpoint and EMA wrappers.

    Args:
        model: a model, wrapped or not.

    Returns:
        The module inside, or `model` itself.

    Raises:
        ArgumentError: `model` is no module.

    >>> net = nn.Linear(2, 3)
    >>> unwrap(nn.DataParallel(net)) is net
    True
    """
    return wrappers(check_module("unwrap", model))[-1]


def class_name(module: nn.Module) -> str:
    """The name of the user's class, also of a module that FSDP2 has sharded.

    `fully_shard` makes a class of the module's own and `FSDPModule`, and puts it in its place.
    """
    first, *others = type(module).__bases__
    sharded = first.__name__ == "FSDPModule" and others
    return others[0].__name__ if sharded else type(module).__name__


def is_parametrization(key: str, module: nn.Module) -> bool:
    """True for the container that `torch.nn.utils.parametrize` puts into a module.

    Its modules run at every access of the parameter, not where the model calls them.
    """
    return key == "parametrizations" and isinstance(module, nn.ModuleDict)


def children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`(key, child)` of the direct children: unwrapped, without parametrizations."""
    for key, child in submodules(module).items():
        if not is_parametrization(key, child):
            yield key, unwrap(child)


def walk(
    model: nn.Module, into: Callable[[nn.Module], bool] = lambda _: True
) -> Iterator[tuple[str, nn.Module, bool]]:
    """`(name, module, first)` for each place of a module, parents first, the root under `""`.

    `first` is False at the second and later places of a shared module, whose children are not
    walked again. Children of modules for which `into` is False are not walked at all.

    Cost: one step per registered child.

    >>> shared = nn.ReLU()
    >>> [(name, first) for name, _, first in walk(nn.Sequential(shared, shared))]
    [('', True), ('0', True), ('1', False)]
    """
    seen: set[int] = set()
    stack = [("", unwrap(model))]
    while stack:
        name, module = stack.pop()
        first = id(module) not in seen
        seen.add(id(module))
        yield name, module, first
        if first and into(module):
            stack += [(join(name, key), child) for key, child in children(module)][::-1]


def all_names(model: nn.Module, module: nn.Module) -> list[str]:
    """Every dotted name of `module` in `model` (at most 64), in walking order."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for _, parent, first in walk(model):
        for key, child in children(parent) if first else ():
            parents.setdefault(id(child), []).append((id(parent), key))
    root = id(unwrap(model))

    def names(i: int, below: frozenset[int]) -> Iterator[str]:
        if i == root:
            yield ""
            return
        for parent, key in parents.get(i, ()):
            if parent not in below:
                yield from (join(name, key) for name in names(parent, below | {i}))

    return list(islice(names(id(module), frozenset()), _MAX_NAMES))


def find(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """`(canonical name, module)` of a dotted name, None if there is none such.

    Parts that wrappers add to names (`_orig_mod`, `module`) are skipped where no child has such a
    name, so names from a wrapped model are valid for the bare one.

    Cost: one dictionary look-up per part of the name.
    """
    at, module = "", unwrap(model)
    for key in name.split(".") if name else ():
        held = child_table(module)
        child = held[key] if key in held else None  # noqa: SIM401 - scripted tables have no get
        if child is not None:
            at, module = join(at, key), unwrap(child)
        elif key not in (*_INNER, "module"):
            return None
    return at, module


def can_run(module: nn.Module) -> bool:
    """True if PyTorch calls the module as a module, so that a hook on it can fire.

    False for containers without a forward (ModuleList, ParameterDict and their like), for scripted
    modules, which refuse hooks, and for the output projection of `nn.MultiheadAttention`, which
    reads its weights and never calls it.
    """
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    if isinstance(module, torch.jit.ScriptModule):
        return type(module).__name__ == "TopLevelTracedModule"
    if "forward" in module.__dict__:
        return True
    forward = next(c.__dict__["forward"] for c in type(module).__mro__ if "forward" in c.__dict__)
    return forward is not nn.Module.__dict__["forward"]


def calls_children(module: nn.Module) -> bool:
    """False for modules that never call the ones inside: scripted ones and attention.

    `nn.MultiheadAttention` reads the weights of its `out_proj` and never calls it.
    """
    return not isinstance(module, nn.MultiheadAttention | torch.jit.ScriptModule)


def is_observer(module: nn.Module) -> bool:
    """True for a module that quantization puts into a layer to observe its values, or round them.

    A Linear that is trained for int8 holds two of them, and is still a leaf. Its observers see what
    the layer returns; an observer inside an observer is never called.
    """
    return any(base.__name__ in _OBSERVERS for base in type(module).__mro__)


def is_leaf(module: nn.Module) -> bool:
    """True if the module runs and no module inside it does, except observers of quantization."""
    inside = (m for _, m, _ in walk(module, calls_children) if m is not module)
    return can_run(module) and not any(can_run(m) and not is_observer(m) for m in inside)


def edges(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """`(parent, key, child)` for each registration in the model, wrappers and their inside too."""
    seen: set[int] = set()
    stack = [model]
    while stack:
        parent = stack.pop()
        if id(parent) not in seen:
            seen.add(id(parent))
            held = submodules(parent)
            yield from ((parent, key, child) for key, child in held.items())
            stack += [*held.values()][::-1]


class Parts:
    """The modules of `model` as they are now.

    Models grow, and have parts exchanged, while they train. A walk at each recorded step is too
    slow; what is compared is only the tables of children, by Python's own list equality (20 µs for
    120 modules, cold caches apart).

    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> parts = Parts(net)
    >>> parts.changed()
    False
    >>> net[0] = nn.Linear(2, 2)
    >>> parts.changed()
    True
    """

    def __init__(self, model: nn.Module) -> None:
        tables = (child_table(module) for module in model.modules())
        self._tables = [table for table in tables if isinstance(table, dict)]  # not a script's
        self._held = self._now()

    def _now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def changed(self) -> bool:
        """Whether a module was added, exchanged, moved or taken out since."""
        return self._now() != self._held
