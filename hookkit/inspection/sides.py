"""One side of a comparison: what the modules of a model gave in a run, or what a file has of one.

Builds on `hooks` and `preserve_state`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hookkit._core.messages import missing_extra
from hookkit._core.modules import join, submodules
from hookkit._core.pytree import Inputs, Parts, describe, tree_leaves, tree_leaves_of_objects
from hookkit.errors import ArgumentError, HookError, OptionError
from hookkit.hooks.attach import Switch, attach
from hookkit.hooks.calls import recomputing
from hookkit.hooks.values import is_transforming, snapshot
from hookkit.inspection.preserve import preserve_state, real_inputs

WHO = "compare_models"
Alone = Callable[[str, Inputs], tuple[Parts, str]]
"""Gives what the second side's module has for a call, by the name on the first; and a note."""


class Key(NamedTuple):
    """One value of a run: an output or a gradient, of one call of one module."""

    name: str
    what: str
    call: int


@dataclass
class Side:
    """What the modules of one side gave, in the order in which they finished.

    Attributes:
        values: the tensors of each call, and gradients.
        types: the modules' classes by name, `""` where they are not known.
        paths: the modules of whose results only some paths count, with these.
        functions: the modules without parameters, which another model may have as functions.
        own: for each call, what the second side's module gave for the same inputs, and a note.
        saved: whether it is from a file, which has tensors only.
        last: whether it has only the last call of each module.
    """

    values: dict[Key, Parts] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    own: dict[Key, tuple[Parts, str]] = field(default_factory=dict)
    saved: bool = False
    last: bool = False

    def last_calls(self) -> Side:
        """The same with the last call of each module alone, as its first."""
        values = dict[Key, Parts]()
        for key, parts in self.values.items():
            key = key._replace(call=0)
            values.pop(key, None)
            values[key] = parts
        return replace(self, values=values)


def copied_parts(parts: Parts) -> Parts:
    """`parts` with snapshots of the tensors, which no later operation in place changes."""
    if is_transforming():
        raise HookError(
            f"{WHO}: a layer is called inside a transform of torch.func (vmap, grad), which ends "
            "before its tensors can be compared. Leave it out: modules= names the others."
        )
    return [(p, snapshot(t.detach()) if isinstance(t, Tensor) else t) for p, t in parts]


def run(
    model: nn.Module,
    modules: dict[str, nn.Module],
    inputs: Inputs,
    into: Side,
    loss: Callable[[Any], Any] | None = None,
    alone: Alone | None = None,
) -> None:
    """Runs `model` once and adds to `into` what its modules give.

    The model, its random states and the inputs are as before afterwards.

    Args:
        model: as the user calls it; compiled parts run eagerly.
        modules: those of it that are recorded, by name.
        inputs: for the model.
        into: where values are added, in the order in which modules finish.
        loss: gives what is differentiated from the output; None for no gradients.
        alone: called as a module begins with its name and inputs, for `Side.own`.
    """
    switch, calls = Switch(), Counter[str]()
    begun: list[tuple[str, tuple[Parts, str]]] = []  # the innermost call last
    edges = dict[Key, list[tuple[str, Any]]]()  # of the outputs that have a gradient

    def begin(name: str, _m: nn.Module, args: Any, kwargs: Any) -> None:
        if alone is None or recomputing():
            return
        switch.on = False  # the second model may have the same modules
        try:
            begun.append((name, alone(name, Inputs(args, kwargs))))
        finally:
            switch.on = True

    def end(name: str, _m: nn.Module, _args: Any, _kwargs: Any, out: Any) -> None:
        if recomputing():  # a checkpoint's second run
            return
        key = Key(name, "output", calls[name])
        calls[name] += 1
        while begun:
            began, own = begun.pop()
            if began == name:  # else the model has caught an exception of the call that began
                into.own[key] = own
                break
        parts = tree_leaves_of_objects(out)
        into.values[key] = copied_parts(parts)
        for path, t in parts if loss else ():
            if isinstance(t, Tensor) and t.requires_grad:
                edges.setdefault(key._replace(what="grad"), []).append((path, get_gradient_edge(t)))

    into.types |= {name: type(m).__name__ for name, m in modules.items()}
    into.functions |= {n for n, m in modules.items() if next(m.parameters(), None) is None}
    with ExitStack() as undo:
        undo.enter_context(preserve_state(model))
        undo.enter_context(torch.set_grad_enabled(loss is not None))
        for name, m in modules.items():
            if alone is not None:
                begins = attach(m, partial(begin, name), pre=True, switch=switch)
                undo.callback(begins.remove)
            undo.callback(attach(m, partial(end, name), switch=switch).remove)
        copied = real_inputs(inputs)
        out = model(*copied, **copied.kwargs)
        if loss is not None:
            _differentiate(_number(loss(out)), modules, edges, into)


