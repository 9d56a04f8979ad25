"""The hooks of the recording callbacks: what they look at, and whether they do.

They stand on the modules all the while and do nothing while their eye is off, so that nothing is
put on and taken off between steps, which a compiled model would have to be compiled for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, is_grad_enabled, nn

from hookkit.errors import HookError
from hookkit.hooks.entries import (
    Attached,
    Dispatcher,
    called,
    check_hookable,
    counts_for,
    graph_task,
    is_compiling,
    is_tracing,
)
from hookkit.hooks.gradients import First, GradState, grad_dispatchers, note_version
from hookkit.hooks.snapshot import Options
from hookkit.hooks.views import listen
from hookkit.moments.accumulator import StatsAccumulator
from hookkit.nested import Inputs, describe, named_leaves, pick, tmap
from hookkit.recording.backward import BackwardHook
from hookkit.selecting import Selection


class Eye:
    """What the hooks look at: whether to record, and where to. All a compiled graph guards on.

    Attributes:
        late: the model is through; what is called by itself now may still make the loss.
        thread: whose forwards are recorded; None records every thread's. No graph guards on it.
    """

    def __init__(self, accumulator: StatsAccumulator) -> None:
        self.on, self.late, self.accumulator = False, False, accumulator
        self.thread: int | None = None

    def __reduce__(self) -> Any:
        return Eye, (self.accumulator,)


class WhenOn(Dispatcher):
    """A hook that passes its call on to `target[1]` while the eye `target[0]` is on.

    Off, it costs this one test: 39 layers at every step of a training, whatever `every` is.
    """

    __slots__ = ()

    keeps_live = False

    def __call__(self, *seen: Any) -> Any:
        """What the hook returns, None while the eye is off."""
        target = self.target
        return target[1](*seen) if target is not None and target[0].on else None


class PreWhenOn(WhenOn):
    """The same before the forward."""

    __slots__ = ()

    is_pre = True


class Look(Dispatcher):
    """Shows the eye every tensor that a module gives, while on.

    Its target is `(eye, row, leaf)`: only the part of the output at the path `leaf`, if there is
    one. One call and no more, since each costs µs in a cold cache.
    """

    __slots__ = ()

    with_kwargs = False
    keeps_live = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the forward."""
        target = self.target
        if target is None:
            return
        eye, row, leaf = target
        if not (eye.on or (eye.late and _makes_loss(output))):
            return
        if not counts_for(eye.thread, module):
            return
        seen = part_of(output, leaf) if leaf else output
        if isinstance(seen, Tensor):
            eye.accumulator.see(row, 0, "", seen)
        else:
            show(eye, row, seen)


class LookThrough(Dispatcher):
    """Shows the eye what the user's `function(m, i, o)` returns, while on.

    Its target is `(eye, row, leaf, function)`. The function gets detached tensors, and of the
    output only the part at the path `leaf`.
    """

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After the forward."""
        target = self.target
        if target is None:
            return
        eye, row, leaf, function = target
        if not (eye.on or (eye.late and _makes_loss(output))):
            return
        if not counts_for(eye.thread, module):
            return
        inputs = tmap(Tensor.detach, Inputs(args, kwargs))
        part = tmap(Tensor.detach, part_of(output, leaf))
        show(eye, row, called(function, module, inputs, part))


def show(eye: Eye, row: int, seen: Any) -> None:
    """Has the eye see every tensor in `seen`, which is recorded in `row`."""
    for leaf, (path, t) in enumerate(named_leaves(seen)):
        eye.accumulator.see(row, leaf, path, t)


def _answers(eye: Eye, module: nn.Module) -> bool:
    """`counts_for`, and for a checkpoint that runs again, whose forward has the gradients."""
    return (not is_compiling() and graph_task() != -1) or counts_for(eye.thread, module)


def _makes_loss(output: Any) -> bool:
    """Whether a layer called by itself takes part in the training: a probe runs without gradients,
    what runs again within the backward was seen before, and torch.jit.trace trains nothing.
    """
    if not is_compiling() and (graph_task() != -1 or is_tracing()):
        return False
    return any(t.requires_grad for _, t in named_leaves(output))


class BeforeGradients(PreWhenOn):
    """Notes the version of what a module gets, for `AfterGradients`; `(eye, general)`."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """Before the forward."""
        target = self.target
        if target is None or not target[0].on or not _answers(target[0], module):
            return None
        plain = len(args) == 1 and not kwargs and type(args[0]) is Tensor and not is_compiling()
        if not plain or args[0].is_inference():
            return target[1](module, args, kwargs)
        note_version(target[1].target, args[0])
        return None


class FirstGradients(WhenOn, First):
    """The same before the other forward hooks."""

    __slots__ = ()


class AfterGradients(WhenOn):
    """Has `receive(grad)` called for the tensor that a module gives: the usual case in few calls.

    Its target is `(eye, general, receive)`: `general` does the same for whatever else it gives.
    """

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> Any:
        """After the forward."""
        target = self.target
        if target is None or not target[0].on or not _answers(target[0], module):
            return None
        _, general, receive = target
        plain = type(output) is Tensor and len(args) == 1 and not kwargs
        if not plain or receive is None or is_compiling() or type(args[0]) is not Tensor:
            return general(module, args, kwargs, output)
        if output.requires_grad and is_grad_enabled():
            own: Tensor | None = output
            if output._is_view():
                own = _own_base(module, args[0], output)
            elif output.is_leaf or (output is args[0] and _is_as_before(general, output)):
                own = None
            if own is None:
                return general(module, args, kwargs, output)
            listen(own, receive)
        return None


def _is_as_before(general: Dispatcher, t: Tensor) -> bool:
    return bool(general.target.versions.get(id(t), t._version) == t._version)


def _own_base(module: nn.Module, given: Tensor, output: Tensor) -> Tensor | None:
    """What the output of a `Linear` for three and more dimensions is a view of, and all of it.

    Nobody else has it, so its gradient is the output's, in another shape, and it keeps its hook
    where the view would lose it to the next in-place operation.
    """
    base = output._base
    if base is None or type(module) is not nn.Linear or base.numel() != output.numel():
        return None
    return None if given is base or given._base is base else base  # a hook may hand on its input


def attach_gradients(eye: Eye, row: int, module: nn.Module, leaf: str) -> Attached:
    """Shows `eye` the gradients of what `module` gives; tensors are hooked while it is on only."""

    def begin(module: nn.Module, output: Any) -> Any:
        paths = [path for path, _ in named_leaves(part_of(output, leaf))]

        def receive(i: int, grad: Tensor) -> None:
            eye.accumulator.see(row, i, paths[i], grad)

        return receive

    def received(grad: Tensor) -> None:
        eye.accumulator.see(row, 0, "", grad)

    check_hookable(module, "GradientStats")
    before, *first, after = grad_dispatchers(GradState(begin, leaf), False, module)
    usual = AfterGradients((eye, after, None if leaf else received))
    firsts = [FirstGradients((eye, call)) for call in first]
    return Attached(module, BeforeGradients((eye, before)), *firsts, usual).put_on()


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


Function = Callable[[nn.Module, Any, Any], Any]


def attach_gradients_through(
    eye: Eye, row: int, module: nn.Module, leaf: str, function: Function
) -> BackwardHook:
    """Shows `eye` what `function(m, grad_inputs, grad_outputs)` returns in each backward pass."""

    def after(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
        show(eye, row, called(function, module, grad_inputs, grad_outputs))

    return BackwardHook(module, type(module).__name__, after, Options("GradientStats"), leaf)
