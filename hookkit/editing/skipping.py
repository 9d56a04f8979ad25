"""`skip_module` passes over a module, for the time of a `with`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hookkit.errors import NeverFiredWarning, warn
from hookkit.hooks.attach import brief, check_hookable
from hookkit.hooks.eager import layer_by_layer
from hookkit.nested import tmap


@contextmanager
def skip_module(module: nn.Module, value: Any) -> Iterator[None]:
    """Gives `value` for each call of `module` in the `with` block, and does not run its forward.

    Nothing inside it runs, whatever it is called with and wherever it is called: a shared module is
    skipped in each place. Hooks on the module itself see the value. In the block compiled models
    run eagerly, and the layers of a TransformerEncoder call their parts, without PyTorch's fused
    path. It warns if the module was never called. Copies of the model made in the block go on
    skipping.

    Args:
        module: any module that is not scripted.
        value: what the calls give, of any structure; its tensors are cloned at each call, and
            gradients flow to them. Or a function of the module's inputs: `lambda x: x`.

    Returns:
        A context manager.

    Raises:
        ArgumentError: `module` is no module.
        HookError: `module` is scripted.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Flatten())
    >>> with skip_module(net[0], lambda x: x):
    ...     net(torch.ones(1, 2))
    tensor([[1., 1.]])
    """
    check_hookable(module, "skip_module")
    n_calls, own = 0, vars(module).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return value(*args, **kwargs) if callable(value) else tmap(Tensor.clone, value)

    with layer_by_layer():
        vars(module)["forward"] = forward
        try:
            yield
        finally:
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own
    if not n_calls:
        warn(
            f"skip_module: nothing was skipped: {brief(module)} was not called. Run the model "
            "inside the block; what uses the weights of a module without calling it (attention "
            "and its out_proj) cannot be skipped so.",
            NeverFiredWarning,
        )
