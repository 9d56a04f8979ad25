"""Callback and CallbackRunner: names, reads and writes, order, adding, removing, cleaning up."""

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import suppress
from typing import Any

import pytest
from fastcore.foundation import L
from learners import EventLog
from torch import nn

from hookkit.callbacks import Callback, Recorder, TrainEvalCallback
from hookkit.callbacks.runner import CallbackRunner
from hookkit.errors import ArgumentError, HookError, HookkitWarning, OptionError
from hookkit.events import EVENTS, CancelFitException
from hookkit.testing import synth_learner


def quiet(**kwargs: Any) -> Any:
    learn = synth_learner(n_trn=2, n_val=1, **kwargs)
    learn.logger = lambda row: None
    return learn


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
    with pytest.raises(AttributeError, match=r"has 'tst_3'\. Nearest: tst"):
        _ = learn.tst_3


def test_a_callback_for_one_fit_has_a_name_of_its_own_in_it_and_afterwards() -> None:
    own, extra = Tst(), Tst()
    learn = quiet(cbs=[own, Callback(after_fit=lambda self: seen.append(self.learn.tst_2))])
    seen: list[Any] = []

    learn.fit(1, cbs=extra)

    assert seen == [extra]
    assert (learn.tst, learn.tst_2) == (own, extra)


def test_two_of_a_name_for_one_fit_are_both_readable_afterwards() -> None:
    first, second, later = Tst(), Tst(), Tst()
    learn = quiet()

    learn.fit(1, cbs=[first, second])
    assert (learn.tst, learn.tst_2) == (first, second)
    learn.fit(1, cbs=later)

    assert learn.tst is later
    assert not hasattr(learn, "tst_2")


def test_a_default_callback_that_is_given_takes_the_place_of_the_default() -> None:
    own = Recorder(add_time=False)

    learn = quiet(cbs=iter([own]))

    assert learn.recorder is own
    assert [cb.name for cb in learn.cbs] == ["train_eval", "recorder"]
    learn.fit(1)
    assert len(own.values) == 1


def test_completion_lists_callbacks() -> None:
    learn = quiet(cbs=[Tst(), Tst()])

    assert {"recorder", "tst", "tst_2", "fit", "model"} <= set(dir(learn))


def test_a_callback_cannot_take_the_place_of_what_the_learner_has() -> None:
    class Opt(Callback):
        pass

    learn = quiet(cbs=Opt)

    assert learn.opt is None


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


def test_an_event_needs_a_function() -> None:
    with pytest.raises(ArgumentError, match=r"Callback\(after_fit=3\).*, found an int\."):
        Callback(after_fit=3)  # type: ignore[arg-type]


def test_a_misspelt_event_method_is_reported_when_the_class_is_made() -> None:
    with pytest.warns(HookkitWarning, match=r"after_predict is never called.*`after_pred`"):

        class Miniai(Callback):
            def after_predict(self) -> None: ...


def test_a_helper_that_only_begins_like_an_event_is_left_alone() -> None:
    class Helper(Callback):
        def before_the_storm(self) -> None: ...
        def after_party(self) -> None: ...


def test_firing_an_unknown_event_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"'before_fitt' is not an event. Nearest: before_fit"):
        quiet()("before_fitt")


# --- reads and writes


def test_reads_fall_through_callback_learner_model() -> None:
    learn = quiet(cbs=Tst)

    assert learn.tst.dls is learn.dls
    assert learn.tst.a is learn.model.a
    assert learn.a is learn.model.a
    assert learn.tst.recorder is learn.recorder


def test_a_missing_attribute_names_where_it_was_looked_for() -> None:
    learn = quiet(cbs=Tst)

    with pytest.raises(
        AttributeError, match=r"its callbacks nor its model \(RegModel\) has 'losz'"
    ):
        _ = learn.tst.losz
    with pytest.raises(AttributeError, match=r"Nearest: .*recorder"):
        _ = learn.recordr


def test_a_callback_without_a_learner_says_so() -> None:
    with pytest.raises(AttributeError, match=r"Tst has no attribute 'pred'.* not known yet"):
        _ = Tst().pred


def test_an_error_inside_a_property_is_shown_as_it_is() -> None:
    class Broken(Callback):
        @property
        def rate(self) -> Any:
            return None.rate  # type: ignore[attr-defined]

    learn = quiet(cbs=Broken)

    with pytest.raises(AttributeError, match=r"'NoneType' object has no attribute 'rate'"):
        _ = learn.broken.rate


