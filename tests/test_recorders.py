"""The recorders of statistics: right numbers, on the optimizer's step axis, in any loop."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookkit.callbacks import Callback, GradientAccumulation
from hookkit.callbacks.events import (
    CancelBatchException,
    CancelStepException,
    CancelTrainException,
)
from hookkit.errors import ArgumentError, NeverFiredWarning, OptionError
from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.recorders.bins import LogBins
from hookkit.testing import synth_learner
from hookkit.training import watch


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def batches(n: int, size: int = 16) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(size, 8, generator=g) for _ in range(n)]


def train(model: nn.Module, data: list[Tensor], *cbs: Any, opt: Any = None, every: int = 1) -> Any:
    opt = opt or torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, *cbs) as w:
        for i, x in enumerate(data):
            loss_of(model(x)).backward()
            if (i + 1) % every == 0:
                opt.step()
                opt.zero_grad()
    return w


def loss_of(y: Any) -> Tensor:
    while not isinstance(y, Tensor):
        y = next(iter(y.values())) if isinstance(y, dict) else y[0]
    return y.pow(2).mean()


# time


@pytest.mark.parametrize("every", [1, 4])
def test_a_second_fit_appends_and_validation_erases_nothing(every: int) -> None:
    learn = synth_learner(n_trn=5, cbs=ActivationStats(every=every, modules=""))

    with learn.no_logging():
        learn.fit(1)
        learn.validate()
        learn.get_preds()
        learn.fit(2)

    record = learn.activation_stats.record()
    assert record.steps.tolist() == (list(range(15)) if every == 1 else [0, 4, 5, 9, 13])
    assert record.epochs.tolist() == ([0] * 10 + [1] * 5 if every == 1 else [0] * 4 + [1])


def test_a_cancelled_batch_and_a_step_left_out_leave_nothing() -> None:
    class Cancel(Callback):
        def after_pred(self) -> None:
            if self.training and self.iter in (0, 3):
                raise CancelBatchException

        def before_step(self) -> None:
            if self.iter == 4:
                raise CancelStepException

    cbs = [ActivationStats(modules=""), GradientStats(modules=""), ParamStats(), Cancel]
    learn = synth_learner(n_trn=6, cbs=cbs)

    with learn.no_logging():
        learn.fit(1)

    for cb in (learn.activation_stats, learn.gradient_stats, learn.param_stats):
        assert cb.record().iters.tolist() == [1, 2, 5]
    assert learn.activation_stats.record().value("count", 0).tolist() == [16] * 3


@pytest.mark.parametrize("cancel", [CancelBatchException, CancelTrainException])
def test_a_batch_cancelled_after_its_step_leaves_nothing_of_the_step(cancel: Any) -> None:
    class Cancel(Callback):
        def after_step(self) -> None:
            if self.n_steps == 1:
                raise cancel

    cbs = [ActivationStats(modules=""), GradientStats(modules=""), GradientAccumulation(2), Cancel]
    learn = synth_learner(n_trn=4, cbs=cbs)

    with learn.no_logging():
        learn.fit(2)

    for cb in (learn.activation_stats, learn.gradient_stats):
        record = cb.record()
        assert record.steps[0] == 1
        assert set(record.value("count", 0).tolist()) == {32.0}


def test_batches_of_one_step_are_merged_and_recomputed_ones_not_seen_twice() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = net(), reentrant

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    for reentrant in (False, True):
        stats, grads, params = ActivationStats(), GradientStats(), GradientStats(of="params")

        train(Checkpointed(reentrant), batches(6), stats, grads, params, every=3)

        assert stats.record().value("count").tolist() == [[1536] * 2, [192] * 2]
        assert grads.record().value("count").tolist() == [[1536] * 2, [192] * 2]
        assert params.record().value("count", "inner.2.weight").tolist() == [128, 128]


# odd models


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)
        self.fc = nn.Linear(4, 4)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        out, _ = self.lstm(x.unsqueeze(1))
        return {"y": self.fc(self.fc(out)), "none": None, "empty": out[:0], "n": 3}


def test_structures_never_called_and_reused_modules_are_recorded() -> None:
    stats, grads = ActivationStats(with_hist=True, units=True), GradientStats(with_hist=True)

    train(Odd(), batches(3), stats, grads)

    record = stats.record()
    assert record.names == ("lstm", "lstm[1][0]", "lstm[1][1]", "fc", "never")
    assert stats.names == ["lstm", "fc", "never"]
    assert [record.value("count", name)[0] for name in ("lstm", "fc")] == [64, 128]
    assert np.isnan(record.value("mean", "never")).all()
    assert math.isnan(stats.stats[0][2]["mean"])
    assert len(stats.layer_stats("never")[0]) == 3
    assert stats.hist(2).sum() == 0
    assert (grads.record().value("rms", "fc") > 0).all()


# gradients


@pytest.mark.parametrize("inplace", [False, True])
def test_a_linear_of_sequences_is_handed_on_as_it_is(inplace: bool) -> None:
    """Its output is a view, whose own hook an in-place operation would lose."""
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace), nn.Linear(6, 2))
    x, stats, given, got = torch.randn(4, 3, 8), GradientStats(), list[Any](), list[Any]()
    hidden = model[0](x).detach().requires_grad_()
    loss_of(model[2](hidden.relu())).backward()
    model.zero_grad()
    model[0].register_forward_hook(lambda m, i, o: given.append(o))
    model[1].register_forward_pre_hook(lambda m, i: got.append(i[0]))

    train(model, [x], stats, opt=torch.optim.SGD(model.parameters(), lr=0.0))

    assert got[0] is given[0]
    assert hidden.grad is not None
    want = hidden.grad.double()
    assert stats.record().value("count", "0")[0] == want.numel()
    assert stats.record().value("rms", "0")[0] == pytest.approx(want.square().mean().sqrt().item())


# parameters


def test_the_facts_of_parameters_follow_what_is_thawed_while_it_trains() -> None:
    model, stats = net(), ParamStats()
    model[0].requires_grad_(False)
    opt = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def thaw(cb: Callback) -> None:
        if cb.learn.n_steps == 2:
            model[0].requires_grad_(True)
        if cb.learn.n_steps == 3:
            opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
        if cb.learn.n_steps < 4:
            meta = stats.record().meta
            facts.append((meta["requires_grad"], meta["in_optimizer"]))

    facts: list[Any] = []
    train(model, batches(5), stats, Callback(before_batch=thaw), opt=opt)

    record, no, yes = stats.record(), [False] * 2 + [True] * 2, [True] * 4
    assert record.types == ("Linear",) * 4
    assert record.meta["ndim"] == [2, 1, 2, 1]
    assert record.meta["numel"] == [256, 32, 128, 4]
    assert facts[1:] == [(no, no), (no, no), (yes, no)]  # as of the last step
    assert record.meta["in_optimizer"] == yes
    assert record.value("lr")[0, -1] == 0.2
    assert np.isnan(record.value("grad_norm")[:2, :2]).all()
    assert (record.value("update_norm")[:2, :3] == 0).all()


def test_each_parameter_knows_its_optimizer_its_group_and_its_rate_at_each_step() -> None:
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
    first = torch.optim.AdamW([
        {"params": a.parameters(), "lr": 0.1},
        {"params": b.parameters(), "lr": 0.2, "weight_decay": 0.5},
    ])  # fmt: skip
    second = torch.optim.SGD(c.parameters(), lr=torch.tensor(0.3))
    sched = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    stats = ParamStats()
    with watch(nn.ModuleDict({"a": a, "b": b, "c": c}), [first, second], stats):
        for _ in range(3):
            c(b(a(torch.ones(4, 2)))).mean().backward()
            first.step()
            second.step()
            sched.step()

    record = stats.record()
    rows = [record.layer(name) for name in ("a.weight", "b.weight", "c.weight")]
    expected = [[0.1, 0.05, 0.025], [0.2, 0.1, 0.05], [0.3, 0.3, 0.3]]
    np.testing.assert_allclose(record.value("lr")[rows], expected, rtol=1e-6)
    assert [record.meta["optimizer"][i] for i in rows] == ["AdamW", "AdamW", "SGD"]
    assert [record.meta["group"][i] for i in rows] == [0, 1, 2]
    assert [record.meta["weight_decay"][i] for i in rows] == [0.01, 0.5, 0.0]


# units


class Before(nn.Module):
    """A Linear whose first two units are below 0, and whose third gives 0, before `act`."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.act, self.head = nn.Linear(8, 6), act, nn.Linear(6, 2)
        with torch.no_grad():
            self.fc.weight[:3] = 0
            self.fc.bias.copy_(torch.tensor([-1.0, -2.0, 0.0, 4.0, 4.0, 4.0]))
            self.head.weight.fill_(0.0)
            self.head.bias.copy_(torch.tensor([-1.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.fc(x)))  # type: ignore[no-any-return]


def relu6_and_dropout(x: Tensor) -> Tensor:
    return nn.functional.dropout(nn.functional.relu6(x), 0.1)


@pytest.mark.parametrize("act", [nn.functional.relu, relu6_and_dropout, nn.functional.gelu])
def test_below_0_is_dead_only_where_a_relu_reads_it(act: Any) -> None:
    model, stats = Before(act), ActivationStats(units=True)

    train(model, batches(3), stats, opt=torch.optim.SGD(model.parameters(), lr=0.0))

    dead = stats.record().value("dead")
    if act is nn.functional.gelu:
        assert np.isnan(dead).all()
    else:
        assert stats.dead_units("fc") == [0, 1, 2]
        np.testing.assert_allclose(dead[0], 3 / 6)
        assert np.isnan(dead[1]).all()  # scores may all be low


def test_only_squashing_layers_saturate() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Sigmoid(), nn.ReLU())
    with torch.no_grad():
        model[0].bias += torch.tensor([50.0, 0, 0, 0])
    stats = ActivationStats(units=True, include_paramless=True)

    train(model, batches(2), stats, opt=torch.optim.SGD(model.parameters(), lr=0.0))

    saturated = stats.record().value("saturated")[:, -1]
    assert np.isnan(saturated[[0, 3]]).all()
    assert saturated[1] >= 0.25
    assert saturated[2] == 0


