"""Modules that many tests hook, and what they ask after it: which hooks there are, what changed.

No public function says the latter; the tables are private, and the same in torch 2.11 to 2.13.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, optimizer
from torch.utils.checkpoint import checkpoint

from hookkit._core.pytree import tree_leaves

OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Gives(nn.Module):
    """Gives what a function makes of its inputs."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(*args, **kwargs)


class Checkpointed(nn.Module):
    """Runs a layer and a ReLU inside a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.fc, self.reentrant = nn.Linear(3, 3), reentrant

    def forward(self, x: Tensor) -> Any:
        run = lambda x: self.fc(x).relu()  # noqa: E731
        return checkpoint(run, x, use_reentrant=self.reentrant)


def n_hooks(model: nn.Module, *opts: Optimizer) -> int:
    """Hooks on the modules of `model`, on optimizers, and on all optimizers of the process."""
    tables: list[Any] = [vars(m)[name] for m in model.modules() for name in OF_MODULES]
    tables += [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    for opt in opts:
        tables += [opt._optimizer_step_pre_hooks, opt._optimizer_step_post_hooks]
    return sum(map(len, tables))


def content(t: Tensor) -> Any:
    """What a tensor holds, in a form that compares."""
    if t.device.type == "meta" or nn.parameter.is_lazy(t):
        return type(t).__name__
    if t.layout is not torch.strided or t.is_nested or t.is_quantized:
        return repr(t)
    return t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def held(value: Any) -> Any:
    if isinstance(value, list | tuple | set):
        return [type(value), [id(v) for v in value]]
    return {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)


def fingerprint(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """All that a summary must leave alone, down to the identity of every attribute."""
    state = []
    for name, m in model.named_modules():
        tensors = [*m.named_parameters(recurse=False), *m.named_buffers(recurse=False)]
        hooks = {k: list(getattr(m, k)) for k in OF_MODULES if k in vars(m)}
        attributes = {k: held(v) for k, v in vars(m).items()}
        values = [(n, id(t), t.requires_grad, id(t.grad), content(t)) for n, t in tensors]
        state.append((name, type(m), m.training, attributes, hooks, values))
    given = [
        (id(t), t._version, content(t)) for t in tree_leaves((args, kwargs)) if not t.is_inference()
    ]
    numpys = np.random.get_state()
    rng = torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2]
    return state, given, rng, torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()
