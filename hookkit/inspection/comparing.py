"""`compare_models` runs two models on the same inputs and compares the outputs of their layers.

Builds on `sides`, `pairing` and `comparison_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hookkit._core.checks import check_callable, check_flag, check_module, check_number
from hookkit._core.modules import can_run, unwrap, walk
from hookkit._core.pytree import Inputs, tree_leaves
from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.hooks.attach import check_hookable
from hookkit.hooks.selection import select
from hookkit.inspection.comparison import Comparison
from hookkit.inspection.comparison_rows import RowMaker
from hookkit.inspection.pairing import Names, pair_modules
from hookkit.inspection.sides import WHO, Side, fitted, read, run

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
    **kwargs: Any,
) -> Comparison:
    """Compare the outputs of two models' layers for the same inputs; find the first that differs.

    Use it for a port and its reference, float32 and bfloat16, before and after surgery, training
    and evaluation mode. `a` is the expected one. Both run in their current modes, from the same
    random state; random states, buffers and modes are restored. Compiled models run eagerly. The
    inputs and outputs of all modules are kept in memory until they are compared.

    Modules are paired by name if every layer with parameters has a namesake. Otherwise they are
    paired by equal weights, also transposed, permuted, split or fused ones; then by name, by size
    in the order of execution, and by the pairs inside. Copies with equal weights are paired in the
    order in which they run. If the two sides call a module different numbers of times, such as an
    LSTM and its cell, outputs that differ are not judged. A port's outputs may have another layout:
    channels last, or heads, batch and positions in one axis.

    Args:
        a: a model, or a file that `Hooks.save` wrote: run in one environment, compare in another.
        b: the same. A model gets the inputs on its own device, and floating point ones in its own
            dtype where the two models' differ.
        *inputs: for the models; none where both are files.
        modules: selectors of `a`'s modules, as for `select`: only these are compared. By default
            all that run, or all that the other side, a file, has.
        names: names or globs in `a` → those in `b`: `{"encoder.layers.*": "h.*"}`. Wildcards of the
            second are filled in order with the matches of the first. Braces stand for as many names
            (`"{q,k}"`: `"{query,key}"`), or for the parts of a fused weight (`"qkv"`: `"{q,k,v}"`).
            A name includes the modules inside, and the longest that fits wins: `{"": "model"}` if
            `b` has all of `a` in its `model`. Other modules are paired as without `names`.
        rtol: relative tolerance; by default for the looser of the two dtypes 1e-5 (float32),
            1e-10 (float64), 1e-2 (float16), 5e-2 (bfloat16), 0 for whole numbers. 0 is exact.
        atol: absolute tolerance; by default `rtol` times the root mean square of `a`'s tensor.
        grads: also compare gradients: of each output, and of the parameters in the compared
            modules, each with the innermost of these. `.grad` stays as it is.
        loss: with `grads`, a function that returns the number to differentiate from a model's
            output; by default the sum of all floating point tensors in it.
        **kwargs: keyword inputs for the models.

    Returns:
        The rows, in the order in which `a`'s modules finish. `.first` is the innermost call whose
        inputs agree and whose output does not, `.names` the pairs that have other names.

    Raises:
        ArgumentError: `a` or `b` is neither a model nor a file, or has parameters without values;
            there are inputs for files, or gradients of them; nothing has a gradient, or `loss`
            gives more than one number.
        HookError: a model is scripted, or a layer is called inside a transform of torch.func.
        OptionError: a tolerance is negative, or a file or one of `names` cannot be read.
        SelectionError: `modules` match nothing, or no modules are pairs.
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
    if "isolate" in kwargs:
        raise OptionError(
            f"{WHO}: isolate= is gone. `.first` is the first layer that differs though its inputs "
            "agree, and each row has the `input_error` beside its `rel_error`."
        )
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            check_number(WHO, name, value, 0)
    if not isinstance(names or {}, Mapping):
        raise OptionError(f"{WHO}: names={names!r:.60} is no dict. Give {{in a: in b}}.")
    rules = Names(names or {})
    n_files = sum(isinstance(x, str | Path) for x in (a, b))
    if check_flag(WHO, "grads", grads) and n_files:
        raise ArgumentError(f"{WHO}: grads needs two models; a file has outputs alone.")
    if n_files == 2 and tree_leaves((inputs, kwargs)):
        raise ArgumentError(f"{WHO}: both sides are files, which take no inputs. Give none.")
    if check_callable(WHO, "loss", loss) and not grads:
        raise ArgumentError(f"{WHO}: loss= is what grads=True differentiates. Give both, or none.")
    one, other, given = _checked("first", a), _checked("second", b), Inputs(inputs, kwargs)
    first, second = (x if isinstance(x, Side) else Side() for x in (one, other))
    rules.check(_every_name(one), _every_name(other))
    selected = modules is not None or (first.saved and not second.saved)
    if isinstance(one, nn.Module):
        first.modules, first.paths = _chosen(one, modules)
        if second.saved and modules is None:  # a file has what was captured
            first.modules = {n: m for n, m in first.modules.items()
                             if {*rules.pair(n).b} & {*second.types}}  # fmt: skip
    elif modules is not None:
        raise ArgumentError(f"{WHO}: modules= selects from a model, and the first is a file.")
    if isinstance(other, nn.Module):
        second.modules = _chosen(other, None)[0]
        wanted = {n for name in first.modules or first.types for n in rules.pair(name).b}
        if selected and wanted <= second.modules.keys():
            second.modules = {n: m for n, m in second.modules.items() if n in wanted}

    def so_far() -> Comparison:
        pairs = pair_modules(first, second, rules)
        return RowMaker(first, second, pairs, rtol, atol).comparison(selected)

    try:
        if isinstance(one, nn.Module):
            run(one, first, given, grads, loss)
    except Exception as error:
        error.add_note(f"{WHO}: raised by the first model")
        raise
    try:
        if isinstance(other, nn.Module):
            run(other, second, fitted(given, one, other), grads, loss)
    except Exception as error:
        error.add_note(f"{WHO}: raised by the second model")
        with suppress(Exception):  # of a comparison of half a run
            error.add_note(f"{WHO}: until then {so_far().verdict}")
        raise
    if first.last or second.last:
        first.keep_last_calls()
        second.keep_last_calls()
    comparison = so_far()
    if all(r.is_alone for r in comparison):
        raise SelectionError(
            f"{WHO}: nothing was compared: no module that gives a tensor is in both, by its name "
            f"or its weights. The first has {_listed(first)}, the second {_listed(second)}. Load "
            "the weights of one into the other, or give names={name in the first: its name in the "
            "second}."
        )
    return comparison


