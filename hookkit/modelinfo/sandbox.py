"""Copies of a model to run in its place, and a world that is put back afterwards.

What a forward can change is the model (buffers, modes, attributes, layers built on first use), its
inputs, and the process (flags; for random states see `drawing`). A copy takes care of the first: on
fake tensors it costs no memory and nothing is computed. The hooks of the model go with it: see
`hooked`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.hooks.global_hooks import stand_in_runs
from hookkit.interrupts import Undo, block
from hookkit.modelinfo import hooked
from hookkit.nested import Inputs, leaves, tmap

try:  # private in torch 2.11-2.13; without it every summary is a real run
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
except ImportError:  # pragma: no cover
    FakeCopyMode = FakeTensor = FakeTensorMode = None  # type: ignore[assignment, misc, unused-ignore]


def new_fake_mode() -> Any:
    """A mode in which tensors have shapes and no values; None where torch has none."""
    return None if FakeTensorMode is None else FakeTensorMode(allow_non_fake_inputs=True)


_SHARE_BYTES = 2**30  # from here on a real copy shares the parameters with the model


def is_sharded(m: nn.Module) -> bool:
    """True if `fully_shard` gave `m` a class of its own, such as FSDPLinear."""
    return hooked.from_fsdp(type(m).__module__)


def copy_memo(model: nn.Module) -> dict[int, Any]:
    """A `deepcopy` memo for `model` that leaves hooks behind (`hooked.put_on` brings them).

    Tensors that autograd made (which refuse to be copied) are cut from their graph.
    """
    memo: dict[int, Any] = {}
    hooked.leave_off(model, memo)
    for m in model.modules():
        if isinstance(m, torch.jit.ScriptModule):
            continue
        for key, value in m.__dict__.items():
            if key.startswith("__composable_api"):  # streams and process groups of fully_shard
                memo[id(value)] = type(value)()
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    return memo


def real_copy(model: nn.Module) -> nn.Module:
    """A deep copy of `model`, hooks included; parameters of 1 GiB and more stay shared."""
    memo = copy_memo(model)
    params = [p for p in model.parameters() if not nn.parameter.is_lazy(p)]
    if sum(p.numel() * p.element_size() for p in params) > _SHARE_BYTES:
        memo |= {id(p): p for p in params}
    made = copy.deepcopy(model, memo)
    hooked.put_on(model, memo)
    return made


def fake_copy(model: nn.Module, mode: Any, home: torch.device | None = None) -> nn.Module:
    """A deep copy of `model` whose tensors are fake: shapes, types and ties without values.

    What stands on `meta` is taken to be on `home`, the device of the inputs.
    """
    with torch.no_grad():
        memo = copy_memo(model)
        for m in model.modules():
            if isinstance(m, torch.jit.ScriptModule):
                continue
            loose = [v for v in vars(m).values() if isinstance(v, Tensor) and v.is_meta]
            for t in (*m._parameters.values(), *m._buffers.values(), *loose):
                if t is not None and id(t) not in memo and _is_plain(t):
                    memo[id(t)] = _faked(t, mode, home)
        with FakeCopyMode(mode), _copyable(model):
            made = copy.deepcopy(model, memo)
            hooked.put_on(model, memo)
            return made


def has_sparse(model: nn.Module, given: Inputs) -> bool:
    """True if a parameter, buffer or input is sparse: a fake one does not know its elements."""
    found = (*model.parameters(), *model.buffers(), *leaves(given))
    return any(str(t.layout).startswith("torch.sparse") for t in found)


def fake_inputs(given: Inputs, mode: Any) -> Inputs:
    """A deep copy of `given` with fake tensors, so that a cache which the forward fills is ours."""

    def fake(t: Tensor) -> Any:
        return mode.from_tensor(t.detach().requires_grad_(t.requires_grad) if t.grad_fn else t)

    with FakeCopyMode(mode):
        return _copied(given, fake)


def real_inputs(given: Inputs) -> Inputs:
    """A deep copy of `given`, tensors cloned and cut from their graph."""
    return _copied(given, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def _copied(given: Inputs, one: Callable[[Tensor], Any]) -> Inputs:
    made = {id(t): one(t) for t in leaves(given)}
    try:
        copied: Inputs = copy.deepcopy(given, dict(made))
    except Exception:  # an open file, a generator: it goes in as it is
        copied = tmap(lambda t: made[id(t)], given)
    return copied


@block
def _copyable(model: nn.Module) -> Iterator[None]:
    """Gives sharded modules their own classes back inside: FSDP's refuse to be copied."""
    sharded = [(m, type(m)) for m in model.modules() if is_sharded(m)]
    try:
        for m, kind in sharded:
            m.__class__ = kind.__mro__[2]  # as FSDP itself finds the class it was derived from
        yield
    finally:
        for m, kind in sharded:
            m.__class__ = kind


