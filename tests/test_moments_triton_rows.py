"""The fused kernel equals the reference: interpreted on the CPU, compiled where there is a GPU."""

import numpy as np
import pytest
import torch
from torch import nn

from hookkit.recorders import (
    ActivationStats,
    FlightRecorder,
    GradientStats,
    ParamStats,
    triton_rows,
)
from hookkit.recorders.moments import moments, to_widest_float
from hookkit.training import watch

pytest.importorskip("triton")

# Triton's interpreter says it to itself, with numpy from 1.25 on
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> None:
    device = request.node.callspec.params["device"] if hasattr(request.node, "callspec") else ""
    if device == "cuda":
        request.getfixturevalue("cuda")
    if device == "cpu" and type(triton_rows._add).__name__ == "JITFunction":
        pytest.skip("set TRITON_INTERPRET=1 before Python starts")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_one_read_equals_the_reference(device: str, dtype: torch.dtype, mean: float) -> None:
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(5000, generator=g).relu() + mean).to(dtype).to(device)
    x[7], x[11], x[13] = float("nan"), float("inf"), 0.0

    sums = triton_rows.sums_of(x[:3000], 0.05)
    both = triton_rows.merge_sums(sums, triton_rows.sums_of(x[3000:], 0.05))

    got, want = triton_rows.collapse(both[None])[0].cpu(), moments(to_widest_float(x), 0.05).cpu()
    assert got[0] == 2
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [0, 1, 1024, 1025])
def test_any_size_is_read(device: str, n: int) -> None:
    x = torch.arange(n, dtype=torch.float32, device=device) - 2

    got = triton_rows.collapse(triton_rows.sums_of(x, 0.05)[None])[0]

    torch.testing.assert_close(got, moments(x, 0.05), rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
def test_recorders_on_a_gpu_give_what_they_give_on_a_cpu(cuda: torch.device) -> None:
    def run(device: torch.device) -> list[ActivationStats | GradientStats | ParamStats]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        stats = [ActivationStats(True, units=True), GradientStats(True), ParamStats()]
        with watch(model, opt, *stats, FlightRecorder("report")):
            for i in range(20):
                x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i)).to(device)
                model(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
        return stats

    for a, b in zip(run(torch.device("cpu")), run(cuda), strict=True):
        for name, table in a.record().values.items():
            np.testing.assert_allclose(b.record().value(name), table, 1e-3, 1e-5, err_msg=name)
