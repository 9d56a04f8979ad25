"""Hooks that are removed or added while the hooks of that very call run.

PyTorch takes the list of hooks first and looks up at each whether it takes the keyword inputs, so
it still calls one that was removed, and then without them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.editing import edit_grad, edit_input, edit_output
from hookkit.hooks import Hook, Hooks, attach, attach_grad, hook_input, hook_output, hook_outputs
from hookkit.hooks.snapshot import Options
from hookkit.stats import ActivationStats, GradientStats
from hookkit.watching import watch

seen: list[str] = []


def note(*_: Any) -> None:
    seen.append("called")


class Block:
    """A `with` block that is removed as the user does it, at its end."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.block.__enter__()

    def remove(self) -> None:
        self.block.__exit__(None, None, None)


def watched(m: nn.Module) -> Block:
    stats = (ActivationStats(), GradientStats())
    return Block(watch(m, torch.optim.SGD(m.parameters(), lr=0.0), *stats))


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "output": hook_output,
    "outputs": lambda m: hook_outputs([m]),
    "input": hook_input,
    "output function": lambda m: Hook(m, note),
    "input function": lambda m: Hook(m, note, pre=True),
    "output gradient": lambda m: hook_output(m, grad=True),
    "input gradient": lambda m: hook_input(m, grad=True),
    "full backward": lambda m: Hook(m, note, is_forward=False),
    "attach": lambda m: attach(m, note),
    "attach pre": lambda m: attach(m, note, pre=True),
    "attach edit": lambda m: attach(m, note, edit=True),
    "attach pre edit": lambda m: attach(m, note, pre=True, edit=True),
    "attach_grad": lambda m: attach_grad(m, note),
    "attach_grad inputs": lambda m: attach_grad(m, note, inputs=True),
    "both sides": lambda m: Hooks.of([m], Options("Hooks", "both", note)),
    "edit output": lambda m: Block(edit_output(m, note)),
    "edit input": lambda m: Block(edit_input(m, note)),
    "edit gradient": lambda m: Block(edit_grad(m, note)),
    "watch": watched,
}


def run(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    y.sum().backward()
    return y.detach()


@pytest.mark.filterwarnings("ignore::hookkit.errors.HookkitWarning")
@pytest.mark.parametrize("by", ["forward hook", "pre hook", "the module"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_is_removed_during_a_call_is_not_called_and_disturbs_nothing(
    kind: str, by: str
) -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if by == "the module":
                remove()
            return super().forward(x)

    seen.clear()
    m, x = Layer(2, 2), torch.ones(1, 2, requires_grad=True)
    want = nn.Linear.forward(m, x).detach()
    made: list[Any] = []

    def remove(*_: Any) -> None:
        while made:
            hook = made.pop()
            hook.remove()
            seen.clear()

    if by == "forward hook":
        m.register_forward_hook(remove)
    if by == "pre hook":
        m.register_forward_pre_hook(remove)
    made.append(KINDS[kind](m))

    got = run(m, x)

    assert torch.equal(got, want)
    assert seen == []
    assert len(m._forward_hooks) == (by == "forward hook")
    assert len(m._forward_pre_hooks) == (by == "pre hook")
    assert not m._forward_hooks_with_kwargs
    assert not m._forward_pre_hooks_with_kwargs


@pytest.mark.filterwarnings("ignore::hookkit.errors.HookkitWarning")
@pytest.mark.parametrize("by", ["forward hook", "pre hook", "the module"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_is_added_during_a_call_disturbs_nothing_and_works_from_then_on(
    kind: str, by: str
) -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if by == "the module":
                add()
            return super().forward(x)

    seen.clear()
    m, x = Layer(2, 2), torch.ones(1, 2, requires_grad=True)
    want = nn.Linear.forward(m, x).detach()
    made: list[Any] = []

    def add(*_: Any) -> None:
        if not made:
            made.append(KINDS[kind](m))

    if by == "forward hook":
        m.register_forward_hook(add)
    if by == "pre hook":
        m.register_forward_pre_hook(add)

    first = run(m, x)
    seen.clear()
    second = run(m, x)

    assert torch.equal(first, want)
    assert torch.equal(second, want)
    if hasattr(made[0], "stored") and "function" not in kind and kind != "full backward":
        stored = made[0].stored
        assert stored is not None or seen
    elif kind != "watch":
        assert seen
    made[0].remove()
    assert not m._forward_hooks_with_kwargs
    assert not m._forward_pre_hooks_with_kwargs


def test_a_hook_that_another_thread_adds_is_never_called_without_the_keyword_inputs() -> None:
    m, x, wrong = nn.Linear(2, 2), torch.ones(1, 2), list[BaseException]()

    class Slow(dict[int, bool]):
        """Lets the other thread run the model just before the flag is there."""

        def __setitem__(self, key: int, value: bool) -> None:
            try:
                m(x)
            except TypeError as e:
                wrong.append(e)
            super().__setitem__(key, value)

    m._forward_hooks_with_kwargs = Slow()  # type: ignore[assignment]
    m._forward_pre_hooks_with_kwargs = Slow()  # type: ignore[assignment]

    handles = [attach(m, note), attach(m, note, pre=True), attach_grad(m, note)]

    assert not wrong
    for handle in handles:
        handle.remove()
