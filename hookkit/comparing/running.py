"""`compare_models`: runs two models on the same inputs and compares what their layers give.

Builds on `hooks`, `selecting` and `modelinfo.sandbox`. What the first model gives is stored; the
second one's outputs are compared in their hooks and not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_callable, check_flag, check_module, check_number
from hookkit.comparing.comparison import Comparison
from hookkit.comparing.isolated import Isolated
from hookkit.comparing.names import Names
from hookkit.comparing.pairs import Kept, Pairs
from hookkit.comparing.saved import Saved
from hookkit.comparing.sides import WHO, Chosen, See, Side, adapted, chosen_of, is_compiled
from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.interrupts import Undo
from hookkit.modelinfo import sandbox
from hookkit.modules import find, unwrap, walk
from hookkit.nested import Inputs, leaves

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
    """Compares what two models give for the same inputs, layer by layer.

    For a port and its reference, float32 and bfloat16, before and after surgery, training and
    evaluation mode. `a` is the expected one. Both run in the modes in which they are, from the same
    random state, without gradients unless `grads`; random states, buffers and modes are restored.
    Of a compiled or scripted model only what it returns is compared, and with `grads` all its
    parameters' gradients, since hooks inside would change what is compiled. A generator that a
    model returns is run to its end.

    Args:
        a: a model, or a file that `Hooks.save` wrote: run on one machine, compare on another.
        b: the same. A model gets the inputs on its own device, and floating point ones in its own
            dtype where the two models' differ.
        *inputs: for the models; none where both are files.
        modules: selectors of `a`'s modules, as for `select`; all that run by default, or all
            that the file `b` has.
        names: names in `a` and the names in `b` that they stand for, where these differ:
            `{"encoder.layers.*": "transformer.h.*"}`. A name stands for all below it, and the
            longest that fits counts: `{"": "model"}` where `b` has all of `a` in its `model`.
        rtol: relative tolerance; by default torch.testing's for the looser of the two dtypes.
        atol: absolute tolerance; as `rtol`.
        grads: whether gradients are compared too: of each output, and of the parameters of the
            compared modules. `.grad` stays as it is. The gradients of both models are stored.
        loss: with `grads`, gives what is differentiated from a model's output; by default the sum
            of all floating point tensors in it.
        isolate: runs `b` once more and gives each of its modules what `a`'s received, and its
            caller what `a`'s returned, for `Row.own_rel`: the error that a module's own code adds,
            not that of the layers before, nor of those inside.
        **kwargs: keyword inputs for the models.

    Returns:
        The rows, in the order in which `a`'s modules finish; `.first` is the first beyond the
        tolerance.

    Raises:
        ArgumentError: `a` or `b` is neither a model nor a file; there are inputs for files, or
            gradients of them; nothing has a gradient, or `loss` gives more than one number.
        OptionError: an option has a value that cannot work; a file cannot be read, or has no
            outputs.
        SelectionError: `modules` or `names` match nothing; nothing is in both by its name.
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
    one, other = _checked(a), _checked(b)
    live = [x for x in (one, other) if isinstance(x, nn.Module)]
    given = Inputs(inputs, kwargs)
    if check_flag(WHO, "grads", grads) | check_flag(WHO, "isolate", isolate) and len(live) < 2:
        raise ArgumentError(
            f"{WHO}: grads and isolate need two models, and a file has outputs alone."
        )
    if not live and leaves(given):
        raise ArgumentError(f"{WHO}: both sides are files, which take no inputs. Give none.")
    if check_callable(WHO, "loss", loss) and not grads:
        raise ArgumentError(f"{WHO}: loss= is what grads=True differentiates. Give both, or none.")
    used = (loss or _sum) if grads else None
    run = _Run(one, other, given, modules, Names(names), isolate, used)
    with Undo() as stack:
        stack.enter_context(sandbox.preserve_global_state())
        torch.set_grad_enabled(grads)
        return run.compared(rtol, atol)


def _checked(x: Any) -> nn.Module | Saved:
    """One of the two: a model, or the file that is meant."""
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


