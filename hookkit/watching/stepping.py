"""Where a step begins and ends, in a loop that is not ours: the part of a followed loop that steps.

Builds on `turns`, which knows when a step of several optimizers is over. A step with a closure
begins, for the callbacks, when that was evaluated first; one made within the backward, by an
optimizer for each parameter, is over when the backward is.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer

from hookkit.callbacks.scaling import stepping_scaler
from hookkit.errors import HookError
from hookkit.events import CancelStepException
from hookkit.hooks.entries import graph_task
from hookkit.watching.eval_passes import Asides
from hookkit.watching.optimizer_groups import Turns


class Stepping(Asides):
    """The part of a followed loop that steps; `FollowedLoop` says what the attributes are."""

    model: nn.Module
    opts: list[Optimizer]
    turns: Turns
    each_forward: bool
    stepped: bool
    n_left_out: int
    train_iter: int
    finds_opts: bool
    _unseen: Any
    _begin_batch: Any
    _end_batch: Any
    _tell: Any

    def _no_steps(self) -> None:
        self._skip = self._due = self._late = self._left_out = self.in_closure = False
        self._marked, self.turns.stepped = False, []
        self._stepped_at = self._longest = 0

    @property
    def n_idle(self) -> int:
        """Training batches since the last step; 0 while they may still be for the next one."""
        idle = self.train_iter - self._stepped_at - 1
        return idle if idle > 8 * max(self._longest, 1) else 0

    def step_began(self, opt: Optimizer, closure: bool) -> None:
        """The weights are about to change."""
        if opt not in self.opts:
            self.opts.append(opt)
        if self._skip or self.each_forward:
            return
        within = graph_task() != -1  # one optimizer for each parameter, as its gradient is there
        if opt in self.turns.stepped and not within:
            self._end_step()
        scaler = stepping_scaler()
        if scaler is not None or not self.turns.stepped:
            self.step_scaler = scaler
        self.in_closure = closure
        self._late = not (self.training or closure) and self.turns.comes_late(opt)
        if self._late or self.turns.stepped:
            return
        if closure:
            self._due = True  # its batch comes first: `closure_ran` goes on
            return
        self._expect_batch()
        self._before_step(too_early=within)

    def closure_ran(self) -> None:
        """The batch of a closure is through; only the first evaluation can be left out."""
        if self._due:
            self._expect_batch()
            self._before_step(too_early=graph_task() != -1)

    def step_ended(self, opt: Optimizer) -> None:
        """The weights have changed."""
        if self.each_forward:
            return
        if self._skip:
            self._skip, self.n_steps = False, self.n_steps + 1
        elif not self._late:
            self._expect_batch()
            if graph_task() != -1:
                self._end_with_backward(opt)
                return
            self.turns.stepped.append(opt)
            unseen = self.model.parameters() if self.finds_opts else ()
            if self.turns.more_to_come(self.opts, unseen):
                self._tell_part(opt)
            else:
                self._end_step()
        self._late = self.in_closure = False

    def _end_with_backward(self, opt: Optimizer) -> None:
        if not self.turns.stepped:
            Variable._execution_engine.queue_callback(self._backward_ended)
        if opt not in self.turns.stepped:
            self.turns.stepped.append(opt)
        self._tell_part(opt)

    def _tell_part(self, opt: Optimizer) -> None:
        """`opt` has made its part of a step; at `after_step` its gradients may be gone."""
        if self._left_out:
            return
        owned = [p for group in opt.param_groups for p in group["params"]]
        for cb in self.cbs:
            if cb.run and hasattr(type(cb), "_note_part"):
                cb._note_part(owned)

    def _backward_ended(self) -> None:
        if self.fitting and self.turns.stepped:
            self._end_step()

    def _expect_batch(self) -> None:
        self._due = False
        if not self.training:  # its forward was not seen
            if (unseen := self._unseen()) is not None:
                unseen()
            self._begin_batch()

    def _before_step(self, too_early: bool = False) -> None:
        try:
            self._tell("before_step")
        except CancelStepException:
            if too_early:
                raise HookError(
                    "A callback asked to leave out this step; the step is made within the backward "
                    "or is not seen (each_forward), so its gradients are still to come. Call "
                    "`backward()` first and a torch `opt.step()` after."
                ) from None
            for opt in self.opts:
                opt.zero_grad(set_to_none=True)  # then a torch optimizer changes nothing
            self._left_out, self.n_left_out = True, self.n_left_out + 1
            self("after_cancel_step")

    def _end_step(self) -> None:
        self.turns.end()
        self._longest = max(self._longest, self.train_iter - self._stepped_at)
        self._stepped_at = self.train_iter
        if self._left_out:
            self._left_out = False
        else:
            self.n_steps, self.stepped = self.n_steps + 1, True
            self._tell("after_step")
        if self.training:
            self._end_batch("after_batch")
