"""What an `ExternalLoop` does: for each of its states and each signal, actions and a next state.

`TABLE` is all of it. An action fires the events of the Learner:

    begin_batch    before_batch, after before_epoch and before_train if the epoch begins with it
    after_pred     after_pred
    before_step    before_step, or after_cancel_step if a callback raises CancelStepException
    end_step       after_step · after_batch
    end_batch      after_batch: of a batch without a step (accumulation, a step skipped by AMP)
    cancel_batch   after_cancel_batch: its forward raised
    begin_eval     before_batch with `training` False, after before_validate if it is the first
    end_eval       after_pred · after_batch

A callback's CancelBatchException closes the batch with after_cancel_batch, and the state is
CANCELLED. `tests/test_watching_external_loop.py` has the events of many loops, signal by signal.
"""

from __future__ import annotations

# Plain strings: reading a member of an Enum takes 0.25 µs in Python 3.11, and a step reads a dozen.


class State:
    """Where the loop is."""

    BETWEEN = "between batches"
    BATCH = "in a batch"
    PARTLY = "in a batch, of whose step a part was made"
    CLOSURE = "in a step whose closure has no batch yet"
    CLOSURE_BATCH = "in a step whose closure is in its first batch"
    CANCELLED = "after a batch that a callback cancelled; its step may follow"
    LATE = "in a step that belongs to the one that has just ended"
    EVAL = "in an eval forward"
    PAUSED = "in an eval forward within a batch"
    BACK = "in the state before the eval forward"


class Signal:
    """What happens. A new batch, the mark of an epoch and the end of the run first send CLOSE."""

    CLOSE = "close what is open"
    BEGIN = "a training forward begins"
    BEGIN_STEP = "a training forward begins that is a step of its own (each_forward)"
    OUT = "the forward returned"
    FAIL = "the forward raised"
    BEGIN_EVAL = "an eval forward begins"
    STEP = "an optimizer's step begins"
    STEP_CLOSURE = "an optimizer's step with a closure begins"
    STEP_LATE = "a further optimizer's step begins, and its batch has ended"
    RAN = "the closure returned"
    STEPPED_PART = "an optimizer has stepped, and others of the same step are to come"
    STEPPED = "the last optimizer of a step has stepped"


Row = tuple[tuple[str, ...], str]
TABLE: dict[str, dict[str, Row]] = {
    State.BETWEEN: {
        Signal.BEGIN: (("begin_batch",), State.BATCH),
        Signal.BEGIN_STEP: (("begin_batch", "before_step"), State.PARTLY),
        Signal.BEGIN_EVAL: (("begin_eval",), State.EVAL),
        Signal.STEP: (("begin_unseen_batch", "before_step"), State.BATCH),
        Signal.STEP_CLOSURE: ((), State.CLOSURE),
        Signal.STEP_LATE: ((), State.LATE),
        Signal.STEPPED_PART: (("begin_unseen_batch",), State.PARTLY),
        Signal.STEPPED: (("begin_unseen_batch", "end_step"), State.BETWEEN),
    },
    State.BATCH: {
        Signal.CLOSE: (("end_batch",), State.BETWEEN),
        Signal.OUT: (("after_pred",), State.BATCH),
        Signal.FAIL: (("cancel_batch",), State.BETWEEN),
        Signal.BEGIN_EVAL: (("pause",), State.PAUSED),
        Signal.STEP: (("before_step",), State.BATCH),
        Signal.STEP_CLOSURE: ((), State.CLOSURE_BATCH),
        Signal.STEPPED_PART: ((), State.PARTLY),
        Signal.STEPPED: (("end_step",), State.BETWEEN),
    },
    State.PARTLY: {
        Signal.CLOSE: (("end_step",), State.BETWEEN),
        Signal.OUT: (("after_pred",), State.PARTLY),
        Signal.FAIL: (("cancel_batch",), State.BETWEEN),
        Signal.BEGIN_EVAL: (("pause",), State.PAUSED),
        Signal.STEPPED: (("end_step",), State.BETWEEN),
    },
    State.CLOSURE: {
        Signal.BEGIN: (("begin_batch",), State.CLOSURE_BATCH),
        Signal.BEGIN_EVAL: (("begin_eval",), State.EVAL),
        Signal.STEP: (("begin_unseen_batch", "before_step"), State.BATCH),
        Signal.RAN: (("begin_unseen_batch", "before_step"), State.BATCH),
        Signal.STEPPED_PART: (("begin_unseen_batch",), State.PARTLY),
        Signal.STEPPED: (("begin_unseen_batch", "end_step"), State.BETWEEN),
    },
    State.CLOSURE_BATCH: {
        Signal.CLOSE: (("end_batch",), State.CLOSURE),
        Signal.OUT: (("after_pred",), State.CLOSURE_BATCH),
        Signal.FAIL: (("cancel_batch",), State.CLOSURE),
        Signal.BEGIN_EVAL: (("pause",), State.PAUSED),
        Signal.STEP: (("before_step",), State.BATCH),
        Signal.RAN: (("before_step",), State.BATCH),
        Signal.STEPPED_PART: ((), State.PARTLY),
        Signal.STEPPED: (("end_step",), State.BETWEEN),
    },
    State.CANCELLED: {
        Signal.CLOSE: ((), State.BETWEEN),
        Signal.BEGIN: (("begin_batch",), State.BATCH),
        Signal.BEGIN_STEP: (("begin_batch", "before_step"), State.PARTLY),
        Signal.BEGIN_EVAL: (("begin_eval",), State.EVAL),
        Signal.STEPPED: (("count_step",), State.BETWEEN),
    },
    State.LATE: {
        Signal.CLOSE: ((), State.BETWEEN),
        Signal.BEGIN: (("begin_batch",), State.BATCH),
        Signal.BEGIN_EVAL: (("begin_eval",), State.EVAL),
        Signal.STEP: (("begin_unseen_batch", "before_step"), State.BATCH),
        Signal.STEP_CLOSURE: ((), State.CLOSURE),
        Signal.STEPPED: ((), State.BETWEEN),
    },
    State.EVAL: {
        Signal.OUT: (("end_eval",), State.BACK),
        Signal.FAIL: (("cancel_eval",), State.BACK),
    },
    State.PAUSED: {Signal.OUT: (("resume",), State.BACK), Signal.FAIL: (("resume",), State.BACK)},
}
"""State → signal → the actions that follow, and the next state. A signal without a row is ignored;
in the two eval states it means that Ctrl-C ended the forward: it is handled as in the state before.
"""
