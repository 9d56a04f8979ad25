"""`OptimizerGroups`: which optimizers make a step together, in a loop that has several.

Two on one model (Muon for matrices, AdamW for the rest) step one after the other and make one step;
the two players of a GAN each make their own. They are distinguished by gradients: if parameters of
an optimizer that has not stepped have gradients, the step is not over. Otherwise by what has
happened before: a group that was once followed by a forward is a step. A wrong guess costs one
record and is not repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.optim import Optimizer


class OptimizerGroups:
    """Says whether a step is over.

    Attributes:
        stepped: the optimizers that have stepped since the last step was over.
        last: those that made it.
    """

    def __init__(self) -> None:
        self.stepped: list[Optimizer] = []
        self.last: list[Optimizer] = []
        self._known: set[frozenset[int]] = set()  # groups that have made a step

    def more_to_come(self, opts: list[Optimizer], parameters: Iterable[Tensor] = ()) -> bool:
        """Whether another of `opts`, or one not seen yet, will step before the next forward.

        Such a one may step `parameters`, which are read only if needed.
        """
        stepped = _ids(self.stepped)
        if stepped in self._known:
            return False
        in_other_groups = stepped.union(*(g for g in self._known if len(g) < len(opts)))
        waiting = [o for o in opts if id(o) not in in_other_groups]
        if any(p.grad is not None for p in _parameters(waiting)):
            return True
        if len(opts) == len(self.stepped):
            owned = set(map(id, _parameters(opts)))
            if any(p.grad is not None and id(p) not in owned for p in parameters):
                return True
        self.learn()
        return False

    def learn(self) -> None:
        """Notes that those which have stepped are a group of their own, or are all."""
        self._known.add(_ids(self.stepped))

    def end(self) -> None:
        """The step is over."""
        self.last, self.stepped = self.stepped, []

    def comes_late(self, opt: Optimizer) -> bool:
        """Whether `opt` adds to the step that was taken to be over; that is then noted."""
        if self.stepped or not self.last or opt in self.last:
            return False
        self._known.discard(_ids(self.last))
        self.last.append(opt)
        return True


def _ids(opts: list[Optimizer]) -> frozenset[int]:
    return frozenset(map(id, opts))


def _parameters(opts: list[Optimizer]) -> Iterator[Tensor]:
    return (p for opt in opts for group in opt.param_groups for p in group["params"])