def test_writing_what_the_loop_reads_on_the_callback_warns_with_the_cure() -> None:
    class Writes(Callback):
        def after_pred(self) -> None:
            self.pred = 0

    learn = quiet(cbs=Writes)

    with pytest.warns(HookkitWarning, match=r"set `self.learn.pred`"):
        learn.fit(1)


def test_names_that_the_loop_does_not_read_are_free() -> None:
    class Own(Callback):
        loss = None  # declared: its own

        def before_fit(self) -> None:
            self.modules = self.metrics = self.epoch = self.loss = 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(cbs=Own).fit(1)


def test_writing_to_the_learner_changes_the_loop() -> None:
    class Zero(Callback):
        def after_pred(self) -> None:
            self.learn.pred = self.pred * 0

    preds, _ = quiet(cbs=Zero).get_preds()

    assert not preds.any()


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


@pytest.mark.parametrize("order", ["first", None])
def test_an_order_is_a_number(order: Any) -> None:
    cb = Tst()
    cb.order = order

    with pytest.raises(ArgumentError, match=rf"Tst has order={order!r}.*Make it a number"):
        quiet(cbs=cb)


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


def test_run_can_be_switched_in_mid_fit() -> None:
    seen: list[int] = []
    cb = Callback(before_batch=lambda self: seen.append(self.iter))
    switch = Callback(after_batch=lambda self: setattr(cb, "run", False))
    learn = quiet(cbs=[cb, switch])

    learn.fit(1)

    assert seen == [0]


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


def test_a_callback_can_be_called_with_an_event() -> None:
    seen: list[Any] = []
    cb = Callback(after_fit=seen.append)

    cb("after_fit")
    cb("before_fit")

    assert seen == [cb]


# --- adding and removing


def test_adding_and_removing_return_the_learner() -> None:
    learn, cb = quiet(), Tst()

    assert learn.add_cb(cb).remove_cb(cb) is learn
    assert learn.add_cbs([Tst, TstCallback()]).remove_cbs([Tst, TstCallback]) is learn
    assert cb.learn is None
    assert len(learn.cbs) == 2


def test_a_class_removes_all_its_instances() -> None:
    learn = quiet(cbs=[Tst(), Tst(), TstCallback()])

    learn.remove_cb(Tst)

    assert [type(cb).__name__ for cb in learn.cbs[2:]] == ["TstCallback"]


def test_the_same_object_is_added_once_and_stays_after_a_fit_that_names_it() -> None:
    cb = Tst()
    learn = quiet(cbs=[cb, cb])

    learn.fit(1, cbs=cb)

    assert list(learn._grab_cbs(Tst)) == [cb]


@pytest.mark.parametrize("bad", [3, "recorder", print, int])
def test_what_is_no_callback_is_refused_with_the_cure(bad: Any) -> None:
    with pytest.raises(ArgumentError, match=r"Give a Callback, a Callback class, or Callback\("):
        quiet(cbs=[bad])


def test_added_cbs_yields_the_learner_and_they_stay_readable() -> None:
    learn, cb = quiet(), Tst()

    with learn.added_cbs(cb) as same:
        assert same is learn
        assert cb in learn.cbs

    assert cb not in learn.cbs
    assert learn.tst is cb


def test_a_callback_of_one_fit_is_readable_afterwards_and_gets_no_more_events() -> None:
    fits: list[int] = []
    learn = quiet()

    learn.fit(1, cbs=Callback(after_fit=lambda self: fits.append(1)))
    learn.fit(1)

    assert fits == [1]
    assert isinstance(learn.callback, Callback)


def test_a_class_for_one_fit_leaves_the_learners_own_alone() -> None:
    own = Tst()
    learn = quiet(cbs=own)

    learn.fit(1, cbs=Tst)

    assert learn.tst is own


@pytest.mark.parametrize("verb", ["fit", "fit_one_cycle"])
def test_callbacks_for_one_fit_come_in_any_collection(verb: str) -> None:
    learn = quiet()

    for several in ({Tst()}, (Tst() for _ in range(2)), L(Tst())):
        getattr(learn, verb)(1, cbs=several)

    assert learn.n_steps == 6
    assert len(learn.cbs) == 2


def test_of_callbacks_that_cannot_all_be_added_none_is() -> None:
    learn = quiet()
    before = list(learn.cbs)

    with pytest.raises(ArgumentError, match=r"add_cbs\(3\): expected a callback, found int"):
        learn.add_cbs([Tst(), 3])
    with pytest.raises(ArgumentError, match=r"add_cbs\(3\): expected a callback, found int"):
        learn.fit_one_cycle(1, cbs=3)

    assert list(learn.cbs) == before


