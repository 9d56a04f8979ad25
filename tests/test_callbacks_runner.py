"""Callback and CallbackRunner: names, reads and writes, order, adding, removing, cleaning up."""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from learners import EventLog, quiet as quiet_learner

from hookkit.callbacks import Callback
from hookkit.errors import ArgumentError, HookError, HookkitWarning, OptionError
from hookkit.events import CancelFitException
from hookkit.testing import synth_learner

quiet = partial(quiet_learner, n_trn=2, n_val=1)


class Tst(Callback):
    pass


class TstCallback(Callback):
    pass


class HTTPLogCallback(Callback):
    pass


# --- names


@pytest.mark.parametrize(
    ("cb", "name"),
    [(Tst, "tst"), (TstCallback, "tst"), (HTTPLogCallback, "http_log"), (Callback, "callback")],
)
def test_a_callback_is_named_after_its_class(cb: type[Callback], name: str) -> None:
    assert cb().name == name
    assert repr(cb()) == cb.__name__


def test_the_learner_shows_its_callbacks_by_name() -> None:
    learn = quiet(cbs=Tst)

    assert isinstance(learn.tst, Tst)
    assert learn.tst.learn is learn
    assert hasattr(learn, "recorder")
    assert not hasattr(learn, "nothing")


def test_of_several_of_a_name_each_has_its_own() -> None:
    first, second, third = Tst(), Tst(), Tst()

    learn = quiet(cbs=[first, second])
    learn.add_cb(third)
    assert (learn.tst, learn.tst_2, learn.tst_3) == (first, second, third)

    learn.remove_cb(first)
    assert (learn.tst, learn.tst_2) == (second, third)
    assert not hasattr(learn, "tst_3")


# --- one-off callbacks


def test_a_function_is_a_callback_for_its_event() -> None:
    seen: list[Any] = []
    cb = Callback(after_fit=lambda self: seen.append(self.learn), before_fit=seen.append)
    learn = quiet(cbs=cb)

    learn.fit(1)

    assert seen == [cb, learn]


def test_an_unknown_event_names_the_near_ones() -> None:
    with pytest.raises(OptionError, match=r"'after_bacth' is not an event. Nearest: after_batch"):
        Callback(after_bacth=print)


def test_a_misspelt_event_method_is_reported_when_the_class_is_made() -> None:
    with pytest.warns(HookkitWarning, match=r"after_predict is never called.*`after_pred`"):

        class Miniai(Callback):
            def after_predict(self) -> None: ...


def test_a_helper_that_only_begins_like_an_event_is_left_alone() -> None:
    class Helper(Callback):
        def before_the_storm(self) -> None: ...
        def after_party(self) -> None: ...


# --- reads and writes


def test_reads_fall_through_callback_learner_model() -> None:
    learn = quiet(cbs=Tst)

    assert learn.tst.dls is learn.dls
    assert learn.tst.a is learn.model.a
    assert learn.a is learn.model.a
    assert learn.tst.recorder is learn.recorder


def test_a_missing_attribute_names_where_it_was_looked_for() -> None:
    learn = quiet(cbs=Tst)

    with pytest.raises(AttributeError, match=r"its callbacks nor its model has 'losz'.*loss"):
        _ = learn.tst.losz


def test_a_callback_without_a_learner_says_so() -> None:
    with pytest.raises(AttributeError, match=r"Tst has no attribute 'pred', and belongs to no"):
        _ = Tst().pred


def test_writing_what_the_loop_reads_on_the_callback_warns_with_the_cure() -> None:
    class Writes(Callback):
        def after_pred(self) -> None:
            self.pred = 0

    learn = quiet(cbs=Writes)

    with pytest.warns(HookkitWarning, match=r"set `self.learn.pred`"):
        learn.fit(1)


# --- order and switches


class Ordered(Callback):
    def __init__(self, order: float, seen: list[float]) -> None:
        self.order, self.seen = order, seen

    def after_fit(self) -> None:
        self.seen.append(self.order)


