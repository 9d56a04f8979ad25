"""Multiply-accumulates of the operations that PyTorch really runs, below `torch.nn`.

A MAC is one multiply-add of linear algebra: matrix products, convolutions, attention, recurrent
cells. Biases, norms, activations, softmax and look-ups count 0. Because the count is taken where
PyTorch dispatches (`aten`), functional calls, hand-written attention and einsum are seen too, and
it does not matter which attention kernel a device chooses.

Where `torch.utils.flop_counter` has a formula, half of its result is used; the other formulas are
here. Linear algebra without a formula, custom kernels and products of sparse, nested and quantized
tensors are reported as uncounted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

MacFormula = Callable[..., int | None]  # of the operation's arguments; `out=` is its result

# Operations whose names begin so do linear algebra for which there is no formula here. `einsum`,
# `linear`, `matmul` and attention are divided into others before, except for nested tensors.
_UNKNOWN = (
    *("_addmm_activation", "_cdist", "_cslt_sparse_mm", "_ctc_loss", "_cudnn_attention"),
    *("_dyn_quant_matmul", "_euclidean_dist", "_fft_", "_foreach_mm", "_int_mm", "_linalg_"),
    *("_mixed_dtypes_linear", "_mkldnn_", "_native_multi_head", "_pdist_forward", "_sparse_"),
    *("_spsolve", "_thnn_differentiable", "_transformer_encoder", "_trilinear", "_triton_"),
    *("_weight_int", "_wrapped_quantized_linear", "cholesky", "conv_tbc", "einsum"),
    *("fbgemm_linear", "grid_sampler", "hspmm", "linalg_", "linear", "lu_solve", "matmul"),
    *("matrix_exp", "miopen_", "mkldnn_", "ormqr", "_scaled_grouped"),
    *("scaled_dot_product_attention", "smm", "sparse_sampled_addmm", "sspaddmm"),
    "triangular_solve",
)
_FREE = ("linalg_vector_norm", "_sparse_softmax", "_sparse_log_softmax", "_sparse_sum")
_OWN = ("aten", "prims", "prim", "_c10d_functional", "c10d", "profiler", "debugprims", "inductor")


@cache
def formula_of(func: Any) -> MacFormula | None:
    """Return the formula of an operation, also of its in-place form; None if it counts 0.

    The formula is called with the operation's arguments and, as `out=`, its result. It holds for
    dense tensors, and returns None where the multiply-accumulates cannot be counted.
    """
    name = name_of(func)
    space, _, short = name.partition("::")
    known = _FORMULAS.get(name) or _FORMULAS.get(name.rstrip("_"))
    if known is not None:
        return known
    unknown = short.startswith(_UNKNOWN) and short not in _FREE
    return _uncounted if unknown or space not in _OWN else None


def name_of(func: Any) -> str:
    """Return the operation's name without its overload, `aten::mm`; higher order: no namespace."""
    # `_schema` is private, in torch 2.11 to 2.13; the public name has the overload in it. Operators
    # without it are counted by their full text, which has no formula.
    return func._schema.name if hasattr(func, "_schema") else str(func)


def _uncounted(*_: Any, **__: Any) -> None:
    return None


def _halved(flops: Callable[..., int]) -> MacFormula:
    """Return one of torch's own formulas, halved: they count a multiply-add as two."""
    return lambda *args, out, **kwargs: int(flops(*args, **kwargs, out_val=out)) // 2


def _second(formula: MacFormula) -> MacFormula:
    """Return `formula` for an operation whose first argument is only added, such as `addmm`."""
    return lambda _added, *args, **kwargs: formula(*args, **kwargs)


def _mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Count `a @ b`, also of batches: each element of `a` meets all columns of `b`."""
    return int(a.numel() * b.shape[-1])


def _grouped_mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Count `F.grouped_mm`, the experts of a mixture: each row meets the matrix of its group.

    If `a` is a batch and `b` is not, the columns of `b` are divided among the groups.
    """
    return _mm(a, b) // (a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1)


def _convolution(
    x: Tensor, w: Tensor, _bias: Any, _stride: Any, _pad: Any, _dilation: Any, transposed: bool,
    *_: Any, out: Tensor,
) -> int:  # fmt: skip
    """Count one filter for each output element; if transposed, for each input element."""
    return int((x if transposed else out).numel() * prod(w.shape[1:]))


def _matvec(a: Tensor, *_: Any, **__: Any) -> int:
    return int(a.numel())


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Count the scores and their product with the values, for all heads of the queries."""
    return int(prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]))


def _mkldnn_rnn(x: Tensor, w_ih: Tensor, w_hh: Tensor, *_: Any, **__: Any) -> int:
    """Count one layer in one direction; `x` is (steps, batch, features)."""
    return prod(x.shape[:-1]) * (w_ih.numel() + w_hh.numel())


def _cudnn_rnn(x: Tensor, weight: list[Tensor], *_: Any, **__: Any) -> int:
    """Count all layers; `x` is (steps, batch, features), or (tokens, features) when packed."""
    return prod(x.shape[:-1]) * sum(w.numel() for w in weight if w.dim() == 2)


_FORMULAS: dict[str, MacFormula] = {
    # The formulas of FlopCounterMode; its keys are operations.
    **{str(op).replace(".", "::", 1): _halved(f) for op, f in flop_registry.items()},
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::convolution": _convolution,
    "aten::addmm": _second(_mm),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_scaled_dot_product_attention_math_for_mps": _attention,
    "flex_attention": _attention,  # of higher order: no namespace; blocks it skips are counted
    "aten::mkldnn_rnn_layer": _mkldnn_rnn,
    "aten::_cudnn_rnn": _cudnn_rnn,
    "aten::_lstm_mps": lambda x, _hx, weight, *_, **__: _cudnn_rnn(x, weight),
    "aten::_grouped_mm": _grouped_mm,
    "aten::_scaled_mm_v2": _mm,
    "aten::mv": _matvec,
    "aten::dot": _matvec,
    "aten::vdot": _matvec,
    "aten::addmv": _second(_matvec),
    "aten::addbmm": _second(_mm),
    "aten::addr": _matvec,
}
