"""The recorders of a Learner under `watch`: the same records, in loops of every kind."""

import copy
import gc
import importlib.util
import pickle
import weakref
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hooked import n_hooks
from test_watching import batches, net, sgd, train
from torch import nn

from hookkit.callbacks import Callback
from hookkit.errors import HookError, HookkitWarning
from hookkit.events import CancelStepException
from hookkit.health import diagnose
from hookkit.learner import Learner
from hookkit.modules import Parts
from hookkit.records import Record
from hookkit.stats import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.watching import watch


def recorders() -> list[object]:
    return [ActivationStats(with_hist=True), GradientStats(), ParamStats()]


def data(n: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, x.sum(1, keepdim=True)) for x in batches(n)]


def same(a: Record, b: Record) -> None:
    assert (a.names, a.types) == (b.names, b.types)
    for own, other in (a.steps, b.steps), (a.epochs, b.epochs), (a.iters, b.iters):
        np.testing.assert_array_equal(own, other)
    assert set(a.values) == set(b.values)
    for key, table in a.values.items():
        np.testing.assert_allclose(table, b.values[key], rtol=1e-6, atol=1e-12, err_msg=key)
    if a.hist is not None:
        np.testing.assert_array_equal(a.hist, b.hist)


def learned(epochs: int = 2):
    model = net(1)
    pair = (data(), data(2))
    learn = Learner(pair, model, nn.MSELoss(), torch.optim.SGD, lr=0.1, cbs=recorders())
    with learn.no_logging():
        learn.fit(epochs)
    return learn.run_record()


def watched(model: nn.Module, called=None, opt=None, epochs: int = 2):
    opt, called, mse = opt or sgd(model), called or model, nn.MSELoss()
    with watch(called, opt, *recorders(), loss_func=mse) as w:
        for _ in range(epochs):
            called.train()
            for x, y in data():
                mse(called(x), y).backward()
                opt.step()
                opt.zero_grad()
            called.eval()
            with torch.no_grad():
                for x, y in data(2):
                    mse(called(x), y)
            w.epoch()
    assert n_hooks(model, opt) == 0
    return w.run_record()


