"""Every capture feature over the zoo and over random module trees, against hand-written hooks."""

import random
import warnings
from typing import Any

import pytest
import torch
from reference import (
    GRADIENTS,
    arrived,
    backward,
    buffers,
    by_hand,
    flat,
    gradients_by_hand,
    hookable,
    plain_backward,
    run,
    same,
)
from torch import Tensor, nn
from zoo import ZOO, Entry

from hookkit.hooks import hook_inputs, hook_outputs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_every_call_of_every_module_is_captured_and_the_run_is_bit_identical(entry: Entry) -> None:
    want_in, want_out, want = by_hand(entry)
    bare, model = entry.build(), entry.build()
    plain = run(entry, bare)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = hookable(model)
        if not modules:
            pytest.skip("no module to hook")
        with (
            hook_inputs(modules, keep="all") as before,
            hook_outputs(modules, keep="all") as after,
            hook_outputs(modules) as last,
        ):
            got = run(entry, model)

    for name in modules:
        ins, outs = want_in.get(name, []), want_out.get(name, [])
        assert before[name].n_calls == len(ins), name
        assert after[name].n_calls == last[name].n_calls == len(outs), name
        for g, w in zip(before[name].calls, ins, strict=True):
            assert same([*flat(g), *flat(g.kwargs)], w), name
        for g, w in zip(after[name].calls, outs, strict=True):
            assert same(list(flat(g)), w), name
        if outs:
            assert same(list(flat(last[name].stored)), outs[-1]), name
    assert same(got[0], want[0])
    assert same(got[0], plain[0])
    assert got[1] is plain[1]
    assert all(same([p], [q]) for p, q in zip(buffers(bare), buffers(model), strict=True))
    for m in modules.values():  # hookkit's keys are negative
        assert all(key >= 0 for key in (*m._forward_hooks, *m._forward_pre_hooks))


# Their modules make one of their outputs from another, which is a use of that one here; the
# reference leaves it out.
OWN_USE = ("lstmcell_loop", "vae", "model_output", "nested_structures")


@pytest.mark.parametrize("entry", GRADIENTS, ids=lambda e: e.name)
def test_gradients_of_every_output_are_those_of_a_hand_tapped_model(entry: Entry) -> None:
    want = gradients_by_hand(entry)
    plain = plain_backward(entry)
    model = entry.build()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = hookable(model)
        if not modules:
            pytest.skip("no module to hook")
        with hook_outputs(modules, grad=True, keep="all") as h:
            got = backward(entry, model)

    for name in modules:
        for mine, hers in zip(h[name].calls, want.get(name, []), strict=True):
            if len(mine) > 1 and entry.name.startswith((*OWN_USE, "tree")):
                continue
            a, b = arrived(mine), arrived(hers)
            assert len(a) == len(b), name
            torch.testing.assert_close(a, b, msg=name)
    for a, b in zip(got, plain, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert same([a.detach()], [b.detach()])


class Node(nn.Module):
    """A random tree: what it does with its children is drawn when it is built."""

    KINDS = ("chain", "residual", "tuple", "dict", "reuse", "inplace", "kwargs", "same", "view")

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.kind = rng.choice(self.KINDS)
        n = rng.randint(1, 3)
        self.kids = nn.ModuleList(
            Node(rng, depth - 1) if depth and rng.random() < 0.7 else nn.Linear(4, 4)
            for _ in range(n)
        )

    def forward(self, x: Any = None, *, extra: Any = None) -> Any:
        x = next(flat(x)) if extra is None else next(flat(x)) + next(flat(extra))
        if self.kind == "same":
            return x
        y = x
        for kid in self.kids:
            by_name = self.kind == "kwargs" and isinstance(kid, Node)
            y = next(flat(kid(x=y, extra=x) if by_name else kid(y)))
        if self.kind == "residual":
            y = x + y
        elif self.kind == "reuse":
            y = next(flat(self.kids[0](y)))
        elif self.kind == "inplace":
            y = (y * 1.0).add_(0.1).relu_()
        elif self.kind == "view":
            y = y.view(-1, 2, 2).flatten(1)
        return (
            (y, [x, None])
            if self.kind == "tuple"
            else {"y": y, "n": 3}
            if self.kind == "dict"
            else y
        )


def tree(seed: int) -> Entry:
    def build() -> nn.Module:
        torch.manual_seed(seed)
        return Node(random.Random(seed), 3)

    def inputs() -> tuple[Tensor]:
        return (torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)),)

    return Entry(f"tree {seed}", build, inputs, 0, 0, 0)


def test_random_trees_of_modules_are_captured_as_by_hand() -> None:
    for seed in range(50):
        test_every_call_of_every_module_is_captured_and_the_run_is_bit_identical(tree(seed))
        test_gradients_of_every_output_are_those_of_a_hand_tapped_model(tree(seed))
