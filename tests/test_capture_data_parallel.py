"""Capture and edits in DataParallel's replicas: on devices where there are two, else on threads.

Without devices the replicas are made by PyTorch's own `replicate`, with copies in the place of its
broadcasts, and run in threads as its `parallel_apply` has it.
"""

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.editing import edit_output, scale, skip_module
from hookkit.errors import NeverFiredWarning
from hookkit.features import feature_extractor
from hookkit.hooks import Hook, hook_function, hook_input, hook_output, hook_outputs
from hookkit.selecting import select

Parallel = Callable[[nn.Module], nn.Module]


class OnThreads(nn.DataParallel):
    """Two replicas on the CPU."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        halves = list(zip(*(x.chunk(2) for x in inputs), strict=True))
        replicas = nn.parallel.replicate(self.module, [0, 1])
        grad = torch.is_grad_enabled()

        def run(i: int) -> Any:
            with torch.set_grad_enabled(grad):
                return replicas[i](*halves[i], **kwargs)

        with ThreadPoolExecutor(2) as pool:
            outputs = [job.result() for job in [pool.submit(run, i) for i in range(2)]]
        if isinstance(outputs[0], dict):
            return {key: torch.cat([o[key] for o in outputs]) for key in outputs[0]}
        return torch.cat(outputs)


def _copies(tensors: Any, devices: Any, detach: bool = False) -> list[list[Tensor]]:
    return [[t.detach().clone() if detach else t.clone() for t in tensors] for _ in devices]


@pytest.fixture(params=["threads", pytest.param("devices", marks=pytest.mark.gpu)])
def parallel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parallel]:
    if request.param == "devices":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        with torch.device("cuda:0"):
            yield lambda model: nn.DataParallel(model.cuda(0), [0, 1])
        return
    torchs = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(torchs, "_broadcast_coalesced_reshape", _copies)
    monkeypatch.setattr(torchs, "_get_device_index", lambda x, *args: x)
    yield OnThreads


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.fixture
def x(parallel: Parallel) -> Tensor:
    return torch.randn(6, 4)  # on the first device, where there is one


def halves(calls: Any, wanted: Tensor) -> None:
    """`calls` are the two halves of `wanted`, whichever came first."""
    first, second = (c.to(wanted.device) for c in calls)
    pair = (first, second) if torch.allclose(first, wanted[:3]) else (second, first)
    torch.testing.assert_close(torch.cat(pair), wanted)


def test_a_hook_left_in_place_stores_what_each_replica_gave(
    parallel: Parallel, net: nn.Sequential, x: Tensor
) -> None:
    model = parallel(net)
    wanted = net(x).detach()
    h = hook_outputs(select(model), keep="all")

    y = model(x)
    h.remove()

    torch.testing.assert_close(y.detach(), wanted)
    assert [hook.n_calls for hook in h] == [2, 2, 2]
    halves(h["2"].calls, wanted)
    halves(h["0"].calls, net[0](x).detach())


def test_plain_and_live_hooks_left_in_place_have_the_last_replica_s(
    parallel: Parallel, net: nn.Sequential, x: Tensor
) -> None:
    model, wanted = parallel(net), net(x).detach()
    plain, live = hook_output(net[2]), hook_output(net[2], clone=False)

    model(x)

    for h in (plain, live):
        stored = h.stored.to(x.device)
        assert h.n_calls == 2
        assert torch.allclose(stored, wanted[:3]) or torch.allclose(stored, wanted[3:])
        assert not stored.requires_grad


def test_in_a_block_calls_of_replicas_are_reported_and_the_whole_is_captured(
    parallel: Parallel, net: nn.Sequential, x: Tensor
) -> None:
    model = parallel(net)

    def run() -> None:
        with hook_outputs([model, net[0]]) as h:
            y = model(x)
        assert torch.equal(h[0].stored, y)
        assert h[1].stored is None

    with pytest.warns(NeverFiredWarning, match=r"called only in DataParallel's replicas"):
        run()


def test_gradients_of_the_whole_and_of_each_replica(
    parallel: Parallel, net: nn.Sequential, x: Tensor
) -> None:
    model, weights = parallel(net), torch.arange(12.0, device=x.device).reshape(6, 2)
    (wanted,) = torch.autograd.grad((net(x.requires_grad_()) * weights).sum(), x)
    inner = hook_output(net[2], grad=True, keep="all")

    with hook_output(model, grad=True) as out, hook_input(model, grad=True) as inp:
        (model(x) * weights).sum().backward()

    torch.testing.assert_close(out.stored[0], weights)
    torch.testing.assert_close(inp.stored[0], wanted)
    halves([grad for (grad,) in inner.calls], weights)


def test_an_edit_left_in_place_changes_every_replica(
    parallel: Parallel, net: nn.Sequential, x: Tensor
) -> None:
    model, wanted = parallel(net), net[2](net[1](net[0](x)) * 3)

    edits, hook = edit_output(net[1], scale(3)), Hook(net[2], lambda m, i, o: -o, edit=True)
    y = model(x)
    edits.remove()
    hook.remove()

    torch.testing.assert_close(y, -wanted)
    assert edits.n_calls == {"0": 2}
    torch.testing.assert_close(model(x), net(x))


def test_an_edit_in_a_block_warns_that_replicas_are_not_edited(
    parallel: Parallel, net: nn.Sequential, x: Tensor
) -> None:
    model, plain = parallel(net), net(x)

    def run() -> Tensor:
        with edit_output(net[1], scale(3)):
            y: Tensor = model(x)
        return y

    with pytest.warns(NeverFiredWarning, match=r"never fired.*only in DataParallel.s replicas"):
        y = run()

    torch.testing.assert_close(y, plain)


def test_a_module_that_is_skipped_runs_in_replicas_as_itself(
    parallel: Parallel, net: nn.Sequential, x: Tensor
) -> None:
    class Said(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            ran.append("_is_replica" in self.__dict__)
            return super().forward(x)

    ran: list[bool] = []
    net[1] = Said()
    model, plain = parallel(net), net(x)

    def run() -> Tensor:
        with skip_module(net[1], lambda x: 0 * x):
            y: Tensor = model(x)
        return y

    with pytest.warns(NeverFiredWarning, match=r"nothing was skipped.*in DataParallel's replicas"):
        y = run()

    torch.testing.assert_close(y, plain)
    assert ran == [False, True, True]


def test_functions_that_only_replicas_call_are_reported_as_such(
    parallel: Parallel, net: nn.Sequential, x: Tensor
) -> None:
    model, text = parallel(net), "relu was never called in this thread within these modules"

    with (
        pytest.warns(NeverFiredWarning, match=text),
        hook_function(torch.relu, within=model) as h,
    ):
        model(x)

    assert len(h) == 0


def test_features_of_all_replicas_are_joined(
    parallel: Parallel, net: nn.Sequential, x: Tensor
) -> None:
    extract = parallel(feature_extractor(net, {"1": "h"}))

    features = extract(x)["h"]
    features.sum().backward()

    torch.testing.assert_close(features, net[1](net[0](x)))
    assert net[0].weight.grad is not None
    assert not net[1]._forward_hooks


def test_an_extractor_around_data_parallel_warns_that_replicas_ran(
    parallel: Parallel, net: nn.Sequential, x: Tensor
) -> None:
    extract = feature_extractor(parallel(net), "1")

    with pytest.warns(NeverFiredWarning, match=r"in this thread: \"1\".*wrap the extractor"):
        features = extract(x)

    assert features == {"1": None}
