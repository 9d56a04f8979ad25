"""The fused kernel equals the reference: interpreted on the CPU, compiled where there is a GPU."""

import numpy as np
import pytest
import torch
from torch import nn

from hookkit.moments import triton_kernels
from hookkit.moments.accumulator import StatsAccumulator
from hookkit.moments.buffers import Options, narrow
from hookkit.moments.histograms import log_bins, sample_of
from hookkit.moments.moments import flat, moments, plain
from hookkit.stats import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.watching import watch

pytest.importorskip("triton")

# Triton's interpreter says it to itself, with numpy from 1.25 on
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> None:
    device = request.node.callspec.params["device"] if hasattr(request.node, "callspec") else ""
    if device == "cuda":
        request.getfixturevalue("cuda")
    if device == "cpu" and type(triton_kernels._add).__name__ == "JITFunction":
        pytest.skip("set TRITON_INTERPRET=1 before Python starts")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_one_read_equals_the_reference(device: str, dtype: torch.dtype, mean: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(5000, generator=g).relu() + mean).to(dtype).to(device)
    x[7], x[11], x[13] = float("nan"), float("inf"), 0.0
    sums = triton_kernels.blank(2, device)

    triton_kernels.add(x[:3000], sums, 1, 0.05)
    triton_kernels.add(x[3000:], sums, 1, 0.05)

    got, want = triton_kernels.collapse(sums)[1].cpu(), moments(x, 0.05).cpu()
    assert got[0] == 2
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [0, 1, 1024, 1025])
def test_any_size_is_read(device: str, n: int) -> None:
    x = torch.arange(n, dtype=torch.float32, device=device) - 2
    sums = triton_kernels.blank(1, device)

    triton_kernels.add(x, sums, 0, 0.05)

    torch.testing.assert_close(
        triton_kernels.collapse(sums)[0], moments(x, 0.05), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("n", [0, 3, 2048, 100_003])
def test_the_same_read_stores_a_sample(device: str, dtype: torch.dtype, n: int) -> None:
    x = (torch.arange(n) - 2).to(dtype).to(device)
    if n > 5 and dtype.is_floating_point:
        x[:3] = torch.tensor([float("nan"), float("inf"), torch.finfo(dtype).max])
    chosen = sample_of(n, 1500, 7)
    samples = torch.full((3, 1500), -7.0, device=device)

    triton_kernels.add(x, triton_kernels.blank(3, device), 1, 0.05, 1, samples, chosen)

    want = narrow(x[chosen]).float()
    assert torch.equal(samples[1, : len(want)].nan_to_num(-1), want.nan_to_num(-1))
    assert (samples[1, len(want) :] == -7).all()
    assert (samples[[0, 2]] == -7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_integers_and_flags_are_read(device: str) -> None:
    for t in (torch.arange(6) - 3, torch.tensor([True, False, True]), torch.ones(2).expand(3, 2)):
        x = plain(t.to(device))
        assert x is not None
        values, times = flat(x)
        sums = triton_kernels.blank(1, device)

        triton_kernels.add(values, sums, 0, 0.05, times)

        want = moments(t.to(device), 0.05)
        torch.testing.assert_close(triton_kernels.collapse(sums)[0], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_an_accumulator_records_the_same_with_and_without(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled() -> StatsAccumulator:
        g = torch.Generator().manual_seed(0)
        stats = StatsAccumulator("gradient", Options(bins=log_bins()))
        first, second = stats.rows(["a", "b"], ["Linear", "Linear"])
        for step in range(3):
            stats.see(first, 0, "", torch.randn(50, generator=g).to(device))
            stats.see(first, 1, "[1]", torch.randn(7, generator=g).to(device))
            stats.fold(finite_only=True)
            stats.see(second, 0, "", torch.full((2,), float("nan"), device=device))
            stats.fold(finite_only=True)
            stats.see(second, 0, "", torch.randn(50, generator=g).to(device))
            stats.see(first, 0, "", torch.randn(50, generator=g).to(device))
            stats.commit(step, 0, step)
        return stats

    monkeypatch.setattr(triton_kernels, "serves", lambda device: False)
    plain_record = filled().record()
    monkeypatch.setattr(triton_kernels, "serves", lambda device: True)
    fused_record = filled().record()

    assert fused_record.value("nonfinite", "b").tolist() == [0, 0, 0]
    for name, table in plain_record.values.items():
        np.testing.assert_allclose(fused_record.values[name], table, 1e-5, 1e-6, err_msg=name)


def test_training_on_a_gpu_never_waits(cuda: torch.device) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(cuda)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 64, device=cuda)
    cbs = [ActivationStats(True, units=True), GradientStats(True), ParamStats()]
    with watch(model, opt, *cbs, FlightRecorder("report")):
        for step in range(20):
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            model(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        torch.cuda.set_sync_debug_mode("default")

    assert len(cbs[0].record()) == 20
    assert (cbs[1].record().value("rms") > 0).all()
