"""The compiled loops: when they are loaded, what prevents it, and that they change nothing else."""

import logging
import math
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hookkit.callbacks import Callback
from hookkit.errors import HookkitWarning
from hookkit.moments import cpu, numba_loader
from hookkit.moments.cpu import cpu_row
from hookkit.stats import (
    ActivationStats,
    FlightRecorder,
    GradientStats,
    ParamStats,
    param_stats,
    stats_callback,
)
from hookkit.testing import synth_learner
from hookkit.watching import watch

numba = pytest.importorskip("numba")
loops = pytest.importorskip("hookkit.moments.numba_kernels")


@pytest.fixture
def machine(monkeypatch):
    fresh = numba_loader.Machine()
    for module in (cpu, param_stats, stats_callback):
        monkeypatch.setattr(module, "machine", fresh)
    return fresh


def read(n=9):
    return cpu_row(np.ones(n, np.float32), 0.05)[1]


def test_they_are_loaded_once(machine):
    machine.load()
    loader = machine._loader

    machine.load()

    assert machine.found is loops
    assert machine._loader is loader


def watched(*cbs):
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    with watch(net, opt, *cbs):
        net(torch.ones(3, 2)).sum().backward()
        opt.step()


@pytest.mark.parametrize("recorder", [ActivationStats, GradientStats, ParamStats])
def test_they_come_when_a_watch_begins_and_at_no_other_time(machine, monkeypatch, recorder):
    events = []
    monkeypatch.setattr(machine, "load", lambda: events.append("load"))

    watched(recorder(), Callback(before_batch=lambda self: events.append("batch")))

    assert events == ["load", "batch"]


def test_they_come_when_a_fit_begins(machine, monkeypatch):
    events = []
    monkeypatch.setattr(machine, "load", lambda: events.append("load"))
    learn = synth_learner(n_trn=2, cbs=[ActivationStats(modules=""), ParamStats()])

    with learn.no_logging():
        learn.fit(1)
        learn.validate()

    assert events == ["load", "load"]


def test_reading_alone_loads_nothing(machine):
    read(1 << 20)

    assert machine.found is None
    assert machine._loader is None


def test_without_numba_numpy_goes_on(machine, monkeypatch):
    monkeypatch.setattr(numba_loader.importlib.util, "find_spec", lambda name: None)
    machine.load()
    assert read() == 1
    assert machine.found is None


def test_a_numba_that_does_not_compile_is_passed_by(machine, monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    machine.load()
    assert read() == 1
    assert machine.found is None


def test_a_numba_that_does_not_work_is_warned_about_once(machine, monkeypatch):
    monkeypatch.delitem(sys.modules, "numba")
    monkeypatch.setattr(sys, "meta_path", [_Refusing(), *sys.meta_path])
    with pytest.warns(HookkitWarning, match=r"does not work here \(ImportError: .*pip install -U"):
        machine.load()
    machine.load()
    assert read() == 1


def test_a_stand_in_for_numba_is_warned_about_too(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace())  # no __spec__: find_spec raises
    with pytest.warns(HookkitWarning, match=r"does not work here \(ValueError"):
        machine.load()


def test_an_interrupt_ends_the_wait_and_not_the_loading(machine, monkeypatch):
    interrupted, join = threading.Event(), threading.Thread.join

    def interrupt(thread):
        monkeypatch.setattr(threading.Thread, "join", join)
        interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupt)
    monkeypatch.setattr(numba_loader.importlib.util, "find_spec", lambda name: interrupted.wait(10))
    with pytest.raises(KeyboardInterrupt):
        machine.load()
    machine.load()  # waits for the same
    assert machine.found is loops
    assert read() == 1


def test_loading_is_outside_of_what_the_training_has_set(machine, monkeypatch):
    seen = []

    def find_spec(name):
        seen.append((np.geterr()["over"], torch.empty(1).device.type, torch.is_grad_enabled()))

    monkeypatch.setattr(numba_loader.importlib.util, "find_spec", find_spec)
    with np.errstate(all="raise"), torch.device("meta"), torch.no_grad():
        machine.load()
    assert seen == [("warn", "cpu", True)]


def test_compiling_fills_no_log_of_everything(caplog):
    log = logging.getLogger("numba")
    with caplog.at_level(logging.DEBUG):
        with numba_loader._quiet():
            log.getChild("core.ssa").debug("of no interest")
        log.debug("wanted")
    assert [r.message for r in caplog.records] == ["wanted"]
    assert log.level == logging.NOTSET


@pytest.mark.parametrize("error", [EOFError, PermissionError, RuntimeError])
def test_what_cannot_be_kept_or_is_kept_broken_is_compiled_anew(monkeypatch, error):
    def njit(signature, cache=False, **options):
        if cache:
            raise error
        return lambda f: f

    monkeypatch.setattr(loops, "njit", njit)
    assert loops._compiled("float64(float64)")(math.sqrt) is math.sqrt


class _Refusing:
    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            spec = SimpleNamespace(loader=self, name=name, submodule_search_locations=None)
            spec.parent, spec.origin, spec.cached, spec.has_location = "", None, None, False
            spec.loader_state, spec._initializing, spec._uninitialized_submodules = None, False, []
            return spec
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise ImportError("needs another numpy")


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("offset", [0, 1])
def test_memory_that_is_not_aligned_is_read(offset):
    memory = bytearray(4 * 1000 + 1)
    x = torch.frombuffer(memory, dtype=torch.float32, count=1000, offset=offset).fill_(3.0)
    assert cpu_row(x.numpy(), 0.05)[:3] == (1000, 3, 0)


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    opt = torch.optim.AdamW(model.parameters())
    guests = [
        ActivationStats(with_hist=True, units=True, include_paramless=True),
        GradientStats(of="both"),
        ParamStats(),
        FlightRecorder("skip"),
    ]
    with watch(model, opt, *guests):
        for i in range(12):
            x = torch.randn(64, 1, 8, 8) + (100 if i % 3 else 0)
            if i == 7:
                x[0, 0, 0, 0] = math.inf
            loss = nn.functional.cross_entropy(model(x).nan_to_num(), torch.arange(64) % 5)
            loss.backward()
            opt.step()
            opt.zero_grad()
    return guests, [p.detach().clone() for p in model.parameters()]


def test_a_training_has_the_same_records_and_the_same_weights(monkeypatch):
    plain, weights = trained()
    monkeypatch.setattr(cpu.machine, "found", loops)
    compiled, again = trained()

    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    for a, b in zip(plain[:3], compiled[:3], strict=True):
        for name, want in a.record().values.items():
            got = b.record().values[name]
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7, err_msg=name)
    assert [str(i) for i in plain[3].incidents] == [str(i) for i in compiled[3].incidents]
