"""Multiply-accumulates of the operations that PyTorch really runs, below `torch.nn`.

A MAC is one multiply-add of linear algebra: matrix products, convolutions, attention, recurrent
cells. Biases, norms, activations, softmax and look-ups count 0. Because the count is taken where
PyTorch dispatches (`aten`), functional calls, hand-written attention and einsum are seen too, and
it does not matter which attention kernel a device chooses.

Where `torch.utils.flop_counter` has a formula, half of its result is used; the other formulas are
here. An operation is looked up by name, without its overload; what has no formula either costs
nothing or is listed as uncounted (`is_unknown`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

MacFormula = Callable[..., int]  # of the operation's arguments; `out=` is its result

# Names (without overload) of operations that do linear algebra for which there is no formula here,
# or how they begin. Everything in a foreign namespace (custom operators) is unknown as well. Of
# `einsum`, `matmul` and attention only tensors of ragged rows come here undivided.
_UNKNOWN = (
    *("_addmm_activation", "_cdist", "_cslt_sparse_mm", "_ctc_loss", "_cudnn_attention"),
    *("_dyn_quant_matmul", "_euclidean_dist", "_fft_", "_foreach_mm", "_int_mm", "_linalg_"),
    *("_mixed_dtypes_linear", "_mkldnn_", "_native_multi_head", "_pdist_forward"),
    *("_sparse_mm_reduce", "_sparse_semi", "_sparse_sparse_matmul", "_spsolve"),
    *("_thnn_differentiable", "_transformer_encoder", "_triton_", "_weight_int"),
    *("_wrapped_quantized_linear", "cholesky", "einsum", "fbgemm_linear", "grid_sampler"),
    *("hspmm", "linalg_", "lu_solve", "matmul", "matrix_exp", "mkldnn_", "ormqr"),
    *("scaled_dot_product_attention", "smm", "sparse_sampled_addmm", "sspaddmm"),
    "triangular_solve",
)
TORCHS_OWN = frozenset(
    ("aten", "prims", "prim", "_c10d_functional", "c10d", "profiler", "debugprims", "inductor")
)


def _numel(*tensors: Any) -> int:
    return sum(int(t.numel()) for t in tensors if isinstance(t, Tensor))


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Scores and their product with the values; all heads of the queries."""
    return int(prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]))


def _stored(t: Tensor) -> int:
    """Elements of `t`; of a sparse tensor those that are stored."""
    # `_nnz` is private, in torch 2.11 to 2.13; `values()` refuses tensors that are not coalesced.
    return int(t._nnz() if t.layout in SPARSE else t.numel())


def _mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """`a @ b`, also of batches: each element of one times the columns (or rows) of the other."""
    if b.layout in SPARSE and a.layout not in SPARSE:
        return _stored(b) * int(a.shape[0])
    return _stored(a) * int(b.shape[-1])


def _grouped_mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """`F.grouped_mm`, the experts of a mixture: each row is multiplied by the matrix of its group.

    Only where `a` is a batch and `b` is not, the columns of `b` are divided among the groups.
    """
    return _mm(a, b) // (a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1)


def _matvec(a: Tensor, *_: Any, **__: Any) -> int:
    return _stored(a)


