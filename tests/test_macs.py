"""Multiply-accumulates against hand-derived truth, and honesty about the rest."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookkit.inspection import summary
from hookkit.inspection.macs import formula_of


class Fn(nn.Module):
    """A function as a model."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *x: Tensor) -> Any:
        return self.f(*x)


def t(*shape: int) -> Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize(
    ("f", "args", "macs"),
    [
        (torch.mm, (t(2, 3), t(3, 5)), 30),
        (torch.matmul, (t(4, 2, 3), t(3, 5)), 4 * 30),
        (torch.bmm, (t(4, 2, 3), t(4, 3, 5)), 4 * 30),
        (torch.addbmm, (t(2, 5), t(4, 2, 3), t(4, 3, 5)), 4 * 30),
        (torch.mv, (t(4, 3), t(3)), 12),
        (torch.dot, (t(7), t(7)), 7),
        (torch.outer, (t(4), t(3)), 0),
        (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (t(2, 3, 4), t(2, 5, 4)), 2 * 3 * 5 * 4),
        (F.linear, (t(2, 3), t(5, 3), t(5)), 30),
        (F.conv1d, (t(1, 4, 10), t(8, 4, 3)), 8 * 8 * 4 * 3),
        (lambda x, w: F.conv2d(x, w, groups=2), (t(1, 4, 6, 6), t(8, 2, 3, 3)), 16 * 8 * 2 * 9),
        (F.conv3d, (t(1, 2, 6, 6, 6), t(4, 2, 3, 3, 3)), 64 * 4 * 2 * 27),
        (F.conv_transpose2d, (t(1, 4, 5, 5), t(4, 8, 3, 3)), 25 * 4 * 8 * 9),
        (lambda x: x.relu().softmax(-1) + F.layer_norm(x, (3,)), (t(2, 3),), 0),
        (F.scaled_dot_product_attention, (t(2, 4, 6, 8), t(2, 4, 7, 8), t(2, 4, 7, 5)),
         2 * 4 * 6 * 7 * (8 + 5)),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
         (t(1, 4, 6, 8), t(1, 2, 6, 8)), 4 * 6 * 6 * 16),
    ],
    ids=lambda v: getattr(v, "__name__", None) if callable(v) else None,
)  # fmt: skip
def test_functions_are_counted_where_they_run(f: Any, args: Any, macs: int) -> None:
    assert summary(Fn(f), *args).macs == macs


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    ("module", "args", "macs"),
    [
        (lambda: nn.LSTM(8, 16, 2, batch_first=True), (t(3, 5, 8),),
         15 * 4 * (8 * 16 + 16 * 16 + 2 * 16 * 16)),
        (lambda: nn.GRU(8, 16, bidirectional=True), (t(5, 3, 8),), 15 * 2 * 3 * (8 * 16 + 16 * 16)),
        (lambda: nn.LSTM(8, 16, proj_size=4), (t(5, 3, 8),),
         15 * (4 * (8 * 16 + 4 * 16) + 16 * 4)),
        (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (t(3, 5, 8),) * 3,
         15 * 4 * 64 + 2 * 3 * 5 * 5 * 8),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (t(3, 5, 8),),
         15 * (4 * 64 + 2 * 8 * 16) + 2 * 3 * 5 * 5 * 8),
    ],
    ids=["lstm", "gru", "lstm_proj", "mha", "encoder"],
)  # fmt: skip
def test_fused_kernels_count_as_what_they_compute(
    module: Any, args: Any, macs: int, training: bool, frozen: bool
) -> None:
    net = module().train(training).requires_grad_(not frozen)

    assert summary(net, *args).macs == macs


