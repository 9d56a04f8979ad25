"""Statistics of what is odd: layers called by themselves, quantized ones, the ends of float32."""

import numpy as np
import pytest
import torch
from torch import nn

from hookkit.errors import ArgumentError, HookError, NeverFiredWarning, OptionError, SelectionError
from hookkit.records import Run
from hookkit.stats import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.stats.param_norms import norms_of
from hookkit.testing import synth_learner
from hookkit.watching import watch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.enc(x))


def train(*cbs, n=2, between=lambda m: None, dtype=torch.float32, scale=1.0, **how):
    m = Net().to(dtype)
    o = torch.optim.SGD(m.parameters(), 1e-3)
    with watch(m, o, *cbs, **how) as w:
        for _ in range(n):
            o.zero_grad()
            (m(torch.randn(10, 4, dtype=dtype) * scale).sum()).backward()
            between(m)
            o.step()
    return w


def probe(m):
    m.eval()
    with torch.no_grad():
        m.enc(torch.randn(100, 4) * 100)
    m.train()


def eval_pass(m):
    m.eval()
    with torch.no_grad():
        m(torch.randn(100, 4))
    m.train()
    probe(m)


@pytest.mark.parametrize("between", [probe, eval_pass])
def test_a_layer_called_by_itself_is_no_part_of_the_batch(between):
    w = train(ActivationStats(), between=between)
    assert w.activation_stats.record().value("count", "enc").tolist() == [40, 40]


def test_the_flight_recorder_does_not_see_a_layer_called_by_itself():
    def spoil(m):
        with torch.no_grad():
            m.enc(torch.full((1, 4), float("nan")))

    assert not train(FlightRecorder(), between=spoil).flight_recorder.incidents


def test_records_go_out_from_whatever_holds_them(tmp_path):
    w = train(ActivationStats(), ParamStats())
    for source in (w, w.run_record(), w.activation_stats, w.param_stats, w.param_stats.record()):
        back = Run.load(source.save(tmp_path / "a.npz")).records[0]
        assert back.names
    tags = []

    class Writer:
        def add_scalar(self, tag, value, step):
            tags.append(tag)

    w.log_to(Writer(), statistics=["mean"])
    assert "activation/mean/enc" in tags


def test_a_frame_of_a_record():
    pytest.importorskip("pandas")
    w = train(ParamStats())
    assert len(w.param_stats.to_df()) == len(w.run_record().to_df()) == len(w.to_df())


def test_save_of_a_recorder_is_not_that_of_the_learner(tmp_path):
    learn = synth_learner(cbs=ActivationStats(modules=""))
    with learn.no_logging():
        learn.fit(1)
    assert len(Run.load(learn.activation_stats.save(tmp_path / "s")).records[0]) == 10


@pytest.mark.parametrize("text", ["step,epoch\n1,2\n", ""])
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(OptionError, match="did not write it"):
        Run.load(tmp_path / "a.csv")
    np.save(tmp_path / "a.npy", np.ones(2))
    with pytest.raises(OptionError, match="did not write it"):
        Run.load(tmp_path / "a.npy")


