"""Record one side of a comparison: inputs, outputs and gradients of modules, or a file of them.

Builds on `first_difference` and `preserve_state`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hookkit._core.messages import missing_extra
from hookkit._core.modules import join, submodules
from hookkit._core.pytree import (
    Inputs,
    Parts,
    describe,
    tree_leaves,
    tree_leaves_of_objects,
    tree_leaves_with_path,
    tree_map,
)
from hookkit.errors import ArgumentError, HookError, OptionError
from hookkit.hooks.values import is_transforming, snapshot
from hookkit.inspection.first_difference import Call, CallTree
from hookkit.inspection.preserve import clone_inputs, preserve_state

WHO = "compare_models"


class Key(NamedTuple):
    """Names one value of a run: `what` is "input", "output", "grad" or "param_grad"."""

    what: str
    call: Call


@dataclass
class Side:
    """Holds the inputs, outputs and gradients of the modules of one side.

    Attributes:
        modules: the recorded modules by name; none if the side is a file.
        types: their classes by name, `""` if a file does not have them.
        paths: module → the paths of the parts of its output that are compared, if not all are.
        values: the tensors of each call, in the order in which the calls returned.
        tree: the calls of the run; empty if the side is a file.
        saved: True if the side is a file, which has outputs only.
        last: True if it has only the last call of each module.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    values: dict[Key, Parts] = field(default_factory=dict)
    tree: CallTree = field(default_factory=CallTree)
    saved: bool = False
    last: bool = False

    def ran(self) -> list[str]:
        """Return the names of the modules that have outputs, in the order of their first call."""
        gave = dict.fromkeys(key.call.name for key in self.values if key.what == "output")
        begun = dict.fromkeys(call.name for call in self.tree.begun)
        return [name for name in (begun or gave) if name in gave]

    def keep_last_calls(self) -> None:
        """Keep only the output of each module's last call, and store it as that of call 0."""
        every, self.values = self.values, {}
        for key, parts in every.items():
            if key.what == "output":
                key = Key("output", Call(key.call.name))
                self.values.pop(key, None)
                self.values[key] = parts


def run(
    model: nn.Module,
    side: Side,
    inputs: Inputs,
    grads: bool = False,
    loss: Callable[[Any], Any] | None = None,
) -> None:
    """Run `model` once, and add the inputs and outputs of its modules to `side`.

    The model, the random states and the inputs are restored.

    Args:
        model: as the user calls it; compiled parts run eagerly.
        side: its `modules` are recorded.
        inputs: for the model.
        grads: whether gradients are added too.
        loss: returns the number to differentiate, from the output; None for the output's sum.
    """
    edges = dict[Call, list[tuple[str, Any]]]()  # of the outputs that have a gradient

    def before(call: Call, _m: nn.Module, args: Any, kwargs: Any) -> None:
        parts = tree_leaves_with_path(Inputs(args, kwargs))
        side.values[Key("input", call)] = _copied(parts)

    def after(call: Call, _m: nn.Module, out: Any) -> None:
        parts = tree_leaves_of_objects(out)
        side.values[Key("output", call)] = _copied(parts)
        for path, t in parts if grads else ():
            if isinstance(t, Tensor) and t.requires_grad:
                edges.setdefault(call, []).append((path, get_gradient_edge(t)))

    side.types |= {name: type(m).__name__ for name, m in side.modules.items()}
    with ExitStack() as undo:
        undo.enter_context(preserve_state(model))
        undo.enter_context(torch.set_grad_enabled(grads))
        for handle in side.tree.follow(side.modules, before, after):
            undo.callback(handle.remove)
        copied = clone_inputs(inputs)
        out = model(*copied, **copied.kwargs)
        if grads:
            _differentiate(_scalar(loss, out), edges, side)


def _copied(parts: Parts) -> Parts:
    """Return `parts` with snapshots of the tensors, which no later write in place changes."""
    if is_transforming():
        raise HookError(
            f"{WHO}: a layer is called inside a transform of torch.func (vmap, grad), which ends "
            "before its tensors can be compared. Leave it out: modules= names the others."
        )
    return [(p, snapshot(t.detach()) if isinstance(t, Tensor) else t) for p, t in parts]