@pytest.mark.parametrize(
    ("name", "args", "macs"),
    [  # the experts of a mixture (each row meets one of 4 matrices), then its other layouts
        ("_grouped_mm", (t(10, 8), t(4, 8, 6)), 10 * 8 * 6),
        ("_grouped_mm", (t(4, 3, 8), t(4, 8, 6)), 4 * 3 * 8 * 6),
        ("_grouped_mm", (t(5, 12), t(12, 6)), 5 * 12 * 6),
        ("_grouped_mm", (t(4, 3, 8), t(8, 12)), 3 * 8 * 12),
        ("_scaled_mm_v2", (t(10, 8), t(8, 6), [t(10)]), 10 * 8 * 6),
        ("_lstm_mps", (t(5, 3, 8), [], [t(64, 8), t(64, 16), t(64), t(64)]), 15 * 64 * 24),
    ],
)  # fmt: skip
def test_kernels_that_not_every_machine_has_are_counted(name: str, args: Any, macs: int) -> None:
    formula = formula_of(getattr(torch.ops.aten, name).default)

    assert formula is not None
    assert formula(*args, out=None) == macs


def test_every_matrix_product_has_a_formula_or_is_listed_as_uncounted() -> None:
    # names by their looks: an operator that a new PyTorch brings gets a formula, or is listed
    looks = re.compile(r"(?!.*backward).*(mm|matmul)(_v\d+)?$")
    composite = {"chain_matmul"}  # made of others, which are counted
    names = {s.name[6:] for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")}

    packets = {n: getattr(torch.ops.aten, n) for n in names - composite if looks.match(n)}
    free = [n for n, op in packets.items() if formula_of(getattr(op, op.overloads()[0])) is None]

    assert sorted(free) == []


def test_work_under_no_grad_and_inference_mode_is_counted() -> None:
    lin = nn.Linear(3, 5)

    assert summary(Fn(torch.no_grad()(lin)), t(2, 3)).macs == 30
    assert summary(Fn(torch.inference_mode()(lin)), t(2, 3)).macs == 30


def test_what_has_no_formula_is_listed() -> None:
    s = summary(Fn(lambda x: torch.linalg.solve(x @ x, torch.fft.rfft(x).real[:, :1])), t(4, 4))

    assert s.macs == 64
    assert any("linalg_solve" in name for name in s.uncounted)
    assert "aten::_fft_r2c" in s.uncounted
    assert [*summary(Fn(torch.cdist), t(30, 4), t(30, 4)).uncounted] == ["aten::_euclidean_dist"]
    assert [*summary(nn.Bilinear(3, 4, 5), t(2, 3), t(2, 4)).uncounted] == ["aten::_trilinear"]
    assert "MACs not counted: aten::_fft_r2c ×1" in s.text(width=120)


def test_custom_operators_are_never_counted_as_free() -> None:
    lib = torch.library.Library("hookkit_test", "DEF")
    lib.define("fused(Tensor x) -> Tensor")
    lib.impl("fused", lambda x: x + 1, "CompositeExplicitAutograd")

    s = summary(Fn(lambda x: torch.ops.hookkit_test.fused(x)), t(2, 3))

    assert s.uncounted == {"hookkit_test::fused": 1}


@pytest.mark.parametrize(
    "made", [Tensor.to_sparse, Tensor.to_sparse_csr, lambda x: torch.nested.nested_tensor([x])]
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
def test_products_of_sparse_and_nested_tensors_are_listed(made: Any) -> None:
    s = summary(Fn(lambda a, b: F.linear(made(a), b)), t(3, 3), t(3, 3))

    assert (s.macs, len(s.uncounted)) == (0, 1)


def test_a_functional_products_macs_count_for_the_module_that_runs_it() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return F.linear(x, self.b.weight) @ torch.ones(5, 2)

    s = summary(Mixed(), t(2, 3))

    assert (s["a"].macs, s["b"].macs, s[""].macs, s.macs) == (24, 0, 40 + 20, 84)


def test_a_product_of_nothing_does_not_hide_the_later_ones() -> None:
    seen = summary(Fn(lambda a, b: (a[:0] @ b, a @ b)[1]), t(2, 3), t(3, 5))

    assert seen.macs == 30
