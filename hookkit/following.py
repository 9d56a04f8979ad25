"""A training loop that is not ours, followed: the events, and the state that callbacks read.

Builds on `driving` and `events`; `boundaries` tells it what happens. `FollowedLoop` is what a
callback sees as `self.learn` while `watch` drives it, with the names it knows from the Learner.

    forward      before_batch · after_pred
    step         before_step · after_step · after_batch
    no step      after_batch when the next batch comes (accumulation, a step skipped by AMP)
    it raised    after_cancel_batch
    validation   before_batch · after_pred · after_batch, with `training` False; around several
                 of them before_validate · after_validate

With several optimizers a step is over when all that have gradients have stepped (two optimizers on
one model), or as many as did before the next forward last time (a GAN's two players take turns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .driving import Driver
from .errors import HookError
from .events import CancelBatchException, CancelStepException
from .losses import LossTape, loss_in
from .outputs import Scores


class FollowedLoop(Driver):
    """Somebody else's training loop, as callbacks see it in `self.learn`.

    Attributes:
        model: the user's own module, without compile and distribution wrappers.
        opts: the torch optimizers; if none was given, those seen stepping the model so far.
        training: True from a training forward to the end of its batch; False in validation.
        epoch: 0-based, as marked.
        train_iter: training batches so far in this run.
        loss: of the batch that is in, detached, if it is known by now; else None.
        pred: the live output of the model during `after_pred`, else None: nothing is kept alive.
        stepped: an optimizer step has happened since the last `before_batch`.
        n_steps: optimizer steps so far, over all runs.
        n_left_out: those that a callback's CancelStepException left out.
        aside, dls, accelerator: as in a Learner that has none of them.
        losses: the `LossTape`.
        scores: what the first output looked like, if the loss function is a cross entropy.
        spans: for each epoch the first step, and what was told of it.
    """

    def __init__(
        self,
        model: nn.Module,
        opts: Iterable[Optimizer] = (),
        each_forward: bool = False,
        unseen: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.opts, self.each_forward = model, list(opts), each_forward
        self.n_steps, self.stepped = 0, False
        self.epoch = self.train_iter = 0
        self.loss: Tensor | None = None
        self.pred: Any = None
        self.scores: Any = None  # what the loss function was fed first: `outputs.Scores`
        self.losses = LossTape()
        self.spans: list[dict[str, Any]] = []
        self.loss_func: Any = None
        self.dls = self.accelerator = self.n_epoch = None
        self.aside = False
        self.scores: Scores | None = None
        self._unseen = unseen
        self._in_epoch = self._marked = self._skip = self._due = self._late = False
        self._left_out = self._aside = self._amid = self._validating = False
        self.n_left_out = 0
        self._recorders: list[Any] = []  # HookCallbacks: what has a `recording` to switch
        self._paused: list[Any] = []
        self._first_part: nn.Module | None = None
        self._running: list[Optimizer] = []
        self._stepped_by: dict[int, Optimizer] = {}
        self._last: frozenset[int] = frozenset()
        self._turns: set[frozenset[int]] = set()
        self._own(None)

    @property
    def opt(self) -> Optimizer | None:
        """The first optimizer, or None while none is known."""
        return self.opts[0] if self.opts else None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and (cb := self._cb_named(name)) is not None:
            return cb
        raise AttributeError(f"a watched loop has no {name!r}", name=name, obj=self)

    def _where(self) -> str:
        return f", epoch {self.epoch}, batch {self.train_iter} (watched loop)"

    # --- a run

    def begin(self) -> None:
        """The run begins: `before_fit`."""
        self._claim()
        self.fitting, self.train_iter, self.stepped = True, 0, False
        self._in_epoch = self._marked = self._skip = self._due = self._late = False
        self.training = self._left_out = self._aside = self._validating = False
        self._running, self._stepped_by = [], {}
        self._recorders = [cb for cb in self.cbs if hasattr(type(cb), "_record")]
        self("before_fit")

    def finish(self) -> None:
        """The run is over: what is open is closed, then `after_fit`."""
        self.mark_epoch()
        self("after_fit")

    def end(self) -> None:
        """Whatever happened: nothing is being followed, and every callback cleans up."""
        self.fitting = self.training = False
        self._clean_up()

    def mark_epoch(self) -> None:
        """Batches after this belong to a new epoch; nothing happens if there was none in this."""
        self._close()
        self._end_validation()
        if self._in_epoch:
            self("after_train", "after_epoch")
            self.epoch, self._in_epoch = self.epoch + 1, False

    def _close(self) -> None:
        if self._stepped_by or (self.each_forward and self.training):
            self._end_step()
        elif self.training:
            self._end_batch("after_batch")

    # --- forward

    def forward_began(self, training: bool) -> None:
        """A batch goes in."""
        if training:
            self._train_began()
        else:
            self._aside_began()

    def _train_began(self) -> None:
        self._aside = False
        if self._marked and self.training:
            self._marked = False
            return
        if self._stepped_by:  # those that have stepped are a turn of their own
            self._turns.add(frozenset(self._stepped_by))
        self._close()
        self._begin_batch()

    def part_began(self, part: nn.Module) -> None:
        """A part of the model runs: a batch goes in, if none is in."""
        again = self.each_forward and part is self._first_part
        if not self.training or self._stepped_by or again:
            self._first_part = part
            self._train_began()
        elif self._due:
            self._due = False
            self._before_step(too_early=True)

    def mark_batch(self) -> None:
        """A batch begins, says the user; the forward that follows belongs to it."""
        self._train_began()
        self._marked = True

    def forward_ended(self, output: Any) -> None:
        """The batch came out."""
        if self._aside:
            self._aside_ended("after_batch", output)
            return
        if not self.training:
            return
        if (loss := loss_in(output)) is not None:
            self.tell_loss(loss)
        if self.scores is None:
            self.scores = Scores(self.loss_func, output)
        self.pred = output
        try:
            self._tell("after_pred")
        finally:
            self.pred = None

    def forward_failed(self) -> None:
        """The model raised: its batch is not recorded."""
        if self._aside:
            self._aside_ended("after_cancel_batch", None)
        elif self.training:
            self.losses.drop()
            self._end_batch("after_cancel_batch")

    def _aside_began(self) -> None:
        """A forward that is not for training: validation, or a rollout amid a training batch."""
        self._amid, self.training, self._aside = self.training, False, True
        self._pause()
        if self._amid:
            return
        if not self._validating:
            self._validating = True
            self("before_validate")
        with suppress(CancelBatchException):
            self("before_batch")

    def _end_validation(self) -> None:
        if self._validating:
            self._validating = False
            self("after_validate")

    def _aside_ended(self, event: str, output: Any) -> None:
        self._aside = False
        try:
            if not self._amid:
                self.pred = output
                with suppress(CancelBatchException):
                    self("after_pred", event)
        finally:
            self.pred, self.training = None, self._amid
            self._pause(resume=self._amid)

    def _pause(self, resume: bool = False) -> None:
        """Between training batches nothing is recorded, also in a forward that cannot be seen."""
        if resume:
            for cb in self._paused:
                cb._record(True)
            self._paused = []
            return
        now = [cb for cb in self._recorders if cb.recording]
        self._paused = now
        for cb in now:
            cb._record(False)

    def tell_loss(self, loss: Tensor) -> None:
        """The loss of the batch that is in, or of the step just made."""
        kept = loss.detach().clone()  # `loss /= n_accumulate` may follow
        self.losses.put(kept)
        if self.training:
            self.loss = kept

    def _begin_batch(self) -> None:
        self._end_validation()
        if not self._in_epoch:
            self._in_epoch = True
            self.spans.append({"epoch": self.epoch, "step": self.n_steps})
            self("before_epoch", "before_train")
        self.training, self.stepped, self._skip, self.loss = True, False, False, None
        self.losses.begin(self.n_steps)
        self._tell("before_batch")
        if self._due or self.each_forward:
            self._due = False
            self._before_step(too_early=True)

    def _end_batch(self, event: str) -> None:
        self.train_iter += event == "after_batch"  # as the Learner: known to most `after_batch`
        try:
            self._tell(event)
        finally:
            self.training = False
            self._pause()

    def _tell(self, event: str) -> None:
        try:
            self(event)
        except CancelBatchException:
            # the user's batch goes on; for the callbacks it is over
            self._skip = True
            self.losses.drop()
            if self.training:
                self._end_batch("after_cancel_batch")

    # --- step

    def step_began(self, opt: Optimizer, closure: bool) -> None:
        """The weights are about to change."""
        if opt in self._running:  # its last step raised
            del self._running[self._running.index(opt) :]
        self._running.append(opt)
        if len(self._running) == 1 and not any(opt is o for o in self.opts):
            self.opts.append(opt)
        if len(self._running) > 1 or self._skip or self.each_forward:
            return  # a step within a step (SAM and its base) is one step
        if id(opt) in self._stepped_by:
            self._end_step()
        self._late = self._comes_late(opt, closure)
        if self._late or self._stepped_by:
            return
        if closure:
            self._due = True  # its forward comes first: `before_batch`, then `before_step`
            return
        self._expect_batch()
        self._before_step()

    def step_ended(self, opt: Optimizer) -> None:
        """The weights have changed."""
        outer = bool(self._running) and self._running[0] is opt
        if opt in self._running:
            del self._running[self._running.index(opt) :]
        if not outer or self.each_forward:
            return
        if self._skip:
            self._skip, self.n_steps = False, self.n_steps + 1
        elif not self._late:
            self._expect_batch()
            self._stepped_by[id(opt)] = opt
            if not self._more_to_come():
                self._end_step()
        self._late = False

    def _more_to_come(self) -> bool:
        """Will another optimizer step before the next forward?"""
        if len(self.opts) == len(self._stepped_by):
            return False
        if (done := frozenset(self._stepped_by)) not in self._turns:
            elsewhere = done.union(*self._turns)
            rest = [o for o in self.opts if id(o) not in elsewhere]
            if any(p.grad is not None for o in rest for g in o.param_groups for p in g["params"]):
                return True
            self._turns.add(done)
        return False

    def _comes_late(self, opt: Optimizer, closure: bool) -> bool:
        """Did this step's round end too early, before `opt` made its part of it?"""
        late = not (self.training or closure or self._stepped_by)
        late = late and bool(self._last) and id(opt) not in self._last
        if late:
            self._turns.discard(self._last)
            self._last |= {id(opt)}
        return late

    def _expect_batch(self) -> None:
        self._due = False
        if not self.training:  # its forward was not seen
            self._unseen()
            self._begin_batch()

    def _before_step(self, too_early: bool = False) -> None:
        try:
            self._tell("before_step")
        except CancelStepException:
            if too_early:
                raise HookError(
                    "A callback asked to leave out this step; the step has a closure, so its "
                    "gradients are still to come. Call the closure first and `opt.step()` after."
                ) from None
            for opt in self.opts or self._running:
                opt.zero_grad(set_to_none=True)  # then a torch optimizer changes nothing
            self._left_out, self.n_left_out = True, self.n_left_out + 1
            self("after_cancel_step")

    def _end_step(self) -> None:
        self._last = frozenset(self._stepped_by)
        self._stepped_by = {}
        if self._left_out:
            self._left_out = False
        else:
            self.n_steps, self.stepped = self.n_steps + 1, True
            self._tell("after_step")
        if self.training:
            self._end_batch("after_batch")
