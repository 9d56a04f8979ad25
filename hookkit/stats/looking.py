"""The hooks of the recording callbacks: what they look at, and whether they do.

They stand on the modules all the while and do nothing while their eye is off, so that nothing is
put on and taken off between steps, which a compiled model would have to be compiled for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hookkit.errors import HookError
from hookkit.hooks import recomputing
from hookkit.hooks.dispatching import Dispatcher, called
from hookkit.moments.tallies import Tally
from hookkit.nested import describe, named_leaves, pick
from hookkit.selecting import Selection


class Eye:
    """What the hooks look at: whether to record, and where to. All a compiled graph guards on."""

    def __init__(self, tally: Tally) -> None:
        self.on, self.tally = False, tally

    def __reduce__(self) -> Any:
        return Eye, (self.tally,)


class WhenOn(Dispatcher):
    """A hook that passes its call on to `target[1]` while the eye `target[0]` is on.

    Off, it costs this one test: 39 layers at every step of a training, whatever `every` is.
    """

    __slots__ = ()

    def __call__(self, *seen: Any) -> Any:
        """What the hook returns, None while the eye is off."""
        target = self.target
        return target[1](*seen) if target is not None and target[0].on else None


class PreWhenOn(WhenOn):
    """The same before the forward."""

    __slots__ = ()

    is_pre = True


class Look(Dispatcher):
    """Shows the eye every tensor that a module gives, or of what `pick(m, i, o)` gives, while on.

    Its target is `(eye, row, pick)`. One call and no more, since each costs µs in a cold cache.
    """

    __slots__ = ()

    with_kwargs = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the forward."""
        target = self.target
        if target is None or not target[0].on or recomputing():
            return
        eye, row, pick = target
        seen = output if pick is None else called(pick, module, args, output)
        if isinstance(seen, Tensor):
            eye.tally.see(row, 0, "", seen)
            return
        for leaf, (path, t) in enumerate(named_leaves(seen)):
            eye.tally.see(row, leaf, path, t)


def leaf_of(modules: Mapping[str, nn.Module], name: str) -> str:
    """The path into the output that a selection asks for at `name`, or nothing."""
    return modules.leaf(name) if isinstance(modules, Selection) else ""


def part_of(output: Any, leaf: str) -> Any:
    """The part of `output` at the path `leaf`.

    Raises:
        HookError: it has none.
    """
    try:
        return pick(output, leaf) if leaf else output
    except (KeyError, IndexError, AttributeError, TypeError) as e:
        raise HookError(
            f"The layer gives nothing at {leaf}; what it gives is {describe(output)}. Select a "
            "path that is there."
        ) from e


def part_hook(leaf: str, hook: Callable[..., Any] | None) -> Callable[..., Any]:
    """What is to be recorded of a layer's output at `leaf`: `hook` sees no other."""

    def part(module: nn.Module, inputs: Any, output: Any) -> Any:
        seen = part_of(output, leaf)
        return seen if hook is None else hook(module, inputs, seen)

    return part
