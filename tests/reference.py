"""What plain PyTorch gives for a model of the zoo: the reference of every test of capture.

Runs, inputs, outputs and gradients are collected by hooks written here, on a model of their own;
nothing of hookkit is used, and its walker of containers shares nothing with hookkit's. What does
not depend on the test is made once in a process: do not write into it.
"""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from zoo import ZOO, Entry

Run = tuple[list[Tensor], type | None]


def once(f: Callable[[Entry], Any]) -> Callable[[Entry], Any]:
    """`f`, called once for each entry of the zoo."""
    made: dict[str, Any] = {}

    @wraps(f)
    def call(entry: Entry) -> Any:
        if entry.name not in made:
            made[entry.name] = f(entry)
        return made[entry.name]

    return call


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


def buffers(model: nn.Module) -> list[Tensor]:
    return [] if isinstance(model, torch.jit.ScriptModule) else list(model.buffers())


def run(entry: Entry, model: nn.Module) -> Run:
    """The output's tensors, and the type of what the model raised; from one seed."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return copied(entry.run(model)), None
        except Exception as e:
            return [], type(e)


@once
def plain_run(entry: Entry) -> Run:
    """`run` of a fresh model without hooks."""
    return run(entry, entry.build())


def is_recomputed() -> bool:
    """Whether a checkpoint runs a module again, in the backward pass."""
    return torch._C._current_autograd_node() is not None


@once
def by_hand(entry: Entry) -> tuple[dict[str, list[Any]], dict[str, list[Any]], Any]:
    """Inputs and outputs of each call of each module, and the result, by plain PyTorch hooks."""
    model = entry.build()
    inputs: dict[str, list[Any]] = {}
    outputs: dict[str, list[Any]] = {}

    def keep(store: dict[str, list[Any]], name: str, *seen: Any) -> None:
        if not is_recomputed():
            store.setdefault(name, []).append(copied(seen))

    for name, m in hookable(model).items():
        m.register_forward_pre_hook(
            lambda _, a, k, name=name: keep(inputs, name, a, k), with_kwargs=True
        )
        m.register_forward_hook(lambda _, i, o, name=name: keep(outputs, name, o))
    return inputs, outputs, run(entry, model)


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


def tapped(x: Any, calls: list[Any]) -> Any:
    """`x` with a clone of each tensor; their gradients come into a list that `calls` gets."""
    slots: list[Any] = []
    calls.append(slots)

    def one(t: Tensor) -> Tensor:
        i = len(slots)
        slots.append(None)
        if not t.requires_grad:
            return t
        twin = t.clone()  # for each place
        twin.register_hook(lambda g: slots.__setitem__(i, g.detach().clone()))
        return twin

    return changed(one, x)


@once
def gradients_by_hand(entry: Entry) -> dict[str, list[Any]]:
    """Output gradients of each call, by handing on a clone of every output."""
    model = entry.build()
    found: dict[str, list[Any]] = {}

    def after(name: str, module: nn.Module, args: Any, output: Any) -> Any:
        return None if is_recomputed() else tapped(output, found.setdefault(name, []))

    for name, m in hookable(model).items():
        m.register_forward_hook(partial(after, name))
    backward(entry, model)
    return found


@once
def input_gradients_by_hand(entry: Entry) -> dict[str, list[Any]]:
    """Input gradients of each call, by calling each module with clones."""
    model = entry.build()
    found: dict[str, list[Any]] = {}

    def before(name: str, module: nn.Module, *given: Any) -> Any:
        return None if is_recomputed() else tapped(given, found.setdefault(name, []))

    for name, m in hookable(model).items():
        m.register_forward_pre_hook(partial(before, name), with_kwargs=True)
    backward(entry, model)
    return found


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


@once
def plain_backward(entry: Entry) -> list[Tensor | None]:
    """`backward` of a fresh model without hooks."""
    return backward(entry, entry.build())


def arrived(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    return [g for g in gradients if g is not None]


GRADIENTS = [
    e
    for e in ZOO
    if not e.tags
    & {"raises", "no_grad_in", "meta", "scripted", "compiled", "checkpoint_reentrant", "sparse"}
]
