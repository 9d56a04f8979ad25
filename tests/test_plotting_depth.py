"""The profile through the depth of a net: every layer is seen, and its line is no comb."""

from collections.abc import Iterator
from dataclasses import replace

import made
import numpy as np
import pytest

from hookkit.records import Run

pytest.importorskip("matplotlib")
plotting = pytest.importorskip("hookkit.plotting")
arrays = pytest.importorskip("hookkit.plotting.arrays")


@pytest.fixture(autouse=True)
def _off_screen() -> Iterator[None]:
    with plotting.offscreen():
        yield


def transformer(n: int) -> list[tuple[str, str]]:
    parts = [("ln_1", "LayerNorm"), ("attn", "Linear"), ("ln_2", "LayerNorm"), ("mlp", "Linear")]
    layers = [(f"h.{i}.{name}", kind) for i in range(n) for name, kind in parts]
    return [("wte", "Embedding"), *layers, ("ln_f", "LayerNorm"), ("head", "Linear")]


@pytest.mark.parametrize("n", [15, 16, 24, 36, 75])
def test_a_net_of_equal_blocks_has_a_level_line(n: int) -> None:
    record = made.record(transformer(n), 3)
    sizes = np.array([1.0 if kind == "LayerNorm" else 0.02 for kind in record.types])
    record = made.with_values(record, "rms", slice(None), sizes[:, None])

    ax = plotting.plot_depth(record, [0]).axes[0]

    points, line = ax.lines[0], ax.lines[1]
    assert points.get_xydata()[:, 0].tolist() == list(range(len(sizes)))
    assert points.get_ydata() == pytest.approx(sizes)
    inside = line.get_ydata()[1:-2]  # between the embedding and the last norm and layer
    assert inside == pytest.approx(np.full(n, np.sqrt(0.02)))
    assert np.diff(line.get_xdata()[1:-2]) == pytest.approx(4)
    assert "lines: geometric mean of each block" in ax.get_xlabel()


def test_a_signal_that_grows_from_block_to_block_rises_in_each() -> None:
    record = made.record(transformer(24), 3)
    sizes = 1.1 ** np.arange(len(record.names))
    record = made.with_values(record, "rms", slice(None), sizes[:, None])

    line = plotting.plot_depth(record, [0]).axes[0].lines[1]

    assert (np.diff(line.get_ydata()) > 0).all()
    assert line.get_ydata()[1] == pytest.approx(1.1**2.5)


@pytest.mark.parametrize("n", [50, 61, 150])
def test_layers_without_blocks_are_joined_one_by_one(n: int) -> None:
    record = made.record([(f"{i}", ("Linear", "ReLU")[i % 2]) for i in range(n)], 3)

    ax = plotting.plot_depth(record, [0]).axes[0]

    assert ax.lines[0].get_xdata().tolist() == list(range(n))
    assert ax.lines[0].get_ydata() == pytest.approx(record.value("rms")[:, 0])
    assert "lines" not in ax.get_xlabel()


def test_a_layer_that_did_not_run_takes_no_part_in_the_mean_of_its_block() -> None:
    record = made.record(transformer(24), 3)
    record = made.with_values(record, "rms", slice(None), 2.0)
    for row, value in ((1, np.nan), (2, 0.0), (7, np.inf)):
        record = made.with_values(record, "rms", (row, slice(None)), value)

    line = plotting.plot_depth(record, [0]).axes[0].lines[1]

    assert line.get_ydata() == pytest.approx(np.full(27, 2.0))


def test_what_is_said_below_deep_nets_fits_below_them() -> None:
    record = replace(made.record(transformer(24), 4), spans=np.full(4, 2))
    record = made.with_values(record, "rms", (1, slice(None)), 0.0)
    record = made.with_values(record, "nonfinite", (2, slice(None)), 1.0)
    figure = plotting.plot_depth(
        Run(activations=record, gradients=replace(record, kind="gradient"))
    )
    figure.draw_without_rendering()

    left, right = (ax.xaxis.label.get_window_extent() for ax in figure.axes)

    assert figure.axes[0].get_xlabel().count(";") == 3
    assert 0 <= left.x0 < left.x1 <= right.x0 < right.x1 <= figure.bbox.x1


def nets() -> dict[str, list[str]]:
    vit = [f"encoder.layers.encoder_layer_{i}.{p}" for i in range(12) for p in ("ln_1", "mlp.0")]
    resnet = [f"layer{s}.{i}.{p}" for s in range(1, 5) for i in range(2) for p in ("conv1", "bn1")]
    mobile = [f"features.{i}.conv.{j}.0" for i in range(17) for j in range(3)]
    experts = [f"model.layers.{i}.mlp.experts.{j}.w1" for i in range(8) for j in range(4)]
    return {
        "encoder.layers.encoder_layer_0": vit,
        "layer1.0": ["conv1", *resnet, "fc"],
        "features.0": mobile,
        "model.layers.0": [*experts, "lm_head"],
    }


@pytest.mark.parametrize("first", nets())
def test_blocks_are_those_that_people_name(first: str) -> None:
    names = nets()[first]

    found = arrays.blocks(names)

    for number in np.unique(found):
        heads = {name for name, n in zip(names, found, strict=True) if n == number}
        assert len(heads) == 1 or len({n.rpartition(".")[0][: len(first)] for n in heads}) == 1
    inside = [n for name, n in zip(names, found, strict=True) if name.startswith(first + ".")]
    assert len(set(inside)) == 1
    assert len(inside) == sum(n == inside[0] for n in found)


def test_names_without_numbers_have_no_blocks() -> None:
    assert arrays.blocks([f"{i}" for i in range(90)]) is None
    assert arrays.blocks([f"net.fc{i}" for i in range(90)]) is None
    assert arrays.blocks([]) is None
