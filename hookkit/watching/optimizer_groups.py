"""Which optimizers make a step together, in a loop that has several.

Two on one model (Muon for matrices, AdamW for the rest) step one after the other and make one step;
a GAN's two players take turns. Told apart by gradients (also of parameters whose optimizer has not
been seen yet), then by what happened before the last forward; a wrong guess costs one record and is
not made again.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        self._known: set[frozenset[int]] = set()
        self._n_all = 0

    def more_to_come(self, opts: list[Optimizer], parameters: Iterable[Tensor] = ()) -> bool:
        """Will another of `opts`, or of those not seen yet, step before the next forward?

        Args:
            parameters: those that an optimizer not seen yet may step; read only if need be.
        """
        if len(opts) == len(self.stepped):
            return self._n_all != len(opts) and self._another(opts, parameters)
        if _ids(self.stepped) not in self._known:
            elsewhere = _ids(self.stepped).union(*self._known)
            if any(_has_gradient(o) for o in opts if id(o) not in elsewhere):
                return True
            self.learn(opts)
        return False

    def _another(self, opts: list[Optimizer], parameters: Iterable[Tensor]) -> bool:
        theirs = {id(p) for o in opts for group in o.param_groups for p in group["params"]}
        if any(p.grad is not None and id(p) not in theirs for p in parameters):
            return True
        self.learn(opts)
        return False

    def learn(self, opts: list[Optimizer]) -> None:
        """Those of `opts` that have stepped are a turn of their own, or all that there are."""
        if len(opts) == len(self.stepped):
            self._n_all = len(opts)
        else:
            self._known.add(_ids(self.stepped))

    def end(self) -> None:
        """The step is over."""
        self.last, self.stepped = self.stepped, []

    def comes_late(self, opt: Optimizer) -> bool:
        """Is `opt` part of the step that was just thought over? It is then learnt."""
        if self.stepped or not self.last or opt in self.last:
            return False
        self._known.discard(_ids(self.last))
        self.last.append(opt)
        return True


def _ids(opts: list[Optimizer]) -> frozenset[int]:
    return frozenset(map(id, opts))


def _has_gradient(opt: Optimizer) -> bool:
    return any(p.grad is not None for group in opt.param_groups for p in group["params"])