def _scalar(loss: Callable[[Any], Any] | None, out: Any) -> Tensor:
    """Return `loss(out)`; without `loss`, the sum of all floats in `out` that need a gradient."""
    floats = [t for t in tree_leaves(out) if t.is_floating_point() and t.requires_grad]
    value = sum(t.sum().to(floats[0]) for t in floats) if loss is None else loss(out)
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return value
    found = f"loss gave {describe(value)}" if loss else "no tensor that a model returns has one"
    raise ArgumentError(
        f"{WHO}: grads=True needs one number with a gradient, and {found}. Give models with "
        "parameters that require one, and a loss that gives a scalar."
    )


def _differentiate(loss: Tensor, edges: dict[Call, list[tuple[str, Any]]], side: Side) -> None:
    """Add the gradients in the order of the backward: of each output, then of the parameters."""

    def wanted() -> Iterator[tuple[Key, str, Any]]:
        left = dict(side.modules)
        compared = {id(m) for m in left.values()}
        # a module's parameters follow its first call, whose backward runs last
        for call in [*reversed(edges), *map(Call, side.modules)]:
            for path, edge in edges.get(call, ()) if call.name in left else ():
                yield Key("grad", call), path, edge
            if call.n == 0 and (m := left.pop(call.name, None)) is not None:
                for name, p in own_params(m, compared):
                    if p.requires_grad:
                        path = f".{name}" if call.name else name
                        yield Key("param_grad", call), path, p

    every = [*wanted()]
    if not every:  # nothing that is compared has a gradient
        return
    grads = torch.autograd.grad(loss, [x for *_, x in every], allow_unused=True)
    for (key, path, _), grad in zip(every, grads, strict=True):
        if grad is not None:
            side.values.setdefault(key, []).append((path, snapshot(grad)))


def own_params(m: nn.Module, others: Collection[int]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of `m` and its children, without modules whose id is in `others`.

    So the parameters of a ParameterList inside `m` are among them.
    """
    found = [*m.named_parameters(recurse=False)]
    for key, child in submodules(m).items():
        if id(child) not in others:
            found += [(join(key, name), p) for name, p in own_params(child, others)]
    return found


def float_dtype(m: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first floating point parameter of `m`; None if it has none."""
    return next((p.dtype for p in m.parameters() if p.is_floating_point()), None)


def fitted(inputs: Inputs, a: Any, b: nn.Module) -> Inputs:
    """Return `inputs` on the device of `b`; cast inputs of the dtype of `a` to the dtype of `b`.

    The dtype of a model is that of its first floating point parameter; a file has none. Finite
    values stay finite, because an attention mask may hold the lowest value of its dtype.
    """
    new = next((p for p in b.parameters() if p.is_floating_point()), None)
    if new is None:
        return inputs
    old = float_dtype(a) if isinstance(a, nn.Module) else None

    def one(t: Tensor) -> Tensor:
        if t.dtype != old:
            return t.to(new.device)
        most = torch.finfo(new.dtype).max
        if most < torch.finfo(t.dtype).max:
            t = torch.where(t.isfinite(), t.clamp(-most, most), t)
        return t.to(new.device, new.dtype)

    moved: Inputs = tree_map(one, inputs)
    return moved


def read(path: str | Path) -> Side:
    """Read the outputs in a file that `Hooks.save` wrote, inner modules before their containers.

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
        key = Key("output", Call(module, call or 0))
        side.values.setdefault(key, []).append((part + inner, tensors[text]))
    side.values = {key: side.values[key] for key in _inside_out([*side.values])}
    return side


def _inside_out(keys: list[Key]) -> list[Key]:
    """Return `keys` in their order, but containers after the modules inside them."""
    last: dict[str, int] = {}
    for i, key in enumerate(keys):
        parts = key.call.name.split(".") if key.call.name else []
        last |= {".".join(parts[:n]): i for n in range(len(parts) + 1)}
    return sorted(keys, key=lambda key: (last[key.call.name], -len(key.call.name)))