def _linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Arrives undivided for nested tensors only: counts their rows, without padding."""
    rows = x.values() if x.layout is torch.jagged else x
    return _numel(rows) * int(weight.shape[0])


def _quantized_linear(x: Tensor, *_: Any, out: Any, **__: Any) -> int:
    return _numel(out) * int(x.shape[-1])


def _mkldnn_rnn(x: Tensor, w_ih: Tensor, w_hh: Tensor, *_: Any, **__: Any) -> int:
    """One layer in one direction; `x` is (steps, batch, features)."""
    return prod(x.shape[:-1]) * _numel(w_ih, w_hh)


def _cudnn_rnn(x: Tensor, weight: list[Tensor], *_: Any, **__: Any) -> int:
    """All layers; `x` is (steps, batch, features), or (tokens, features) when packed."""
    return prod(x.shape[:-1]) * sum(_numel(w) for w in weight if w.dim() == 2)


def _conv_tbc(_x: Tensor, weight: Tensor, *_: Any, out: Tensor, **__: Any) -> int:
    return _numel(out) * int(weight.shape[0] * weight.shape[1])


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand_a: Any, expand_b: Any, expand_c: Any, *_: Any, **__: Any
) -> int:
    """`nn.Bilinear`: one product per element of the three tensors expanded to each other."""
    for dims, i in ((expand_a, 0), (expand_b, 1), (expand_c, 2)):
        for d in sorted(dims):
            a, b, c = (t.unsqueeze(d) if j == i else t for j, t in enumerate((a, b, c)))
    return prod(map(max, a.shape, b.shape, c.shape))


def _second(formula: MacFormula) -> MacFormula:
    """`formula` of an operation whose first argument is only added, such as `addmm`."""
    return lambda _added, *args, **kwargs: formula(*args, **kwargs)


def _halved(flops: Callable[..., int]) -> MacFormula:
    """One of torch's own formulas, which count a multiply-add as two."""
    return lambda *args, out, **kwargs: int(flops(*args, **kwargs, out_val=out)) // 2


_FORMULAS: dict[str, MacFormula] = {
    # What FlopCounterMode uses; its keys are operations.
    **{str(op).replace(".", "::", 1): _halved(f) for op, f in flop_registry.items()},
    "aten::mm": _mm,
    "aten::addmm": _second(_mm),
    "aten::_sparse_mm": _mm,
    "aten::_sparse_addmm": _second(_mm),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_scaled_dot_product_attention_math_for_mps": _attention,
    "flex_attention": _attention,  # of higher order: no namespace; blocks it skips are counted
    "aten::mkldnn_rnn_layer": _mkldnn_rnn,
    "aten::_cudnn_rnn": _cudnn_rnn,
    "aten::miopen_rnn": _cudnn_rnn,
    "aten::_lstm_mps": lambda x, _hx, weight, *_, **__: _cudnn_rnn(x, weight),
    "aten::_grouped_mm": _grouped_mm,
    "aten::_scaled_grouped_mm": _grouped_mm,
    "aten::_scaled_grouped_mm_v2": _grouped_mm,
    "aten::_scaled_mm_v2": _mm,
    "aten::linear": _linear,
    "aten::mv": _matvec,
    "aten::dot": _matvec,
    "aten::vdot": _matvec,
    "aten::addmv": _second(_matvec),
    "aten::addbmm": _second(_mm),
    "aten::addr": _matvec,
    "aten::conv_tbc": _conv_tbc,
    "aten::_trilinear": _trilinear,
}
SPARSE_PRODUCTS = frozenset(
    ("aten::mm", "aten::addmm", "aten::_sparse_mm", "aten::_sparse_addmm", "aten::mv")
)


def name_of(func: Any) -> str:
    """The operation without its overload: `aten::mm`; one of higher order has no namespace."""
    # `_schema` is private, in torch 2.11 to 2.13; the public name has the overload in it. Operators
    # without it are counted by their full text, which has no formula.
    return func._schema.name if hasattr(func, "_schema") else str(func)


def formula_of(name: str) -> MacFormula | None:
    """The formula of an operation, also of its in-place form (`addmm_`)."""
    if name.startswith("quantized::linear"):
        return _quantized_linear
    return _FORMULAS.get(name) or _FORMULAS.get(name.rstrip("_"))


def macs_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """Multiply-accumulates of one dispatched operation; None if there is no formula for it."""
    name = name_of(func)
    if (formula := formula_of(name)) is not None:
        return formula(*args, **{**kwargs, "out": out})
    return None if is_unknown(name) else 0


def is_unknown(name: str) -> bool:
    """True if `name` (`aten::mm`) may do linear algebra that has no formula here."""
    space, _, short = name.partition("::")
    norm = short == "linalg_vector_norm"  # a reduction, as other norms
    return space not in TORCHS_OWN or (short.startswith(_UNKNOWN) and not norm)
