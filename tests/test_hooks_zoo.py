"""Every capture feature over the zoo and over random module trees, against hand-written hooks."""

import copy
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from zoo import ZOO, Entry

from hookkit.hooks import hook_inputs, hook_outputs


def flat(x: Any) -> Iterator[Tensor]:
    """The tensors of `x`, by a walker that shares nothing with hookkit's."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, nn.utils.rnn.PackedSequence):
        yield x.data
    elif isinstance(x, Mapping):
        for v in x.values():
            yield from flat(v)
    elif isinstance(x, (tuple, list)):
        for v in x:
            yield from flat(v)
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        for f in dataclasses.fields(x):
            yield from flat(getattr(x, f.name, None))


def copied(x: Any) -> list[Tensor]:
    return [t.detach().clone() for t in flat(x)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    if len(a) != len(b):
        return False
    return all(
        s.dtype == t.dtype and s.shape == t.shape and equal(s, t) for s, t in zip(a, b, strict=True)
    )


def equal(s: Tensor, t: Tensor) -> bool:
    if s.is_meta or t.is_meta:
        return s.is_meta and t.is_meta
    if s.is_sparse:
        s, t = s.to_dense(), t.to_dense()
    if s.is_nested:
        return all(equal(u, v) for u, v in zip(s.unbind(), t.unbind(), strict=True))
    return bool(torch.equal(s.nan_to_num(7.5), t.nan_to_num(7.5)))


def hookable(model: nn.Module) -> dict[str, nn.Module]:
    found = {}
    for name, m in model.named_modules():
        if not isinstance(m, torch.jit.ScriptModule) and "_orig_mod" not in name:
            found[name or "(root)"] = m
    return found


def run(entry: Entry, model: nn.Module) -> tuple[list[Tensor], type | None]:
    """The output's tensors, and the type of what the model raised; from one seed."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return copied(entry.run(model)), None
        except Exception as e:
            return [], type(e)


def by_hand(entry: Entry) -> tuple[dict[str, list[Any]], dict[str, list[Any]], Any]:
    """Inputs and outputs of each call of each module, and the result, by plain PyTorch hooks."""
    model = entry.build()
    inputs: dict[str, list[Any]] = {}
    outputs: dict[str, list[Any]] = {}

    def keep(store: dict[str, list[Any]], name: str, *seen: Any) -> None:
        if torch._C._current_autograd_node() is None:
            store.setdefault(name, []).append(copied(seen))

    for name, m in hookable(model).items():
        m.register_forward_pre_hook(
            lambda _, a, k, name=name: keep(inputs, name, a, k), with_kwargs=True
        )
        m.register_forward_hook(lambda _, i, o, name=name: keep(outputs, name, o))
    return inputs, outputs, run(entry, model)


# of the entries whose modules return a distribution or another object: those are references
@pytest.mark.filterwarnings("ignore:.*which is stored as a reference")
@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_every_call_of_every_module_is_captured_and_the_run_is_bit_identical(entry: Entry) -> None:
    want_in, want_out, want = by_hand(entry)
    bare, model = entry.build(), entry.build()
    plain = run(entry, bare)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = hookable(model)
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


def buffers(model: nn.Module) -> list[Tensor]:
    return [] if isinstance(model, torch.jit.ScriptModule) else list(model.buffers())


def changed(one: Callable[[Tensor], Tensor], x: Any) -> Any:
    """`x` with `one(t)` for each tensor."""
    if isinstance(x, nn.utils.rnn.PackedSequence):
        return x._replace(data=one(x.data))
    if isinstance(x, dict) and type(x) is not dict:
        twin = copy.copy(x)
        for key, value in x.items():
            twin[key] = changed(one, value)
            if key in vars(twin):
                setattr(twin, key, twin[key])
        return twin
    if not dataclasses.is_dataclass(x):
        return tree_map_only(Tensor, one, x)
    new = {f.name: changed(one, getattr(x, f.name)) for f in dataclasses.fields(x)}
    return dataclasses.replace(x, **new)


def gradients_by_hand(entry: Entry) -> tuple[dict[str, list[Any]], list[Tensor | None]]:
    """Output gradients of each call, by handing on a clone of every output."""
    model = entry.build()
    found: dict[str, list[Any]] = {}

    def tap(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            slots: list[Any] = []

            def one(t: Tensor) -> Tensor:
                i = len(slots)
                slots.append(None)
                if not t.requires_grad:
                    return t
                t = t.clone()
                t.register_hook(lambda g: slots.__setitem__(i, g.detach().clone()))
                return t

            new = changed(one, output)
            found.setdefault(name, []).append(slots)
            return new

        return hook

    for name, m in hookable(model).items():
        m.register_forward_hook(tap(name))
    return found, backward(entry, model)


def backward(entry: Entry, model: nn.Module) -> list[Tensor | None]:
    """Runs and differentiates a loss in all output tensors; the parameters' gradients."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = [t for t in flat(entry.run(model)) if t.requires_grad]
        loss = sum((t.abs() if t.is_complex() else t).float().pow(2).sum() for t in out)
        if out:
            loss.backward()
    return [p.grad for p in model.parameters()]


def arrived(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    return [g for g in gradients if g is not None]


GRADIENTS = [
    e
    for e in ZOO
    if not e.tags
    & {"raises", "no_grad_in", "meta", "scripted", "compiled", "checkpoint_reentrant", "sparse"}
]


@pytest.mark.parametrize("entry", GRADIENTS, ids=lambda e: e.name)
def test_gradients_of_every_output_are_those_of_a_hand_tapped_model(entry: Entry) -> None:
    want, _ = gradients_by_hand(entry)
    plain = backward(entry, entry.build())
    model = entry.build()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = hookable(model)
        with hook_outputs(modules, grad=True, keep="all") as h:
            got = backward(entry, model)

    for name in modules:
        for mine, hers in zip(h[name].calls, want.get(name, []), strict=False):
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


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_trees_of_modules_are_captured_as_by_hand(first: int) -> None:
    for seed in range(first, first + 50):
        test_every_call_of_every_module_is_captured_and_the_run_is_bit_identical(tree(seed))
        test_gradients_of_every_output_are_those_of_a_hand_tapped_model(tree(seed))