def test_norms_whose_squares_leave_float32():
    values = [1e-24, 0.0, 1.0, 1e25, float("inf"), float("nan")]
    norms = [float(n) for n in norms_of([torch.full((4,), value) for value in values])]
    assert norms == pytest.approx([2 * value for value in values], rel=1e-6, nan_ok=True)
    assert norms[0] > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_layers_trained_for_quantization_are_recorded():
    ao = pytest.importorskip("torch.ao.quantization")
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    model.qconfig = ao.get_default_qat_qconfig("fbgemm")
    model, acts = ao.prepare_qat(model), ActivationStats()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, acts):
        model(torch.randn(5, 4)).sum().backward()
        opt.step()

    assert acts.record().names == ("0", "2")
    assert acts.record().value("count").tolist() == [[15], [5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_of_16_bit_weights_are_not_rounded(dtype):
    torch.manual_seed(0)
    model, stats = nn.Linear(2, 2).to(dtype), ParamStats()
    opt, before = torch.optim.SGD(model.parameters(), 1.0), model.weight.detach().double()
    with watch(model, opt, stats):
        model(torch.ones(2, 2, dtype=dtype)).sum().backward()
        model.weight.grad = torch.randn(2, 2).to(dtype)
        opt.step()

    moved = (model.weight.detach().double() - before).norm().item()
    assert stats.record().value("update_norm", "weight")[0] == pytest.approx(moved, rel=1e-6)


def test_a_function_between_layers_is_not_blamed_on_the_next():
    class Odd(Net):
        def forward(self, x):
            return self.head(self.enc(x) / 0)

    m = Odd()
    o = torch.optim.SGD(m.parameters(), 0.1)
    with watch(m, o, FlightRecorder("report")) as w:
        m(torch.randn(3, 4)).sum().backward()
        o.step()
    (incident,) = w.flight_recorder.incidents
    assert incident.name == "head"
    assert "between enc and it" in incident.note


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_values_beyond_float32_are_finite():
    stats = ActivationStats(with_hist=True)
    record = train(stats, dtype=torch.float64, scale=1e200, n=1).activation_stats.record()
    assert record.hist is not None
    assert record.hist[0].sum() == 40  # none of them is lost
    assert not np.isnan(record.value("std")).any()


def test_a_model_in_eval_mode_is_warned_about():
    m = Net()
    o = torch.optim.SGD(m.parameters(), 0.1)
    with watch(m, o, ActivationStats()):
        m(torch.randn(3, 4)).sum().backward()
        o.step()
        m.eval()
        m(torch.randn(3, 4)).sum().backward()
        with pytest.warns(NeverFiredWarning, match="was in eval mode"):
            o.step()


@pytest.mark.parametrize("every", ["3", 1.5, True, 0])
def test_every_is_a_whole_number(every):
    with pytest.raises(OptionError, match="whole"):
        ParamStats(every=every)


@pytest.mark.parametrize("n", ["3", 2.5, True, 1])
def test_n_batches_is_a_whole_number(n):
    with pytest.raises(OptionError, match="a whole number from 2"):
        FlightRecorder(n_batches=n)


@pytest.mark.parametrize("make", [ActivationStats, GradientStats])
@pytest.mark.parametrize("what", [nn.Linear, "enc", Net()])
def test_modules_in_the_place_of_with_hist_are_refused(make, what):
    with pytest.raises(ArgumentError, match=r"with_hist=.* True or False.* given by name: "):
        make(what)


def test_the_update_ratio_of_a_nan_is_one():
    for few in (True, False):
        model = nn.Linear(4, 4 if few else 200_000)
        opt, stats = torch.optim.SGD(model.parameters(), 0.1), ParamStats()
        with watch(model, opt, stats):
            for _ in range(2):
                model(torch.randn(2, 4)).sum().backward()
                model.weight.grad[0, 0] = float("nan")
                opt.step()
        assert np.isnan(stats.record().value("update_ratio", "weight")).all()
        assert np.isfinite(stats.record().value("update_ratio", "bias")).all()


def test_a_zero_weight_that_moves_has_an_infinite_ratio():
    for n in (4, 200_000):
        model = nn.Linear(4, n)
        nn.init.zeros_(model.bias)
        nn.init.zeros_(model.weight)
        model.bias.requires_grad_(False)
        opt, stats = torch.optim.SGD(model.parameters(), 0.1), ParamStats()
        with watch(model, opt, stats):
            model(torch.randn(2, 4)).sum().backward()
            opt.step()
        assert stats.record().value("update_ratio", "weight").tolist() == [np.inf]
        assert stats.record().value("update_ratio", "bias").tolist() == [0]


@pytest.mark.parametrize("make", [ActivationStats, GradientStats])
def test_a_path_into_the_output_is_what_is_recorded(make):
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"lstm": nn.LSTM(3, 4)}), torch.randn(5, 2, 3)
    opt = torch.optim.SGD(model.parameters(), 0.0)
    stats, seen = make(modules=["lstm[1][0]", "lstm[0]"]), []
    with watch(model, opt, stats, each_forward=True):
        for _ in range(2):
            output, (h, _) = model["lstm"](x)
            h.retain_grad(), output.retain_grad()
            (h.square().sum() + output.sum()).backward()
            seen.append((h, output) if make is ActivationStats else (h.grad, output.grad))
            opt.step()

    record = stats.record()
    assert record.names == ("lstm[1][0]", "lstm[0]")
    assert record.value("count").tolist() == [[8, 8], [40, 40]]
    if make is ActivationStats:
        want = [[t.mean().item() for t in ts] for ts in zip(*seen, strict=True)]
        np.testing.assert_allclose(record.value("mean"), want, rtol=1e-5)


@pytest.mark.parametrize("make", [ActivationStats, GradientStats])
def test_a_path_that_is_not_there_raises(make):
    model = nn.Sequential(nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, make(modules="0[1][0]")), pytest.raises(HookError, match=r"\[1\]\[0\]"):
        model(torch.randn(2, 4)).sum().backward()


def test_a_hook_of_ones_own_sees_the_part():
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 4)})
    stats = ActivationStats(modules="lstm[1][0]", hook=lambda m, i, o: o[..., :1])
    opt = torch.optim.SGD(model.parameters(), 0.0)
    with watch(model, opt, stats, each_forward=True):
        model["lstm"](torch.randn(5, 2, 3))[0].sum().backward()
        opt.step()
    assert stats.record().value("count").tolist() == [[2]]


@pytest.mark.parametrize("layer", [None, slice(0, 1), 1.0, True, 2, "unknown"])
@pytest.mark.parametrize("read", ["hist", "layer_stats", "plot_layer_stats", "dead_units"])
def test_a_layer_that_is_none_gets_the_names_that_there_are(read, layer):
    stats = train(ActivationStats(with_hist=True, units=True)).activation_stats
    with pytest.raises(SelectionError, match='"enc", "head"'):
        getattr(stats, read)(layer)


def test_a_layer_is_read_by_any_whole_number():
    stats = train(ActivationStats(with_hist=True)).activation_stats
    assert stats.hist(np.int64(-1)).equal(stats.hist("head"))


def test_a_small_model_that_changes_between_steps_keeps_its_norms():
    torch.manual_seed(0)
    model, stats, want = Net(), ParamStats(), []
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, stats):
        for step in range(4):
            if step == 2:  # of another size, under the same name
                model.head = nn.Linear(4, 3)
                opt.param_groups[0]["params"] = list(model.parameters())
            model(torch.randn(5, 4)).sum().backward()
            before = model.head.weight.detach().clone()
            opt.step()
            opt.zero_grad()
            moved = model.head.weight.detach() - before
            want.append([before.norm().item(), moved.norm().item()])

    record = stats.record()
    got = [record.value("weight_norm", "head.weight"), record.value("update_norm", "head.weight")]
    np.testing.assert_allclose(np.array(got).T, want, rtol=1e-5)


def test_under_torch_func_nothing_is_recorded_and_it_says_so():
    model, x = Net(), torch.randn(6, 4)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, stats := ActivationStats(), FlightRecorder()):
        torch.func.vmap(model)(x[:, None])
        opt.step()
    record = stats.record()
    assert np.isnan(record.value("count")).all()
    assert list(record.meta["skipped"]) == ["enc", "head"]
