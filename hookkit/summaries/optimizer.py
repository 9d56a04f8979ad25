"""What an optimizer holds of a model: its groups, the bytes of its state, and likely mistakes.

The state is what is there; before the first step it is what the optimizer's class and options will
allocate, known for PyTorch's own optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookkit.modelinfo.tree import numel, storage_of
from hookkit.nested import leaves

# Copies of a parameter in the state of each class, which its options decide.
_COPIES: dict[str, Callable[[dict[str, Any]], int]] = {
    "SGD": lambda g: bool(g.get("momentum")),
    "Adam": lambda g: 2 + bool(g.get("amsgrad")),
    "AdamW": lambda g: 2 + bool(g.get("amsgrad")),
    "NAdam": lambda g: 2,
    "RAdam": lambda g: 2,
    "Adamax": lambda g: 2,
    "SparseAdam": lambda g: 2,
    "Adagrad": lambda g: 1,
    "Adadelta": lambda g: 2,
    "RMSprop": lambda g: 1 + bool(g.get("momentum")) + bool(g.get("centered")),
    "Rprop": lambda g: 2,
    "ASGD": lambda g: 1,
    "Muon": lambda g: 1,
}


def grad_bytes(params: Iterable[Tensor]) -> int:
    """Bytes of the gradients that a backward pass makes for `params`."""
    return sum(_bytes(p) for p in params if p.requires_grad)


def _bytes(p: Tensor) -> int:
    return 0 if nn.parameter.is_lazy(p) else int(p.numel() * p.element_size())


def _state_bytes(opt: Optimizer) -> tuple[int | None, str]:
    """Bytes of the state of `opt`, and "" or " (after the first step)"; None if unknown."""
    held = {storage_of(t) for state in opt.state.values() for t in leaves(dict(state))}
    if held:
        return sum(size for _, size in held), ""
    copies = _COPIES.get(type(opt).__name__)
    if copies is None:
        return None, ""
    trained = [(g, p) for g in opt.param_groups for p in g["params"] if p.requires_grad]
    return sum(int(copies(g)) * _bytes(p) for g, p in trained), " (after the first step)"


def read(opt: Optimizer) -> dict[str, Any]:
    """Name, groups and state of `opt` as plain values."""
    state, source = _state_bytes(opt)
    return {
        "name": type(opt).__name__,
        "state_bytes": state,
        "state_from": source,
        "groups": [_group(i, g) for i, g in enumerate(opt.param_groups)],
    }


def _group(i: int, group: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": i,
        "name": str(group.get("name", "")),
        "n_params": sum(map(numel, group["params"])),
        "n_trainable": sum(numel(p) for p in group["params"] if p.requires_grad),
        "lr": _number(group.get("lr")),
        "weight_decay": _number(group.get("weight_decay")),
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | Tensor) else None


def warnings_of(params: list[tuple[str, Tensor]], opt: Optimizer) -> list[str]:
    """Trainable parameters that are in no group, and weights of one memory in two groups."""
    held = {id(p) for group in opt.param_groups for p in group["params"]}
    lost = [name for name, p in params if p.requires_grad and id(p) not in held]
    found = []
    if lost:
        found.append(f"{count(lost, 'trainable parameter')} in no optimizer group: {some(lost)}")
    homes: dict[Any, int] = {}
    names = {id(p): name for name, p in params}
    for i, group in enumerate(opt.param_groups):
        for p in group["params"]:
            key = storage_of(p)[0]
            if homes.setdefault(key, i) != i:
                found.append(
                    f"tied weights in two optimizer groups: {names.get(id(p), 'a parameter')} "
                    f"is in group {homes[key]} and in group {i}, and is stepped twice"
                )
    return found


def some(names: Sequence[str], n: int = 4) -> str:
    """The first `n` names and how many more there are."""
    more = f" and {len(names) - n} more" if len(names) > n else ""
    return ", ".join(names[:n]) + more


def count(names: Sequence[str], what: str) -> str:
    """How many, in words that agree: `1 trainable parameter is`, `2 trainable parameters are`."""
    return f"{len(names)} {what} is" if len(names) == 1 else f"{len(names)} {what}s are"
