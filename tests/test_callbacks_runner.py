"""Callback and Loop: names, reads and writes, order, adding, removing, cleaning up."""

from functools import partial
from typing import Any

import pytest
from learners import EventLog, quiet as quiet_learner

from hookkit.callbacks import Callback
from hookkit.callbacks.events import CancelFitException
from hookkit.errors import ArgumentError, HookError, HookkitWarning, OptionError
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
    ("cb", "name"), [(TstCallback, "tst"), (HTTPLogCallback, "http_log"), (Callback, "callback")]
)
def test_a_callback_is_named_after_its_class(cb: type[Callback], name: str) -> None:
    assert cb().name == name
    assert repr(cb()) == cb.__name__


def test_the_learner_shows_its_callbacks_by_name_and_of_one_class_the_last() -> None:
    first, second = Tst(), Tst()

    learn = quiet(cbs=[first, second])
    assert learn.tst is second
    assert first.learn is learn

    learn.remove_cb(second)
    assert learn.tst is first


# --- one-off callbacks


def test_a_function_is_a_callback_for_its_event() -> None:
    seen: list[Any] = []
    cb = Callback(after_fit=lambda self: seen.append(self.learn), before_fit=seen.append)
    learn = quiet(cbs=cb)

    learn.fit(1)

    assert seen == [cb, learn]
    with pytest.raises(OptionError, match=r"'after_bacth' is not an event\. Nearest: .after_batch"):
        Callback(after_bacth=print)


def test_a_misspelt_event_method_is_reported_when_the_class_is_made() -> None:
    with pytest.warns(HookkitWarning, match=r"after_predict is never called.*`after_pred`"):

        class Miniai(Callback):
            def after_predict(self) -> None: ...

    class Helper(Callback):  # whose methods only begin like events
        def before_the_storm(self) -> None: ...
        def after_party(self) -> None: ...


# --- reads and writes


def test_reads_fall_through_callback_learner_model_and_name_where_they_looked() -> None:
    learn = quiet(cbs=Tst)

    assert learn.tst.dls is learn.dls
    assert learn.tst.a is learn.a is learn.model.a
    assert learn.tst.recorder is learn.recorder
    with pytest.raises(AttributeError, match=r"its callbacks nor its model has 'losz'.*loss"):
        _ = learn.tst.losz
    with pytest.raises(AttributeError, match=r"Tst has no attribute 'pred', and belongs to no"):
        _ = Tst().pred
    with pytest.warns(HookkitWarning, match=r"set `self.learn.pred`"):
        learn.tst.pred = 0


# --- order and switches


class Ordered(Callback):
    def __init__(self, order: float, seen: list[float]) -> None:
        self.order, self.seen = order, seen

    def after_fit(self) -> None:
        self.seen.append(self.order)


def test_callbacks_run_by_order_and_equal_ones_as_added_and_changes_count_in_the_next_fit() -> None:
    seen: list[float] = []
    cbs = [Ordered(o, seen) for o in (1, -1, 0.5, 1)]
    learn = quiet(cbs=cbs)

    learn("after_fit")
    assert seen == [-1, 0.5, 1, 1]
    assert learn.ordered_cbs("after_fit")[-2:] == [cbs[0], cbs[3]]
    assert [cb.order for cb in learn.cbs.sorted("order")] == [-10, -1, 0.5, 1, 1, 50]

    seen.clear()
    cbs[1].order = 3
    cbs[0].before_fit = lambda: seen.append(0)  # type: ignore[attr-defined]
    learn.fit(1)
    assert seen == [0, 0.5, 1, 1, 3]


@pytest.mark.parametrize(
    ("flag", "expected"), [("run_train", [False]), ("run_valid", [True] * 2), ("run", [])]
)
def test_flags_switch_a_callback_off_in_batches_or_until_the_fit_is_over(
    flag: str, expected: list[bool]
) -> None:
    seen: list[bool] = []
    cb = Callback(
        before_fit=lambda self: setattr(self, flag, False),
        before_batch=lambda self: seen.append(self.training),
        after_fit=lambda self: seen.append(self.run),
    )

    quiet(cbs=cb).fit(1)

    assert seen == [*expected, *([True] if flag != "run" else [])]
    assert cb.run


# --- adding and removing


@pytest.mark.parametrize("bad", ["recorder", print, int])
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

    with learn.added_cbs(other := HTTPLogCallback()) as same:
        assert same is learn
        assert other in learn.cbs
    assert other not in learn.cbs
    assert learn.http_log is other  # it stays readable


def test_removed_cbs_come_back_to_their_place_among_equals() -> None:
    a, b, c = EventLog(), Tst(), EventLog()
    learn = quiet(cbs=[a, b, c])
    before = list(learn.cbs)

    with learn.removed_cbs(EventLog):
        learn.add_cb(late := Tst())

    assert list(learn.cbs) == [*before, late]
    assert list(learn.ordered_cbs("after_fit")) == [a, c]


def test_a_callback_removed_or_added_in_mid_fit_is_cleaned_up_or_gets_its_before_fit() -> None:
    victim, late, heard = Cleans(), EventLog("before_fit", "after_fit"), list[str]()
    victim.after_batch = lambda: heard.append("after_batch")  # type: ignore[attr-defined]

    def change(self: Any) -> None:
        self.learn.remove_cb(victim)
        self.learn.add_cb(late)

    quiet(cbs=[Callback(after_pred=change), victim]).fit(1)

    assert (heard, victim.cleaned) == ([], 1)
    assert late.seen == ["before_fit", "after_fit"]


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
    learn.remove_cbs(learn.cbs[-1:])
    learn.fit(1)  # one callback serves several Learners in turn
    assert shared.learn is learn


# --- errors and cleaning up


def test_an_exception_keeps_its_type_and_gains_a_note() -> None:
    def fail(self: Any) -> None:
        raise ValueError  # without arguments

    with pytest.raises(ValueError, match=r"in callback Callback") as caught:
        quiet(cbs=Callback(after_batch=fail)).fit(1)

    note = "in callback Callback, event after_batch, epoch 0, batch 0 (training)"
    assert caught.value.__notes__ == [note]
    assert caught.traceback[-1].name == "fail"


class Cleans(Callback):
    cleaned = 0

    def cleanup_fit(self) -> None:
        self.cleaned += 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, CancelFitException])
@pytest.mark.parametrize("event", ["before_fit", "before_batch", "after_step", "after_epoch"])
def test_cleanup_runs_once_however_a_fit_ends(event: str, error: type[BaseException]) -> None:
    class Bad(Callback):  # what it raises keeps no other from cleaning up
        def cleanup_fit(self) -> None:
            raise RuntimeError("bad cleanup")

    a, b = Cleans(), Cleans()

    def fail(self: Any) -> None:
        raise error

    learn = quiet(cbs=[a, Bad, b, Callback(**{event: fail})])
    with pytest.raises((ValueError, KeyboardInterrupt, RuntimeError)):
        learn.fit(1)

    assert (a.cleaned, b.cleaned, learn.fitting) == (1, 1, False)


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
