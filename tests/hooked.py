"""How many hooks there are: what most tests ask when hookkit is done.

No public function says it; the tables are private, and the same in torch 2.11 to 2.13.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer, optimizer

OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def n_hooks(model: nn.Module, *opts: Optimizer) -> int:
    """Hooks on the modules of `model`, on optimizers, and on all optimizers of the process."""
    tables: list[Any] = [vars(m)[name] for m in model.modules() for name in OF_MODULES]
    tables += [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    for opt in opts:
        tables += [opt._optimizer_step_pre_hooks, opt._optimizer_step_post_hooks]
    return sum(map(len, tables))