@dataclass
class _Run:
    """The checked arguments of a comparison, and its steps."""

    one: nn.Module | Saved
    other: nn.Module | Saved
    given: Inputs
    modules: Any
    names: Names
    isolate: bool
    loss: Callable[[Any], Tensor] | None

    @property
    def whole(self) -> bool:
        """Whether only what the models return is compared, as one of them is compiled."""
        return any(isinstance(x, nn.Module) and is_compiled(x) for x in (self.one, self.other))

    def compared(self, rtol: float | None, atol: float | None) -> Comparison:
        """What both sides have, beside each other."""
        _check_files(saved := [x for x in (self.one, self.other) if isinstance(x, Saved)])
        if only_last := any(x.last for x in saved):
            for x in saved:
                x.forget_all_but_last()
        first = self.one if isinstance(self.one, Saved) else self._kept(self.one, only_last)
        others = {name: self.names.of(name) for name in first.types}
        self._check_names(first, others)
        pairs = Pairs(first, others, rtol, atol)
        pairs.notes += self._notes()
        if isinstance(self.other, Saved):
            _see_saved(pairs, self.other)
        else:
            self._see_model(pairs, self.other, only_last)
        found = pairs.comparison()
        if not found.rows:  # `.first` would be None, as where both agree
            raise SelectionError(
                f"{WHO}: nothing was compared: no module that gives a tensor is in both by its "
                f"name. The first has {_listed(self.one)}, the second {_listed(self.other)}. Give "
                "names={name in the first: its name in the second}."
            )
        return found

    def _kept(self, model: nn.Module, only_last: bool) -> Kept:
        """What the first model gives."""
        chosen = {"": (unwrap(model), "")} if self.whole else chosen_of(model, self.modules)
        if self.modules is None and isinstance(self.other, Saved):
            chosen |= _at_leaves(model, {n: n for n in self.other.types}, self.other.leaves)
            chosen = {n: at for n, at in chosen.items() if self.names.of(n) in self.other.types}
        kept = Kept(chosen)
        side = Side("first", model, chosen)
        receive = kept.receive if self.isolate else None
        side.run(self.given, _as_one(kept.see, only_last), receive=receive, loss=self.loss)
        return kept

    def _check_names(self, first: Kept | Saved, others: dict[str, str]) -> None:
        """Raises if a name that is mapped, compared or not, is missing on its side."""
        there = _names(self.other)
        if isinstance(self.other, nn.Module):  # with paths, and second places of shared modules
            there += [others[name] for name in _at_leaves(self.other, others, first.leaves)]
        self.names.check([*first.types, *_names(self.one)], there)

    def _see_model(self, pairs: Pairs, model: nn.Module, only_last: bool) -> None:
        """Runs the second model, whose outputs are compared and not stored."""
        names = {"": ""} if self.whole else pairs.others
        chosen = _at_leaves(model, names, pairs.first.leaves)
        others: Chosen = {}
        if self.modules is None and isinstance(pairs.first, Kept) and not self.whole:
            partners = {id(m) for m, _ in chosen.values()}
            every = chosen_of(model, None).items()
            others = {name: at for name, at in every if id(at[0]) not in partners}
        side = Side("second", model, chosen, others)
        given = adapted(self.given, None if isinstance(self.one, Saved) else self.one, model)
        try:
            side.run(given, _as_one(pairs.see, only_last), loss=self.loss)
        except Exception as error:
            error.add_note(f"{WHO}: until then {pairs.comparison().headline}")
            raise
        pairs.list_only(f"{name or '(model)'} (second only)" for name in side.ran)
        if self.isolate and isinstance(pairs.first, Kept) and not self.whole:
            isolated = Isolated(pairs.first.inputs, pairs)
            side.run(given, isolated.see, receive=isolated.receive)

    def _notes(self) -> list[str]:
        """What else there is to know about the two sides."""
        sides = {"first": self.one, "second": self.other}
        notes = [
            f"The {which} model is compiled, so that only what it returns is compared"
            for which, x in sides.items()
            if isinstance(x, nn.Module) and is_compiled(x)
        ]
        unnamed = [x for x in sides.values() if isinstance(x, Saved) and not x.named]
        if len(unnamed) == 1 and not self.names.rules:
            notes.append(
                f"{unnamed[0].path} has positions (0, 1, …) for names: save hooks that were made "
                "with select(model, …), or give names="
            )
        return notes


def _names(x: nn.Module | Saved) -> list[str]:
    return [*x.types] if isinstance(x, Saved) else [name for name, *_ in walk(x)]


def _listed(x: nn.Module | Saved) -> str:
    names = [name for name in _names(x) if name] or [""]
    more = f" and {len(names) - 6} more" * (len(names) > 6)
    return f"{', '.join(map(repr, names[:6]))}{more}"


def _check_files(saved: list[Saved]) -> None:
    """Raises if a file has gradients or inputs, which are no outputs."""
    for x in saved:
        if x.kind != "forward" and not (len(saved) == 2 and saved[0].kind == saved[1].kind):
            raise OptionError(
                f"{WHO}: {x.path} has what was stored by hooks of kind {x.kind!r}, which are no "
                "outputs. Save what hook_outputs stored."
            )


def _as_one(see: See, only_last: bool) -> See:
    """`see`; with `only_last` for all calls as for the first, so that the last one counts."""
    return (lambda key, value: see(key._replace(call=0), value)) if only_last else see


def _see_saved(pairs: Pairs, saved: Saved) -> None:
    for name, other in pairs.others.items():
        for key in saved.keys:
            if key.name == other:
                pairs.see_parts(key._replace(name=name), saved.read(key))
    partners = {*pairs.others.values()}
    pairs.list_only(f"{n or '(model)'} (second only)" for n in saved.types if n not in partners)


def _at_leaves(model: nn.Module, names: dict[str, str], paths: dict[str, str]) -> Chosen:
    """The modules of `model` that `names` has, by its keys, with the `paths` into their outputs."""
    found: Chosen = {}
    for name, there in names.items():
        path = paths.get(name, "")
        if (place := find(model, there.removesuffix(path))) is not None:
            found[name] = place[1], path
    return found
