"""What a model has and what comes out of its layers; nothing is changed."""

from typing import Any

import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hookkit.errors import ArgumentError, ModelRunError, OptionError
from hookkit.fastai import (
    ParameterModule,
    dummy_eval,
    flatten_model,
    has_params,
    in_channels,
    model_sizes,
    num_features_model,
    total_params,
)


def conv(ni: int, nf: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(ni, nf, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(nf), nn.ReLU()
    )


def body() -> nn.Sequential:
    return nn.Sequential(conv(3, 16), conv(16, 32, 2), conv(32, 32))


class Branches(nn.Module):
    """Not a Sequential; children are called out of order, one is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)
        self.aux = nn.Linear(8, 5)
        self.first = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.head(self.first(x))}


class Swapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize(
    ("module", "n", "trainable"),
    [
        (nn.Linear(10, 32), 352, True),
        (nn.Linear(10, 32, bias=False), 320, True),
        (nn.BatchNorm2d(20), 40, True),
        (nn.BatchNorm2d(20, affine=False), 0, False),
        (nn.Conv2d(16, 32, 3), 4640, True),
        (nn.Conv2d(16, 32, 3, bias=False), 4608, True),
        (nn.LSTM(20, 10, 2), 4 * (20 * 10 + 10) + 3 * 4 * (10 * 10 + 10), True),
        (nn.MultiheadAttention(8, 2), 4 * (8 * 8 + 8), True),
        (nn.LazyLinear(4), 0, False),
        (nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1))), 2, True),
        (nn.ParameterList([nn.Parameter(torch.ones(1))]), 1, True),
        (nn.Sequential(nn.ReLU(), nn.Sequential()), 0, False),
    ],
)
def test_parameters_are_counted(module: nn.Module, n: int, trainable: bool) -> None:
    assert total_params(module) == (n, trainable)
    assert has_params(module) == bool(n or list(module.parameters()))
    assert type(total_params(module)[1]) is bool


def test_flattening_keeps_order_lists_bare_parameters_and_shared_modules_once() -> None:
    relu = nn.ReLU()
    net = nn.Sequential(nn.Linear(2, 2), relu, nn.Sequential(nn.Linear(2, 2), relu))
    net.scale = nn.Parameter(torch.ones(3))

    flat = flatten_model(net)

    assert flat[:3] == [net[0], relu, net[2][0]]
    assert isinstance(flat[3], ParameterModule)
    assert flat[3].val is net.scale
    assert len(flat) == 4


@pytest.mark.parametrize(
    ("module", "n"),
    [
        (nn.Linear(7, 3), 7),
        (nn.Conv1d(5, 3, 3), 5),
        (nn.Conv2d(8, 16, 3, groups=4), 8),
        (nn.Conv3d(2, 3, 3), 2),
        (nn.ConvTranspose2d(8, 16, 3), 8),
        (nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 3, 3)), 6),
        (nn.TransformerEncoderLayer(12, 2, 16), 12),
        (parametrizations.weight_norm(nn.Conv2d(4, 5, 3)), 4),
    ],
)
def test_input_channels_of_any_first_layer(module: nn.Module, n: int) -> None:
    assert in_channels(module) == n


def test_no_layer_with_channels_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"no layer has parameters.*Sequential.* x=\.\.\."):
        in_channels(nn.Sequential(nn.ReLU(), nn.Flatten()))


@pytest.mark.parametrize("first", [nn.Embedding(7, 3), nn.LSTM(9, 4), nn.LazyConv2d(4, 3)])
@pytest.mark.parametrize("f", [in_channels, dummy_eval, model_sizes, num_features_model])
def test_only_what_begins_with_a_convolution_or_a_matrix_gets_a_made_up_input(
    f: Any, first: nn.Module
) -> None:
    kind = type(first).__name__
    with pytest.raises(ArgumentError, match=rf'"0" is a {kind}.*Sequential.*x=\.\.\.'):
        f(nn.Sequential(first, nn.Linear(5, 3)))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(7, 3), (1, 3)),
        (nn.Conv1d(5, 3, 3), (1, 3, 62)),
        (nn.Conv2d(8, 16, 3, groups=4), (1, 16, 62, 62)),
        (nn.Conv3d(2, 3, 33), (1, 3, 32, 32, 32)),
        (nn.ConvTranspose2d(8, 16, 2, stride=2), (1, 16, 128, 128)),
        (nn.Linear(7, 3).bfloat16(), (1, 3)),
        (nn.BatchNorm1d(6), (1, 6)),
    ],
)
def test_a_made_up_input_fits_the_first_layer(module: nn.Module, shape: tuple[int, ...]) -> None:
    assert dummy_eval(module).shape == shape


def test_a_model_that_ends_in_a_mode_of_its_own_keeps_it_and_all_else() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU()).train()
    net[1].eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    modes, rng, seen = [m.training for m in net.modules()], torch.get_rng_state(), []
    net.register_forward_hook(lambda m, i, o: seen.append(o.shape))

    for look in (dummy_eval, model_sizes, num_features_model):
        look(net, (16, 16))

    assert seen == 3 * [(1, 4, 14, 14)]

    assert [m.training for m in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.is_grad_enabled()


def test_a_layer_that_is_shared_with_a_deeper_part_has_a_size() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pool = nn.MaxPool2d(2)
            self.a, self.b = nn.Sequential(pool), pool

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    assert model_sizes(Net(), x=torch.ones(1, 1, 8, 8)) == [(1, 1, 4, 4), (1, 1, 2, 2)]


def test_sizes_are_those_of_the_children_of_any_module() -> None:
    lstm = nn.Sequential(nn.LSTM(4, 5))

    assert model_sizes(body(), 32) == [(1, 16, 32, 32), (1, 32, 16, 16), (1, 32, 16, 16)]
    assert model_sizes(Branches(), x=torch.randn(3, 4)) == [(3, 2), None, (3, 8)]
    assert model_sizes(lstm, x=torch.randn(6, 2, 4)) == [((6, 2, 5), ((1, 2, 5), (1, 2, 5)))]
    assert model_sizes(nn.Linear(5, 3)) == [torch.Size([1, 3])]


def test_a_compiled_model_and_one_on_meta_have_sizes() -> None:
    compiled = torch.compile(body(), backend="eager")
    compiled(torch.ones(1, 3, 8, 8))
    with torch.device("meta"):
        meta = body()

    expected = [(1, 16, 8, 8), (1, 32, 4, 4), (1, 32, 4, 4)]
    assert model_sizes(compiled, 8) == model_sizes(meta, 8) == expected
    assert dummy_eval(meta, 8).device.type == "meta"


def test_errors_are_the_models_own_on_an_example_and_leave_it_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6)).train()

    with pytest.raises(ModelRunError, match="Sequential cannot take a made-up input 1×3"):
        model_sizes(net)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        dummy_eval(net, x=torch.ones(1, 3))
    with pytest.raises(OptionError, match=r"both size= and x="):
        dummy_eval(body(), (8, 8), x=torch.ones(1, 3, 8, 8))

    assert all(m.training for m in net.modules())
    assert n_hooks(net) == 0


def test_features_of_a_sequence_come_last() -> None:
    net = nn.Sequential(nn.Conv2d(3, 12, 16, stride=16), nn.Flatten(2), Swapped())

    assert num_features_model(net) == 12


@pytest.mark.parametrize("f", [dummy_eval, model_sizes, num_features_model])
@pytest.mark.parametrize("size", [(64, -1), (64, "a"), "64", 64.0, True, {64: 64}, 0])
def test_a_size_of_a_wrong_kind_is_an_error_before_anything_runs(f: Any, size: Any) -> None:
    with pytest.raises(OptionError, match=r"size=.*: sizes are whole numbers from 1, such as"):
        f(nn.Conv2d(3, 4, 3), size)
