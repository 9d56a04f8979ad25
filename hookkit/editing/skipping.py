"""Run a part of a model: `skip_module` passes over a module, `run_from` starts in the middle."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from hookkit.errors import HookError, NeverFiredWarning, OptionError
from hookkit.hooks.block import Block, reason
from hookkit.hooks.capture import Capture
from hookkit.hooks.compiling import enter_eager, leave_eager
from hookkit.hooks.entries import check_hookable, in_thread, note
from hookkit.hooks.global_hooks import switch_fused_path
from hookkit.hooks.snapshot import Options
from hookkit.interrupts import block
from hookkit.modules import submodules, unwrap
from hookkit.nested import tmap
from hookkit.selecting import Selector, select

# Private: `Module._compiled_call_impl`, which a module's `__call__` calls in the place of forward
# and hooks; `module.compile()` sets it (since 2.0), and copies and pickles leave it out. And
# `_call_impl`, forward and hooks (since 1.7). Without them a call could be replaced only in the
# modules around it, which a hook does not know, or as `forward`, whose hooks run. No fallback.
_CALL = "_compiled_call_impl"


@block
def skip_module(module: nn.Module, value: Any) -> Iterator[None]:
    """Gives `value` for each call of `module` in the `with` block, and does not run it.

    Neither its forward runs nor its own hooks, nor anything inside it, whatever it is called with
    and wherever it is called: a shared module is skipped in each place. (`edit_output` runs the
    module, and replaces what it gave.) Calls from other threads run it, DataParallel's too; copies
    of the module run, also those made in the block. In the block compiled models run eagerly, and
    the layers of a TransformerEncoder call their parts, without PyTorch's fused path.

    Args:
        module: any module that is not scripted.
        value: what the calls give, of any structure; its tensors are cloned at each call, and
            gradients flow to them. Or a function of the module's inputs: `lambda x: x`.

    Returns:
        A context manager.

    Raises:
        ArgumentError: `module` is no module.
        HookError: `module` is scripted.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Flatten())
    >>> with skip_module(net[0], lambda x: x):
    ...     net(torch.ones(1, 2))
    tensor([[1., 1.]])
    """
    check_hookable(module, "skip_module")
    skip = _Skip(module, value)
    try:
        enter_eager(skip)
        switch_fused_path(skip, True)  # it looks for hooks, not for a call that is replaced
        module.__dict__[_CALL] = skip
        yield
    finally:
        skip.end(module)
        switch_fused_path(skip, False)
        leave_eager(skip)
    if not skip.seen.count:
        warnings.warn(
            f"skip_module: nothing was skipped. {skip.seen.label()}: {reason(skip.seen)}. Run the "
            "model inside the block.",
            NeverFiredWarning,
            stacklevel=4,
        )


class _Skip:
    """What is called in the place of a module."""

    def __init__(self, module: nn.Module, value: Any) -> None:
        self.value, self.thread, self.on = value, get_ident(), True
        self.before = module.__dict__.get(_CALL)
        self.run = self.before or module._call_impl
        self.seen = Capture(module, Block(Options("skip_module", keep="none")))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value, in the thread of the block; else what the module gives."""
        # A replica of DataParallel has the attributes of its module, this one too. Only the caller
        # knows which of the two is called: `Module._wrapped_call_impl`, private, as old as `_CALL`.
        called = sys._getframe(1).f_locals.get("self")
        if isinstance(called, nn.Module) and called is not self.seen.module():
            self.seen.missed = "replica"
            return called._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not (self.on and in_thread(self.thread)):
            self.seen.missed = "thread"
            return self.run(*args, **kwargs)
        self.seen.count += 1
        if not callable(self.value):
            return tmap(Tensor.clone, self.value)
        try:
            return self.value(*args, **kwargs)
        except Exception as e:
            note(e, self.value, self.seen.label())
            raise

    def end(self, module: nn.Module) -> None:
        """Has the module called again; blocks of several threads end in any order."""
        self.on, before = False, self.before
        while isinstance(before, _Skip) and not before.on:
            before = before.before
        if module.__dict__.get(_CALL) is not self:
            return
        if before is None:
            del module.__dict__[_CALL]
        else:
            module.__dict__[_CALL] = before

    def __reduce__(self) -> Any:
        return type(None), ()  # of a module that copies or pickles all of its attributes


def run_from(model: nn.Module, what: Selector, value: Any) -> Any:
    """What `model` gives if the module `what` gets `value`; only that and what follows is run.

    For a module in a chain of Sequentials, which alone say what follows. The Sequentials around it
    are not called, so their own hooks do not run; those of all modules that run do.

    Args:
        model: a Sequential, or a wrapper around one.
        what: selects one module, as in `select`: `"3"`, `"features.4"`; it is run too.
        value: its input.

    Returns:
        What the model gives.

    Raises:
        SelectionError: no such module.
        OptionError: several modules, or a part of one's output.
        HookError: a module around it is no plain Sequential; the message names it.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Flatten()), nn.Softplus())
    >>> torch.equal(run_from(net, "1.1", torch.ones(1, 3)), net[2](torch.ones(1, 3)))
    True
    """
    chosen = select(model, what)
    (pick, *others) = chosen.picks.values()
    if others or pick.leaf:
        raise OptionError(
            f"run_from starts at one module, and {what!r} selects {', '.join(map(repr, chosen))}. "
            "Select the one whose input you give."
        )
    places, module = _places(unwrap(model), pick.name), model
    if places:
        module = submodules(places[-1][0])[places[-1][1]]
    value = module(value)
    for parent, key in reversed(places):
        below = submodules(parent)
        for later in list(below)[list(below).index(key) + 1 :]:
            value = below[later](value)
    return value


def _places(root: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """The Sequentials around the module called `name`, outermost first, each with the next key."""
    places, keys = list[tuple[nn.Module, str]](), name.split(".") if name else []
    module = root
    for i, key in enumerate(keys):
        if type(module).forward is not nn.Sequential.forward or "forward" in module.__dict__:
            around = f'"{".".join(keys[:i])}"' if i else "the model itself"
            start = f"Start at {around}, or run" if i else "Run"
            raise HookError(
                f'run_from: "{name}" is inside {around}, a {type(module).__name__}, and what its '
                f"forward does next is not known: only a Sequential says it. {start} the whole "
                "model with the input replaced: with edit_input(module, lambda input: value)."
            )
        places.append((module, key))
        module = unwrap(submodules(module)[key])
    return places