def _checked(which: str, x: Any) -> nn.Module | Side:
    """Return one of the two sides: a model that can run, or what a file has."""
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


def _chosen(
    model: nn.Module, modules: Any
) -> tuple[dict[str, nn.Module], dict[str, tuple[str, ...]]]:
    """Return the modules to compare by name: all that can run, or those selected.

    The second dict has, for modules of which only parts of the output are selected, their paths.
    """
    root, chosen, paths = unwrap(model), dict[str, nn.Module](), dict[str, tuple[str, ...]]()
    if modules is None:
        return {name: m for name, m, first in walk(root) if first and can_run(m)}, paths
    selection = select(root, *(modules if isinstance(modules, list | tuple) else [modules]))
    for key, module in selection.items():
        name, path = selection.place(key)
        chosen[name], paths[name] = module, (*paths.get(name, ()), path)
    return chosen, paths


def _every_name(x: nn.Module | Side) -> list[str]:
    """Return the names of all modules; for a file, also of the modules around those in the file."""
    if isinstance(x, nn.Module):
        return [name for name, *_ in walk(x)]
    keys = [name.split(".") for name in x.types]
    return [*dict.fromkeys(".".join(k[:n]) for k in keys for n in range(len(k) + 1))]


def _listed(side: Side) -> str:
    names = [name for name in side.ran() if name] or [""]
    more = f" and {len(names) - 6} more" * (len(names) > 6)
    return f"{', '.join(map(repr, names[:6]))}{more}"
