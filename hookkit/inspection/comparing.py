"""`compare_models`: runs two models on the same inputs and compares what their layers give.

Builds on `sides` and `pairing`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hookkit._core.checks import check_callable, check_flag, check_module, check_number
from hookkit._core.modules import can_run, find, unwrap, walk
from hookkit._core.pytree import Inputs, tree_leaves
from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.hooks.attach import check_hookable
from hookkit.hooks.selection import select
from hookkit.inspection.comparison import Comparison
from hookkit.inspection.isolating import alone, fitted
from hookkit.inspection.pairing import compared
from hookkit.inspection.sides import WHO, Side, read, run, sum_of_outputs

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
    Compiled models run eagerly; what both give is kept until it is compared. A layer that only one
    of them runs, and a result that cannot be taken apart or is a nested tensor, are differences.

    Args:
        a: a model, or a file that `Hooks.save` wrote: run in one environment, compare in another.
        b: the same. A model gets the inputs on its own device, and floating point ones in its own
            dtype where the two models' differ.
        *inputs: for the models; none where both are files.
        modules: selectors of `a`'s modules, as for `select`: only these are compared. By default
            all that run, or all that the other side, a file, has.
        names: names in `a` and the names in `b` that they stand for, where these differ:
            `{"encoder.layers.*": "transformer.h.*"}`. Only `*` is special. A name stands for all
            below it, and the longest that fits counts: `{"": "model"}` where `b` has all of `a` in
            its `model`. With it, modules without parameters, modules around compared ones, and
            modules inside one that is compared with a layer may be in one of the models alone.
        rtol: relative tolerance; by default torch.testing's for the looser of the two dtypes.
        atol: absolute tolerance; as `rtol`.
        grads: whether gradients are compared too: of each output, and of the parameters in the
            compared modules, each with the innermost of them. `.grad` stays as it is.
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
        HookError: a model is scripted, or a layer is called inside a transform of torch.func.
        OptionError: a tolerance is negative, or a file or one of `names` cannot be read.
        SelectionError: `modules` match nothing, or nothing is in both by its name.
        MissingExtraError: there is a file, and safetensors is not installed.

    >>> import torch
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
    _check_names(names)
    n_files = sum(isinstance(x, str | Path) for x in (a, b))
    if check_flag(WHO, "grads", grads) | check_flag(WHO, "isolate", isolate) and n_files:
        raise ArgumentError(f"{WHO}: grads and isolate need two models; a file has outputs alone.")
    if n_files == 2 and tree_leaves((inputs, kwargs)):
        raise ArgumentError(f"{WHO}: both sides are files, which take no inputs. Give none.")
    if check_callable(WHO, "loss", loss) and not grads:
        raise ArgumentError(f"{WHO}: loss= is what grads=True differentiates. Give both, or none.")
    one, other, given = _checked("first", a), _checked("second", b), Inputs(inputs, kwargs)
    first, second = (x if isinstance(x, Side) else Side() for x in (one, other))
    ours = _chosen(one, modules, first)
    partners, theirs = _partners(other, ours, names or {})
    if modules is None and isinstance(one, nn.Module):
        if isinstance(other, Side):  # a file has what was captured
            ours = {name: m for name, m in ours.items() if partners[name] in other.types}
        else:
            theirs = {**_chosen(other, None, second), **theirs}

    loosely = names is not None
    so_far = partial(compared, first, second, partners, rtol=rtol, atol=atol, loosely=loosely)
    used = (loss or sum_of_outputs) if grads else None
    try:
        if isinstance(one, nn.Module):
            own = alone(one, other, partners) if isolate and isinstance(other, nn.Module) else None
            run(one, ours, given, first, used, own)
    except Exception as error:
        error.add_note(f"{WHO}: raised by the first model")
        raise
    try:
        if isinstance(other, nn.Module):
            run(other, theirs, fitted(given, one, other), second, used)
    except Exception as error:
        error.add_note(f"{WHO}: raised by the second model; until then {so_far().verdict}")
        raise
    comparison = so_far()
    if all(r.is_alone for r in comparison):
        raise SelectionError(
            f"{WHO}: nothing was compared: no module that gives a tensor is in both by its name. "
            f"The first has {_listed(one)}, the second {_listed(other)}. Give names={{name in "
            "the first: its name in the second}."
        )
    return comparison


def _check_names(names: Any) -> None:
    """Raises if `names` is no dict of names, or has patterns of `select` that it does not know."""
    if not isinstance(names or {}, Mapping):
        raise OptionError(f"{WHO}: names={names!r:.60} is no dict. Give {{in a: in b}}.")
    for old, new in (names or {}).items():
        known = isinstance(old, str) and isinstance(new, str)
        if not known or re.search(r"[?{}\[\]]|\*\*", old + new) or new.count("*") > old.count("*"):
            raise OptionError(
                f"{WHO}: names={{{old!r}: {new!r}}} cannot be read: only * is special, and stands "
                "for one part of the name in a, and for the same in b. Give an entry for each name."
            )


def _checked(which: str, x: Any) -> nn.Module | Side:
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


def _chosen(x: nn.Module | Side, modules: Any, side: Side) -> dict[str, nn.Module]:
    """The modules of `x` that are compared, by name: the selected, or all that run.

    If only parts of their results are meant, `side` is told their paths.
    """
    if isinstance(x, Side):
        if modules is not None:
            raise ArgumentError(f"{WHO}: modules= selects from a model, and the first is a file.")
        return dict.fromkeys(x.types, nn.Identity())
    root, chosen = unwrap(x), dict[str, nn.Module]()
    if modules is None:
        return {name: m for name, m, first in walk(root) if first and can_run(m)}
    selection = select(root, *(modules if isinstance(modules, list | tuple) else [modules]))
    for key, module in selection.items():
        name, path = selection.place(key)
        chosen[name], side.paths[name] = module, (*side.paths.get(name, ()), path)
    return chosen


def _partners(
    other: nn.Module | Side, chosen: Mapping[str, nn.Module], names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, nn.Module]]:
    """The names of the chosen modules on the other side, and its modules of these names."""
    partners, theirs = {name: renamed(name, names) for name in chosen}, dict[str, nn.Module]()
    if isinstance(other, nn.Module):
        for name, there in partners.items():
            place = find(unwrap(other), there)
            if place is not None and can_run(place[1]):
                partners[name], theirs[place[0]] = place
    return partners, theirs


def _listed(side: nn.Module | Side) -> str:
    every = side.types if isinstance(side, Side) else [name for name, *_ in walk(side)]
    names = [name for name in every if name] or [""]
    more = f" and {len(names) - 6} more" * (len(names) > 6)
    return f"{', '.join(map(repr, names[:6]))}{more}"


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
