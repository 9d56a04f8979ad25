"""Where fake tensors know less than real ones: types, indices, the workspace of an LSTM.

Kernels without values do not compare types and cannot see an index, so that a model which fails in
truth would pass. What is suspicious raises here; the run is then repeated for real, and that one
fails in the model's own words or passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from hookkit.modelinfo.flops import SPARSE, TWO_SIDED, has_formula, name_of

# Products whose operands must be of one type. Autocast has made them so before they come here.
_ONE_DTYPE = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot",
                 "convolution", "_convolution", "mkldnn_rnn_layer")
)  # fmt: skip
_no_modes: Any = _python_dispatch._disable_current_modes  # real tensors amid fake ones
_DEAR = 2**27  # multiply-accumulates of an LSTM layer that is not run to see its workspace


def looks_at(name: str) -> bool:
    """True for an operation that must be seen each time: it may cost or fail another time."""
    return name == "aten::embedding" or has_formula(name)


def check(func: Any, args: tuple[Any, ...], real: Mapping[int, Tensor]) -> None:
    """Raises where a real run might; `real` gives the inputs by the id of their fakes."""
    name = name_of(func)
    if (name in TWO_SIDED or name == "aten::mv") and any(_entries_unknown(a) for a in args):
        raise RuntimeError(f"{name} of a sparse tensor whose entries are not known")
    if name in _ONE_DTYPE:
        kinds = {str(a.dtype) for a in args if isinstance(a, Tensor) and a.dim()}
        if len(kinds) > 1:
            raise TypeError(f"{name} of mixed types {', '.join(sorted(kinds))}")
    elif name == "aten::embedding" and (ids := real.get(id(args[1]))) is not None:
        _check_ids(ids, len(args[0]))


def _entries_unknown(a: Any) -> bool:
    """Of what `to_sparse` or `coalesce` makes of a fake tensor: it has none to count."""
    return isinstance(a, Tensor) and a.layout in SPARSE and not a._nnz()


def _check_ids(ids: Tensor, n: int) -> None:
    if type(ids) is not Tensor or ids.device.type != "cpu" or not ids.numel():
        return  # a real run with a wrong index would end a whole process on CUDA
    with _no_modes():
        low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= n:
        raise IndexError(f"indices {low}..{high} into {n} embeddings")


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` gives on fake tensors, also where only the fake refuses."""
    if name_of(func) == "aten::_grouped_mm" and args[0].dtype is not torch.bfloat16:
        return _grouped_mm(*args, **kwargs)
    return _completed(func, args, func(*args, **kwargs))


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """The experts of a mixture in float32 or float16, of which the fake kernel knows nothing."""
    if a.dtype is not b.dtype or a.shape[-1] != b.shape[-2]:
        raise RuntimeError("aten::_grouped_mm of types or sizes that differ")
    groups = [len(offs) if a.dim() == 2 else a.shape[0]] if a.dim() == b.dim() else []
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)


def _completed(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """`out` of an operation on fake tensors, with a workspace of the size of the real one.

    The fake LSTM of oneDNN returns an empty one; autograd keeps the real one, ten times the rest.
    """
    if name_of(func) != "aten::mkldnn_rnn_layer":
        return out
    plain = (tuple(a.shape) if isinstance(a, Tensor) else _frozen(a) for a in args)
    try:
        size = workspace_bytes(func, args[0].dtype, tuple(plain))
    except (RuntimeError, TypeError):  # built without oneDNN, or one that wants other arguments
        return out
    return (*out[:3], out[3].new_empty([size], dtype=torch.uint8), *out[4:])


def _frozen(a: Any) -> Any:
    return tuple(a) if isinstance(a, list) else a


@lru_cache(maxsize=256)
def workspace_bytes(func: Any, dtype: torch.dtype, args: tuple[Any, ...]) -> int:
    """Bytes of the workspace of `mkldnn_rnn_layer`, its tensors given by their shapes.

    oneDNN does not tell the size: the layer runs once on zeros. A long sequence runs on 4 and on 8
    steps, from which the size follows to a few percent.
    """
    steps, *rest = args[0]
    if prod(args[0][:-1]) * (prod(args[1]) + prod(args[2])) <= _DEAR or steps <= 8:
        return _run(func, dtype, args)
    at = {n: _run(func, dtype, ((n, *rest), *args[1:])) for n in (4, 8)}
    more: int = (at[8] - at[4]) * (steps - 8) // 4
    return at[8] + more


def _run(func: Any, dtype: torch.dtype, args: tuple[Any, ...]) -> int:
    with _no_modes(), torch.enable_grad():  # without gradients there is no workspace
        given = [torch.zeros(a, dtype=dtype, device="cpu") for a in args[:7]]
        made = func(*given, args[7], list(args[8]), *args[9:])[3]
        return 0 if made is None else int(made.nbytes)
