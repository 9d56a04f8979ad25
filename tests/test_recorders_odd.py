"""Statistics of odd layers and odd trainings: what plain arithmetic says, or nothing."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.recorders.parameters import norms_of
from hookkit.training import watch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.enc(x))


def train(model, *cbs, n=2, x=None, between=lambda i: None, opt=torch.optim.SGD, lr=1e-3):
    """A watched loop of `n` steps; `between(i)` is called between backward and step."""
    opt = opt(model.parameters(), lr)
    with watch(model, opt, *cbs) as w:
        for i in range(n):
            model(torch.randn(10, 4) if x is None else x).sum().backward()
            between(i)
            opt.step()
            opt.zero_grad()
    return w


# --- calls that are no part of a batch


def test_what_is_called_in_eval_mode_is_no_part_of_the_batch():
    model, stats, flight = Net(), ActivationStats(), FlightRecorder()

    def evaluate(i):
        model.eval()
        with torch.no_grad():
            model(torch.randn(100, 4))
            model.enc(torch.full((100, 4), math.nan))  # a layer by itself
        model.train()

    train(model, stats, flight, between=evaluate)

    assert stats.record().value("count", "enc").tolist() == [40, 40]
    assert not flight.incidents


class BodyAndHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.body(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo
@pytest.mark.parametrize("compiled", [False, True])
def test_a_head_that_runs_after_the_model_is_recorded_and_a_probe_is_not(compiled):
    model, stats, flight = BodyAndHead(), ActivationStats(), FlightRecorder("report")
    head = torch.compile(model.head, backend="eager", fullgraph=True) if compiled else model.head
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    want = []

    with watch(model, opt, stats, flight):
        for i in range(3):
            out = head(model(torch.randn(4, 8)).relu() / (i < 2))  # in the last step Inf
            with torch.no_grad():
                model.head(torch.full((50, 8), math.nan))  # a probe
            want.append(out.mean().item())
            out.square().mean().backward()
            opt.step()
            opt.zero_grad()

    record = stats.record()
    assert record.value("mean", "head")[:2] == pytest.approx(want[:2], abs=1e-7)
    assert [incident.name for incident in flight.incidents] == ["head"]
    assert record.value("count", "head").tolist() == [8, 8, 8]
    assert record.value("count", "body").tolist() == [32, 32, 32]


def test_under_torch_func_nothing_is_recorded_and_it_says_so():
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, stats := ActivationStats(), FlightRecorder()):
        torch.func.vmap(model)(torch.randn(6, 1, 4))
        opt.step()

    assert np.isnan(stats.record().value("count")).all()
    assert list(stats.record().meta["skipped"]) == ["enc", "head"]


def test_a_function_between_layers_is_not_blamed_on_the_next():
    class Odd(Net):
        def forward(self, x):
            return self.head(self.enc(x) / 0)

    (incident,) = train(Odd(), FlightRecorder("report"), n=1).flight_recorder.incidents

    assert incident.name == "head"
    assert "first non-finite: div (test_recorders_odd.py" in incident.note


# --- parts of an output


def test_a_path_into_the_output_is_what_is_recorded():
    paths, model = ["lstm[1][0]", "lstm[0]"], nn.ModuleDict({"lstm": nn.LSTM(3, 4)})
    acts, grads = ActivationStats(modules=paths), GradientStats(modules=paths)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, acts, grads):
        output, (h, _) = model["lstm"](torch.randn(5, 2, 3))
        (h.square().sum() + output.sum()).backward()
        opt.step()

    for stats in (acts, grads):
        assert stats.record().names == ("lstm[1][0]", "lstm[0]")
        assert stats.record().value("count").tolist() == [[8], [40]]
    means = [h.mean().item(), output.mean().item()]
    np.testing.assert_allclose(acts.record().value("mean")[:, 0], means, rtol=1e-5)


# --- numbers at the ends of their types


@pytest.mark.parametrize("n", [4, 100_000])
def test_norms_are_right_where_squares_leave_their_dtype(n):
    values = [1e-42, 1e-24, 0.0, 1.0, 1e25, float("inf"), float("nan")]
    tensors = [torch.full((n,), value) for value in values]
    tensors += [torch.full((n,), value, dtype=torch.float16) for value in (1e-4, 60_000.0)]
    tensors += [torch.full((n,), 1e200, dtype=torch.float64), torch.full((n,), 3e38).bfloat16()]

    norms = norms_of(tensors).tolist()

    truth = [math.sqrt(n) * t[0].double().item() for t in tensors]
    assert norms == pytest.approx(truth, rel=2e-6, nan_ok=True)
    assert math.copysign(1, norms[2]) == 1


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_values_beyond_float32_are_finite():
    stats = ActivationStats(with_hist=True)
    train(Net().double(), stats, x=torch.randn(10, 4, dtype=torch.float64) * 1e200, n=1)

    record = stats.record()
    assert record.hist[0].sum() == 40  # none of them is lost
    assert not np.isnan(record.value("std")).any()


# --- parameters


@pytest.mark.parametrize("n", [4, 200_000])
def test_the_update_ratio_of_a_nan_is_nan_and_of_a_zero_that_moves_infinite(n):
    def ratios(model, between=lambda i: None):
        train(model, stats := ParamStats(), between=between, n=1)
        return [stats.record().value("update_ratio", name)[0] for name in ("weight", "bias")]

    spoiled, zero = nn.Linear(4, n), nn.Linear(4, n)
    weight, bias = ratios(spoiled, lambda i: spoiled.weight.grad[0, 0].fill_(math.nan))
    assert math.isnan(weight)
    assert math.isfinite(bias)

    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias).requires_grad_(False)
    assert ratios(zero) == [math.inf, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_parameters_small_and_large_equal_float64_truth(dtype):
    """A small one, an empty one, one that is not contiguous, one of its own beside the others."""
    torch.manual_seed(0)
    sizes = {"small": (3, 5), "empty": (0, 2), "large": (300, 200), "none": (4,)}
    model = nn.ParameterDict({name: torch.randn(size).to(dtype) for name, size in sizes.items()})
    model["turned"] = nn.Parameter(torch.randn(7, 9).to(dtype).t())
    opt, stats, want = torch.optim.SGD(model.parameters(), 0.5), ParamStats(), {}

    with watch(model, opt, stats) as w:
        w.batch()
        for name, p in model.items():
            p.grad = None if name == "none" else torch.randn(p.shape).to(dtype)
        before = {name: p.detach().double().clone() for name, p in model.items()}
        grads = {name: p.grad.double().clone() for name, p in model.items() if name != "none"}
        opt.step()
        for name, p in model.items():
            moved = (p.detach().double() - before[name]).norm().item()
            grad = grads[name].norm().item() if name in grads else math.nan
            want[name] = [before[name].norm().item(), grad, moved]

    record = stats.record()
    for name, norms in want.items():
        got = [record.value(f"{what}_norm", name)[0] for what in ("weight", "grad", "update")]
        np.testing.assert_allclose(got, norms, rtol=2e-6 if dtype.itemsize > 2 else 1e-5)


class Growing(torch.optim.SGD):
    """Gives the parameters of `layer` another number of rows, `to`, in its second step."""

    n_steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.n_steps += 1
        if self.n_steps == 2:
            self.layer.weight.data = torch.ones(self.to, 4)
            self.layer.bias.data = torch.ones(self.to)
            self.layer.weight.grad = self.layer.bias.grad = None


@pytest.mark.parametrize(("to", "every_layer"), [(3, False), (11, False), (3, True)])
def test_a_step_that_gives_a_parameter_another_shape_has_no_update(to, every_layer):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = model[2:] if every_layer else model
    opt = type("Grows", (Growing,), {"layer": model[-1], "to": to})
    stats = ParamStats()

    train(model, stats, n=4, opt=opt)

    record = stats.record()
    known = np.isfinite(record.value("update_norm"))
    assert known.tolist() == [[True, False, True, True]] * len(record.names)
    assert record.value("weight_norm", record.names[-1])[2] == pytest.approx(math.sqrt(to))


def test_a_parameter_that_is_called_otherwise_goes_on_under_its_new_name():
    model, stats = nn.Sequential(nn.Linear(4, 2)), ParamStats()
    prune.random_unstructured(model[0], "weight", 0.5)

    train(model, stats, n=4, between=lambda i: i == 1 and prune.remove(model[0], "weight"))

    norms = {name: stats.record().value("weight_norm", name) for name in stats.record().names}
    assert np.isfinite(norms["0.weight_orig"]).tolist() == [True, False, False, False]
    assert np.isfinite(norms["0.weight"]).tolist() == [False, True, True, True]
