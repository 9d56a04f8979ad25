"""What an `ExternalLoop` does: for each state of the loop and each signal, actions and a next state.

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
CANCELLED. `tests/test_external_loop.py` has the events of many loops, signal by signal.
"""

from __future__ import annotations

# --- States.
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

# --- Signals. A new batch, an epoch's mark and the end of the run first close what is open.
CLOSE = "close what is open"
BEGIN = "a training forward begins"
BEGIN_STEP = "a training forward begins that is a step of its own (each_forward)"
OUT = "the forward returned"
FAIL = "the forward raised"
ASIDE = "an eval forward begins"
STEP = "an optimizer's step begins"
STEP_CLOSURE = "an optimizer's step with a closure begins"
STEP_LATE = "a further optimizer's step begins, and its batch has ended"
RAN = "the closure returned"
STEPPED_PART = "an optimizer has stepped, and others of the same step are to come"
STEPPED = "the last optimizer of a step has stepped"

Row = tuple[tuple[str, ...], str]
TABLE: dict[str, dict[str, Row]] = {
    BETWEEN: {
        BEGIN: (("begin_batch",), BATCH),
        BEGIN_STEP: (("begin_batch", "before_step"), PARTLY),
        ASIDE: (("begin_eval",), EVAL),
        STEP: (("begin_unseen_batch", "before_step"), BATCH),
        STEP_CLOSURE: ((), CLOSURE),
        STEP_LATE: ((), LATE),
        STEPPED_PART: (("begin_unseen_batch",), PARTLY),
        STEPPED: (("begin_unseen_batch", "end_step"), BETWEEN),
    },
    BATCH: {
        CLOSE: (("end_batch",), BETWEEN),
        OUT: (("after_pred",), BATCH),
        FAIL: (("cancel_batch",), BETWEEN),
        ASIDE: (("pause",), PAUSED),
        STEP: (("before_step",), BATCH),
        STEP_CLOSURE: ((), CLOSURE_BATCH),
        STEPPED_PART: ((), PARTLY),
        STEPPED: (("end_step",), BETWEEN),
    },
    PARTLY: {
        CLOSE: (("end_step",), BETWEEN),
        OUT: (("after_pred",), PARTLY),
        FAIL: (("cancel_batch",), BETWEEN),
        ASIDE: (("pause",), PAUSED),
        STEPPED: (("end_step",), BETWEEN),
    },
    CLOSURE: {
        BEGIN: (("begin_batch",), CLOSURE_BATCH),
        ASIDE: (("begin_eval",), EVAL),
        STEP: (("begin_unseen_batch", "before_step"), BATCH),
        RAN: (("begin_unseen_batch", "before_step"), BATCH),
        STEPPED_PART: (("begin_unseen_batch",), PARTLY),
        STEPPED: (("begin_unseen_batch", "end_step"), BETWEEN),
    },
    CLOSURE_BATCH: {
        CLOSE: (("end_batch",), CLOSURE),
        OUT: (("after_pred",), CLOSURE_BATCH),
        FAIL: (("cancel_batch",), CLOSURE),
        ASIDE: (("pause",), PAUSED),
        STEP: (("before_step",), BATCH),
        RAN: (("before_step",), BATCH),
        STEPPED_PART: ((), PARTLY),
        STEPPED: (("end_step",), BETWEEN),
    },
    CANCELLED: {
        CLOSE: ((), BETWEEN),
        BEGIN: (("begin_batch",), BATCH),
        BEGIN_STEP: (("begin_batch", "before_step"), PARTLY),
        ASIDE: (("begin_eval",), EVAL),
        STEPPED: (("count_step",), BETWEEN),
    },
    LATE: {
        CLOSE: ((), BETWEEN),
        BEGIN: (("begin_batch",), BATCH),
        ASIDE: (("begin_eval",), EVAL),
        STEP: (("begin_unseen_batch", "before_step"), BATCH),
        STEP_CLOSURE: ((), CLOSURE),
        STEPPED: ((), BETWEEN),
    },
    EVAL: {OUT: (("end_eval",), BACK), FAIL: (("cancel_eval",), BACK)},
    PAUSED: {OUT: (("resume",), BACK), FAIL: (("resume",), BACK)},
}
"""State → signal → the actions that follow, and the next state. A signal without a row is ignored;
in the two eval states it means that Ctrl-C ended the forward: it is handled as in the state before.
"""
