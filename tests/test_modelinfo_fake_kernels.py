"""Repeated operations on fake tensors return what PyTorch's own fake kernels return."""

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.modelinfo import fake_kernels, fake_tensors
from hookkit.modelinfo.fake_kernels import FakeKernels
from hookkit.modelinfo.tracer import Tracer
from hookkit.modelinfo.tree import Tree
from hookkit.nested import leaves
from hookkit.summaries import summary

DTYPES = (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64)


def operands(dtype: torch.dtype) -> list[Tensor]:
    """Tensors that broadcast with each other, in many layouts."""
    return [
        torch.ones(3, 4, dtype=dtype),
        torch.ones(4, 3, dtype=dtype).t(),
        torch.ones(1, 4, dtype=dtype).expand(3, 4),
        torch.ones(3, 8, dtype=dtype)[:, 1::2],
        torch.ones(3, 1, dtype=dtype),
        torch.ones(4, dtype=dtype),
        torch.ones((), dtype=dtype),
        torch.ones(0, 3, 4, dtype=dtype),
        torch.ones(2, 5, 3, 4, dtype=dtype).to(memory_format=torch.channels_last),
        torch.ones(2, 3, 4, dtype=dtype).transpose(0, 1).contiguous().transpose(0, 1),
    ]


def pairs() -> list[tuple[Tensor, Tensor]]:
    """Every two layouts in one dtype, and every two dtypes in some layouts."""
    floats = itertools.product(operands(torch.float32), repeat=2)
    mixed = itertools.permutations(DTYPES, 2)
    return [
        *floats,
        *(p for a, b in mixed for p in zip(operands(a)[:6], operands(b)[5::-1], strict=True)),
    ]


UNARY = [t for d in DTYPES for t in operands(d)]
PAIRS = pairs()


def overloads(name: str) -> list[Any]:
    """The operations of a name that take the fast way."""
    packet = getattr(torch.ops.aten, name)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    kinds = [(func, fake_kernels._Operation(func)) for func in found]
    return [func for func, kind in kinds if kind.is_repeatable or kind.is_view]


def arguments(func: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls of `func` by its signature; PyTorch refuses some of them."""
    needed = [a for a in func._schema.arguments if not a.has_default_value()]
    kinds = [str(a.type) for a in needed]
    n = kinds.count("Tensor")
    values = {"Scalar": 2.5, "number": 2.5, "int": 0, "float": 0.5, "bool": True, "List[int]": [0]}
    values |= {"Optional[List[int]]": [0], "Optional[int]": 0, "Optional[Scalar]": 1}
    values |= {"Optional[number]": 1, "str": "none", "Optional[float]": 0.5}
    values |= {"Optional[Tensor]": None, "Optional[bool]": None}
    if not 1 <= n <= 3 or any(k != "Tensor" and k not in values for k in kinds):
        return
    for tensors in ((t,) for t in UNARY) if n == 1 else PAIRS:
        given = iter((*tensors, tensors[-1]))
        found = [next(given) if k == "Tensor" else values[k] for k in kinds]
        names = [a.name for a in needed if a.kwarg_only]
        positional = len(found) - len(names)
        yield tuple(found[:positional]), dict(zip(names, found[positional:], strict=True))


def seen(out: Any, args: Any) -> list[Any]:
    """All that can be told of a result: its tensors, and whose memory they share."""
    memory = [t.untyped_storage()._cdata for t in leaves(args)]
    found: list[Any] = [type(out)]
    for t in leaves(out):
        storage = t.untyped_storage()
        shared = [i for i, other in enumerate(memory) if other == storage._cdata]
        layout = (t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad)
        bits = (t.is_conj(), t.is_neg(), str(torch._C._dispatch_keys(t)), sorted(vars(t)))
        itself = [i for i, a in enumerate(leaves(args)) if a is t]
        found.append((type(t), layout, storage.nbytes(), shared, itself, bits))
    return found


def compared(func: Any) -> int:
    """How many calls of `func` take the fast way; each must be as PyTorch's own."""
    mode = fake_tensors.new_mode()
    kernels = FakeKernels(mode, {}, [], macs=False)
    n = 0
    for args, kwargs in arguments(func):
        fakes = {id(t): mode.from_tensor(t) for t in leaves((args, kwargs))}
        given = tuple(fakes.get(id(a), a) for a in args)
        named = {k: fakes.get(id(v), v) for k, v in kwargs.items()}
        everything = (given, named)
        with mode, torch.no_grad():
            try:
                expected = seen(func(*given, **named), everything)
            except Exception:
                continue  # torch refuses it
            try:
                kernels.run(func, given, named)
            except Exception as error:  # torch 2.11's fake `select` takes any index
                with pytest.raises(type(error)), fake_tensors._disable_current_modes():
                    func(*args, **kwargs)
                continue
            again, _ = kernels.run(func, given, named)
        assert seen(again, everything) == expected, (func, args, kwargs)
        n += 1
    return n


def is_general(name: str) -> bool:
    """True for element-wise operations and for views."""
    packet = getattr(torch.ops.aten, name)
    if not hasattr(packet, "overloads") or name in ODD:
        return False
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.pointwise in func.tags or func.is_view for func in found)


# Torch's fake kernel of the first takes no fake tensors. Of the others its cache returns something
# else than its kernel: a stride of 1 for 0 where a tensor is empty, less memory than at first.
ODD = ("lift_fresh", "_reshape_alias", "copy")

