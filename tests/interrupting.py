"""Ctrl-C at each point of a scenario where Python looks for signals.

A scenario is a function that uses hookkit. It is run once to count the points, and then once for
each point with a SIGINT that arrives there. A point is an instruction after which Python looks for
signals: a call, a jump backwards, the beginning or end of a `with`. The signal is set pending just
before the instruction, and Python itself delivers it where it looks next: in the function that is
called as it begins, or after the call of a C function. Counted are the instructions of the scenario
itself, of hookkit's files, and of whatever these call.

Raising KeyboardInterrupt at each line instead would interrupt where Python never does (between two
assignments), and would miss what it does (after the call in the middle of a line).
"""

from __future__ import annotations

import _thread
import dis
import signal
import sys
import weakref
from collections.abc import Callable
from functools import cache
from operator import methodcaller
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules_of_torch
from torch.optim import optimizer as optimizers_of_torch

import hookkit
from hookkit import interrupts
from hookkit.hooks import global_hooks

PACKAGE = str(Path(hookkit.__file__).parent)
ENTERS = ("BEFORE_WITH", "LOAD_SPECIAL")
LOOKS = ("CALL", "JUMP_BACKWARD", "WITH_EXCEPT_START", *ENTERS)
MOST = 300
# From Python 3.12 on, the events of instructions begin with the second run of a function, from 3.13
# on with the second after an interrupt: a run that counts for nothing goes before each.
FORGETS = sys.version_info >= (3, 12)

Scenario = Callable[[], object]


class _Mayfly:
    """Dies as the function that made it returns."""


class _Pending(weakref.ref):
    """Sets a SIGINT pending when its object dies, with no Python code that would receive it."""

    set = staticmethod(_thread.interrupt_main)


class _Run:
    """One run of a scenario: counts its points, and interrupts the one numbered `at`."""

    def __init__(self, scenario: Scenario, at: int = -1, entering: bool = False) -> None:
        self.scenario, self.at, self.n = scenario, at, 0
        self.code: CodeType = scenario.__code__  # type: ignore[attr-defined]
        self.entering = entering
        self.where = ""

    def __call__(self) -> BaseException | None:
        """What the scenario raised, the interrupt or anything else."""
        if FORGETS and self.at >= -1:
            _Run(self.scenario, at=-2, entering=self.entering)()
        before = sys.gettrace()
        try:
            sys.settrace(self._begun)
            try:
                self.scenario()
            finally:
                sys.settrace(None)
            for _ in range(2):  # a signal that came with the last instruction is delivered here
                pass
        except BaseException as e:
            return e
        finally:
            sys.settrace(before)
        return None

    def _begun(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._counts(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        points = _points(frame.f_code, frame.f_code is self.code, self.entering)

        def goes_on(frame: FrameType, event: str, arg: Any) -> Any:
            if frame.f_lasti in points and event == "opcode":
                if self.n == self.at:
                    self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} "
                    self.where += frame.f_code.co_qualname
                    sys.settrace(None)
                    mayfly = _Mayfly()
                    self.pending = _Pending(mayfly, methodcaller("set"))
                self.n += 1
            return goes_on

        return goes_on

    def _counts(self, frame: FrameType | None) -> bool:
        """Whether `frame` is the scenario's own, or of hookkit, or of what hookkit calls."""
        if frame is not None and frame.f_code is self.code:
            return True
        while frame is not None and frame.f_code is not self.code:
            if frame.f_code.co_filename.startswith(PACKAGE):
                return not self.entering
            frame = frame.f_back
        return False


@cache
def _points(code: CodeType, of_scenario: bool, entering: bool) -> frozenset[int]:
    """Where in `code` Python looks for signals, as offsets; of the scenario's `with`s see below."""
    found = [i for i in dis.get_instructions(code) if i.opname.startswith(LOOKS)]
    if of_scenario:
        found = [i for i in found if i.opname.startswith(ENTERS) == entering]
    return frozenset(i.offset for i in found)


def interrupted_everywhere(
    scenario: Scenario, left: Callable[[], str], most: int = MOST, entering: bool = False
) -> list[str]:
    """What went wrong at each point of `scenario`, in words; empty if nothing did.

    Args:
        scenario: a Python function; what it does must be repeatable.
        left: says what is left behind, "" if nothing is; called after each run.
        most: so many points at most, evenly over all of them.
        entering: the points between what stands behind the scenario's own `with`s and the
            beginning of their `__enter__`, instead of all others.
    """
    scenario()
    assert not left(), "without an interrupt nothing is left behind"
    counted = _Run(scenario, entering=entering)
    assert counted() is None
    n = counted.n
    assert n > 0, "no point was found: nothing would be interrupted"
    wrong = []
    for at in sorted({i * n // min(n, most) for i in range(min(n, most))}):
        run = _Run(scenario, at, entering)
        error = run()
        if not isinstance(error, KeyboardInterrupt):
            wrong.append(f"{run.where}: no KeyboardInterrupt but {error!r}")
        del error
        if what := left():
            wrong.append(f"{run.where}: {what}")
    return wrong


def left_behind(*models: nn.Module) -> str:
    """What hookkit could have left: hooks, the compiler's stance, switches, the SIGINT handler.

    It is taken off, so that each point is judged by itself.
    """
    found = []
    owners = [m for model in models for m in model.modules()]
    for owner in (*owners, modules_of_torch, optimizers_of_torch):
        name = getattr(owner, "__name__", type(owner).__name__)
        for what, table in _hooks_of(owner).items():
            found.append(f"{what} of {name}")
            table.clear()
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None and frames._stance.stance != "default":
        found.append(f"stance {frames._stance.stance}")
        torch.compiler.set_stance("default")
    if not torch.backends.mha.get_fastpath_enabled():
        found.append("the fused path is off")
        torch.backends.mha.set_fastpath_enabled(True)
        global_hooks._global.clear()
    while torch._C._len_torch_function_stack():
        found.append("a function mode")
        torch._C._pop_torch_function_stack()
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        found.append("the grad mode")
        torch.set_grad_enabled(True)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        found.append("the SIGINT handler")
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts._delayed is not None:
        found.append("a Ctrl-C that is held back")
        interrupts._delayed = None
    return ", ".join(found)


def _hooks_of(owner: Any) -> dict[str, Any]:
    """The tables of hooks in `owner` that are not empty."""
    tables = vars(owner).items()
    return {k: v for k, v in tables if "_hooks" in k and isinstance(v, dict) and v}
