"""Every recorder beside tensors of every dtype and layout: an output, an input, a weight."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.records import Record
from hookkit.training import watch

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
PER_TENSOR = (torch.qint8, torch.quint8, torch.qint32)


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; any bytes where PyTorch only stores it."""
    if dtype in PER_TENSOR:
        return torch.quantize_per_tensor(x, 0.1, 0, dtype)
    try:
        return x.to(dtype)
    except (NotImplementedError, RuntimeError):
        return torch.zeros(x.shape, dtype=torch.uint8).view(dtype)


MAKERS = {str(d).removeprefix("torch."): lambda x, d=d: of_dtype(x, d) for d in DTYPES} | {
    "sparse_coo": Tensor.to_sparse,
    "sparse_csr": Tensor.to_sparse_csr,
    "sparse_csc": Tensor.to_sparse_csc,
    "sparse_bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "mkldnn": Tensor.to_mkldnn,
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged),
    "meta": lambda x: x.to("meta"),
}
odd = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
quiet = pytest.mark.filterwarnings("ignore")  # PyTorch's, of layouts in beta and of quantization


class Odd(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.weight = make, nn.Parameter(make(torch.randn(4, 4)), requires_grad=False)

    def forward(self, x, given):
        return self.make(x.detach())


class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.odd, self.a, self.b = Odd(make), nn.Linear(4, 4), nn.Linear(4, 1)
        self.make = make

    def forward(self, x, given):
        h = self.a(x)
        self.odd(h, given)
        return self.b(h)


def train(make, *callbacks) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net(make)
    trained = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.SGD(trained, 0.1)
    with watch(net, opt, *callbacks):
        for _ in range(3):
            x = torch.randn(4, 4)
            net(x, make(x)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return trained


def recorders() -> list[ActivationStats | GradientStats | ParamStats]:
    stats = [ActivationStats(True, include_paramless=True, units=True)]
    return [*stats, GradientStats(True, include_paramless=True), ParamStats()]


@pytest.fixture(scope="module")
def ordinary() -> list[Record]:
    train(lambda x: x, *(found := recorders()))
    return [cb.record() for cb in found]


@pytest.mark.slow
@quiet
@odd
def test_no_dtype_and_no_layout_changes_a_training_or_what_is_recorded_beside_it(make, ordinary):
    plain = train(make)
    watched = train(make, *(found := recorders()), FlightRecorder("raise"))

    assert all(map(torch.equal, plain, watched))
    for got, want in zip([cb.record() for cb in found], ordinary, strict=True):
        for name in {"a", "b", "a.weight", "b.bias"} & {*want.names}:
            for stat in want.values:
                own, others = got.value(stat, name), want.value(stat, name)
                np.testing.assert_allclose(own, others, rtol=1e-6, atol=1e-12)


@quiet
@pytest.mark.parametrize("kind", ["sparse_coo", "nested", "qint8", "bits8"])
def test_what_cannot_be_read_is_named(kind: str):
    stats = ActivationStats(modules=["odd", "a"])

    train(MAKERS[kind], stats)

    assert list(stats.record().meta["skipped"]) == ["odd"]
    assert np.isnan(stats.record().value("count", "odd")).all()
    assert stats.record().value("count", "a").tolist() == [16, 16, 16]


FLOATS = [d for d in DTYPES if d.is_floating_point and "x2" not in str(d)]


@quiet
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.bool], ids=str)
def test_values_with_a_meaning_are_recorded_with_it(dtype: torch.dtype):
    seen: list[Tensor] = []
    recorder, params = ActivationStats(modules="odd"), ParamStats()

    def make(x: Tensor) -> Tensor:
        seen.append(of_dtype(x, dtype))
        return seen[-1]

    train(make, recorder, params)

    outputs, weight = seen[2::2], seen[0].double()
    means = [t.double().mean().item() for t in outputs]
    np.testing.assert_allclose(recorder.record().value("mean", "odd"), means, rtol=1e-6)
    norms = params.record().value("weight_norm", "odd.weight")
    np.testing.assert_allclose(norms, weight.norm().item(), rtol=1e-6)
    assert (params.record().value("update_norm", "odd.weight") == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_flight_recorder_finds_a_nan_of_any_dtype(dtype: torch.dtype):
    if not torch.zeros(1).fill_(math.nan).to(dtype).float().isnan().item():
        pytest.skip("a dtype without NaN")
    recorder = FlightRecorder("report")

    train(lambda x: torch.full_like(x, math.nan).to(dtype), recorder)

    assert recorder.incidents[0].name == "odd"


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 3), (torch.bfloat16, 3), (torch.float32, 1e17)]
)
def test_gradients_whose_squares_overflow_are_no_incident(dtype: torch.dtype, scale: float):
    net = nn.Linear(1024, 4).to(dtype)

    with watch(net, opt := torch.optim.SGD(net.parameters(), 1e-6), FlightRecorder("raise")):
        (net(torch.full((1, 1024), 1000.0, dtype=dtype)) * scale).sum().backward()
        opt.step()

    assert torch.isfinite(net.weight.grad).all()


def test_complex_gradients_that_are_not_finite_are_an_incident():
    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x):
            return (self.w * x).abs().sqrt()  # which has no gradient at 0

    net, recorder = Turn(), FlightRecorder("report")

    with watch(net, opt := torch.optim.SGD(net.parameters(), 0.1), recorder):
        net(torch.zeros(3)).sum().backward()
        opt.step()

    assert recorder.incidents[0].kind == "gradient"
