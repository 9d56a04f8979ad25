"""`ExternalLoop`: what callbacks get for each signal of a loop, as literal logs of many loops.

Each log has a signal on the left and the events that follow it on the right. The signals are those
that `LoopHooks` sends; here no model runs, and `a` and `b` are optimizers of one parameter each.

    in / eval       a forward begins, in training mode with gradients / in any other
    out / fail      it returned / it raised
    part:x          the child `x` of a model runs whose own forward is never called
    a.step a.done   `a.step()` is called / has changed the weights
    a.closure ran   `a.step(closure)` is called / the closure returned
    a.grad a.zero   the parameter of `a` gets a gradient / loses it
    mark epoch stop `w.batch()` / `w.epoch()` / the end of the `with`
    { … }           what happens within a backward pass
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hookkit.callbacks import Callback
from hookkit.events import EVENTS, CancelBatchException, CancelStepException
from hookkit.recording import HookCallback
from hookkit.watching.external_loop import ExternalLoop

CANCELS = {"batch": CancelBatchException, "step": CancelStepException}


class Replay(Callback):
    """Sends a log's signals to a loop, and writes down the events that come of each.

    Args:
        options: `opts`, the names of the optimizers that the loop was given ("" for none);
            `each_forward`; `cancel`, an event, and after it the batch or step to cancel there.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.seen: list[str] = []
        self.cancel, _, self.what = options.get("cancel", "").partition(" ")
        names = options.get("opts", "a")
        self.model = nn.ParameterDict({k: nn.Parameter(torch.ones(1)) for k in "ab"})
        self.known = {k: torch.optim.SGD([self.model[k]], lr=0.1) for k in "ab"}
        self.parts = {"x": nn.ReLU(), "y": nn.ReLU()}
        given = [self.known[k] for k in names]
        each = options.get("each_forward", False)
        self.loop = ExternalLoop(self.model, given, each)
        self.loop.warned = True  # of steps whose forward is not in the log
        self.hooked = HookCallback(modules=[])
        self.loop.add_cbs([self, self.hooked])

    def note(self, event: str) -> None:
        self.seen.append(event)
        if event == self.cancel:
            self.cancel = ""
            raise CANCELS[self.what]

    def send(self, signal: str) -> None:
        loop = self.loop
        who, _, verb = signal.partition(".")
        simple: dict[str, Callable[[], Any]] = {
            "in": lambda: loop.forward_began(True),
            "eval": lambda: loop.forward_began(False),
            "out": lambda: loop.forward_ended(None),
            "fail": loop.forward_failed,
            "ran": loop.closure_ran,
            "mark": loop.mark_batch,
            "epoch": loop.mark_epoch,
            "stop": loop.finish,
            "part:x": lambda: loop.part_began(self.parts["x"]),
            "part:y": lambda: loop.part_began(self.parts["y"]),
        }
        if signal in simple:
            simple[signal]()
        elif verb in ("grad", "zero"):
            self.model[who].grad = torch.ones(1) if verb == "grad" else None
        elif verb == "done":
            loop.step_ended(self.known[who])
        else:
            loop.step_began(self.known[who], verb == "closure")

    def lines(self, signals: list[str]) -> Iterator[str]:
        while signals:
            signal = signals.pop(0)
            if signal == "{":
                yield "{"
                yield from self.within_backward(signals)
                signal = "}"
            else:
                self.send(signal)
            yield f"{signal:<9} {' '.join(self.seen)}".rstrip()
            self.seen.clear()

    def within_backward(self, signals: list[str]) -> list[str]:
        end = signals.index("}")
        inside, found = signals[:end], list[str]()
        del signals[: end + 1]
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda g: found.extend(self.lines(inside)))
        x.sum().backward()
        return found

    def run_all(self, signals: list[str]) -> list[str]:
        self.loop.begin()
        assert self.seen == ["before_fit"]
        self.seen.clear()
        try:
            return list(self.lines(signals))
        finally:
            self.loop.end()