def test_callbacks_whose_beginning_fails_in_mid_fit_are_taken_off() -> None:
    def fail(self: Any) -> None:
        raise ValueError("no beginning")

    def begin(self: Any) -> None:
        with self.learn.added_cbs([Tst(), Callback(before_fit=fail)]):
            pass

    learn = quiet(cbs=Callback(before_train=begin))
    before = list(learn.cbs)

    with pytest.raises(ValueError, match=r"no beginning"):
        learn.fit(1)

    assert list(learn.cbs) == before


def test_removed_cbs_come_back_to_their_place_among_equals() -> None:
    a, b, c = EventLog(), Tst(), EventLog()
    learn = quiet(cbs=[a, b, c])
    before = list(learn.cbs)

    with learn.removed_cbs(EventLog):
        learn.add_cb(late := Tst())

    assert list(learn.cbs) == [*before, late]
    assert list(learn.ordered_cbs("after_fit")) == [a, c]


def test_removed_cbs_come_back_also_after_an_error() -> None:
    learn = quiet(cbs=Tst)

    with pytest.raises(RuntimeError, match=r"boom"), learn.removed_cbs(Tst) as same:
        raise RuntimeError("boom" if same is learn and not learn._grab_cbs(Tst) else "wrong")

    assert learn.tst.learn is learn


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


def test_another_learner_may_train_inside_a_fit() -> None:
    other = quiet(cbs=Tst)
    learn = quiet(cbs=[Tst, Callback(after_epoch=lambda self: other.fit(1))])

    learn.fit(2)

    assert (learn.n_steps, other.n_steps) == (4, 4)


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


def test_control_flow_gains_no_note() -> None:
    learn = quiet()

    with pytest.raises(CancelFitException) as caught:
        learn._fire(
            "before_fit", [(learn.recorder, lambda: (_ for _ in ()).throw(CancelFitException))]
        )

    assert not hasattr(caught.value, "__notes__")


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


@pytest.mark.parametrize("remove", [False, True])
def test_an_exception_while_cleaning_up_names_its_callback(remove: bool) -> None:
    class Bad(Callback):
        def before_train(self) -> None:
            if remove:
                self.learn.remove_cb(self)

        def cleanup_fit(self) -> None:
            raise RuntimeError("bad cleanup")

    with pytest.raises(RuntimeError, match=r"bad cleanup") as caught:
        quiet(cbs=Bad).fit(1)

    assert "in callback Bad, cleanup_fit, epoch 0" in caught.value.__notes__[0]


def test_validate_cleans_up_too() -> None:
    cb = Cleans()

    quiet(cbs=cb).validate()

    assert cb.cleaned == 1


# --- copies and lifetime


def test_callbacks_can_be_copied_and_pickled() -> None:
    cb = Tst()
    cb.mark = 3  # type: ignore[attr-defined]

    assert copy.deepcopy(cb).mark == 3  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(cb)).mark == 3


def test_a_removed_callback_is_not_kept_alive() -> None:
    learn, cb = quiet(), Tst()
    weak = weakref.ref(cb)
    learn.add_cb(cb).remove_cb(cb)

    del cb
    gc.collect()

    assert weak() is None


def test_anything_can_run_callbacks() -> None:
    class Mine(CallbackRunner):
        def __init__(self) -> None:
            super().__init__()
            self.add_cb(Callback(after_fit=lambda cb: seen.append(1)))

    seen: list[int] = []

    Mine()("after_fit")

    assert seen == [1]


def test_every_event_reaches_a_method_of_its_name() -> None:
    seen: list[str] = []
    cb = Callback(**{e: (lambda self, e=e: seen.append(e)) for e in EVENTS})
    learn = quiet(cbs=cb)
    seen.clear()

    learn(*EVENTS[1:4])

    assert seen == list(EVENTS[1:4])
    assert isinstance(learn.model, nn.Module)
    assert isinstance(learn.cbs[0], TrainEvalCallback)


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


@pytest.mark.parametrize("cb", ["recorder", 3, int])
def test_what_is_no_callback_cannot_be_removed(cb: Any) -> None:
    learn = quiet()

    with pytest.raises(ArgumentError, match=r"expected a callback or its class.*Give one"):
        learn.remove_cb(cb)
    with (
        pytest.raises(ArgumentError, match="expected a callback or its class"),
        learn.removed_cbs(cb),
    ):
        pass
