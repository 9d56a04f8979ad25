"""What a zoo entry is, and the registration every zoo file uses."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any

import torch
from torch import nn

NO_CALLS: Mapping[str, int] = {}


@dataclass(frozen=True)
class Entry:
    """One odd model with its hand-derived truth.

    `n_params` counts distinct Parameters by identity (elements; a complex number is one).
    `macs` are forward multiply-accumulates of linear algebra (matmul, convolution, attention);
    bias adds, norms, activations, softmax and look-ups count 0. `None`: no fixed truth, `note`
    says why. `calls` names modules and how often `__call__` runs in one forward (a subset; fused
    transformer path off). Tags:

    raises          forward raises, on purpose
    inplace         an in-place operation follows or is a module
    mutates_input   a forward writes into its input
    no_grad_in      outputs carry no gradient (generator of none, numbers, integers ...)
    lazy, scripted, compiled, meta, cyclic, checkpoint_reentrant, sparse
    """

    name: str
    build: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    n_params: int
    macs: int | None
    n_trainable: int
    kwargs: Callable[[], dict[str, Any]] = dict
    calls: Mapping[str, int] | None = None
    tags: frozenset[str] = field(default_factory=frozenset)
    note: str = ""

    def __repr__(self) -> str:
        return f"Entry({self.name})"

    def run(self, model: nn.Module) -> Any:
        """One forward of `model` on fresh inputs; a generator is run to its end."""
        out = model(*self.args(), **self.kwargs())
        return list(out) if isinstance(out, GeneratorType) else out


ENTRIES: list[Entry] = []


def seeded(f: Callable[[], Any]) -> Callable[[], Any]:
    """`f` with seed 0, leaving the global RNG where it was and silent about deprecations."""

    def call() -> Any:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            return f()

    return call


def add(
    name: str,
    build: Callable[[], nn.Module],
    args: Callable[[], tuple[Any, ...]],
    *,
    params: int,
    macs: int | None,
    trainable: int | None = None,
    kwargs: Callable[[], dict[str, Any]] = dict,
    calls: Mapping[str, int] | None = None,
    tags: Iterable[str] = (),
    note: str = "",
) -> None:
    """Register an entry; `trainable` defaults to all parameters."""
    n_trainable = params if trainable is None else trainable
    ENTRIES.append(
        Entry(
            name,
            seeded(build),
            seeded(args),
            params,
            macs,
            n_trainable,
            seeded(kwargs),
            calls,
            frozenset(tags),
            note,
        )
    )


def module(name: str, args: Callable[[], tuple[Any, ...]], **truth: Any) -> Callable[[type], type]:
    """Register the decorated class in evaluation mode, as `add` does."""

    def register(kind: type) -> type:
        add(name, lambda: kind().eval(), args, **truth)
        return kind

    return register


def rand(*shape: int) -> Callable[[], tuple[torch.Tensor]]:
    """`args` of one float tensor of this shape."""
    return lambda: (torch.randn(*shape),)


def ids(high: int, *shape: int) -> Callable[[], tuple[torch.Tensor]]:
    """`args` of one tensor of token ids below `high`."""
    return lambda: (torch.randint(high, shape),)
