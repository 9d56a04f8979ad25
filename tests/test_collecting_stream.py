"""`activation_stream` gives each row of a layer once, in an order of its own."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hookkit import activation_stream
from hookkit.errors import ArgumentError, HookError, ModelRunError, OptionError, SelectionError


def net() -> nn.Sequential:
    """Whole numbers in the first layer: its sums are exact, in whatever order a CPU adds them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    for p in model[0].parameters():
        p.data = torch.randint(-8, 9, p.shape).float()
    return model


def batches(n: int = 10) -> list[Tensor]:
    return [*torch.randint(-99, 99, (n, 5, 4), generator=torch.Generator().manual_seed(1)).float()]


def in_order(x: Tensor) -> Tensor:
    return torch.tensor(sorted(x.tolist()))


@pytest.mark.parametrize(("size", "buffer"), [(8, 8), (10, 10), (8, 30), (7, None), (64, None)])
def test_each_row_is_given_once_in_whole_batches(size: int, buffer: int | None) -> None:
    model, data = net(), batches()

    found = [*activation_stream(model, data, "0", batch_size=size, buffer=buffer)]

    expected = model[0](torch.cat(data)).detach()
    assert [len(x) for x in found[:-1]] == [size] * (len(found) - 1)
    assert len(found[-1]) > 0
    assert torch.equal(in_order(torch.cat(found)), in_order(expected))
    assert not torch.equal(torch.cat(found), expected)


def test_batches_mix_rows_of_many_batches_and_the_seed_is_the_order() -> None:
    data = [torch.full((5, 4), float(i)) for i in range(20)]
    model = nn.Identity()

    def stream(seed: int) -> list[Tensor]:
        return [*activation_stream(model, data, "", batch_size=10, buffer=50, seed=seed)]

    first = stream(0)

    assert len(first[0].unique()) > 3
    assert all(torch.equal(x, y) for x, y in zip(first, stream(0), strict=True))
    assert not torch.equal(first[0], stream(1)[0])


def test_the_model_runs_only_when_a_batch_is_asked_for_and_stays_as_it_is() -> None:
    model, calls = net().train(), list[int]()
    model[0].register_forward_hook(lambda *_: calls.append(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def endless() -> Any:
        while True:
            yield from batches()

    stream = activation_stream(model, endless(), "1", batch_size=5, buffer=20)
    assert not calls
    state = torch.get_rng_state()
    for _ in range(30):
        rows = next(stream)

    assert rows.shape == (5, 6)
    assert len(calls) <= 34  # the buffer, and as much as was given
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    assert [len(m._forward_hooks) for m in model] == [1, 0, 0]


def test_dropout_differs_from_batch_to_batch_and_from_stream_to_stream() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity()).train()
    torch.manual_seed(0)

    streams = [
        [*activation_stream(model, [torch.ones(1, 16)] * 8, "1", batch_size=1, buffer=buffer)]
        for buffer in (1, 1, 4)
    ]

    assert len(torch.cat([row for stream in streams for row in stream]).unique(dim=0)) == 24


def test_the_users_random_numbers_go_on_between_the_batches() -> None:
    """Nothing rewinds them: neither a batch nor the end of the stream."""
    data = DataLoader(torch.randn(20, 4), batch_size=4, shuffle=True)

    torch.manual_seed(0)
    drawn = [torch.rand(1) for _ in activation_stream(net(), data, "0", batch_size=4, buffer=8)]
    after = torch.rand(1)

    assert len({x.item() for x in [*drawn, after]}) == len(drawn) + 1


def test_what_the_user_does_to_the_model_between_the_batches_stays() -> None:
    model = net().train()
    stream = activation_stream(model, batches(), "1", batch_size=5, buffer=10)

    next(stream)
    model.eval()
    with torch.no_grad():
        model[1].running_mean.fill_(3)
        model[0].weight.zero_()
    rows = [*stream]
    del stream
    gc.collect()

    assert len(rows) == 9
    assert not model.training
    assert model[1].running_mean.unique().tolist() == [3]
    assert model[0].weight.abs().sum() == 0


@pytest.mark.parametrize("end", ["close", "delete", "error"])
def test_a_stream_that_is_left_leaves_nothing_on_the_model(end: str) -> None:
    model = net().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    data = [*batches(4), *([torch.ones(5, 7)] if end == "error" else [])]
    stream = activation_stream(model, iter(data), "1", batch_size=5, buffer=10)

    next(stream)
    if end == "error":
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            list(stream)
    elif end == "close":
        stream.close()  # type: ignore[attr-defined]
    del stream

    assert torch.is_grad_enabled()
    assert not any(m._forward_hooks for m in model)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())


def test_batches_larger_than_the_buffer_are_given_before_more_are_loaded() -> None:
    loaded: list[int] = []

    def large() -> Any:
        for i in range(3):
            loaded.append(i)
            yield torch.randn(100, 2)

    stream = activation_stream(nn.Identity(), large(), "", batch_size=5, buffer=10)
    first = [len(next(stream)) for _ in range(19)]

    assert first == [5] * 19
    assert loaded == [0]
    assert sum(map(len, stream)) == 300 - 95


def test_arguments_and_runs_that_cannot_be_meant() -> None:
    model = net()
    with pytest.raises(OptionError, match=r"one layer gives one stream; select one of .*'0', '2'"):
        activation_stream(model, batches(), nn.Linear)
    with pytest.raises(SelectionError, match='no module matches "9"'):
        activation_stream(model, batches(), "9")
    with pytest.raises(OptionError, match="buffer"):
        activation_stream(model, batches(), "0", batch_size=8, buffer=7)
    with pytest.raises(ArgumentError, match="The model comes first"):
        activation_stream(batches(), model, "0")  # type: ignore[arg-type]
    with pytest.raises(ModelRunError, match="activation_stream: the loader"):
        next(activation_stream(model, [], "0"))
    with pytest.raises(HookError, match="was called 0 times"):
        next(activation_stream(model, batches(), "2", forward=lambda model, x: model[0](x)))
