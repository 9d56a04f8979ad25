"""How one operation runs on fake tensors: as an equal call before, or by a kernel without values.

Builds on `fake_tensors` and `flops`. What an operation returns on fake tensors follows from the
shapes, strides, dtypes and devices of its operands and from its other arguments. A model repeats
its operations, so the first call runs as PyTorch runs it and its result is noted; the others only
make new tensors of that kind. PyTorch's own such cache takes 70 µs a call against 7 here: it also
serves the compiler, and notes values that are not known before the run.

Kernels without values compare no dtypes and see no index. So `check` raises where a real run might;
the run is then repeated for real, and fails with the model's own error or passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookkit.modelinfo.fake_tensors import (
    FakeTensor,
    _disable_current_modes,
    in_kernel_invocation_manager,
)
from hookkit.modelinfo.flops import SPARSE, SPARSE_PRODUCTS, macs_of, name_of
from hookkit.modelinfo.tree import storage_of
from hookkit.nested import PLAIN, leaves

_META = torch.device("meta")
_VALUES = PLAIN | {torch.dtype, torch.device, torch.layout, torch.memory_format}
_WRITTEN = object()  # stands for the first operand, which an operation has written and returns


class _New(NamedTuple):
    """A tensor with memory of its own that an operation returns."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Result(NamedTuple):
    """What an operation returns for operands of certain shapes, and its multiply-accumulates."""

    kind: Any  # tuple or list; None for one value
    parts: tuple[Any, ...]  # each `_New`, `_WRITTEN` or None
    macs: int | None


class _Operation:
    """What is always true of one operation; read at its first call."""

    __slots__ = ("is_repeatable", "is_view")

    def __init__(self, func: Any) -> None:
        whole = not _is_made_of_others(func)
        self.is_view = whole and _is_view(func)
        self.is_repeatable = whole and not self.is_view and _is_repeatable(func)