def test_the_records_are_those_of_the_learner():
    other, own = learned(), watched(net(1))

    same(own.activations, other.activations)
    same(own.gradients, other.gradients)
    same(own.params, other.params)
    np.testing.assert_allclose(own.losses, other.losses, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.traces_gradients
def test_a_compiled_model_gives_the_same(backend: str):
    torch.compiler.reset()
    model = net(1)

    compiled = watched(model, torch.compile(model, backend=backend, fullgraph=True))

    truth = watched(net(1))
    same(compiled.activations, truth.activations)
    same(compiled.params, truth.params)
    torch.compiler.reset()


def test_accumulated_batches_make_one_record():
    model, acts, params = net(1), ActivationStats(), ParamStats()
    opt = sgd(model)

    with watch(model, opt, acts, params):
        train(model, opt, 4, each=2)

    assert acts.record().steps.tolist() == params.record().steps.tolist() == [0, 1]
    assert acts.record().value("count", 0).tolist() == [2 * 5 * 8, 2 * 5 * 8]


def test_every_counts_steps():
    model, acts, params = net(1), ActivationStats(every=2), ParamStats(every=3)
    opt = sgd(model)

    with watch(model, opt, acts, params):
        train(model, opt, 6)

    assert acts.record().steps.tolist() == [0, 2, 4]
    assert params.record().steps.tolist() == [0, 3]


def test_parameters_know_their_optimizer_though_none_was_given():
    model, params = net(1), ParamStats()
    opts = [sgd(model[0]), sgd(model[2])]

    with watch(model, None, params):
        for x in batches(3):
            model(x).sum().backward()
            for opt in opts:
                opt.step()

    assert params.record().meta["in_optimizer"] == [True] * 4
    assert (params.record().value("update_norm")[:, 1:] > 0).all()


def test_a_closure_gives_updates_and_gradients():
    model, acts, params = net(1), ActivationStats(), ParamStats()
    opt = sgd(model)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(batches(1)[0]).pow(2).mean()
        loss.backward()
        return loss

    with watch(model, opt, acts, params):
        for _ in range(3):
            opt.step(closure)

    assert len(acts.record()) == 3
    assert (params.record().value("update_norm") > 0).all()
    assert (params.record().value("grad_norm") > 0).all()


def test_the_flight_recorder_skips_a_bad_step():
    model, flight = net(1), FlightRecorder("skip")
    opt = sgd(model)
    bad = batches(3)
    bad[1][0, 0] = float("nan")

    with watch(model, opt, flight) as w:
        for x in bad:
            loss = model(x).pow(2).mean()
            w.loss(loss)
            loss.backward()
            opt.step()
            opt.zero_grad()

    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert w.n_steps == 2
    assert w.run_record().incidents[0].step == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("each", [1, 2])
def test_the_losses_of_a_skipped_step_are_in_no_other(each: int, late: bool):
    model, truth = net(1), []
    opt, bad = sgd(model), batches(8)
    bad[4][0, 0] = float("nan")

    with watch(model, opt, FlightRecorder("skip")) as w:
        for i, x in enumerate(bad):
            loss = model(x).pow(2).mean()
            (loss / each).backward()
            if not late:
                w.loss(loss)
            if (i + 1) % each == 0:
                opt.step()
                opt.zero_grad()
                assert len(w.losses) == w.n_steps  # reading changes nothing
            if late:
                w.loss(loss)
            truth.append(loss.item())

    good = np.reshape(truth, (-1, each)).mean(1)
    np.testing.assert_allclose(w.losses, good[np.isfinite(good)], rtol=1e-6)
    assert w.n_steps == 8 // each - 1


def test_a_run_can_be_diagnosed():
    model, loss_func = net(3), nn.CrossEntropyLoss()
    opt = sgd(model)

    with watch(model, opt, ActivationStats(), ParamStats(), loss_func=loss_func) as w:
        for x in batches(60):
            loss_func(model(x), torch.zeros(5, dtype=torch.long)).backward()
            opt.step()
            opt.zero_grad()

    assert w.run_record().info["n_classes"] == 3
    assert w.run_record().info["loss_func"] == "CrossEntropyLoss"
    assert "60 steps" in str(w.diagnose()) or w.diagnose()


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("marked", [False, True])
def test_every_evaluation_of_a_closure_is_part_of_its_step(every: int, marked: bool):
    model, x = net(1), batches(1)[0]
    acts, grads = ActivationStats(every=every), GradientStats(every=every)
    of_params = GradientStats(of="params", every=every)
    opt = torch.optim.LBFGS(model.parameters(), max_iter=4)
    calls = list[torch.Tensor]()

    def closure() -> torch.Tensor:
        calls.append(nn.functional.linear(x, model[0].weight, model[0].bias).detach())
        opt.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    n_calls = [0]
    with watch(model, opt, acts, grads, of_params) as w:
        for _ in range(3):
            if marked:
                w.batch()
            opt.step(closure)
            n_calls.append(len(calls))

    taken = slice(None, None, every)
    means = [torch.cat(calls[a:b]).double().mean() for a, b in pairwise(n_calls)]
    assert n_calls[1] == 4
    for record in acts.record(), grads.record():
        assert (record.value("count", "0") == 40 * np.diff(n_calls)[taken]).all()
    np.testing.assert_allclose(acts.record().value("mean", "0"), means[taken], rtol=1e-5)
    assert (of_params.record().value("count", "0.weight") == 32).all()


def test_the_first_step_of_two_optimizers_that_were_not_given_is_measured_whole():
    model, params, grads = net(1), ParamStats(), GradientStats(of="params")
    opts = [sgd(model[0]), sgd(model[2])]

    with watch(model, None, params, grads) as w:
        for x in batches(3):
            model.zero_grad()
            model(x).sum().backward()
            for opt in opts:
                opt.step()

    assert w.n_steps == len(params.record()) == 3
    assert (params.record().value("update_norm") > 0).all()
    assert (params.record().value("grad_norm") > 0).all()
    assert (grads.record().value("count") > 0).all()


def test_a_parameter_that_no_optimizer_steps_costs_one_guess():
    model, params = net(1), ParamStats()
    opt = sgd(model[0])

    with watch(model, None, params) as w:
        for x in batches(3):
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()

    assert w.n_steps == 3
    assert (params.record().value("update_norm")[:2] > 0).all()
    assert (params.record().value("update_norm")[2:] == 0).all()
    assert (params.record().value("grad_norm")[:2, 1:] > 0).all()
    assert np.isnan(params.record().value("grad_norm")[2:]).all()  # no step has used it


def test_a_recorder_given_to_a_second_watch_goes_on():
    cbs = [*recorders(), FlightRecorder("report")]
    acts, grads, params, flight = cbs
    runs = []

    for n in 3, 4:
        model, mse = net(1), nn.MSELoss()
        opt = sgd(model)
        with watch(model, opt, *cbs, loss_func=mse) as w:
            for x, y in data(n):
                opt.zero_grad()
                mse(model(x), y * (float("nan") if runs else 1.0)).backward()
                opt.step()
        runs.append(w)
    first, second = runs

    for record in acts.record(), grads.record(), params.record():
        assert record.steps.tolist() == list(range(7))
        assert record.iters.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert (first.n_steps, second.n_steps, second.run_record().n_steps) == (3, 4, 7)
    assert np.isfinite(first.losses).tolist() == [True] * 3
    assert np.isfinite(second.run_record().grad_norms).tolist() == [True] * 3 + [False] * 4
    assert flight.incidents[0].step == 3
    assert str(second).startswith("Watcher(Sequential: 4 steps")


def test_two_watches_in_turns_share_one_axis():
    acts, models = ActivationStats(every=2), [net(1), net(1)]
    opts = [sgd(m) for m in models]
    mse = nn.MSELoss()
    watchers = [watch(m, o, acts, loss_func=mse) for m, o in zip(models, opts, strict=True)]

    for i in (0, 1, 0):
        with watchers[i] as w:
            for x, y in data(3):
                mse(models[i](x), y).backward()
                opts[i].step()
            w.epoch()

    assert acts.record().steps.tolist() == [0, 2, 3, 5, 6, 8]
    assert [w.n_steps for w in watchers] == [6, 3]
    assert [len(w.losses) for w in watchers] == [6, 3]
    assert (
        np.isfinite(watchers[0].run_record().losses).tolist()
        == [True] * 3 + [False] * 3 + [True] * 3
    )
    both = [row["train_loss"] for row in watchers[0].run_record().valid]
    np.testing.assert_allclose(both, watchers[0].losses.reshape(2, 3).mean(1))


def test_a_recorder_given_to_a_second_learner_goes_on():
    cbs = recorders()

    for _ in range(2):
        learn = Learner((data(3), None), net(1), nn.MSELoss(), torch.optim.SGD, lr=0.1, cbs=cbs)
        with learn.no_logging():
            learn.fit(1)

    run = learn.run_record()
    for record in run.records:
        assert record.steps.tolist() == list(range(6))
    assert np.isfinite(run.losses).tolist() == [False] * 3 + [True] * 3
    assert np.isfinite(run.grad_norms).all()


def changed_during_training(*cbs: object, change, n: int = 3, root: nn.Module | None = None):
    model = root or net(2)
    x, opt = batches(1)[0], None
    with watch(model, None, *cbs) as w:
        for i in range(2 * n):
            if i == n:
                change(model)
            opt = sgd(model)
            model.zero_grad()
            model(x).pow(2).mean().backward()
            opt.step()
    assert n_hooks(model, opt) == 0
    return w


@pytest.mark.parametrize("every", [1, 2])
def test_modules_added_or_exchanged_during_a_run_are_recorded_from_then_on(every: int):
    acts, grads = ActivationStats(every=every, with_hist=True, units=True), GradientStats()

    def change(model: nn.Sequential) -> None:
        model[0] = nn.Linear(4, 16)
        model[2] = nn.Linear(16, 2)
        model.append(nn.Linear(2, 3))

    changed_during_training(acts, grads, change=change, n=4)

    n = 4 // every
    counts = acts.record().value("count")
    assert acts.names == grads.names == ["0", "2", "3"]
    assert counts[0].tolist() == [40.0] * n + [80.0] * n
    assert counts[1].tolist() == [10.0] * 2 * n
    assert np.isnan(counts[2]).tolist() == [True] * n + [False] * n
    np.testing.assert_array_equal(grads.record().value("count")[2][4:], [15.0] * 4)
    assert len(acts.stats) == 2 * n


def test_a_module_that_has_gone_keeps_its_past():
    acts = ActivationStats(modules=["0", "", "1"])
    grads = GradientStats(modules=["0", ""])

    def change(model: nn.Sequential) -> None:
        model[0] = nn.Sequential(nn.Linear(4, 8))
        model.insert(1, nn.Tanh())

    changed_during_training(acts, grads, change=change)

    assert (acts.record().value("count") == [[40.0] * 6, [10.0] * 6, [40.0] * 6]).all()
    assert acts.record().types == ("Sequential", "Sequential", "Tanh")
    assert (grads.record().value("count") == [[40.0] * 6, [10.0] * 6]).all()


def test_a_named_module_that_has_gone_is_reported():
    acts = ActivationStats(modules=["0", "1"])

    with pytest.warns(HookkitWarning, match=r"other modules.*recorded on: no module .* \"1\""):
        changed_during_training(acts, change=lambda model: model.__delitem__(slice(1, 3)))

    assert (acts.record().value("count")[0] == 40.0).all()
    assert np.isnan(acts.record().value("count")[1]).tolist() == [False] * 3 + [True] * 3


def test_new_modules_are_not_looked_for_at_a_step_that_is_not_recorded(monkeypatch):
    asked = []
    monkeypatch.setattr(Parts, "changed", lambda self: asked.append(1))
    model, acts = net(1), ActivationStats(every=3)
    opt = sgd(model)

    with watch(model, opt, acts):
        train(model, opt, 7)
        assert pickle.loads(pickle.dumps(acts))._parts is None

    assert len(asked) == 3
    assert acts._parts is None


def test_a_recorder_is_read_without_its_model_which_it_does_not_keep():
    cbs = [ActivationStats(True, units=True), *recorders()[1:], FlightRecorder("report")]
    model = net(1)
    opt = sgd(model)
    with watch(model, opt, *cbs):
        train(model, opt, 4)
    refs = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(opt)]

    del model, opt
    gc.collect()

    assert [r() for r in refs] == [None] * 3
    acts, grads, params, _ = cbs
    assert [len(cb.record()) for cb in (acts, grads, params)] == [4] * 3
    assert len(acts.stats[0]) == 2
    assert acts.hist(0).shape[1] == 4
    assert isinstance(acts.dead_units(0), list)
    assert "4 steps: healthy" in str(diagnose(acts))
    assert all(pickle.loads(pickle.dumps(cb)).learn is None for cb in cbs)
    if importlib.util.find_spec("matplotlib"):
        assert acts.plot_layer_stats(0)
    with pytest.raises(
        AttributeError, match=r"'train_iter', .* watched loop .* no longer exists\. K"
    ):
        _ = acts.train_iter