NAMES = (
    "add add_ sub mul mul_ div div_ pow maximum eq lt where sigmoid sigmoid_ tanh exp neg relu "
    "gelu clone _to_copy copy_ zeros_like sum mean amax argmax var cumsum sort _softmax "
    "masked_fill masked_fill_ clamp_min lerp addcmul unsqueeze select t transpose detach "
    "unsafe_split diagonal view_as_real alias squeeze abs"
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", NAMES.split())
def test_a_repeated_operation_returns_what_torch_returns(name: str) -> None:
    assert sum(compared(func) for func in overloads(name)) >= 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_element_wise_operation_and_view_returns_what_torch_returns() -> None:
    every = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names()
             if n.startswith("aten::")}  # fmt: skip
    names = [n for n in sorted(every) if hasattr(torch.ops.aten, n) and is_general(n)]

    assert sum(compared(func) for n in names for func in overloads(n)) > 10_000


def alike(x: Tensor) -> Any:
    """Calls between which only a type, a flag, or what was written differs."""
    a = x.long()
    whole = (a + 1, a + 1.0, a + True, a == 1, torch.add(a, 1, alpha=2))
    sums = (x.sum(), x.sum(-1), x.sum(0), x.sum(-1, keepdim=True), x.sum(-1, dtype=torch.float64))
    several = (torch.frexp(x), x.sort(), x.sort(0), torch.var_mean(x, -1), x.unsafe_split(2))
    written = (x.add_(1), x.t_().mul_(2), x.sum(-1), x.sum(0), x + x.t().contiguous().t())
    return whole, sums, several, written


def test_calls_that_look_alike_are_told_apart() -> None:
    mode = fake_tensors.new_mode()
    kernels = FakeKernels(mode, {}, [], macs=False)
    with mode, Tracer(Tree(nn.Identity()), kernels, macs=False), torch.no_grad():
        alike(mode.from_tensor(torch.rand(3, 4)))  # all of it is known after this
        found = leaves(alike(mode.from_tensor(torch.rand(3, 4))))
        layouts = [(t.shape, t.stride(), t.dtype) for t in found]

    real = leaves(alike(torch.rand(3, 4)))

    assert layouts == [(t.shape, t.stride(), t.dtype) for t in real]


def test_a_result_that_shares_memory_is_never_repeated() -> None:
    mode = fake_tensors.new_mode()
    kernels = FakeKernels(mode, {}, [], macs=False)
    x = mode.from_tensor(torch.ones(2, 3))
    func = torch.ops.aten._reshape_alias.default

    with mode, torch.no_grad():
        made = [kernels.run(func, (x, [6], [1]), {})[0] for _ in range(3)]

    assert len({t.untyped_storage()._cdata for t in (x, *made)}) == 1


def test_a_value_that_torch_knows_is_computed_by_torch() -> None:
    class Known(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            n = torch.tensor(2)
            return x[: int(n + 1)] * int(n * 2)

    assert summary(Known(), torch.ones(5, 2)).output == "3×2 float32"
    assert summary(Known(), torch.ones(5, 2)).run == "fake"


def test_references_to_tensors_that_died_do_not_pile_up() -> None:
    mode, made = fake_tensors.new_mode(), []
    kernels = FakeKernels(mode, {}, made, macs=False)
    x = mode.from_tensor(torch.ones(2, 3))
    kept = []

    with mode, torch.no_grad():
        for i in range(5000):
            out, _ = kernels.run(torch.ops.aten.add.Tensor, (x, 1), {})
            kept += [out] if i % 1000 == 0 else []

    assert len(made) <= 2100
    assert {id(t) for t in kept} <= {id(ref()) for ref in made}


def test_python_collects_garbage_again_after_a_summary() -> None:
    seen_inside = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen_inside.append(gc.isenabled())
            if x.shape[0] == 3:
                raise RuntimeError("three")
            return x

    summary(Looks(), torch.ones(2))
    with pytest.raises(RuntimeError, match="three"):
        summary(Looks(), torch.ones(3))

    assert gc.isenabled()
    assert seen_inside == [False, False, True]  # the last one ran for real


def test_a_collector_that_the_user_has_switched_off_stays_off() -> None:
    gc.disable()
    try:
        summary(nn.Linear(2, 2), torch.ones(1, 2))

        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_depends_on_more_than_shapes_is_not_repeated() -> None:
    mode = fake_tensors.new_mode()
    kernels = FakeKernels(mode, {}, [], macs=False)
    x, part = mode.from_tensor(torch.ones(2, 3)), mode.from_tensor(torch.ones(4, 3))[:2]
    func = torch.ops.aten._has_same_storage_numel.default

    with mode, torch.no_grad():
        found = [kernels.run(func, (x, other), {})[0] for other in (x, part, x)]

    assert found == [True, False, True]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_zero_tangents_stay_zero_tensors() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                return (dual.exp() * 2).view(-1)[:3] * 1 + (dual * 2).view(-1)[:3] * 1

    assert summary(Twice(), torch.ones(4, 8)).run == "fake"


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", ["values", "indices", "_nnz"])
def test_entries_that_a_fake_sparse_tensor_does_not_know_are_counted_for_real(name: str) -> None:
    class Entries(nn.Module):
        def forward(self, x: Tensor) -> Any:
            entries = getattr(x.to_sparse().coalesce(), name)()
            return entries if isinstance(entries, Tensor) else torch.ones(entries)

    found = summary(Entries(), torch.eye(3))

    assert (found.run, found[0].shape) == ("real", [2, 3] if name == "indices" else [3])