for _event in EVENTS:
    setattr(Replay, _event, lambda self, event=_event: self.note(event))

LOGS: dict[str, tuple[dict[str, Any], str]] = {
    "a plain loop": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
in        before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "no step at all": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
in        after_batch before_batch
out       after_pred
stop      after_batch after_train after_epoch after_fit
n_steps=0 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "an empty run": (
        {},
        """
epoch
stop      after_fit
n_steps=0 train_iter=0 epoch=0 n_cancelled_steps=0
""",
    ),
    "accumulation": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
in        after_batch before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
in        before_batch
out       after_pred
in        after_batch before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=4 epoch=1 n_cancelled_steps=0
""",
    ),
    "a step that a GradScaler skips": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
in        before_batch
out       after_pred
in        after_batch before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=3 epoch=1 n_cancelled_steps=0
""",
    ),
    "epochs marked at the bottom": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
epoch     after_train after_epoch
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
epoch     after_train after_epoch
stop      after_fit
n_steps=2 train_iter=2 epoch=2 n_cancelled_steps=0
""",
    ),
    "epochs marked at the top": (
        {},
        """
epoch
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
epoch     after_train after_epoch
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=2 n_cancelled_steps=0
""",
    ),
    "an epoch marked between forward and step": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
epoch     after_batch after_train after_epoch
a.step    before_epoch before_train before_batch before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=2 epoch=2 n_cancelled_steps=0
""",
    ),
    "validation after each epoch": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
eval      before_validate before_batch
out       after_pred after_batch
eval      before_batch
out       after_pred after_batch
in        after_validate before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
eval      before_validate before_batch
out       after_pred after_batch
epoch     after_validate after_train after_epoch
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=3 train_iter=3 epoch=2 n_cancelled_steps=0
""",
    ),
    "validation before the first batch": (
        {},
        """
eval      before_validate before_batch
out       after_pred after_batch
in        after_validate before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "an eval forward within a batch": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
eval
out
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "an eval forward within a batch that raises": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
eval
fail
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a validation forward that raises": (
        {},
        """
eval      before_validate before_batch
fail      after_cancel_batch
in        after_validate before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a forward that raises": (
        {},
        """
in        before_epoch before_train before_batch
fail      after_cancel_batch
in        before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a forward that raises among accumulated ones": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
in        after_batch before_batch
fail      after_cancel_batch
in        before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a forward cut short by Ctrl-C": (
        {},
        """
in        before_epoch before_train before_batch
in        after_batch before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=1 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a validation forward cut short by Ctrl-C": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
eval      before_validate before_batch
in        after_validate before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a step that raises, and is tried again": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a step that raises, and the loop goes on": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
in        after_batch before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=1 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a step before any forward": (
        {},
        """
a.step    before_epoch before_train before_batch before_step
a.done    after_step after_batch
in        before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "two steps for one forward": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
a.step    before_batch before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a closure": (
        {},
        """
a.closure
in        before_epoch before_train before_batch
out       after_pred
ran       before_step
a.done    after_step after_batch
a.closure
in        before_batch
out       after_pred
ran       before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a closure evaluated three times": (
        {},
        """
a.closure
in        before_epoch before_train before_batch
out       after_pred
ran       before_step
in        after_batch before_batch
out       after_pred
ran
in        after_batch before_batch
out       after_pred
ran
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=3 epoch=1 n_cancelled_steps=0
""",
    ),
    "a closure over a forward that came before": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
a.closure
ran       before_step
a.done    after_step after_batch
in        before_batch
out       after_pred
a.closure
ran       before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a closure that is never evaluated": (
        {},
        """