class FakeKernels:
    """The operations of one run on fake tensors.

    Args:
        mode: in which the tensors are fake.
        real: the given inputs by the id of their fakes.
        made: gets weak references to the tensors that the run makes.
        macs: whether multiply-accumulates are counted.
    """

    def __init__(
        self, mode: Any, real: Mapping[int, Tensor], made: list[weakref.ref[Tensor]], *, macs: bool
    ) -> None:
        self.mode, self.real, self.made, self.macs = mode, real, made, macs
        self._operations: dict[Any, _Operation] = {}
        self._results: dict[tuple[Any, ...], _Result] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        self._full = 1000  # references in `made`

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """What `func` returns, and its `macs_of`. Raises where a real run might."""
        op = self._operations.get(func)
        if op is None:
            op = self._operations[func] = _Operation(func)
        if op.is_view and not kwargs and self._is_plain(args[0]):
            return self._view(func, args), 0
        key: list[Any] = [op, torch.get_default_dtype()]
        known = op.is_repeatable and self._describe(key, (*args, *kwargs, *kwargs.values()))
        if known and (result := self._results.get(tuple(key))) is not None:
            return self._repeated(result, args), result.macs
        check(func, args, self.real)
        out = call(func, args, kwargs)
        self._note(*leaves(out))
        macs = macs_of(func, args, kwargs, out) if self.macs else 0
        if known and (result := _result(key, args, kwargs, out, macs)) is not None:
            self._results[tuple(key)] = result
        elif known:
            op.is_repeatable = False
        return out, macs

    def _is_plain(self, t: Any) -> bool:
        """True for this run's own fake tensors, but those that carry their value."""
        return type(t) is FakeTensor and t.constant is None and t.fake_mode is self.mode

    def _describe(self, key: list[Any], values: Any) -> bool:
        """Appends to `key` what a result depends on; False if `values` hold what has rules."""
        for v in values:
            kind = type(v)
            if kind is FakeTensor:
                if not self._is_plain(v) or v.layout is not torch.strided:
                    return False
                key += (v.dtype, v.shape, v.stride(), v.fake_device)
            elif kind in _VALUES:
                key += (kind, v)  # 1, 1.0 and True are equal
            elif kind is list or kind is tuple:
                key += (kind, len(v))
                if not self._describe(key, v):
                    return False
            else:
                return False
        return True

    def _repeated(self, result: _Result, args: tuple[Any, ...]) -> Any:
        """What an operation returns by its noted result."""
        parts = [
            self._new(part) if type(part) is _New else args[0] if part is _WRITTEN else part
            for part in result.parts
        ]
        return parts[0] if result.kind is None else result.kind(parts)

    def _new(self, one: _New) -> Tensor:
        # Private, since torch 2.0, as the mode's own way in `_view`: calls in here do not come
        # back to the modes.
        with torch._C._DisableTorchDispatch():
            elem = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=_META)
        return self._fake(elem, one.device)

    def _view(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What a view returns, by its kernel alone, as the mode calls it; it is short."""
        with in_kernel_invocation_manager(self.mode):
            out = func(*args)
        device = args[0].fake_device
        if isinstance(out, Tensor):
            return out if isinstance(out, FakeTensor) else self._fake(out, device)
        return [self._fake(t, device) for t in out]

    def _fake(self, elem: Tensor, device: torch.device) -> Tensor:
        """`FakeTensor(mode, elem, device)`, which takes 7 µs, in 1.5."""
        attributes = self._attributes.get(device)
        if attributes is None:
            fake = FakeTensor(self.mode, elem, device)
            self._attributes[device] = dict(vars(fake))
        else:
            # Private, in torch 2.11 to 2.13: what the constructor does, without its checks.
            fake = Tensor._make_subclass(
                FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
            )
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
            vars(fake).update(attributes)
        self._note(fake)
        return fake

    def _note(self, *tensors: Tensor) -> None:
        self.made += map(weakref.ref, tensors)
        if len(self.made) > self._full:
            self.made[:] = [ref for ref in self.made if ref() is not None]
            self._full = 2 * len(self.made) + 1000


# What these return shares the memory of the operand, though their signatures do not say so.
_VIEWS = frozenset(("aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes"))


def _is_made_of_others(func: Any) -> bool:
    """True for an operation without a kernel of its own: PyTorch divides it before a mode sees it.

    Called by itself it may look at the device, which is `meta` in a kernel, and return its operand.
    """
    # Private, since torch 1.8: which kernels an operation has; some of TorchScript's have none.
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    return not torch._C._dispatch_has_kernel(name) or has_kernel(name, "CompositeImplicitAutograd")


def _is_view(func: Any) -> bool:
    """True if `func` returns its first argument seen differently, and takes no other tensor."""
    name = name_of(func)
    if name in _ENTRIES or not (getattr(func, "is_view", False) or name in _VIEWS):
        return False
    kinds = [str(argument.type) for argument in func._schema.arguments]
    return kinds[0] == "Tensor" and not any("Tensor" in kind for kind in kinds[1:])


def _is_repeatable(func: Any) -> bool:
    """True if what `func` returns depends on shapes, and it writes its first argument or none."""
    space, _, short = name_of(func).partition("::")
    if space not in ("aten", "prims") or short == "embedding":  # `check` looks at its index
        return False
    arguments = func._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    return written in ([], [0]) and torch.Tag.inplace_view not in func.tags


def _result(
    key: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, macs: int | None
) -> _Result | None:
    """What is noted of `out`; None if it cannot be made again from what a key holds."""
    kind = type(out) if type(out) in (tuple, list) else None
    taken = {storage_of(t)[0] for t in leaves((args, kwargs))}
    parts: list[Any] = []
    for part in (out,) if kind is None else out:
        if args and part is args[0] and isinstance(part, Tensor):
            same = [part.dtype, part.shape, part.stride()] == key[2:5]
            part = _WRITTEN if same else part
        elif type(part) is FakeTensor and part.constant is None and _is_whole(part, taken):
            part = _New(part.shape, part.stride(), part.dtype, part.fake_device)
        parts.append(part)
    # Numbers are about more than shapes: `_has_same_storage_numel`, `_nnz`.
    known = all(type(p) is _New or p is _WRITTEN or p is None for p in parts)
    return _Result(kind, tuple(parts), macs) if known else None


def _is_whole(t: Tensor, taken: set[Any]) -> bool:
    """True if `t` has all of a memory of its own, which is not in `taken` and is put there."""
    if t.layout is not torch.strided or t.storage_offset():
        return False
    # The last is private, in torch 2.11 to 2.13: a zero tangent of forward-mode AD.
    if t.is_conj() or t.is_neg() or t._is_zerotensor():
        return False
    (storage, size), last = storage_of(t), 0
    if t.numel():
        last = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    is_own = storage not in taken and size == last * t.element_size()
    taken.add(storage)
    return is_own


# --- what kernels without values do not see

# Products whose operands must be of one dtype. Autocast has made them so before they come here.
_ONE_DTYPE = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot",
                 "convolution", "_convolution", "mkldnn_rnn_layer")
)  # fmt: skip


# What a sparse tensor is made of.
_ENTRIES = frozenset(
    f"aten::{name}" for name in ("_nnz", "values", "_values", "indices", "_indices")
)


def check(func: Any, args: tuple[Any, ...], real: Mapping[int, Tensor]) -> None:
    """Raises where a real run might; `real` gives the inputs by the id of their fakes."""
    name = name_of(func)
    if (name in SPARSE_PRODUCTS or name in _ENTRIES) and any(_entries_unknown(a) for a in args):
        raise RuntimeError(f"{name} of a sparse tensor whose entries are not known")
    if name in _ONE_DTYPE:
        kinds = {str(a.dtype) for a in args if isinstance(a, Tensor) and a.dim()}
        if len(kinds) > 1:
            raise TypeError(f"{name} of mixed types {', '.join(sorted(kinds))}")
    elif name == "aten::embedding" and (ids := real.get(id(args[1]))) is not None:
        _check_ids(ids, len(args[0]))


def _entries_unknown(a: Any) -> bool:
    """True for what `to_sparse` or `coalesce` makes of a fake tensor: it has none to count."""
    # `_nnz` is private, in torch 2.11 to 2.13; `values()` refuses tensors that are not coalesced.
    return isinstance(a, Tensor) and a.layout in SPARSE and not a._nnz()


def _check_ids(ids: Tensor, n: int) -> None:
    if type(ids) is not Tensor or ids.device.type != "cpu" or not ids.numel():
        return  # a real run with a wrong index would end a whole process on CUDA
    with _disable_current_modes():  # type: ignore[no-untyped-call, unused-ignore]
        low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= n:
        raise IndexError(f"indices {low}..{high} into {n} embeddings")


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func` on fake tensors, also where only its fake kernel refuses."""
    if name_of(func) == "aten::_grouped_mm" and args[0].dtype is not torch.bfloat16:
        return _grouped_mm(*args, **kwargs)
    return func(*args, **kwargs)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """The experts of a mixture in float32 or float16; the fake kernel knows bfloat16 only."""
    if a.dtype is not b.dtype or a.shape[-1] != b.shape[-2]:
        raise RuntimeError("aten::_grouped_mm of types or sizes that differ")
    groups = [len(offs) if a.dim() == 2 else a.shape[0]] if a.dim() == b.dim() else []
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)