# bins


def test_bins_are_of_the_users_own_range_and_those_of_gradients_reach_down_to_tiny_ones() -> None:
    stats, grads = ActivationStats(True, bins=(0, 10, 40)), GradientStats(True)

    train(net(), batches(1), stats, grads)

    own, tiny = stats.record().edges, grads.record().edges
    assert own is not None
    assert own[:3].tolist() == [-math.inf, 0, 0.25]
    assert stats.hist(0).shape == (42, 1)
    np.testing.assert_array_equal(tiny, LogBins(-40, 8, 1).edges)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ActivationStats(bins=(0, 1, 4)), "with_hist=True"),
        (lambda: ActivationStats(True, bins="ten"), "give .low, high, n."),
        (lambda: ActivationStats(True, bins=(1, 0, 2)), "low < high"),
        (lambda: ActivationStats(True, bins=(0, 1, 10**9)), r"bins.2.=1000000000.* 1 to 4096"),
        (lambda: ActivationStats(eps=-1), "eps=-1"),
        (lambda: ActivationStats(every=0), "every=0"),
        (lambda: ParamStats(every=1.5), "every=1.5.* whole"),
        (lambda: ActivationStats(is_forward=False), r"Use GradientStats\(\)"),
        (lambda: ActivationStats(nn.Linear), r"with_hist=.* True or False.* given by name: "),
        (lambda: GradientStats(of="weights"), '"outputs", "params"'),
        (lambda: GradientStats(scaler=1024.0), r"scaler=1024.0.* Give the torch\.amp\.GradSc"),
        (lambda: FlightRecorder("stop"), '"raise", "skip", "report"'),
        (lambda: FlightRecorder(n_batches=1), "a whole number from 2"),
    ],
)
def test_options_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises((OptionError, ArgumentError), match=message):
        make()


