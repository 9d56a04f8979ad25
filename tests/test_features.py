"""feature_extractor: a model's inner outputs as an ordinary module."""

import copy
import gc
import io
import pickle
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.edits import add, edit_output
from hookkit.errors import HookError, NeverFiredWarning
from hookkit.hooks import hook_outputs
from hookkit.inspection.features import feature_extractor


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(400, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.conv1(x)))
        x = self.pool(self.act(self.conv2(x)))
        return self.fc(x.flatten(1))


class Blows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("ran too far")


@pytest.fixture
def lenet() -> LeNet:
    torch.manual_seed(0)
    return LeNet().eval()


IMAGE = torch.linspace(-1, 1, 2 * 28 * 28).reshape(2, 1, 28, 28)


def conv2_by_hand(net: LeNet) -> Tensor:
    return net.conv2(net.pool(net.conv1(IMAGE).relu()))


def test_it_runs_only_as_far_as_needed() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Blows())

    assert list(feature_extractor(net, "1", "0")(torch.ones(1, 2))) == ["1", "0"]
    with pytest.raises(AssertionError, match="ran too far"):
        feature_extractor(net, "1", stop=False)(torch.ones(1, 2))


def test_gradients_flow_through_the_features(lenet: LeNet) -> None:
    feature_extractor(lenet, "conv1", "conv2")(IMAGE)["conv2"].square().sum().backward()

    wanted = torch.autograd.grad(conv2_by_hand(lenet).square().sum(), lenet.conv1.weight)[0]
    torch.testing.assert_close(lenet.conv1.weight.grad, wanted)
    assert lenet.fc.weight.grad is None


def test_leaf_paths_and_structures() -> None:
    net = nn.Sequential(nn.LSTM(4, 3))
    x = torch.randn(2, 1, 4)
    out, (h, c) = net(x)

    features = feature_extractor(net, "0", "0[1][0]", {"0[0]": "out"})(x)

    torch.testing.assert_close(features, {"0": (out, (h, c)), "0[1][0]": h, "out": out})


# --- an ordinary module


def test_copies_and_pickles_extract_from_their_own_model(lenet: LeNet) -> None:
    extract = feature_extractor(lenet, "conv2")
    saved = io.BytesIO()
    torch.save(extract, saved)
    saved.seek(0)
    twins = [
        copy.deepcopy(extract),
        pickle.loads(pickle.dumps(extract)),
        torch.load(saved, weights_only=False),
    ]

    for twin in twins:
        nn.init.zeros_(twin.wrapped.conv2.weight)
        nn.init.ones_(twin.wrapped.conv2.bias)
        assert twin(IMAGE)["conv2"].unique().tolist() == [1]
    torch.testing.assert_close(extract(IMAGE)["conv2"], conv2_by_hand(lenet))


def test_threads_do_not_interfere() -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.01)
            return x + 1

    net = nn.Sequential(Slow(), Slow(), Slow())
    extract = feature_extractor(net, "0", "1")
    wrong: list[Any] = []

    def work(i: int) -> None:
        for _ in range(5):
            got = extract(torch.full((1,), float(i)))
            if [t.item() for t in got.values()] != [i + 1, i + 2]:
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    assert wrong == []


def test_edits_and_other_hooks_act_inside(lenet: LeNet) -> None:
    with edit_output(lenet.conv2, add(1)), hook_outputs([lenet.conv1]) as h:
        features = feature_extractor(lenet, "conv2")(IMAGE)

    torch.testing.assert_close(features["conv2"], conv2_by_hand(lenet) + 1)
    torch.testing.assert_close(h[0].stored, lenet.conv1(IMAGE).detach())


# --- transforms


def test_an_extractor_is_exported_with_its_features(lenet: LeNet) -> None:
    extract = feature_extractor(lenet, "conv1", {"conv2": "c"})

    exported: Any = torch.export.export(extract, (IMAGE,), strict=False).module()

    torch.testing.assert_close(exported(IMAGE), extract(IMAGE))


@torch.no_grad()
@pytest.mark.parametrize("compile_it", ["model", "extractor", "layer"])
def test_compiled_models_and_compiled_extractors(lenet: LeNet, compile_it: str) -> None:
    wanted = conv2_by_hand(lenet)
    model: Any = lenet
    if compile_it == "model":
        model = torch.compile(lenet, backend="eager")
        model(IMAGE)
    if compile_it == "layer":
        lenet.conv2 = torch.compile(lenet.conv2, backend="eager")  # type: ignore[assignment]
        lenet(IMAGE)
    extract: Any = feature_extractor(model, "conv2")
    if compile_it == "extractor":
        extract = torch.compile(extract, backend="eager")

    for _ in range(2):
        torch.testing.assert_close(extract(IMAGE)["conv2"], wanted)

    torch.testing.assert_close(model(IMAGE), lenet(IMAGE))


def test_features_are_freed_with_the_last_reference() -> None:
    extract = feature_extractor(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), "0")
    extract(torch.zeros(1, 3))
    gc.collect()

    gc.disable()  # nothing may be left to it: frames of a stopped forward hold the whole model's
    try:
        found = weakref.ref(extract(torch.zeros(1, 3))["0"])
        assert found() is None
    finally:
        gc.enable()


def test_vmap_jacobian_and_inference_mode() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), Blows()), torch.randn(4, 3)
    extract = feature_extractor(net, "1")
    wanted = net[1](net[0](x))

    torch.testing.assert_close(torch.func.vmap(extract)(x)["1"], wanted)
    detached = feature_extractor(net, "1", detach=True)
    torch.testing.assert_close(torch.func.vmap(detached)(x)["1"], wanted.detach())
    jacobian = torch.func.jacrev(lambda x: extract(x)["1"])(x[0])
    assert jacobian.shape == (2, 3)
    with torch.inference_mode():
        torch.testing.assert_close(extract(x)["1"], wanted)


def test_features_on_a_gpu_are_safe_from_in_place_operations(
    lenet: LeNet, gpu: torch.device
) -> None:
    wanted = conv2_by_hand(lenet)
    extract = feature_extractor(lenet, "conv2", stop=False).to(gpu)

    torch.testing.assert_close(extract(IMAGE.to(gpu))["conv2"].cpu(), wanted, rtol=1e-3, atol=1e-3)


# --- warnings and errors


def test_a_layer_that_is_not_reached() -> None:
    net = nn.ModuleDict({"a": nn.ReLU()})
    net.forward = lambda x: net["a"](x)  # type: ignore[method-assign]
    net["b"] = nn.ReLU()

    with pytest.warns(
        NeverFiredWarning,
        match=r'1 of 2 layers were not reached by this input, in this thread: "b"',
    ):
        features = feature_extractor(net, "a", "b")(torch.ones(1))

    assert features["b"] is None
    assert features["a"].item() == 1


def test_a_path_that_is_not_there() -> None:
    net = nn.Sequential(nn.LSTM(4, 3))

    with pytest.raises(HookError, match=r'"0\[7\]" has nothing at \[7\]; there is .*\[0\]'):
        feature_extractor(net, "0[7]")(torch.randn(2, 1, 4))


def test_both_names_of_a_shared_layer_give_its_first_output() -> None:
    layer, head = nn.Linear(2, 2), nn.Linear(2, 2)
    net = nn.Sequential(layer, head, layer)

    found = feature_extractor(net, "2", "1", "0", stop=False)(torch.ones(1, 2))

    assert list(found) == ["2", "1", "0"]
    assert torch.equal(found["0"], layer(torch.ones(1, 2)))
    assert torch.equal(found["0"], found["2"])
