"""`run_fake`: a run of a model on fake tensors, of which none stays behind.

PyTorch's fake tensors have a shape, a dtype and a device, and no values: a forward on them costs no
memory and computes nothing. The model itself runs: PyTorch makes a fake tensor of each parameter
that an operation meets. `preserve_state` restores its modules, also parameters: PyTorch computes
some operations on a real tensor and a number, such as `weight.div_(2)`, for real.

A forward may also store a tensor elsewhere, such as in a global list or a cached function. A fake
tensor that stays there would come back in every later call, so it is an error.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from torch import Tensor, nn

from hookkit.errors import ModelRunError
from hookkit.hooks import Hook
from hookkit.hooks.attach import AttachedFunction
from hookkit.inspection.tracer import Saved, Trace
from hookkit.inspection.tree import Tree

T = TypeVar("T")

_LEFT = (
    "{0} ran on fake tensors, which have no values, since its real run was stopped as too large, "
    "and its forward has stored some outside of its modules, in: {1}. Calls that read them will "
    "fail. Remove them there (from a cached function by its cache_clear()), or start a new "
    "process; and give summary a smaller input, with which the model runs for real."
)


def may_run_fake(tree: Tree) -> bool:
    """Return whether only the model's own code runs: no hooks or patched forward of a user.

    These are there for values: a hook that records or compares would get tensors without any.
    """
    modules = (*tree.wrappers, *tree.modules)
    tables = [vars(m)[name] for m in modules for name in ("_forward_pre_hooks", "_forward_hooks")]
    # Private by their names, in torch 1.8 to 2.13. Without them a global hook gets fake tensors.
    names = ("_global_forward_pre_hooks", "_global_forward_hooks")
    tables += [getattr(nn.modules.module, name, {}) for name in names]
    hooks = [hook for table in tables if table for hook in table.values()]
    return all(map(_is_harmless, hooks)) and not any("forward" in vars(m) for m in modules)


def _is_harmless(hook: Any) -> bool:
    """Return whether `hook` is one of PyTorch's own, or is off in the run, as it only observes."""
    if isinstance(hook, (Hook, AttachedFunction)):
        return hook.observes
    home: str = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0] == "torch"


def run_fake(tree: Tree, run: Callable[[Any], tuple[Trace, T]]) -> T | None:
    """Return what `run(mode)` read of a run with a new mode of fake tensors.

    Return None if the model raised, which it does if it needs values.

    Raises:
        ModelRunError: the forward has stored a fake tensor outside of the model's modules.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to load

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # torch's own and private by its name: it prints each operation that fails on fake tensors,
    # which is handled here. Under another name its records would be printed.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        seen, found = run(mode)
        result: T | None = found if seen.error is None else None
        del seen, found  # the traceback of an error holds fake tensors
    finally:
        log.disabled = was_disabled
        if holders := _holders(mode):
            kinds = ", ".join(sorted({type(x).__name__ for x in holders}))
            raise ModelRunError(_LEFT.format(type(tree.model).__name__, kinds))
    return result


def _holders(mode: Any) -> list[Any]:
    """Return the Python objects that hold a fake tensor of `mode`.

    Tensors that only PyTorch holds do no harm: it never frees some autograd graphs. Python does not
    tell who holds a tensor after `gc.freeze()`; then they are returned themselves.
    """
    gc.collect()  # some may wait in a reference cycle
    fakes: list[Any] = [
        x
        for x in gc.get_objects()
        if issubclass(type(x), Tensor) and getattr(x, "fake_mode", None) is mode
    ]
    if not fakes or gc.get_freeze_count():
        return fakes
    found = gc.get_referrers(*fakes)
    return [x for x in found if x is not fakes and type(x) not in (FrameType, Saved)]
