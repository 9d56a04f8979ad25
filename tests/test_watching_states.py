"""The states of a watched loop: the table in the docstring of `State` is what a real loop does."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from test_watching import Log, batches, net, sgd
from torch import nn

from hookkit.callbacks.events import CancelStepException
from hookkit.training import Watcher, watch
from hookkit.training.watched_loop import State

TABLE = {
    (cells[0], cells[1]): (cells[2], cells[3:])
    for line in str(State.__doc__).splitlines()
    if line.strip()[:4].isupper() and len(cells := line.split()) > 2 and cells[2].isupper()
}
"""(state, what comes) → (the next state, the events that are sent)."""

INSIDE = ("EVALUATING", "PAUSED")
"""States in which a forward is under way that does not train."""

COMES = ("train", "other", "returns", "raises", "mark", "step", "last", "epoch")
OF_AN_EPOCH = ("before_epoch", "before_train", "after_train", "after_epoch")


def is_in_the_table(state: str, comes: str) -> bool:
    if comes in ("returns", "raises"):
        return state in (*INSIDE, "BATCH")
    return comes not in ("train", "other") or state not in INSIDE


class Bench:
    """A real loop that is driven into a state, where something comes.

    Attributes:
        opts: three optimizers: when one has stepped, another can, and still another is to follow.
        inside: what is done once within the next forward.
        found: the state and the events, when what was to come has come.
    """

    def __init__(self) -> None:
        self.model, self.log = net(), Log()
        self.model.append(nn.Linear(2, 2))
        self.opts = [sgd(self.model[i]) for i in (0, 2, 3)]
        self.inside: Callable[[], object] | None = None
        self.cancels = False
        self.found: Any = None
        self.log.before_step = self.before_step  # type: ignore[attr-defined]
        self.model[0].register_forward_hook(self.within)
        self.w: Watcher = watch(self.model, self.opts, self.log)

    def before_step(self) -> None:
        self.log.events.append("before_step")
        if self.cancels:
            raise CancelStepException

    def within(self, *_: object) -> None:
        inside, self.inside = self.inside, None
        if inside is not None:
            inside()

    def forward(self, trains: bool, inside: Callable[[], object] | None = None) -> torch.Tensor:
        self.inside = inside
        self.model.train(trains)
        with torch.set_grad_enabled(trains):
            return self.model(batches(1)[0])

    def look(self) -> None:
        events = [event for event in self.log.events if event not in OF_AN_EPOCH]
        self.found = self.w.loop.state.name, events

    def come(self, comes: str) -> None:
        state = self.w.loop.state.name
        left = self.opts[1:] if state in ("STEPPED", "CANCELLED") else self.opts
        self.log.events.clear()
        if comes in ("train", "other"):
            self.forward(comes == "train", self.look)
            return
        if comes in ("step", "last"):
            for opt in left[:1] if comes == "step" else left:
                opt.step()
        elif comes == "raises":
            raise ZeroDivisionError
        elif comes != "returns":
            self.w.batch() if comes == "mark" else self.w.epoch()
        self.look()

    def drive(self, state: str, comes: str) -> None:
        """Bring the loop into `state`; let it come there."""
        if state in ("STEPPED", "CANCELLED"):
            self.forward(True).sum().backward()
            self.cancels = state == "CANCELLED"
            self.opts[0].step()
        elif state == "VALIDATION":
            self.forward(False)
        elif state == "MARKED":
            self.w.batch()
        elif state in INSIDE or comes in ("returns", "raises"):
            if state == "PAUSED":
                self.forward(True)
            try:
                self.forward(state == "BATCH", lambda: self.arrive(state, comes))
            except ZeroDivisionError:
                self.look()
            if comes == "returns":
                self.look()
            return
        elif state == "BATCH":
            self.forward(True)
        self.arrive(state, comes)

    def arrive(self, state: str, comes: str) -> None:
        assert self.w.loop.state.name == state
        self.come(comes)


@pytest.mark.parametrize(("state", "comes"), [*product(State.__members__, COMES)])
def test_the_table_of_states_is_what_a_loop_does(state: str, comes: str) -> None:
    assert ((state, comes) in TABLE) == is_in_the_table(state, comes)
    if (state, comes) not in TABLE:
        return
    bench = Bench()

    with bench.w:
        bench.forward(True).sum().backward()  # so that no step is the first that was seen
        for opt in bench.opts:
            opt.step()
        bench.drive(state, comes)

    then, sent = TABLE[state, comes]
    assert bench.found == (then, sent)