# good guests


def test_the_host_reads_nothing_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    for name in ("item", "tolist", "cpu", "__float__", "__bool__", "__int__"):
        real = getattr(Tensor, name)
        note = lambda t, *a, real=real, name=name, **k: (reads.append(name), real(t, *a, **k))[1]  # noqa: E731
        monkeypatch.setattr(Tensor, name, note)
    acts, grads = ActivationStats(True, units=True), GradientStats(True)

    train(net(), batches(3), acts, grads, GradientStats(of="params"), ParamStats())

    assert reads == []


# compiled


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = nn.functional.relu_(self.body(x))
        return {"a": self.a(x), "rest": (self.b(x), None)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.traces_gradients
def test_a_compiled_model_records_the_same_in_two_graphs(backend: str) -> None:
    from torch._dynamo.utils import counters

    def run(compiled: bool) -> Any:
        torch.manual_seed(0)
        model: Any = TwoHeads()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        if compiled:
            torch._dynamo.reset()
            counters.clear()
            # without vectors: the compiler's cache gives what it has compiled for another
            # ATEN_CPU_CAPABILITY, which computes something else
            options = {"cpp.simdlen": 1} if backend == "inductor" else None
            model = torch.compile(model, fullgraph=True, backend=backend, options=options)
        # the compiler of C++ takes half a minute for all of it
        rest = {} if backend == "inductor" else {"with_hist": True, "every": 2}
        kinds: dict[str, Any] = {"include_paramless": True, **rest}
        cbs = ActivationStats(units=bool(rest), **kinds), GradientStats(**kinds), ParamStats()
        train(model, batches(6), *cbs, opt=opt)
        return cbs

    eager = run(False)
    compiled = run(True)

    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]
    for a, b in zip(eager, compiled, strict=True):
        x, y = a.record(), b.record()
        assert x.names == y.names
        for name in x.values.keys() - {"dead"}:  # a compiled graph shows no ReLU
            ran = ~np.isnan(x.values[name])  # a compiled graph gives zeros where none arrive
            np.testing.assert_allclose(
                x.values[name][ran], y.values[name][ran], rtol=1e-3, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("kind", [ActivationStats, GradientStats, ParamStats])
def test_a_recorder_that_was_in_no_training_says_so(kind: type[Any]) -> None:
    model, recorder = net(), kind()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, opt, recorder)  # without `with`
    loss_of(model(batches(1)[0])).backward()
    opt.step()

    with pytest.warns(NeverFiredWarning, match=r"in no training yet.*Write `with watch\("):
        record = recorder.record()

    assert len(record) == 0
