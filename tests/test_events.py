"""Events, in order; what each Cancel* skips; and the table that says so."""

from typing import Any

import pytest
from learners import EventLog
from torch import nn

from hookkit import events
from hookkit.callbacks import Callback
from hookkit.events import BATCH_EVENTS, CANCELS, EVENTS
from hookkit.testing import synth_learner

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

FIT = [
    "before_fit",
    "before_epoch",
    "before_train",
    "before_batch",
    "after_pred",
    "after_loss",
    "before_backward",
    "after_backward",
    "before_step",
    "after_step",
    "after_batch",
    "after_train",
    "before_validate",
    "before_batch",
    "after_pred",
    "after_loss",
    "after_batch",
    "after_validate",
    "after_epoch",
    "after_fit",
]

VALIDATE = [
    "before_fit",
    "before_epoch",
    "before_validate",
    "before_batch",
    "after_pred",
    "after_loss",
    "after_batch",
    "after_validate",
    "after_epoch",
    "after_fit",
]


def quiet(n_trn: int = 1, **kwargs: Any) -> Any:
    learn = synth_learner(n_trn=n_trn, n_val=1, **kwargs)
    learn.logger = lambda row: None
    return learn


def events_of(what: Any, *cbs: Any, n_trn: int = 1) -> list[str]:
    log = EventLog(order=100)
    learn = quiet(n_trn, cbs=[log, *cbs])
    log.seen.clear()
    what(learn)
    return log.seen


def test_one_fit_fires_fastais_events_in_fastais_order() -> None:
    assert events_of(lambda learn: learn.fit(1)) == FIT


def test_a_second_batch_and_a_second_epoch_repeat_their_parts() -> None:
    seen = events_of(lambda learn: learn.fit(2), n_trn=2)

    epoch = [
        "before_epoch",
        "before_train",
        *TRAIN_BATCH,
        *TRAIN_BATCH,
        "after_train",
        "before_validate",
        *VALID_BATCH,
        "after_validate",
        "after_epoch",
    ]
    assert seen == ["before_fit", *epoch, *epoch, "after_fit"]


@pytest.mark.parametrize("verb", ["validate", "get_preds"])
def test_a_pass_without_learning_fires_the_validation_inside_fit_and_epoch(verb: str) -> None:
    assert events_of(lambda learn: getattr(learn, verb)()) == VALIDATE


def test_with_learn_fires_fit_and_epoch_also_after_an_error() -> None:
    def body(learn: Any) -> None:
        with pytest.raises(RuntimeError, match=r"boom"), learn:
            raise RuntimeError("boom")

    assert events_of(body) == ["before_fit", "before_epoch", "after_epoch", "after_fit"]


def test_creation_is_an_event() -> None:
    log = EventLog()

    quiet(cbs=log)

    assert log.seen == ["after_create"]


def test_no_validation_data_means_no_validation_events() -> None:
    def body(learn: Any) -> None:
        learn.dls.loaders[1] = None
        learn.fit(1)

    seen = events_of(body)

    assert "before_validate" not in seen
    assert seen[-2:] == ["after_epoch", "after_fit"]


# --- cancelling: raised as the part begins

CANCELLED = {
    "backward": [
        "before_fit",
        "before_epoch",
        "before_train",
        "before_batch",
        "after_pred",
        "after_loss",
        "after_cancel_backward",
        "after_backward",
        "before_step",
        "after_step",
        "after_batch",
        "after_train",
        *FIT[12:],
    ],
    "step": [
        "before_fit",
        "before_epoch",
        "before_train",
        "before_batch",
        "after_pred",
        "after_loss",
        "before_backward",
        "after_backward",
        "after_cancel_step",
        "after_step",
        "after_batch",
        "after_train",
        *FIT[12:],
    ],
    "batch": [
        "before_fit",
        "before_epoch",
        "before_train",
        "after_cancel_batch",
        "after_batch",
        "after_train",
        "before_validate",
        "after_cancel_batch",
        "after_batch",
        "after_validate",
        "after_epoch",
        "after_fit",
    ],
    "train": [
        "before_fit",
        "before_epoch",
        "after_cancel_train",
        "after_train",
        *FIT[12:],
    ],
    "validate": [
        *FIT[:12],
        "after_cancel_validate",
        "after_validate",
        "after_epoch",
        "after_fit",
    ],
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


def test_a_batch_cancelled_before_its_step_keeps_its_gradients() -> None:
    learn = quiet(cbs=raiser("before_step", CANCELS["batch"]))

    learn.fit(1)

    assert all(p.grad is not None for p in learn.model.parameters())


def test_a_cancelled_backward_leaves_no_gradient() -> None:
    grads: list[Any] = []
    look = Callback(before_step=lambda self: grads.extend(p.grad for p in self.model.parameters()))

    quiet(cbs=[raiser("before_backward", CANCELS["backward"]), look]).fit(1)

    assert grads == [None, None]


def test_any_other_exception_skips_every_later_event() -> None:
    def body(learn: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            learn.fit(1)

    seen = events_of(body, raiser("after_pred", ZeroDivisionError))

    assert seen == ["before_fit", "before_epoch", "before_train", "before_batch"]


# --- the tables


def test_the_events_are_fastais() -> None:
    assert EVENTS == (
        "after_create",
        "before_fit",
        "before_epoch",
        "before_train",
        "before_batch",
        "after_pred",
        "after_loss",
        "before_backward",
        "after_cancel_backward",
        "after_backward",
        "before_step",
        "after_cancel_step",
        "after_step",
        "after_cancel_batch",
        "after_batch",
        "after_cancel_train",
        "after_train",
        "before_validate",
        "after_cancel_validate",
        "after_validate",
        "after_cancel_epoch",
        "after_epoch",
        "after_cancel_fit",
        "after_fit",
    )


def test_batch_events_are_those_inside_a_batch() -> None:
    assert set(TRAIN_BATCH) < BATCH_EVENTS
    assert BATCH_EVENTS - set(TRAIN_BATCH) == {
        "after_cancel_backward",
        "after_cancel_step",
        "after_cancel_batch",
    }


def test_every_part_has_its_exception_its_events_and_its_line_in_the_table() -> None:
    for part, error in CANCELS.items():
        assert {f"before_{part}", f"after_{part}", f"after_cancel_{part}"} <= set(EVENTS)
        assert getattr(events, error.__name__) is error
        assert error.__name__ == f"Cancel{'Valid' if part == 'validate' else part.title()}Exception"


def test_parameters_are_untouched_by_a_cancelled_fit() -> None:
    model = nn.Linear(1, 1)
    before = model.weight.clone()

    quiet(model=model, cbs=raiser("before_fit", CANCELS["fit"])).fit(3)

    assert model.weight.equal(before)