def test_a_callback_reads_a_loop_that_is_over_while_its_watcher_is_kept():
    model, cb = net(1), Callback(after_fit=lambda self: None)
    opt = sgd(model)

    with watch(model, opt, cb) as w:
        train(model, opt, 2)
        assert cb.learn is w.loop

    assert (cb.n_steps, cb.learn.model, cb.learn.fitting) == (2, model, False)
    assert copy.deepcopy(cb).learn is None
    cb.order = 3
    with w:
        assert cb.learn is w.loop
    del w
    gc.collect()
    cb.order = 4
    assert not hasattr(cb, "n_steps")


@pytest.mark.parametrize("given", [False, True])
def test_steps_within_the_backward_are_recorded_whole(given: bool):
    model, acts, params = net(1), ActivationStats(), ParamStats()
    grads, x = GradientStats(), batches(1)[0]
    opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    before = [p.detach().clone() for p in model.parameters()]
    with watch(model, list(opts.values()) if given else None, acts, params, grads) as w:
        for i in range(3):
            model(x).pow(2).sum().backward()
            assert w.n_steps == i + 1
            if i == 0:
                after = [p.detach().clone() for p in model.parameters()]

    moved = [(a - b).norm().item() for a, b in zip(after, before, strict=True)]
    np.testing.assert_allclose(params.record().value("update_norm")[:, 0], moved, rtol=1e-5)
    assert (params.record().value("update_norm") > 0).all()
    for record in acts.record(), grads.record():
        assert record.value("count").tolist() == [[40.0] * 3, [5.0] * 3]


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("within", [True, False])
def test_gradients_that_are_gone_before_the_step_is_over_are_recorded(within: bool, none: bool):
    model, x = net(1), batches(1)[0]
    grads, params = GradientStats(of="params"), ParamStats()
    opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    names = {p: name for name, p in model.named_parameters()}
    used: dict[str, list[float]] = {name: [] for name in names.values()}

    def step(p: torch.Tensor) -> None:
        used[names[p]].append(p.grad.norm().item())
        opts[p].step()
        opts[p].zero_grad(set_to_none=none)

    if within:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
    with watch(model, list(opts.values()), params, grads) as w:
        for _ in range(3):
            model(x).pow(2).sum().backward()
            for p in () if within else reversed(list(opts)):
                step(p)

    norms, record = np.array(list(used.values())), grads.record()
    roots = np.sqrt([[p.numel()] for p in opts])
    assert (w.n_steps, record.names) == (3, tuple(used))
    np.testing.assert_allclose(record.value("rms") * roots, norms, rtol=1e-5)
    np.testing.assert_allclose(params.record().value("grad_norm"), norms, rtol=1e-5)