def test_callbacks_run_by_order_and_equal_ones_as_added() -> None:
    seen: list[float] = []
    cbs = [Ordered(o, seen) for o in (1, -1, 0.5, 1)]
    learn = quiet(cbs=cbs)

    learn("after_fit")

    assert seen == [-1, 0.5, 1, 1]
    assert learn.ordered_cbs("after_fit")[-2:] == [cbs[0], cbs[3]]
    assert [cb.order for cb in learn.cbs.sorted("order")] == [-10, -1, 0.5, 1, 1, 50]


def test_an_order_or_a_method_set_later_counts() -> None:
    seen: list[float] = []
    a, b = Ordered(1, seen), Ordered(2, seen)
    learn = quiet(cbs=[a, b])
    learn("after_fit")

    a.order = 3
    b.before_fit = lambda: seen.append(0)  # type: ignore[attr-defined]
    learn("before_fit", "after_fit")

    assert seen == [1, 2, 0, 2, 3]


def test_run_switches_a_callback_off_until_the_fit_is_over() -> None:
    seen: list[str] = []
    cb = Callback(
        before_batch=lambda self: seen.append("batch"),
        before_fit=lambda self: setattr(self, "run", False),
    )
    learn = quiet(cbs=cb)

    learn.fit(1)

    assert seen == []
    assert cb.run


@pytest.mark.parametrize(("flag", "expected"), [("run_train", [False]), ("run_valid", [True] * 2)])
def test_run_train_and_run_valid_switch_in_batch_events_only(
    flag: str, expected: list[bool]
) -> None:
    seen: list[bool] = []
    cb = Callback(
        before_batch=lambda self: seen.append(self.training),
        after_fit=lambda self: seen.append(self.run),
    )
    setattr(cb, flag, False)

    quiet(cbs=cb).fit(1)

    assert seen == [*expected, True]


# --- adding and removing


@pytest.mark.parametrize("bad", [3, "recorder", print, int])
def test_what_is_no_callback_is_refused_with_the_cure_and_nothing_is_added(bad: Any) -> None:
    learn = quiet()
    before = list(learn.cbs)

    for verb in learn.add_cbs, learn.remove_cbs, lambda cbs: learn.fit(1, cbs=cbs):
        with pytest.raises(ArgumentError, match=r"Give a Callback, a Callback class, or Callback"):
            verb([Tst(), bad])

    assert list(learn.cbs) == before


def test_callbacks_are_added_and_removed_by_themselves_or_by_their_class() -> None:
    learn, cb = quiet(cbs=[Tst(), Tst(), TstCallback()]), Tst()

    assert learn.add_cb(cb).add_cb(cb).remove_cb(cb) is learn
    assert cb.learn is None
    assert [type(cb).__name__ for cb in learn.cbs[2:]] == ["Tst", "Tst", "TstCallback"]
    assert [type(cb).__name__ for cb in learn.remove_cbs([Tst]).cbs[2:]] == ["TstCallback"]


def test_added_cbs_yields_the_learner_and_they_stay_readable() -> None:
    learn, cb = quiet(), Tst()

    with learn.added_cbs(cb) as same:
        assert same is learn
        assert cb in learn.cbs

    assert cb not in learn.cbs
    assert learn.tst is cb


def test_removed_cbs_come_back_to_their_place_among_equals() -> None:
    a, b, c = EventLog(), Tst(), EventLog()
    learn = quiet(cbs=[a, b, c])
    before = list(learn.cbs)

    with learn.removed_cbs(EventLog):
        learn.add_cb(late := Tst())

    assert list(learn.cbs) == [*before, late]
    assert list(learn.ordered_cbs("after_fit")) == [a, c]


class Removes(Callback):
    order = -1

    def __init__(self, victim: Callback) -> None:
        self.victim = victim

    def after_batch(self) -> None:
        self.learn.remove_cb(self.victim)