in        before_epoch before_train before_batch
out       after_pred
a.closure
a.done    after_step after_batch
a.closure
a.done    before_batch after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a closure whose forward raises": (
        {},
        """
a.closure
in        before_epoch before_train before_batch
fail      after_cancel_batch
a.closure
in        before_batch
out       after_pred
ran       before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a closure with an eval forward": (
        {},
        """
a.closure
eval      before_validate before_batch
out       after_pred after_batch
in        after_validate before_epoch before_train before_batch
out       after_pred
eval
out
ran       before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a closure that the caller marks as a batch": (
        {},
        """
a.closure
mark      before_epoch before_train before_batch
ran       before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "two optimizers of one model": (
        {"opts": "ab"},
        """
a.grad
b.grad
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
a.done
b.step
b.done    after_step after_batch
in        before_batch
out       after_pred
a.step    before_step
a.done
b.step
b.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "two optimizers, found by themselves": (
        {"opts": ""},
        """
a.grad
b.grad
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
a.done
b.step
b.done    after_step after_batch
in        before_batch
out       after_pred
a.step    before_step
a.done
b.step
b.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "two optimizers without gradients: the second is late": (
        {"opts": "ab"},
        """
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
b.step
b.done
in        before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
b.step
b.done
in        before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
b.step
b.done
stop      after_train after_epoch after_fit
n_steps=3 train_iter=3 epoch=1 n_cancelled_steps=0
""",
    ),
    "two players": (
        {"opts": "ab"},
        """
in        before_epoch before_train before_batch
out       after_pred
b.grad
b.step    before_step
b.done    after_step after_batch
b.zero
in        before_batch
out       after_pred
a.grad
b.grad
a.step    before_step
a.done    after_step after_batch
a.zero
b.zero
in        before_batch
out       after_pred
b.grad
b.step    before_step
b.done    after_step after_batch
b.zero
in        before_batch
out       after_pred
a.grad
b.grad
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=4 train_iter=4 epoch=1 n_cancelled_steps=0
""",
    ),
    "one of two optimizers stops stepping": (
        {"opts": "ab"},
        """
a.grad
b.grad
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
a.done
b.step
b.done    after_step after_batch
in        before_batch
out       after_pred
a.step    before_step
a.done
in        after_step after_batch before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
in        before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=4 train_iter=4 epoch=1 n_cancelled_steps=0
""",
    ),
    "one optimizer steps twice while the other waits": (
        {"opts": "ab"},
        """
a.grad
b.grad
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
a.done
a.step    after_step after_batch before_batch before_step
a.done
stop      after_step after_batch after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "the second of two optimizers has a closure": (
        {"opts": "ab"},
        """
a.grad
b.grad
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
a.done
b.closure
in        after_step after_batch before_batch
out       after_pred
ran
b.done    after_step after_batch
in        before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
b.closure
ran       before_batch before_step
b.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=4 train_iter=4 epoch=1 n_cancelled_steps=0
""",
    ),
    "an epoch marked between two optimizers": (
        {"opts": "ab"},
        """
a.grad
b.grad
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
a.done
epoch     after_step after_batch after_train after_epoch
b.step
b.done
stop      after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "an eval forward between two optimizers": (
        {"opts": "ab"},
        """
a.grad
b.grad
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step
a.done
eval
out
b.step
b.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "optimizers that step within the backward": (
        {"opts": ""},
        """
in        before_epoch before_train before_batch
out       after_pred
{
a.grad
a.step    before_step
a.done
a.zero
b.grad
b.step
b.done
b.zero
}         after_step after_batch
in        before_batch
out       after_pred
{
a.step    before_step
a.done
b.step
b.done
}         after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "optimizers that step within an accumulated backward": (
        {"opts": ""},
        """
in        before_epoch before_train before_batch
out       after_pred
in        after_batch before_batch
out       after_pred
{
a.step    before_step
a.done
b.step
b.done
}         after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "marked batches": (
        {},
        """
mark      before_epoch before_train before_batch
in
out       after_pred
mark      after_batch before_batch
in
out       after_pred
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "marked batches whose forwards are not seen": (
        {},
        """
mark      before_epoch before_train before_batch
a.step    before_step
a.done    after_step after_batch
mark      before_batch
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a marked batch, then unmarked ones": (
        {},
        """
mark      before_epoch before_train before_batch
in
out       after_pred
a.step    before_step
a.done    after_step after_batch
in        before_batch
out       after_pred
in        after_batch before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=3 epoch=1 n_cancelled_steps=0
""",
    ),
    "a marked batch with a closure": (
        {},
        """
mark      before_epoch before_train before_batch
a.closure
in
out       after_pred
ran       before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "an eval forward in a marked batch": (
        {},
        """
mark      before_epoch before_train before_batch
eval
out
in
out       after_pred
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "each forward is a step": (
        {"each_forward": True},
        """
in        before_epoch before_train before_batch before_step
out       after_pred
in        after_step after_batch before_batch before_step
out       after_pred
eval
out
in        after_step after_batch before_batch before_step
out       after_pred
epoch     after_step after_batch after_train after_epoch
in        before_epoch before_train before_batch before_step
out       after_pred
stop      after_step after_batch after_train after_epoch after_fit
n_steps=4 train_iter=4 epoch=2 n_cancelled_steps=0
""",
    ),
    "each forward is a step, one raises": (
        {"each_forward": True},
        """
in        before_epoch before_train before_batch before_step
fail      after_cancel_batch
in        before_batch before_step
out       after_pred
stop      after_step after_batch after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "each forward is a step, an optimizer steps too": (
        {"each_forward": True},
        """
in        before_epoch before_train before_batch before_step
out       after_pred
a.step
a.done
in        after_step after_batch before_batch before_step
out       after_pred
a.closure
in        after_step after_batch before_batch before_step
out       after_pred
ran
a.done
stop      after_step after_batch after_train after_epoch after_fit
n_steps=3 train_iter=3 epoch=1 n_cancelled_steps=0
""",
    ),
    "a model used through its parts": (
        {},
        """
part:x    before_epoch before_train before_batch
part:y
a.step    before_step
a.done    after_step after_batch
part:x    before_batch
part:y
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "parts, gradients of two batches make a step": (
        {},
        """
part:x    before_epoch before_train before_batch
part:y
part:x
a.grad
part:y
part:x    after_batch before_batch
part:x
a.step    before_step
a.done    after_step after_batch
a.zero
part:x    before_batch
stop      after_batch after_train after_epoch after_fit
n_steps=1 train_iter=3 epoch=1 n_cancelled_steps=0
""",
    ),
    "parts, each forward is a step": (
        {"each_forward": True},
        """
part:x    before_epoch before_train before_batch before_step
part:y
part:x    after_step after_batch before_batch before_step
part:y
stop      after_step after_batch after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "parts, two optimizers": (
        {"opts": "ab"},
        """
a.grad
b.grad
part:x    before_epoch before_train before_batch
part:y
a.step    before_step
a.done
part:x    after_step after_batch before_batch
b.step    before_step
b.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "parts in a marked batch": (
        {},
        """
mark      before_epoch before_train before_batch
part:x
part:y
a.step    before_step
a.done    after_step after_batch
mark      before_batch
part:x
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a batch cancelled as it begins": (
        {"cancel": "before_batch batch"},
        """
in        before_epoch before_train before_batch after_cancel_batch
out
a.grad
a.step
a.done
a.zero
in        before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a batch cancelled after the forward": (
        {"cancel": "after_pred batch"},
        """
in        before_epoch before_train before_batch
out       after_pred after_cancel_batch
a.grad
a.step
a.done
a.zero
in        before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a batch cancelled before its step": (
        {"cancel": "before_step batch"},
        """
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step after_cancel_batch
a.done
a.zero
in        before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a batch cancelled after its step": (
        {"cancel": "after_step batch"},
        """
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_cancel_batch
a.zero
in        before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a batch cancelled as it ends": (
        {"cancel": "after_batch batch"},
        """
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch after_cancel_batch
a.zero
in        before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "an accumulated batch cancelled as it ends": (
        {"cancel": "after_batch batch"},
        """
in        before_epoch before_train before_batch
out       after_pred
in        after_batch after_cancel_batch before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=2 epoch=1 n_cancelled_steps=0
""",
    ),
    "a cancelled batch with an eval forward": (
        {"cancel": "before_batch batch"},
        """
in        before_epoch before_train before_batch after_cancel_batch
out
eval      before_validate before_batch
out       after_pred after_batch
a.step
a.done
in        after_validate before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=2 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a validation batch cancelled": (
        {"cancel": "before_batch batch"},
        """
eval      before_validate before_batch
out       after_pred after_batch
eval      before_batch
out       after_pred after_batch
in        after_validate before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=1 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a closure's batch cancelled": (
        {"cancel": "after_pred batch"},
        """
a.closure
in        before_epoch before_train before_batch
out       after_pred after_cancel_batch
ran
a.done
a.closure
in        before_batch
out       after_pred
ran       before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=2 train_iter=1 epoch=1 n_cancelled_steps=0
""",
    ),
    "a step cancelled": (
        {"cancel": "before_step step"},
        """
in        before_epoch before_train before_batch
out       after_pred
a.grad
a.step    before_step after_cancel_step
a.done    after_batch
a.zero
in        before_batch
out       after_pred
a.grad
a.step    before_step
a.done    after_step after_batch
a.zero
stop      after_train after_epoch after_fit
n_steps=1 train_iter=2 epoch=1 n_cancelled_steps=1
""",
    ),
    "a step of two optimizers cancelled": (
        {"opts": "ab", "cancel": "before_step step"},
        """
a.grad
b.grad
in        before_epoch before_train before_batch
out       after_pred
a.step    before_step after_cancel_step
a.grad
a.done    after_batch
b.grad
b.step
b.done
a.grad
b.grad
in        before_batch
out       after_pred
a.step    before_step
a.done
b.step
b.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=2 epoch=1 n_cancelled_steps=1
""",
    ),
    "a closure's step cancelled": (
        {"cancel": "before_step step"},
        """
a.closure
in        before_epoch before_train before_batch
out       after_pred
ran       before_step after_cancel_step
a.done    after_batch
a.closure
in        before_batch
out       after_pred
ran       before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=2 epoch=1 n_cancelled_steps=1
""",
    ),
    "a closure's step cancelled, evaluated twice": (
        {"cancel": "before_step step"},
        """
a.closure
in        before_epoch before_train before_batch
out       after_pred
ran       before_step after_cancel_step
in        after_batch before_batch
out       after_pred
ran
a.done    after_batch
a.closure
in        before_batch
out       after_pred
ran       before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=3 epoch=1 n_cancelled_steps=1
""",
    ),
    "an accumulated step cancelled": (
        {"cancel": "before_step step"},
        """
in        before_epoch before_train before_batch
out       after_pred
in        after_batch before_batch
out       after_pred
a.step    before_step after_cancel_step
a.done    after_batch
in        before_batch
out       after_pred
a.step    before_step
a.done    after_step after_batch
stop      after_train after_epoch after_fit
n_steps=1 train_iter=3 epoch=1 n_cancelled_steps=1
""",
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_events_of_each_signal(name: str) -> None:
    options, text = LOGS[name]
    *log, counts = text.strip().splitlines()
    replay = Replay(options)

    found = replay.run_all([line.split()[0] for line in log])

    loop = replay.loop
    assert found == log
    assert counts == (
        f"n_steps={loop.n_steps} train_iter={loop.train_iter} epoch={loop.epoch} "
        f"n_cancelled_steps={loop.n_cancelled_steps}"
    )
