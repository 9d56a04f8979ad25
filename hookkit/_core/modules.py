"""Walk the modules of a model and their names, whatever wraps the model.

PyTorch's `named_modules` hides the second name of a shared module, and wrappers add to its names
(`_orig_mod.`, `module.`). Here `walk` yields every place where a module is registered, by its name
in the bare model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim.swa_utils import AveragedModel

from hookkit._core.checks import check_module

# Private: the names under which torch.compile (since 2.0), FSDP and checkpoint_wrapper (since 1.12)
# hold the module that they wrap. A name that is missing here becomes part of all names inside.
_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
# Classes of libraries that are not imported here, and the observers of torch.ao and torchao.
_OTHER_WRAPPERS = ("DeepSpeedEngine",)
_OBSERVERS = ("ObserverBase", "FakeQuantizeBase", "FakeQuantizerBase")

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The classes of batch normalization; lazy ones derive from them."""


def join(name: str, key: str) -> str:
    """Return the dotted name of child `key` of the module called `name`.

    >>> join("", "conv1"), join("layer1", "0")
    ('conv1', 'layer1.0')
    """
    return f"{name}.{key}" if name else key


def submodules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the direct children of `module` by key; wrappers are not removed, `None` is."""
    # Private by its name: `Module._modules`, key → child, since torch 0.1. The public
    # `named_children()` leaves out second names of a child. A scripted module's is no dict.
    return {key: child for key, child in module._modules.items() if child is not None}


def wrappers(model: nn.Module) -> list[nn.Module]:
    """Return `model` and the modules it wraps (compile, DDP, FSDP), outermost first."""
    wraps = isinstance(model, _WRAPPERS) or type(model).__name__ in _OTHER_WRAPPERS
    for key in (*_INNER, "module") if wraps else _INNER:
        if key in model._modules:
            return [model, *wrappers(submodules(model)[key])]
    return [model]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside compile, DDP, FSDP, checkpoint and EMA wrappers.

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
    """Return the name of the user's class, also of a module that FSDP2 has sharded.

    `fully_shard` gives the module a new class, made from its own class and `FSDPModule`.
    """
    first, *others = type(module).__bases__
    sharded = first.__name__ == "FSDPModule" and others
    return others[0].__name__ if sharded else type(module).__name__


def is_parametrization(key: str, module: nn.Module) -> bool:
    """Return True for the container that `torch.nn.utils.parametrize` puts into a module.

    The modules in it run at every access of the parameter; the model does not call them.
    """
    return key == "parametrizations" and isinstance(module, nn.ModuleDict)


def children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `(key, child)` of the direct children, unwrapped, without parametrizations."""
    for key, child in submodules(module).items():
        if not is_parametrization(key, child):
            yield key, unwrap(child)


def walk(
    model: nn.Module, into: Callable[[nn.Module], bool] = lambda _: True
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield `(name, module, first)` for each place of each module, parents first, the root as `""`.

    `first` is False at the second and later places of a shared module, whose children are not
    walked again. Children of modules for which `into` is False are not walked at all.

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


def find(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """Return `(name in the bare model, module)` of a dotted name; None if there is no such module.

    Parts that wrappers add to names (`_orig_mod`, `module`) are skipped if no child has that name,
    so a name from a wrapped model also works for the bare one. `module` as the last part is likely
    a mistake, so it is skipped only if such a wrapper is there.
    """
    at, (*around, module) = "", wrappers(model)
    keys = name.split(".") if name else []
    for i, key in enumerate(keys):
        child = module._modules[key] if key in module._modules else None  # noqa: SIM401 - scripted
        if child is not None:
            at, (*around, module) = join(at, key), wrappers(child)
        elif key == "module" and i == len(keys) - 1:
            if not any(key in wrapper._modules for wrapper in around):
                return None
        elif key not in (*_INNER, "module"):
            return None
    return at, module


def can_run(module: nn.Module) -> bool:
    """Return True if PyTorch can call `module(…)`, so that a hook on it can fire.

    It is False for containers without a forward (ModuleList, ParameterDict and their like), for
    scripted modules, which refuse hooks, and for the output projection of `nn.MultiheadAttention`,
    whose weights are read without calling it.
    """
    if isinstance(module, (NonDynamicallyQuantizableLinear, torch.jit.ScriptModule)):
        # what `torch.jit.trace` returns is a scripted module that takes hooks
        return type(module).__name__ == "TopLevelTracedModule"
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def calls_children(module: nn.Module) -> bool:
    """Return False for modules that never call their children: scripted ones and attention."""
    return not isinstance(module, nn.MultiheadAttention | torch.jit.ScriptModule)


def is_observer(module: nn.Module) -> bool:
    """Return True for a module that quantization puts into a layer to observe or round values."""
    return any(base.__name__ in _OBSERVERS for base in type(module).__mro__)


def is_replica(module: nn.Module) -> bool:
    """Return True for the copy of a module that `nn.DataParallel` runs on another device."""
    # Private: `_is_replica`, which DataParallel sets on its copies (since 1.5). Without it their
    # calls are taken for those of another model, in another thread.
    return "_is_replica" in module.__dict__
