"""Events, in order; what each Cancel* skips; and the table that says so."""

from typing import Any

import pytest
from learners import EventLog, quiet as quiet_learner

from hookkit.callbacks import Callback
from hookkit.callbacks.events import CANCELS

TRAIN_BATCH = [
    "before_batch",
    "after_pred",
    "after_loss",
    "before_backward",
    "after_backward",
    "before_step",
    "after_step",
    "after_batch",
]

VALID_BATCH = ["before_batch", "after_pred", "after_loss", "after_batch"]

TRAIN = ["before_train", *TRAIN_BATCH, "after_train"]
VALID = ["before_validate", *VALID_BATCH, "after_validate"]
FIT = ["before_fit", "before_epoch", *TRAIN, *VALID, "after_epoch", "after_fit"]

VALIDATE = ["before_fit", "before_epoch", *VALID, "after_epoch", "after_fit"]


def quiet(n_trn: int = 1, **kwargs: Any) -> Any:
    return quiet_learner(n_trn, n_val=1, **kwargs)


def events_of(what: Any, *cbs: Any, n_trn: int = 1) -> list[str]:
    log = EventLog(order=100)
    learn = quiet(n_trn, cbs=[log, *cbs])
    assert log.seen == ["after_create"]
    log.seen.clear()
    what(learn)
    return log.seen


def test_a_fit_fires_fastais_events_in_fastais_order() -> None:
    assert events_of(lambda learn: learn.fit(1)) == FIT

    seen = events_of(lambda learn: learn.fit(2), n_trn=2)

    train = ["before_train", *TRAIN_BATCH, *TRAIN_BATCH, "after_train"]
    epoch = ["before_epoch", *train, *VALID, "after_epoch"]
    assert seen == ["before_fit", *epoch, *epoch, "after_fit"]


@pytest.mark.parametrize("verb", ["validate", "get_preds"])
def test_a_pass_without_learning_fires_the_validation_inside_fit_and_epoch(verb: str) -> None:
    assert events_of(lambda learn: getattr(learn, verb)()) == VALIDATE


def test_no_validation_data_means_no_validation_events() -> None:
    def body(learn: Any) -> None:
        learn.dls.loaders[1] = None
        learn.fit(1)

    seen = events_of(body)

    assert "before_validate" not in seen
    assert seen[-2:] == ["after_epoch", "after_fit"]


# --- cancelling: raised as the part begins

INSIDE = {  # of `before_train` to `after_epoch`, after the events before it
    "backward": [
        *TRAIN[:4],
        "after_cancel_backward",
        *TRAIN[5:],
        *VALID,
    ],
    "step": [
        *TRAIN[:6],
        "after_cancel_step",
        *TRAIN[7:],
        *VALID,
    ],
    "batch": [
        "before_train",
        "after_cancel_batch",
        "after_batch",
        "after_train",
        "before_validate",
        "after_cancel_batch",
        "after_batch",
        "after_validate",
    ],
    "train": ["after_cancel_train", "after_train", *VALID],
    "validate": [*TRAIN, "after_cancel_validate", "after_validate"],
}
CANCELLED = {
    **{part: [*FIT[:2], *inside, *FIT[-2:]] for part, inside in INSIDE.items()},
    "epoch": ["before_fit", "after_cancel_epoch", "after_epoch", "after_fit"],
    "fit": ["after_cancel_fit", "after_fit"],
}


def raiser(event: str, error: BaseException | type[BaseException]) -> Callback:
    def fail(self: Any) -> None:
        raise error

    return Callback(**{event: fail})


@pytest.mark.parametrize("part", CANCELS)
def test_a_cancelled_part_skips_its_work_and_ends_with_its_two_events(part: str) -> None:
    seen = events_of(lambda learn: learn.fit(1), raiser(f"before_{part}", CANCELS[part]))

    assert seen == CANCELLED[part]


def test_a_batch_cancelled_after_its_loss_skips_the_rest() -> None:
    seen = events_of(lambda learn: learn.fit(1), raiser("after_loss", CANCELS["batch"]))

    train = [*TRAIN_BATCH[:2], "after_cancel_batch", "after_batch"]
    assert seen[3:7] == train


def test_an_outer_cancel_ends_the_inner_parts_without_their_after_events() -> None:
    seen = events_of(lambda learn: learn.fit(2), raiser("after_pred", CANCELS["epoch"]))

    epoch = ["before_epoch", "before_train", "before_batch", "after_cancel_epoch", "after_epoch"]
    assert seen == ["before_fit", *epoch, *epoch, "after_fit"]


def test_a_cancelled_step_leaves_the_weights_and_zeroes_the_gradients() -> None:
    learn = quiet(cbs=raiser("before_step", CANCELS["step"]))
    before = [p.clone() for p in learn.model.parameters()]

    learn.fit(1)

    assert all(p.equal(q) for p, q in zip(before, learn.model.parameters(), strict=True))
    assert all(p.grad is None for p in learn.model.parameters())
    assert learn.n_steps == 0


@pytest.mark.parametrize("part", ["batch", "backward"])
def test_gradients_are_kept_by_a_cancelled_batch_and_not_made_by_a_cancelled_backward(
    part: str,
) -> None:
    event = "before_step" if part == "batch" else "before_backward"
    grads: list[Any] = []
    look = Callback(after_batch=lambda self: grads.extend(p.grad for p in self.model.parameters()))
    look.run_valid = False

    quiet(cbs=[raiser(event, CANCELS[part]), look]).fit(1)

    assert [grad is None for grad in grads] == [part == "backward"] * 2


def test_any_other_exception_skips_every_later_event() -> None:
    def body(learn: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            learn.fit(1)

    seen = events_of(body, raiser("after_pred", ZeroDivisionError))

    assert seen == ["before_fit", "before_epoch", "before_train", "before_batch"]
