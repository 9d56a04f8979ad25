"""`Ending`: whether a forward may end with the last layer that is wanted."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import nn

from hookkit.collecting.index import IDS
from hookkit.modelinfo.sandbox import generators
from hookkit.modelinfo.tree import Tree
from hookkit.modules import unwrap

# Private: `_has_any_global_hook` (since 1.8), whether hooks are on all modules. Without it such
# hooks would not see the layers that are left out; there is no public name.
_has_global_hooks = getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: True)


class Ending:
    """Decides by the first batch, which runs whole, whether later ones may end early.

    What follows the last layer that is wanted is left out only where nobody could tell: it has no
    wrapper or hook of others (which FSDP works by), no dropout or running statistics, and it
    changed no attribute, buffer or random state in the first batch, which an earlier layer could
    read in the next one.
    """

    def __init__(self, model: nn.Module, tree: Tree) -> None:
        self._tree = tree
        self._may = unwrap(model) is model and not tree.scripted and not _has_global_hooks()
        for m in tree.modules:
            hooked = m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m)
            self._may = self._may and not m.training and not hooked
        self._before = self._state()

    def may(self, keys: Iterable[str]) -> bool:
        """After the first batch, in which these calls were recorded."""
        now = self._state()
        same = [*map(len, now)] == [*map(len, self._before)]
        same = same and all(map(is_, now[0], self._before[0])) and now[1] == self._before[1]
        return self._may and same and all(key.endswith("-00000") or key == IDS for key in keys)

    def _state(self) -> tuple[list[Any], list[Any]]:
        """The objects that the modules have, and numbers that tell whether these have changed."""
        held = [v for m in self._tree.modules for v in (*vars(m).values(), *m.buffers(False))]
        sizes = [len(v) for v in held if isinstance(v, list | dict | set)]
        # see `hooks.snapshot` for `_version`; an inference tensor has none
        versions = [t._version for t in self._tree.tensors if not t.is_inference()]
        randoms = [g.get_state().numpy().tobytes() for g in generators()]
        return held, [*sizes, *versions, *randoms]
