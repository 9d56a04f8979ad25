"""`compare_models`: runs two models on the same inputs and compares what their layers give.

Builds on `sides`, `saved` and `comparison`. What the first model gives is stored; the second one's
values are compared as they come and not stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_callable, check_flag, check_module, check_number
from hookkit.comparing.comparison import Comparison
from hookkit.comparing.isolating import alone, fitting
from hookkit.comparing.pairing import compared
from hookkit.comparing.saved import read
from hookkit.comparing.sides import WHO, Hooked, Recorded, Run
from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.hooks.attach import check_hookable
from hookkit.modules import can_run, find, unwrap, walk
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
    """Compares what two models give for the same inputs, layer by layer.

    For a port and its reference, float32 and bfloat16, before and after surgery, training and
    evaluation mode. `a` is the expected one. Both run in the modes in which they are, from the same
    random state, without gradients unless `grads`; random states, buffers and modes are restored.
    Compiled models run eagerly. A layer that only one of them runs, and a result that cannot be
    taken apart, are differences.

    Args:
        a: a model, or a file that `Hooks.save` wrote: run in one environment, compare in another.
        b: the same. A model gets the inputs on its own device, and floating point ones in its own
            dtype where the two models' differ.
        *inputs: for the models; none where both are files.
        modules: selectors of `a`'s modules, as for `select`: only these are compared. By default
            all that run, or all that the other side, a file, has.
        names: names in `a` and the names in `b` that they stand for, where these differ:
            `{"encoder.layers.*": "transformer.h.*"}`. A name stands for all below it, and the
            longest that fits counts: `{"": "model"}` where `b` has all of `a` in its `model`. With
            it, modules without parameters, modules around compared ones, and modules inside one
            that is compared with a layer may be in one of the models alone.
        rtol: relative tolerance; by default torch.testing's for the looser of the two dtypes.
        atol: absolute tolerance; as `rtol`.
        grads: whether gradients are compared too: of each output, and of the parameters of the
            compared modules. `.grad` stays as it is. The first model's are stored.
        loss: with `grads`, gives what is differentiated from a model's output; by default the sum
            of all floating point tensors in it.
        isolate: calls each module of `b` alone too, on what `a`'s received and from the same random
            state, for `Row.own_rel`: without the errors of the layers before it. `Row.own_note`
            says where that was not possible. Cost: a run of `b` for each level of modules.
        **kwargs: keyword inputs for the models.

    Returns:
        The rows, in the order in which `a`'s modules finish; `.first` is the first that differs.

    Raises:
        ArgumentError: `a` or `b` is neither a model nor a file, or has parameters without values;
            there are inputs for files, or gradients of them; nothing has a gradient, or `loss`
            gives more than one number.
        HookError: a model is scripted.
        OptionError: a tolerance is negative, or a file cannot be read.
        SelectionError: `modules` match nothing, or nothing is in both by its name.
        MissingExtraError: there is a file, and safetensors is not installed.

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
    if not isinstance(names or {}, Mapping):
        raise OptionError(f"{WHO}: names={names!r:.60} is no dict. Give {{in a: in b}}.")
    n_files = sum(isinstance(x, str | Path) for x in (a, b))
    if check_flag(WHO, "grads", grads) | check_flag(WHO, "isolate", isolate) and n_files:
        raise ArgumentError(f"{WHO}: grads and isolate need two models; a file has outputs alone.")
    if n_files == 2 and leaves((inputs, kwargs)):
        raise ArgumentError(f"{WHO}: both sides are files, which take no inputs. Give none.")
    if check_callable(WHO, "loss", loss) and not grads:
        raise ArgumentError(f"{WHO}: loss= is what grads=True differentiates. Give both, or none.")
    one, other, given = _checked("first", a), _checked("second", b), Inputs(inputs, kwargs)
    chosen = _chosen(one, modules)
    partners, hooked = _partners(other, chosen, names or {})
    if isinstance(other, Recorded) and modules is None and not isinstance(one, Recorded):
        paths = {
            name: other.paths[there] for name, there in partners.items() if there in other.paths
        }
        chosen = {name: (chosen[name][0], at) for name, at in paths.items()}
    elif isinstance(other, nn.Module) and modules is None and not isinstance(one, Recorded):
        hooked = {**_chosen(other, None), **hooked}
    last = any(isinstance(x, Recorded) and x.last for x in (one, other))
    used = (loss or _sum) if grads else None
    record = partial(_record, last=last, loss=used)
    apart = partial(compared, partners=partners, rtol=rtol, atol=atol, loosely=names is not None)
    first, second = Recorded(), Recorded()
    own = alone(one, other, partners) if isolate else None
    record("first", one, chosen, given, first, alone=own)
    try:
        record("second", other, hooked, fitting(one, other)(given), second)
    except Exception as error:
        error.add_note(f"{WHO}: until then {apart(first, second).headline}")
        raise
    comparison = apart(first, second)
    if all(r.is_alone for r in comparison):
        raise SelectionError(
            f"{WHO}: nothing was compared: no module that gives a tensor is in both by its name. "
            f"The first has {_listed(one)}, the second {_listed(other)}. Give names={{name in "
            "the first: its name in the second}."
        )
    return comparison


