"""`compare_models`: runs two models on the same inputs and compares what their layers give.

Builds on `hooks`, `selecting` and `modelinfo.sandbox`. What the first model gives is stored; the
second one's outputs are compared in their hooks and not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_callable, check_flag, check_module, check_number
from hookkit.comparing.comparison import Comparison
from hookkit.comparing.names import Names
from hookkit.comparing.pairs import Kept, Pairs
from hookkit.comparing.saved import Saved
from hookkit.comparing.sides import WHO, Side, adapted, chosen_of, entries, is_compiled
from hookkit.errors import ArgumentError, SelectionError
from hookkit.interrupts import Undo
from hookkit.modelinfo import sandbox
from hookkit.modelinfo.tree import Tree
from hookkit.modules import find
from hookkit.nested import Inputs, leaves
from hookkit.selecting import select

Model = nn.Module | str | Path


def compare_models(
    a: Model,
    b: Model,
    *inputs: Any,
    modules: Any = None,
    names: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    grads: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    isolate: bool = False,
    **kwargs: Any,
) -> Comparison:
    """What the layers of two models give for the same inputs, layer by layer.

    For a port and its reference, float32 and bfloat16, before and after surgery, training and
    evaluation mode. `a` is the expected one. Both run in the modes in which they are, from the same
    random state, without gradients unless `grads`; random states, buffers and modes are restored.
    Of a compiled model only what it returns is compared, since hooks inside would change what is
    compiled.

    Args:
        a: a model, or a file that `Hooks.save` wrote: run on one machine, compare on another.
        b: the same. A model gets the inputs on its own device, and floating point ones in its own
            dtype where the two models' differ.
        *inputs: for the models; none where both are files.
        modules: selectors of `a`'s modules, as for `select`; all that run by default.
        names: names in `a` and the names in `b` that they stand for, where these differ:
            `{"encoder.layers.*": "transformer.h.*"}`. A name stands for all below it; the longest
            that fits counts.
        rtol: relative tolerance; by default torch.testing's for the looser of the two dtypes.
        atol: absolute tolerance; as `rtol`.
        grads: whether gradients are compared too: of each output, and of the parameters of the
            compared modules. `.grad` stays as it is. The gradients of both models are stored.
        loss: with `grads`, gives what is differentiated from a model's output; by default the sum
            of all floating point tensors in it.
        isolate: runs `b` once more and gives each of its modules what `a`'s received, for
            `Row.own_rel`: the error that a module adds itself, not that of the layers before.
        **kwargs: keyword inputs for the models.

    Returns:
        The rows, in the order in which `a`'s modules finish; `.first` is the first beyond the
        tolerance.

    Raises:
        ArgumentError: `a` or `b` is neither a model nor a file; there are inputs for files, or
            gradients of them; nothing has a gradient.
        OptionError: an option has a value that cannot work, or a file cannot be read.
        SelectionError: `modules` or `names` match nothing.
        MissingExtraError: safetensors is not installed, for a file.

    Cost: a forward of each model, of `b` two with `isolate`; what `a`'s layers gave is stored.
    Buffers are cloned.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x = torch.randn(3, 4)
    >>> compare_models(net, net, x).first is None
    True
    >>> other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> _ = other.load_state_dict({**net.state_dict(), "2.bias": torch.ones(2)})
    >>> compare_models(net, other, x).first.name
    '2'
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            check_number(WHO, name, value, 0)
    sides = [_checked(x) for x in (a, b)]
    live = [x for x in sides if isinstance(x, nn.Module)]
    given = Inputs(inputs, kwargs)
    if check_flag(WHO, "grads", grads) | check_flag(WHO, "isolate", isolate) and len(live) < 2:
        raise ArgumentError(
            f"{WHO}: grads and isolate need two models, and a file has outputs alone."
        )
    if not live and leaves(given):
        raise ArgumentError(f"{WHO}: both sides are files, which take no inputs. Give none.")
    used = (check_callable(WHO, "loss", loss) or _sum) if grads else None
    mapped = Names(names)
    with Undo() as stack:
        for model in {id(m): m for m in live}.values():
            stack.enter_context(sandbox.restore_after(Tree(model), params=False))
        stack.enter_context(sandbox.preserve_global_state())
        torch.set_grad_enabled(grads)
        one, other = sides
        first = one if isinstance(one, Saved) else _kept(one, modules, given, isolate, used)
        known = [*{key.name: None for key in first.keys} | dict.fromkeys(first.types)]
        mapped.check(known)
        pairs = Pairs(first, {name: mapped.of(name) for name in known}, rtol, atol)
        if isinstance(other, Saved):
            _see_saved(pairs, other)
        else:
            _see_model(pairs, one, other, given, isolate, used)
            if modules is None and isinstance(one, nn.Module):
                _list_others(pairs, other)
    return pairs.comparison()


def _checked(x: Any) -> nn.Module | Saved:
    """A side: a model, or the file that is meant."""
    if isinstance(x, str | Path):
        return Saved(Path(x))
    return check_module(WHO, x, "Give two models, or files that Hooks.save wrote.")


def _sum(out: Any) -> Tensor:
    parts = [t.sum() for t in leaves(out) if t.is_floating_point() and t.requires_grad]
    if not parts:
        raise ArgumentError(
            f"{WHO}: grads=True, and no tensor that a model returns has a gradient. Give models "
            "with parameters that require one, or a loss."
        )
    return torch.stack([part.to(parts[0]) for part in parts]).sum()


def _kept(model: nn.Module, modules: Any, given: Inputs, isolate: bool, loss: Any) -> Kept:
    """What the first model gives."""
    side = Side("first", model, chosen_of(model, modules))
    kept = Kept({name: type(m).__name__ for name, (m, _) in side.chosen.items()})
    side.run(given, kept.see, see_inputs=kept.see_inputs if isolate else None, loss=loss)
    return kept


def _see_saved(pairs: Pairs, saved: Saved) -> None:
    for name, other in pairs.others.items():
        for key in saved.keys:
            if key.name == other:
                pairs.see_parts(key._replace(name=name), saved.read(key))


def _see_model(
    pairs: Pairs, one: nn.Module | Saved, other: nn.Module, given: Inputs, isolate: bool, loss: Any
) -> None:
    side = Side("second", other, _partners(pairs, other))
    for which, model in (("first", one), ("second", other)):
        if isinstance(model, nn.Module) and is_compiled(model):
            pairs.notes.append(
                f"The {which} model is compiled, so that only what it returns is compared"
            )
    given = adapted(given, one if isinstance(one, nn.Module) else None, other)
    side.run(given, pairs.see, loss=loss)
    if isolate and isinstance(pairs.first, Kept) and not side.is_compiled:
        side.run(given, pairs.see_own, feed=pairs.first.feed)


def _partners(pairs: Pairs, other: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The second model's modules by the first one's names."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, there in ({"": ""} if is_compiled(other) else pairs.others).items():
        if (place := find(other, there)) is not None:
            found[name] = place[1], ""
        elif "[" in there or "." in there:  # a path into what a module returns
            with suppress(SelectionError):
                (found[name],) = entries(select(other, there)).values()
    return found


def _list_others(pairs: Pairs, other: nn.Module) -> None:
    """Notes the modules of the second model that have no partner."""
    partners = {*pairs.others.values()}
    pairs.only += [
        f"{n or '(model)'} (second only)" for n in chosen_of(other, None) if n not in partners
    ]
