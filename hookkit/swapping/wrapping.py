"""Modules that stand in the place of another and pass for it: put in by `swap`.

A hook sees what goes into a module and what comes out; a wrapper decides what happens in between:
call it, call it twice, call something else. `Wrapper` is what to build on; `Catcher` records,
`GramWrapper` sums XᵀX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_choice, check_flag, check_module
from hookkit.errors import OptionError
from hookkit.hooks.entries import recomputing, untraced
from hookkit.hooks.snapshot import owned, rehoused, snapshot, unwrapped
from hookkit.modules import unwrap
from hookkit.nested import Inputs, describe, tmap


class Wrapper(nn.Module):
    """A module in the place of another, which it holds as `wrapped` and by default just calls.

    To be inherited from: override `forward`, call `self.wrapped`. It passes as the module it
    wraps: attributes that it does not have are those of `wrapped` (`wrapper.in_features`), and a
    model's state dict has the same keys with it and without it; parameters of your own add keys.

    >>> class Doubled(Wrapper):
    ...     def forward(self, *args, **kwargs):
    ...         return 2 * self.wrapped(*args, **kwargs)
    >>> net = nn.Sequential(nn.Identity())
    >>> from hookkit.swapping import swap
    >>> with swap(net, {"0": Doubled}):
    ...     net(torch.ones(2))
    tensor([2., 2.])
    """

    wrapped: nn.Module

    def __init__(self, wrapped: nn.Module):
        super().__init__()
        self.wrapped = check_module(type(self).__name__, wrapped)
        self.training = wrapped.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `wrapped` returns."""
        return self.wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = self.__dict__.get("_modules", {})
            if name.startswith("__") or "wrapped" not in held:
                raise
            return getattr(held["wrapped"], name)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`, with the wrapped module's entries under its own names."""
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        inner = f"{prefix}wrapped."
        for key in [key for key in state if key.startswith(inner)]:
            state[prefix + key.removeprefix(inner)] = state.pop(key)
        versions = getattr(state, "_metadata", {})
        for key in [key for key in versions if f"{key}.".startswith(inner)]:
            versions[(prefix + f"{key}.".removeprefix(inner))[:-1]] = versions.pop(key)
        return state

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        own = {*self._parameters, *self._buffers, *self._modules}
        for key in [key for key in state if key.startswith(prefix)]:
            name = key.removeprefix(prefix)
            if name.split(".")[0] not in own:
                state[f"{prefix}wrapped.{name}"] = state.pop(key)
        super()._load_from_state_dict(state, prefix, *args)


@dataclass(frozen=True)
class Call:
    """One call of a caught module: `inputs` (positional by index, keyword by name) and `output`."""

    inputs: Inputs
    output: Any

    def __repr__(self) -> str:
        return f"Call({describe(self.inputs)} → {describe(self.output)})"


class Catcher(Wrapper):
    """A wrapper that records what goes in and what comes out, call by call.

    Args:
        wrapped: the module to call.
        detach: stores detached snapshots, which no later in-place operation changes (on the CPU
            copied only if one tries); False stores the live tensors with their graph.
        keep: `"all"` calls, or only the `"last"`.

    Attributes:
        calls: a `Call` for each call, the inputs as they were before it. Calls that activation
            checkpointing repeats are not recorded.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> from hookkit.swapping import swap
    >>> with swap(net, {"1": Catcher}) as caught:
    ...     _ = net(torch.ones(2, 4))
    >>> caught["1"].calls[0].inputs[0].shape
    torch.Size([2, 3])
    """

    def __init__(self, wrapped: nn.Module, *, detach: bool = True, keep: str = "all"):
        super().__init__(wrapped)
        self.detach = check_flag("Catcher", "detach", detach)
        self.keep = check_choice("Catcher", "keep", keep, ("all", "last"))
        self.calls: list[Call] = []

    @property
    def n_calls(self) -> int:
        """How many calls are recorded."""
        return len(self.calls)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `wrapped` returns, recorded with what it was given."""
        if recomputing():
            return self.wrapped(*args, **kwargs)
        given = owned(self.wrapped, args, kwargs)
        inputs = self._stored(Inputs(args, kwargs), given)
        output = self.wrapped(*args, **kwargs)
        if self.keep == "last":
            self.calls.clear()
        self.calls.append(Call(inputs, self._stored(output, given)))
        return output

    def _stored(self, x: Any, given: Any) -> Any:
        with untraced():
            return tmap(lambda t: snapshot(unwrapped(t), given), x) if self.detach else rehoused(x)


class GramWrapper(Wrapper):
    """A wrapper that sums XᵀX over its inputs X, each flattened to rows of its last dimension.

    The statistic that layer-wise quantisation and pruning need (GPTQ's Hessian is 2 XᵀX, Frantar
    et al. 2022, arXiv:2210.17323, eq. 3), in memory that does not grow with the data.

    Args:
        wrapped: a layer whose first input is (..., n_features), such as a Linear.
        dtype: of the sum. fp32 inputs summed in fp32 err by about 1e-6 of the diagonal.

    Attributes:
        gram: (n_features, n_features), `dtype`, on the inputs' device; None before the first call.
        n_rows: how many rows were summed, so `gram / n_rows` is the second moment.

    >>> net = nn.Sequential(nn.Linear(3, 2))
    >>> from hookkit.swapping import swap
    >>> with swap(net, {"0": GramWrapper}) as seen:
    ...     _ = net(torch.ones(5, 3))
    >>> seen["0"].gram[0], seen["0"].n_rows
    (tensor([5., 5., 5.]), 5)
    """

    def __init__(self, wrapped: nn.Module, *, dtype: torch.dtype = torch.float32):
        super().__init__(wrapped)
        if isinstance(unwrap(wrapped), nn.modules.conv._ConvNd):
            raise OptionError(
                f"GramWrapper sums over the last dimension of its inputs, and a "
                f"{type(unwrap(wrapped)).__name__} has its channels in another. Derive from it, "
                f"and call add(patches) with inputs unfolded to rows."
            )
        self.dtype = dtype
        self.gram: Tensor | None = None
        self.n_rows = 0

    @property
    def n_calls(self) -> int:
        """1 or more once there was an input, else 0."""
        return self.n_rows

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `wrapped` returns; its first input is summed before."""
        if not recomputing():
            self.add(args[0] if args else next(iter(kwargs.values())))
        return self.wrapped(*args, **kwargs)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Adds the rows of `x`, (..., n_features)."""
        with untraced():
            self._add(x)

    def _add(self, x: Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1]).to(self.dtype)
        if self.gram is None:
            with torch.inference_mode(False):  # else it could not be added to outside
                n = rows.shape[1]
                self.gram = torch.zeros(n, n, dtype=self.dtype, device=rows.device)
        with torch.autocast(rows.device.type, enabled=False):
            self.gram += rows.T @ rows
        self.n_rows += rows.shape[0]