def _number(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    raise ArgumentError(
        f"{WHO}: loss gave {describe(loss)}, and one number with a gradient is needed. Give models "
        "with parameters that require one, and a loss that gives a scalar."
    )


def _differentiate(
    loss: Tensor, modules: dict[str, nn.Module], edges: dict[Key, list[tuple[str, Any]]], into: Side
) -> None:
    """Adds the gradients of the outputs, the last one first, and of the modules' parameters."""
    wanted = [(key, path, edge) for key in reversed(edges) for path, edge in edges[key]]
    compared = {id(m) for m in modules.values()}
    wanted += [(Key(name, "param_grad", 0), f".{k}" if name else k, p)
               for name, m in modules.items()
               for k, p in _params_of(m, compared) if p.requires_grad]  # fmt: skip
    if not wanted:  # nothing that is compared has a gradient
        return
    grads = torch.autograd.grad(loss, [x for *_, x in wanted], allow_unused=True)
    for (key, path, _), grad in zip(wanted, grads, strict=True):
        if grad is not None:
            into.values.setdefault(key, []).append((path, snapshot(grad)))


def _params_of(m: nn.Module, compared: set[int]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of `m` and of what is inside it, such as a ParameterList, but not compared."""
    found = [*m.named_parameters(recurse=False)]
    for key, child in submodules(m).items():
        if id(child) not in compared:
            found += [(join(key, name), p) for name, p in _params_of(child, compared)]
    return found


def sum_of_outputs(out: Any) -> Tensor:
    """The sum of all floating point tensors in what a model gave."""
    parts = [t.sum() for t in tree_leaves(out) if t.is_floating_point() and t.requires_grad]
    if not parts:
        raise ArgumentError(
            f"{WHO}: grads=True, and no tensor that a model returns has a gradient. Give models "
            "with parameters that require one, or a loss."
        )
    return torch.stack([part.to(parts[0]) for part in parts]).sum()


def read(path: str | Path) -> Side:
    """Read the outputs in a file that `Hooks.save` wrote, containers after what is inside them.

    Raises:
        OptionError: the file is missing, damaged, of another writer, or has no outputs.
        MissingExtraError: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise missing_extra("safetensors", "collect", "read a saved capture") from None
    try:
        with safe_open(path, framework="pt") as file:
            about = {k: json.loads(text) for k, text in (file.metadata() or {}).items()}
            tensors = {key: file.get_tensor(key) for key, *_ in about["keys"]}
    except (OSError, SafetensorError, LookupError, ValueError) as why:
        raise OptionError(
            f"{WHO}: {path} cannot be read ({why}). Give a file that Hooks.save wrote."
        ) from why
    if (kind := about["kind"]) != "forward":
        raise OptionError(
            f"{WHO}: {path} has what hooks of kind {kind!r} stored, which are no outputs. Save "
            "what hook_outputs stored."
        )
    side = Side(saved=True, last=all(call is None for _, _, call, _ in about["keys"]))
    for text, name, call, inner in about["keys"]:
        part = about["paths"][name]
        module = name.removesuffix(part)
        side.paths[module] = (*side.paths.get(module, ()), part)
        side.types[module] = about["types"][name]
        key = Key(module, "output", call or 0)
        side.values.setdefault(key, []).append((part + inner, tensors[text]))
    side.values = {key: side.values[key] for key in _inside_out([*side.values])}
    return side


def _inside_out(keys: list[Key]) -> list[Key]:
    """`keys` in their order, but a container's after those of what is inside it."""
    last: dict[str, int] = {}
    for i, key in enumerate(keys):
        parts = key.name.split(".") if key.name else []
        last |= {".".join(parts[:n]): i for n in range(len(parts) + 1)}
    return sorted(keys, key=lambda key: (last[key.name], -len(key.name)))