def test_a_backward_that_raises_during_its_steps_ends_the_step_at_the_next_forward():
    model, params = net(1), ParamStats()
    opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    fails = iter([True, False, False])

    def step(p: torch.Tensor) -> None:
        opts[p].step()
        opts[p].zero_grad()
        if p is model[2].weight and next(fails):
            raise ValueError("within")

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with watch(model, None, params) as w:
        for x in batches(3):
            with suppress(ValueError):
                model(x).pow(2).sum().backward()

    assert w.n_steps == 3
    assert (params.record().value("update_norm")[:2] > 0).sum(1).tolist() == [2, 2]


def test_a_step_within_the_backward_cannot_be_left_out():
    model = net(1)
    opt = sgd(model[2])
    model[2].bias.register_post_accumulate_grad_hook(lambda p: opt.step())

    def cancel(self: Callback) -> None:
        raise CancelStepException

    with pytest.raises(HookError, match="within"), watch(model, opt, Callback(before_step=cancel)):
        model(batches(1)[0]).sum().backward()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("each", [1, 2])
def test_gradients_are_those_of_the_optimizers_that_step_in_turns(given, each):
    torch.manual_seed(0)
    nets = nn.ModuleDict({"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)})
    opts = {name: torch.optim.SGD(net.parameters(), 0.1) for name, net in nets.items()}
    params, grads = ParamStats(), GradientStats(of="params")
    want, turns = [], "gd" * 6

    with watch(nets, list(opts.values()) if given else None, params, grads):
        for name in turns:
            opts[name].zero_grad()  # the other's gradient stays
            for _ in range(
                each
            ):  # through both: there is a gradient of the other from the first on
                loss = nets["d"](nets["g"](torch.randn(8, 2))).square().mean()
                loss.backward()
            want.append({n: p.grad.norm().item() for n, p in nets[name].named_parameters()})
            opts[name].step()

    record, by_grads = params.record(), grads.record()
    assert len(record) == len(turns)
    for row, full_name in enumerate(record.names):
        player, _, name = full_name.partition(".")
        own = [player == turn for turn in turns]
        norms = [step[name] if on else np.nan for on, step in zip(own, want, strict=True)]
        assert ((record.values["update_norm"][row] > 0) == own).all()
        np.testing.assert_allclose(record.values["grad_norm"][row], norms, rtol=1e-4)
        np.testing.assert_array_equal(np.isfinite(by_grads.value("rms", full_name)), own)


def test_an_optimizer_that_never_steps_is_what_the_diagnosis_names():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    opts = [torch.optim.SGD(net[i].parameters(), 0.1) for i in (0, 2)]
    x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))

    with watch(net, opts, ParamStats()) as w:
        for _ in range(40):
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opts[0].step()
            net.zero_grad()
            w.loss(loss)

    assert w.param_stats.record().meta["in_optimizer"] == [True, True, False, False]
    (finding,) = [f for f in w.diagnose() if f.rule == "not_in_optimizer"]
    assert finding.layers == ("2.weight", "2.bias")
    assert "never stepped" in finding.cause


def call_whole(net, x):
    return net(x)


def call_in_parts(net, x):
    body, head = net
    return head(body[1:](body[0](x)))


@pytest.mark.parametrize("as_list", [False, True])
def test_of_a_model_that_is_called_in_parts_as_much_is_known(as_list):
    def facts(call, as_list):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.9))
        model = nn.Sequential(body, nn.Linear(8, 3))
        opt = sgd(model)
        with watch(list(model) if as_list else model, opt, ActivationStats()) as w:
            for _ in range(12):
                call(model, torch.randn(2, 4)).square().mean().backward()
                opt.step()
        record = w.activation_stats.record()
        meta = {k: v for k, v in record.meta.items() if "variation" not in k}
        values = {k: v.tolist() for k, v in record.values.items()}
        return record.names, meta, values, w.diagnose().rules

    whole, parts = facts(call_whole, False), facts(call_in_parts, as_list)
    assert parts == whole
    assert whole[1]["dropout"] == {"0.3": 0.9}
    assert whole[1]["norm_samples"] == 2
    assert whole[1]["predecessors"] == {"0.0.weight": "", "1.weight": "0.0.weight"}
    assert {"dropout", "small_batch"} <= set(whole[3])
