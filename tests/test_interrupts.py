"""Ctrl-C anywhere: whatever hookkit has changed is restored."""

import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from interrupting import interrupted_everywhere, left_behind

from hookkit.interrupts import Guard, Undo, block, interruptible, uninterrupted


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def handler() -> object:
    return signal.getsignal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _the_handler_is_the_one_of_before() -> Iterator[None]:
    before = handler()
    yield
    assert handler() is before


# --- the tools


def test_an_uninterrupted_function_ends_before_the_interrupt_is_raised() -> None:
    done = []

    @uninterrupted
    def both() -> None:
        ctrl_c()
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        both()

    assert done == [1]


def test_an_interrupt_is_raised_after_the_outermost_uninterrupted_function() -> None:
    done = []
    inner = uninterrupted(ctrl_c)

    @uninterrupted
    def outer() -> None:
        inner()
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        outer()

    assert done == [1]


def test_a_second_interrupt_is_raised_at_once() -> None:
    done = []

    @uninterrupted
    def hangs() -> None:
        ctrl_c()
        ctrl_c()
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        hangs()

    assert done == []


def test_user_code_in_an_uninterrupted_function_is_interrupted_at_once() -> None:
    done = []

    @interruptible
    def users() -> None:
        ctrl_c()
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(users)()

    assert done == []


def test_an_open_block_passes_an_interrupt_on_at_once() -> None:
    done = []

    def body() -> None:
        with Undo() as undo:
            undo.callback(done.append, "undone")
            ctrl_c()
            done.append("not here")

    with pytest.raises(KeyboardInterrupt):
        body()

    assert done == ["undone"]


def test_the_users_own_handler_is_called_and_kept() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        own = handler()
        with Undo():
            ctrl_c()
        uninterrupted(ctrl_c)()

        assert seen == [signal.SIGINT] * 2
        assert handler() is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_set_inside_a_block_stays() -> None:
    before = handler()
    try:
        with Undo():
            signal.signal(signal.SIGINT, signal.SIG_IGN)

        assert handler() is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_blocks_that_end_out_of_order_restore_the_users_handler() -> None:
    before, one, two = handler(), Guard(), Guard()

    one.begin()
    two.begin()
    one.end()

    assert handler() is not before
    two.end()
    assert handler() is before


def test_a_handler_that_is_no_python_function_is_not_replaced() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Undo():
            assert handler() is signal.SIG_IGN
        uninterrupted(ctrl_c)()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_set_no_handler() -> None:
    before, seen = handler(), []

    def work() -> None:
        with Undo():
            seen.append(handler())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [before]


def _undo() -> None:
    with Undo() as undo:
        undo.callback(state.clear)
        state["on"] = True


def _generator() -> None:
    with changed():
        int("1")


@block
def changed() -> Iterator[None]:
    try:
        state["on"] = True
        yield
    finally:
        state.clear()


state: dict[str, bool] = {}


@pytest.mark.parametrize("scenario", [_undo, _generator])
def test_an_undo_runs_wherever_the_interrupt_falls(scenario: Callable[[], None]) -> None:
    assert interrupted_everywhere(scenario, lambda: left_behind() + str(state or "")) == []


class Unguarded:
    def __enter__(self) -> None:
        state["on"] = True

    def __exit__(self, *error: object) -> None:
        state.clear()


def _unguarded() -> None:
    with Unguarded():
        int("1")


def test_the_search_finds_what_a_plain_exit_does_not_undo() -> None:
    found = interrupted_everywhere(_unguarded, lambda: f"left {state}" if state else "")
    state.clear()

    assert any("left" in what for what in found)
