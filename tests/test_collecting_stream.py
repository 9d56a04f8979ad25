"""`activation_stream` gives each row of a layer once, in an order of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit import activation_stream
from hookkit.errors import ArgumentError, HookError, ModelRunError, OptionError, SelectionError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def batches(n: int = 10) -> list[Tensor]:
    return [*torch.randn(n, 5, 4, generator=torch.Generator().manual_seed(1))]


def in_order(x: Tensor) -> Tensor:
    return x[x[:, 0].argsort()]


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


def test_tokens_that_a_mask_leaves_and_what_a_hook_makes_of_them() -> None:
    model = nn.Sequential(nn.Embedding(9, 4))
    ids = torch.arange(9).view(3, 3)
    data = [{"input": ids, "mask": ids % 2}]

    (rows,) = activation_stream(
        model, data, "0", per="token", mask="mask", hook=lambda o: 2 * o, dtype=torch.float64
    )

    expected = 2 * model[0].weight[1::2].detach().double()
    assert torch.equal(in_order(rows), in_order(expected))


def test_arguments_and_runs_that_cannot_be_meant() -> None:
    model = net()
    with pytest.raises(OptionError, match="one layer gives one stream, and these are 2: '0', '2'"):
        activation_stream(model, batches(), nn.Linear)
    with pytest.raises(SelectionError, match='no module matches "9"'):
        activation_stream(model, batches(), "9")
    with pytest.raises(OptionError, match="buffer"):
        activation_stream(model, batches(), "0", batch_size=8, buffer=7)
    with pytest.raises(ArgumentError, match="The model comes first"):
        activation_stream(batches(), model, "0")  # type: ignore[arg-type]
    with pytest.raises(ModelRunError, match="activation_stream: the loader"):
        next(activation_stream(model, [], "0"))
    with pytest.raises(HookError, match="were not called"):
        next(activation_stream(Skipping(), batches(), "unused"))


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y