def _checked(which: str, x: Any) -> nn.Module | Recorded:
    """One of the two sides: a model that can run, or what a file has."""
    if isinstance(x, str | Path):
        return read(x)
    model = check_module(WHO, x, "Give two models, or files that Hooks.save wrote.")
    check_hookable(unwrap(model), WHO)
    if any(nn.parameter.is_lazy(p) or p.is_meta for p in model.parameters()):
        raise ArgumentError(
            f"{WHO}: the {which} model has parameters without values: on meta, or lazy. Load its "
            "weights, or run it once."
        )
    return model


def _record(
    which: str, side: nn.Module | Recorded, hooked: Hooked, given: Inputs, into: Recorded,
    *, last: bool, **options: Any,
) -> None:  # fmt: skip
    """Adds to `into` what `side` has: by a run of a model, or as it was saved."""
    if isinstance(side, Recorded):
        side = side.last_calls() if last else side
        into.values, into.types = side.values, side.types
        return
    try:
        Run(side, hooked, into, last=last, **options)(given)
    except Exception as error:
        error.add_note(f"{WHO}: raised by the {which} model")
        raise


def _listed(side: nn.Module | Recorded) -> str:
    every = side.types if isinstance(side, Recorded) else [name for name, *_ in walk(side)]
    names = [name for name in every if name] or [""]
    more = f" and {len(names) - 6} more" * (len(names) > 6)
    return f"{', '.join(map(repr, names[:6]))}{more}"


def _sum(out: Any) -> Tensor:
    parts = [t.sum() for t in leaves(out) if t.is_floating_point() and t.requires_grad]
    if not parts:
        raise ArgumentError(
            f"{WHO}: grads=True, and no tensor that a model returns has a gradient. Give models "
            "with parameters that require one, or a loss."
        )
    return torch.stack([part.to(parts[0]) for part in parts]).sum()


def _chosen(side: nn.Module | Recorded, modules: Any) -> Hooked:
    """The modules of `side` that are compared, by name: the selected, or all that run."""
    if isinstance(side, Recorded):
        if modules is not None:
            raise ArgumentError(f"{WHO}: modules= selects from a model, and the first is a file.")
        return {name: (nn.Identity(), paths) for name, paths in side.paths.items()}
    root, chosen = unwrap(side), Hooked()
    if modules is None:
        return {name: (m, ("",)) for name, m, first in walk(root) if first and can_run(m)}
    what = modules if isinstance(modules, list | tuple) else [modules]
    selection = select(root, *what)
    for key, module in selection.items():
        name, leaf = selection.place(key)
        _, paths = chosen.get(name, (module, ()))
        chosen[name] = module, (*paths, leaf)
    return chosen


def _partners(
    other: nn.Module | Recorded, chosen: Hooked, names: Mapping[str, str]
) -> tuple[dict[str, str], Hooked]:
    """The names of the chosen modules on the other side, and its modules of these names."""
    partners, hooked = dict[str, str](), Hooked()
    for name, (_, paths) in chosen.items():
        partners[name] = there = renamed(name, names)
        place = find(unwrap(other), there) if isinstance(other, nn.Module) else None
        if place is not None and can_run(place[1]):
            partners[name], hooked[place[0]] = place[0], (place[1], paths)
    return partners, hooked


def renamed(name: str, names: Mapping[str, str]) -> str:
    """The name in the second model: of the patterns that fit, the longest counts.

    >>> names = {"encoder.layers.*": "h.*", "encoder.layers.*.linear1": "h.*.mlp.fc"}
    >>> [renamed(f"encoder.layers.3.{name}", names) for name in ("norm1", "linear1")]
    ['h.3.norm1', 'h.3.mlp.fc']
    >>> renamed("head", {"": "model"}), renamed("model.head", {"model": ""})
    ('model.head', 'head')
    """
    for old in sorted(names, key=lambda n: (-n.count(".") - bool(n), n.count("*"))):
        pattern = re.escape(old).replace(r"\*", "([^.]+)") + r"(?=\.|$)" if old else ""
        if fits := re.match(pattern, name):
            new = names[old]
            for part in fits.groups():
                new = new.replace("*", part, 1)
            return ".".join(filter(None, (new, name[fits.end() :].lstrip("."))))
    return name
