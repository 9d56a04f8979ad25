"""DataLoaders and batches: any iterable, any structure, any device; errors when they are made."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from hookkit._core.batches import split_batch, to_device
from hookkit.errors import ModelRunError, SelectionError
from hookkit.training.data import DataLoaders

BATCHES = [(torch.ones(4, 2), torch.zeros(4))] * 3


def loader(n: int = 8, **kwargs: Any) -> DataLoader[Any]:
    x = torch.arange(float(n)).reshape(n, 1)
    return DataLoader(TensorDataset(x, x), 4, **kwargs)


def test_loaders_by_name_by_index_and_in_turn() -> None:
    train, valid, test = loader(), loader(), BATCHES
    dls = DataLoaders(train, valid, test)

    assert dls.train is dls[0] is train
    assert dls.valid is dls[1] is valid
    assert dls[2] is test
    assert list(dls) == [train, valid, test]
    assert dls.train_ds is train.dataset
    assert dls.valid_ds is valid.dataset
    assert DataLoaders(BATCHES).train_ds is None
    assert repr(dls) == "DataLoaders(2 + 2 + 3 batches, device=None)"
    assert repr(DataLoaders(iter(BATCHES))) == "DataLoaders(? batches, device=None)"
    with pytest.raises(SelectionError, match=r"there is no loader 3: DataLoaders has 3"):
        dls[3]
    with pytest.raises(ModelRunError, match=r"loader 0 gave no batch.*drop_last"):
        DataLoaders([]).one_batch()


def test_one_batch_draws_no_random_numbers() -> None:
    own = torch.Generator().manual_seed(1)
    x = torch.arange(8.0)[:, None]
    deep = BatchSampler(RandomSampler(x, generator=own), 4, drop_last=False)  # type: ignore[arg-type]
    by_batch = DataLoader(TensorDataset(x, x), batch_sampler=deep)
    for dl in (loader(shuffle=True), loader(shuffle=True, generator=own), by_batch):
        before, state = torch.get_rng_state(), own.get_state()

        x, _ = DataLoaders(dl, device="cpu").one_batch()

        assert x.shape == (4, 1)
        assert torch.get_rng_state().equal(before)
        assert own.get_state().equal(state)


def test_one_batch_starts_no_worker_and_ends_none() -> None:
    dl = DataLoader(SameProcess(), 4, num_workers=2, timeout=5, persistent_workers=True)

    assert DataLoaders(dl).one_batch().tolist() == [0, 1, 2, 3]
    assert (dl.num_workers, dl.timeout, dl._iterator) == (2, 5, None)


class SameProcess(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        assert get_worker_info() is None
        return i


class Graph:
    """As PyTorch Geometric's `Data`: no structure that hookkit knows, and it can be moved."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: torch.device) -> "Graph":
        moved = Graph()
        moved.x = self.x.to(device)
        return moved


def test_every_tensor_and_what_can_be_moved_is_moved_and_nothing_is_rebuilt_in_its_place() -> None:
    batch = (torch.ones(2), {"a": [torch.ones(1), None, "text"]}, Graph())

    x, rest, inside = to_device(batch, torch.device("meta"))
    alone = to_device(Graph(), torch.device("meta"))

    assert all(t.is_meta for t in (x, rest["a"][0], inside.x, alone.x))
    assert rest["a"][1:] == [None, "text"]
    for here in (batch[:2], BATCHES[0]):
        assert to_device(here, torch.device("cpu")) is here


@pytest.mark.parametrize(
    ("batch", "n_inp", "xb", "yb"),
    [
        ([1, 2], None, (1,), (2,)),
        ((1, 2), 2, (1, 2), ()),
        (5, None, (5,), ()),
        ({"x": 1}, None, ({"x": 1},), ({"x": 1},)),
    ],
)
def test_a_batch_splits_into_inputs_and_targets(
    batch: Any, n_inp: int | None, xb: tuple[Any, ...], yb: tuple[Any, ...]
) -> None:
    assert split_batch(batch, n_inp) == (xb, yb)


def test_a_device_without_a_number_is_the_one_that_tensors_report(gpu: torch.device) -> None:
    dls = DataLoaders(BATCHES, device=gpu.type)

    x: Tensor = dls.one_batch()[0]

    assert x.device == dls.device
