"""A training loop that is not ours, followed: the events, and the state that callbacks read.

Builds on `driving` and `events`; `boundaries` tells it what happens. `FollowedLoop` is what a
callback sees as `self.learn` while `watch` drives it, with the names it knows from the Learner.

    forward      before_batch · after_pred
    step         before_step · after_step · after_batch
    (a step made within the backward is over when the backward is)
    no step      after_batch when the next batch comes (accumulation, a step skipped by AMP)
    it raised    after_cancel_batch
    validation   before_batch · after_pred · after_batch, with `training` False; around several
                 of them before_validate · after_validate

What begins and ends a step is in `stepping`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookkit.callbacks.callback import Callback
from hookkit.callbacks.outputs import Scores, loss_by_graph
from hookkit.callbacks.runs import info_of
from hookkit.events import CancelBatchException
from hookkit.watching.losses import LossTape, loss_in
from hookkit.watching.optimizer_groups import Turns
from hookkit.watching.stepping import Stepping

_BY_CLASS = ("cross_entropy", "nll_loss")


class FollowedLoop(Stepping):
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
        n_steps: optimizer steps so far, over all runs, and those `elsewhere`.
        elsewhere: (first, end) of steps that its recorders saw in another loop before.
        n_left_out: those that a callback's CancelStepException left out.
        aside, dls, accelerator: as in a Learner that has none of them.
        scaler: a GradScaler that is known beforehand.
        finds_opts: no optimizer was given: those that step are found.
        losses: the `LossTape`.
        scores: what a cross entropy was fed first.
        loss_facts: what the graph of the first told loss says of it; None before, or if named.
        spans: for each epoch the first step, and what was told of it.
    """

    def __init__(
        self,
        model: nn.Module,
        opts: Iterable[Optimizer] = (),
        each_forward: bool = False,
        unseen: Callable[[], Callable[[], None] | None] = lambda: None,
        finds_opts: bool = False,
    ) -> None:
        self.model, self.opts, self.each_forward = model, list(opts), each_forward
        self.n_steps = self.epoch = 0
        self.elsewhere: list[tuple[int, int]] = []
        self.loss: Tensor | None = None
        self.pred: Any = None
        self.losses = LossTape()
        self.spans: list[dict[str, Any]] = []
        self.loss_func: Any = None
        self.dls = self.accelerator = self.scaler = self.n_epoch = None
        self.aside = False
        self.scores: Scores | None = None
        self.loss_facts: dict[str, str] | None = None
        self._unseen = unseen
        self.n_left_out = 0
        self._first_part: nn.Module | None = None
        self.turns, self.finds_opts = Turns(), finds_opts
        self._reset()
        self._own(None)

    def _reset(self) -> None:
        self.train_iter, self.stepped, self.training = 0, False, False
        self._in_epoch = False
        self._no_steps()
        self._no_asides()

    @property
    def opt(self) -> Optimizer | None:
        """The first optimizer, or None while none is known."""
        return self.opts[0] if self.opts else None

    @property
    def stepped_opts(self) -> list[Optimizer]:
        """The optimizers that made the last step; all, where steps are not seen."""
        return self.turns.last or self.opts

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and (cb := self._cb_named(name)) is not None:
            return cb
        raise AttributeError(f"a watched loop has no {name!r}", name=name, obj=self)

    def __getstate__(self) -> dict[str, Any]:
        """What was recorded; the model, the optimizers and what is open belong to the original."""
        names = ("cbs", "_past", "n_steps", "epoch", "elsewhere", "losses", "spans", "n_left_out")
        return {**{name: getattr(self, name) for name in names}, "kept_info": info_of(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None)  # type: ignore[misc]
        super().__setstate__(state)

    def _where(self) -> str:
        return f", epoch {self.epoch}, batch {self.train_iter} (watched loop)"

    # --- a run

    def begin(self) -> None:
        """The run begins: `before_fit`."""
        self._claim()
        self._reset()
        self.fitting = True
        self._find_recorders()
        self("before_fit")

    def _carry_on(self, cb: Callback) -> None:
        own = self.n_steps
        super()._carry_on(cb)
        if self.n_steps > own:
            self.elsewhere.append((own, self.n_steps))

    def finish(self) -> None:
        """The run is over: what is open is closed, then `after_fit`."""
        self.mark_epoch()
        self("after_fit")

    def end(self) -> None:
        """Whatever happened: nothing is being followed, and every callback cleans up."""
        self.fitting = self.training = False
        self.step_scaler = None
        self._clean_up()

    def mark_epoch(self) -> None:
        """Batches after this belong to a new epoch; nothing happens if there was none in this."""
        self._close()
        self._end_validation()
        if self._in_epoch:
            self("after_train", "after_epoch")
            self.epoch, self._in_epoch = self.epoch + 1, False

    def _close(self) -> None:
        if self.turns.stepped or (self.each_forward and self.training):
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
        if self.turns.stepped:
            self.turns.learn(self.opts)
        self._close()
        self._begin_batch()

    def part_began(self, part: nn.Module) -> None:
        """A part of the model runs: a batch goes in, if none is in."""
        again = self.each_forward and part is self._first_part
        if not self.training or self.turns.stepped or again:
            self._first_part = part
            self._train_began()

    def mark_batch(self) -> None:
        """A batch begins, says the user; the forward that follows belongs to it."""
        self._marked = False
        self._train_began()
        self._marked = True

    def forward_ended(self, output: Any, share: bool = False) -> None:
        """The batch came out; `share`: its loss is a part of its step's, not one to average."""
        if self._aside:
            self._aside_ended(output, "after_pred", "after_batch")
            return
        if not self.training:
            return
        loss, guess = loss_in(output)
        if loss is not None:
            self.tell_loss(loss, guess, share)
        if self.scores is None and not isinstance(self.loss_func, nn.Module):
            # a module's own input is looked at
            self.scores = Scores(self.loss_func, output, fed=False)
        self.pred = output
        try:
            self._tell("after_pred")
        finally:
            self.pred = None

    def forward_failed(self) -> None:
        """The model raised: its batch is not recorded."""
        if self._aside:
            self._aside_ended(None, "after_cancel_batch")
        elif self.training:
            self.losses.drop()
            self._end_batch("after_cancel_batch")

    def tell_loss(self, loss: Tensor, guess: bool = False, share: bool = False) -> None:
        """The loss of the batch that is in, or of the step just made."""
        if self.loss_facts is None and self.loss_func is None:
            self._learn_loss(loss)
        kept = loss.detach().clone()  # `loss /= n_accumulate` may follow
        self.losses.put(kept, guess, share)
        if self.training:
            self.loss = kept

    def _learn_loss(self, loss: Tensor) -> None:
        """What kind of loss it is, from the graph of the first that is told."""
        self.loss_facts = loss_by_graph(loss)
        if self.scores is not None and self.loss_facts.get("loss_func") in _BY_CLASS:
            self.scores.by_class = True

    def _begin_batch(self) -> None:
        self._end_validation()
        if not self._in_epoch:
            self._in_epoch = True
            self.spans.append({"epoch": self.epoch, "step": self.n_steps})
            self("before_epoch", "before_train")
        self.training, self.stepped, self._skip, self.loss = True, False, False, None
        self.losses.begin(self.n_steps)
        self._tell("before_batch")
        if self.each_forward:
            self._before_step(too_early=True)

    def _end_batch(self, event: str) -> None:
        self.train_iter += event == "after_batch"  # as the Learner: known to most `after_batch`
        try:
            self._tell(event)
        finally:
            self.training = False
            self._pause()

    def _tell(self, event: str) -> None:
        if self._listeners.get(event) == []:
            return  # the common case, without the calls that follow
        try:
            self(event)
        except CancelBatchException:
            # the user's batch goes on; for the callbacks it is over
            self._skip = True
            self.losses.drop()
            if self.training:
                self._end_batch("after_cancel_batch")