def test_a_callback_removed_in_mid_fit_is_not_called_again_and_cleaned_up() -> None:
    class Victim(Tst):
        batches = cleaned = 0

        def after_batch(self) -> None:
            self.batches += 1

        def cleanup_fit(self) -> None:
            self.cleaned += 1

    victim = Victim()

    quiet(cbs=[Removes(victim), victim]).fit(1)

    assert (victim.batches, victim.cleaned) == (0, 1)


def test_a_callback_added_in_mid_fit_gets_its_before_fit() -> None:
    seen: list[str] = []
    late = Callback(
        before_fit=lambda self: seen.append("before_fit"),
        after_fit=lambda self: seen.append("after_fit"),
    )

    quiet(cbs=Callback(after_pred=lambda self: self.learn.add_cb(late))).fit(1)

    assert seen == ["before_fit", "after_fit"]


@pytest.mark.parametrize("verb", ["add_cb", "fit", "validate"])
def test_a_callback_at_work_in_one_fit_serves_no_other(verb: str) -> None:
    shared = Tst()
    other = quiet(cbs=shared)

    def inside(self: Any) -> None:
        {
            "add_cb": lambda: quiet(cbs=shared),
            "fit": lambda: other.fit(1),
            "validate": lambda: other.validate(),
        }[verb]()

    learn = quiet(cbs=[shared, Callback(before_train=inside)])

    with pytest.raises(HookError, match=r"Tst is in use in a run that is under way\. Give"):
        learn.fit(1)
    other.fit(1)

    assert (learn.fitting, other.n_steps) == (False, 2)


def test_one_callback_serves_two_learners_in_turn() -> None:
    seen: list[Any] = []
    cb = Callback(after_fit=lambda self: seen.append(self.learn))
    a, b = quiet(cbs=cb), quiet(cbs=cb)

    a.fit(1)
    b.fit(1)
    a.fit(1)

    assert seen == [a, b, a]


# --- errors and cleaning up


def test_an_exception_keeps_its_type_and_gains_a_note() -> None:
    class Fails(Callback):
        def after_batch(self) -> None:
            raise ValueError  # without arguments

    with pytest.raises(ValueError, match=r"in callback Fails") as caught:
        quiet(cbs=Fails).fit(1)

    note = "in callback Fails, event after_batch, epoch 0, batch 0 (training)"
    assert caught.value.__notes__ == [note]
    assert caught.traceback[-1].name == "after_batch"


class Cleans(Callback):
    cleaned = 0

    def cleanup_fit(self) -> None:
        self.cleaned += 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, CancelFitException])
@pytest.mark.parametrize("event", ["before_fit", "before_batch", "after_step", "after_epoch"])
def test_cleanup_runs_once_however_a_fit_ends(event: str, error: type[BaseException]) -> None:
    cb = Cleans()

    def fail(self: Any) -> None:
        raise error

    learn = quiet(cbs=[cb, Callback(**{event: fail})])
    with suppress(ValueError, KeyboardInterrupt):
        learn.fit(1)

    assert cb.cleaned == 1
    assert not learn.fitting


def test_cleanup_of_the_others_runs_when_one_fails() -> None:
    class Bad(Callback):
        def cleanup_fit(self) -> None:
            raise RuntimeError("bad cleanup")

    a, b = Cleans(), Cleans()
    learn = quiet(cbs=[a, Bad, b])

    with pytest.raises(RuntimeError, match=r"bad cleanup"):
        learn.fit(1)

    assert (a.cleaned, b.cleaned, learn.fitting) == (1, 1, False)


# --- copies and lifetime


def test_a_callback_with_a_call_of_its_own_hears_every_event() -> None:
    heard = []

    class Log(Callback):
        def __call__(self, event: str) -> None:
            heard.append(event)
            super().__call__(event)

        def after_fit(self) -> None:
            heard.append("its own method")

    learn = synth_learner(n_trn=1, n_val=1, cbs=Log())
    heard.clear()
    with learn.no_logging():
        learn.fit(1)

    assert heard[:4] == ["before_fit", "before_epoch", "before_train", "before_batch"]
    assert heard[-2:] == ["after_fit", "its own method"]
