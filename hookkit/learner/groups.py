"""From a splitter's parameter groups to a torch optimizer: groups, learning rates, freezing.

Plain functions over `torch.optim.Optimizer.param_groups`; the `Learner` calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_number, is_number, shown
from hookkit.errors import ArgumentError, OptionError

# Private: `_BatchNorm`, the base of all batch norms, SyncBatchNorm too (since 0.4). Without it each
# public class would have to be listed.
_NORMS = (nn.modules.batchnorm._BatchNorm,)


def trainable_params(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `model` that require a gradient: one group. The default splitter.

    >>> len(trainable_params(nn.Linear(2, 3)))
    2
    """
    return [p for p in model.parameters() if p.requires_grad]


def param_groups(split: Any) -> list[dict[str, Any]]:
    """What a splitter returned, as torch's parameter groups; an ArgumentError if they are empty.

    `split` is parameters (one group), lists of parameters or modules (a group each), or torch's own
    dicts.
    """
    items = list(split) if isinstance(split, Iterable) else [split]
    if all(isinstance(x, Tensor) for x in items):
        items = [items]
    groups = [_group(x) for x in items]
    if not any(g["params"] for g in groups):
        raise ArgumentError(
            "Learner: the splitter returned no parameter, so there is nothing to optimise. If all "
            "are frozen: `p.requires_grad_(True)`."
        )
    return groups


def _group(x: Any) -> dict[str, Any]:
    if not isinstance(x, dict):
        return {"params": _params(x)}
    params = x["params"]
    return {**x, "params": [params] if isinstance(params, Tensor) else list(params)}


def _params(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, nn.Module):
        return list(x.parameters())
    return [p for item in x for p in _params(item)]


def spread(lr: Any, n: int) -> list[float]:
    """`lr` for each of `n` groups; an OptionError for other numbers of them, negative ones or NaN.

    A number is for all; a sequence has one for each; `slice(lo, hi)` grows geometrically from the
    first group to the last; `slice(hi)` is `hi` for the last and a tenth of it for the others, as
    in fastai.

    >>> spread(0.1, 2), spread(slice(0.01), 2), spread([1, 2], 2)
    ([0.1, 0.1], [0.001, 0.01], [1.0, 2.0])
    """
    try:
        rates = _rates(lr, n)
    except (TypeError, ValueError):
        rates = []  # words, None, a slice without an end
    if len(rates) != n or not all(rate >= 0 for rate in rates):
        raise OptionError(
            f"lr={lr!r}: the optimizer has {n} parameter group{'s' * (n != 1)}. Give one "
            f"number, {n} of them, or slice(lowest, highest); none negative or NaN."
        )
    return rates


def _rates(lr: Any, n: int) -> list[float]:
    if isinstance(lr, slice) and lr.start:
        steps = [i / max(n - 1, 1) for i in range(n)]
        rates = [lr.start * (lr.stop / lr.start) ** s for s in steps[:-1]] + [lr.stop]
    elif isinstance(lr, slice):
        rates = [lr.stop / 10] * (n - 1) + [lr.stop]
    elif isinstance(lr, str):
        raise TypeError(lr)  # float("1") is a number
    else:
        rates = list(lr) if isinstance(lr, Sequence) else [lr] * n
    return [float(rate) for rate in rates]


def make_optimizer(opt_func: Callable[..., Any], groups: list[dict[str, Any]], lr: Any) -> Any:
    """`opt_func(groups, lr=…)`, each group with its own learning rate."""
    rates = spread(lr, len(groups))
    for group, rate in zip(groups, rates, strict=True):
        group.setdefault("lr", rate)
    return opt_func(groups, lr=rates[-1])


def set_hyper(opt: Any, key: str, values: Sequence[float]) -> None:
    """Sets `param_groups[i][key]` to `values[i]`, a tensor in place; else an OptionError."""
    for group, value in zip(opt.param_groups, values, strict=True):
        if key not in group:
            known = ", ".join(k for k in group if k != "params")
            raise OptionError(
                f"{key}: {type(opt).__name__} has no such hyperparameter, only {known}. Omit it, "
                f"or choose an optimizer that has it."
            )
        if isinstance(group[key], Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def freeze_groups(opt: Any, model: nn.Module, n: int, train_bn: bool) -> int:
    """Makes groups from `n` on trainable and those before it not; the index of the first trainable.

    With `train_bn` the batch norms of `model` stay trainable, as in fastai. Negative `n` count from
    the end; an OptionError if there is no such group.
    """
    size = len(opt.param_groups)
    what = f"the first to train of the optimizer's {size} group{'s' * (size != 1)}"
    n = check_number("freeze_to", "n", n, -size, size, whole=True, what=what)
    first = n + size if n < 0 else n
    norms = [m for m in model.modules() if isinstance(m, _NORMS)] if train_bn else []
    kept = {id(p) for m in norms for p in m.parameters()}
    for i, group in enumerate(opt.param_groups):
        for p in group["params"]:
            p.requires_grad_(i >= first or id(p) in kept)
    return first


def one_cycle(
    lr: Any, div: float, div_final: float, pct_start: float, moms: tuple[float, float]
) -> Callable[[Any, int], Any]:
    """`make(opt, n_steps)` of torch's OneCycleLR, with fastai's parameters; checks them.

    Momentum is cycled where there is one: setting it would turn plain SGD into another optimizer.
    """
    _check_cycle(div, div_final, pct_start, moms)

    def make(opt: Any, n_steps: int) -> Any:
        groups = opt.param_groups
        total, share = _phases(pct_start, max(n_steps, 1))
        has = all(g.get("momentum", 0) or g.get("betas", (0,))[0] for g in groups)
        return torch.optim.lr_scheduler.OneCycleLR(
            opt,
            spread(lr, len(groups)),
            total_steps=total,
            pct_start=share,
            div_factor=div,
            final_div_factor=div_final / div,
            cycle_momentum=bool(has),
            base_momentum=moms[0],
            max_momentum=moms[1],
        )

    return make


def _phases(pct_start: float, n: int) -> tuple[int, float]:
    """Steps and share of warm-up for torch, which divides by the length of each phase."""
    if pct_start == 1:
        n, pct_start = n + 1, n / (n + 1)  # the decrease is one more step, never made
    return n, (1 + 1e-6) / n if pct_start * n == 1 else float(pct_start)


def _check_cycle(div: Any, div_final: Any, pct_start: Any, moms: Any) -> None:
    who, divides = "fit_one_cycle", "what the learning rate is divided by"
    check_number(who, "div", div, above=0, what=divides)
    check_number(who, "div_final", div_final, above=0, what=divides)
    check_number(who, "pct_start", pct_start, 0, 1, what="the share of the steps that warm up")
    pair = isinstance(moms, (tuple, list)) and len(moms) == 2
    if not pair or not all(is_number(m) and 0 <= m < 1 for m in moms):
        raise OptionError(
            f"fit_one_cycle(moms={shown(moms)}): these are the lowest and the highest momentum. "
            f"Give two numbers from 0 to below 1, such as (0.85, 0.95)."
        )