def _is_plain(t: Tensor) -> bool:
    """True for ordinary dense tensors; the others go the long way through torch's converter.

    A DTensor counts as the whole tensor that its ranks hold together.
    """
    if type(t).__name__ == "DTensor":
        return True
    usual = type(t) in (Tensor, nn.Parameter, nn.Buffer) and t.layout is torch.strided
    return usual and not (t.is_quantized or t.is_nested or t.is_inference() or t.is_conj())


def _faked(t: Tensor, mode: Any, home: torch.device | None) -> Tensor:
    """What torch's converter makes of a plain tensor, ten times as fast: it keeps no aliases."""
    elem = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    fake: Tensor = FakeTensor(mode, elem, home if home and t.is_meta else t.device)
    return nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake


# Looked up once: a Ctrl-C inside `getLogger` can leave the lock of all logging held (Python 3.11).
_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@block
def undisturbed() -> Iterator[None]:
    """Keeps what a run of a copy might change outside of it, for this thread, also after an error.

    The grad mode, and two switches of the process that are safe with several threads inside: that
    of the fused transformer path, off inside, and the log of fake tensors, which prints what we
    handle.
    """
    quiet = _Quiet()
    with Undo() as stack:
        stack.enter_context(stand_in_runs())
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        stack.enter_context(torch.inference_mode(False))  # a copy made inside could not be trained
        stack.callback(_LOG.removeFilter, quiet)
        _LOG.addFilter(quiet)
        yield


class _Quiet(logging.Filter):
    """Drops what the thread logs that made this."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a record of that thread."""
        return record.thread != self.thread


@block
def put_back(model: nn.Module) -> Iterator[None]:
    """Puts the modules of `model` back as they were: modes, attributes, hooks, buffers' content.

    Attributes are restored one level deep (a list that grew shrinks again); tensors whose version
    moved get their content back. Cost: one clone of every buffer and parameter.
    """
    modules = list(model.modules())
    shells = [(m, type(m), _shell(m)) for m in modules]
    tensors = {id(t): t for m in modules for t in (*m.parameters(False), *m.buffers(False))}
    saved = [(t, t._version, t.detach().clone()) for t in tensors.values() if not _lazy(t)]
    try:
        yield
    finally:
        for m, kind, shell in shells:
            m.__class__ = kind
            m.__dict__.clear()
            m.__dict__.update({k: _restored(old, content) for k, (old, content) in shell.items()})
        with torch.no_grad():
            for t, version, content in saved:
                if t._version != version:
                    t.copy_(content)


def _lazy(t: Tensor) -> bool:
    return bool(nn.parameter.is_lazy(t))


def _shell(m: nn.Module) -> dict[str, tuple[Any, Any]]:
    return {
        k: (v, copy.copy(v) if isinstance(v, list | dict | set) else None)
        for k, v in vars(m).items()
    }


def _restored(old: Any, content: Any) -> Any:
    if isinstance(old, list):
        old[:] = content
    elif isinstance(old, dict | set):
        old.clear()
        old.update(content)
    return old
