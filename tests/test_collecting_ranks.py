"""What several processes collect reads as what one collects, and nothing goes between them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import in_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from hookkit import Activations, Covariance, Mean, TopK, collect
from hookkit.errors import OptionError

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

N = 11


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh()).eval()


def data(shape: tuple[int, ...] = (4,)) -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    ids = torch.arange(N) * 7 % N
    return TensorDataset(torch.randn(N, *shape, generator=g), ids)


def loader(of: Dataset[Any], rank: int | None = None, shuffle: bool = False) -> DataLoader[Any]:
    if rank is None:
        return DataLoader(of, batch_size=3)
    sampler = DistributedSampler(of, num_replicas=2, rank=rank, shuffle=shuffle, seed=5)
    return DataLoader(of, batch_size=3, sampler=sampler)


def mask(batch: Any) -> Tensor:
    return batch[0][..., 0] > -0.5


OPTIONS: dict[str, dict[str, Any]] = {
    "positions": {},
    "ids": {"ids": 1},
    "tokens": {"per": "token", "mask": mask},
}


def collected(folder: Path, rank: int | None, shuffle: bool = False) -> None:
    for name, options in OPTIONS.items():
        shape = (5, 4) if name == "tokens" else (4,)
        batches = loader(data(shape), rank, shuffle)
        collect(model(), batches, ["0", "1"], folder / name, **options)


def read(x: Any) -> list[Any]:
    return [x.values, x.ids] if isinstance(x, TopK) else [x.n, x.mean, getattr(x, "cov", None)]


def in_group(rank: int, folder: Path) -> None:
    sent = []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda out, x, g: (sent.append(x), gather(out, x, g))  # type: ignore
    collected(folder / "two", rank)
    assert sent == [None] * len(OPTIONS)  # no data goes from one process to another
    dist.all_gather_object = gather
    collected(folder / "shuffled", rank, shuffle=True)
    for name, batches in (("apart", loader(data(), rank)), ("same", loader(data()))):
        # without a sampler both get all samples, which count once; one of them has fewer batches
        some = [*batches][: 4 - rank] if name == "same" else batches
        for blank in (Mean(), Covariance(), TopK(3)):
            found = collect(model(), some, "1", into=blank, ids=1)
            torch.save(read(found["1"]), folder / f"{name}{type(blank).__name__}{rank}")
    with pytest.raises(OptionError, match=r"not known which samples of this loader each"):
        collect(model(), loader(data()), "0", folder / "wrong")
    fewer = DistributedSampler(data(), num_replicas=1, rank=0)  # both would write the same part
    with pytest.raises(OptionError, match="with torch's DistributedSampler over all of them"):
        collect(model(), DataLoader(data(), sampler=fewer), "0", folder / "wrong")
    # as many batches as a process likes, also of a model in DistributedDataParallel
    norm = nn.parallel.DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4)).eval())
    sampler = loader(data(), rank).sampler
    batches = DataLoader(data(), batch_size=(6, 1)[rank], sampler=sampler)
    collect(norm, batches, "0", folder / "ddp")
    collect(model(), loader(data(), rank), "0", folder / "none", mask=lambda b: b[1] < 0)
    collect(model(), loader(data()), ["0", "1"], folder / "same", ids=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote."""
    made = tmp_path_factory.mktemp("ranks")
    in_ranks(in_group, made)
    collected(made / "one", None)
    return made


def ordered(acts: Activations) -> list[Tensor]:
    """Ids and rows in the order of the ids."""
    at = sorted(range(acts.n_rows), key=lambda i: acts.ids[i].tolist())
    return [acts.ids[at], acts["0"][at], acts["1"][at]]


@pytest.mark.parametrize("name", OPTIONS)
def test_two_processes_give_what_one_gives(name: str, folder: Path) -> None:
    two, one = Activations(folder / "two" / name), Activations(folder / "one" / name)

    wanted = [one.ids, one["0"][:], one["1"][:]] if name != "ids" else ordered(one)
    for a, b in zip([two.ids, two["0"][:], two["1"][:]], wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert repr(two) == repr(one)
    torch.testing.assert_close(two["0"][::2], wanted[1][::2])
    torch.testing.assert_close(two["0"][[5, 1]], wanted[1][[5, 1]])


def test_shuffled_positions_are_those_of_all_processes(folder: Path) -> None:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(5))

    acts = Activations(folder / "shuffled" / "positions")

    x, _ = data().tensors
    torch.testing.assert_close(acts["0"][:], model()[0](x[order]).detach())
    assert torch.equal(Activations(folder / "shuffled" / "ids").ids, torch.arange(N))


def test_samples_that_several_processes_saw_count_once(folder: Path) -> None:
    acts, one = Activations(folder / "same"), Activations(folder / "one" / "ids")

    for a, b in zip(ordered(acts), ordered(one), strict=True):
        torch.testing.assert_close(a, b)


def test_processes_may_have_other_numbers_of_batches_or_no_row(folder: Path) -> None:
    assert Activations(folder / "ddp").ids.tolist() == [*range(N)]
    assert Activations(folder / "none")["0"].shape == (0, 6)


@pytest.mark.parametrize("name", ["apart", "same"])
@pytest.mark.parametrize("blank", [Mean(), Covariance(), TopK(3)], ids=lambda b: type(b).__name__)
def test_accumulators_are_those_of_one_process(name: str, blank: Any, folder: Path) -> None:
    one = read(collect(model(), loader(data()), "1", into=blank, ids=1)["1"])

    for rank in range(2):
        found = torch.load(folder / f"{name}{type(blank).__name__}{rank}")
        torch.testing.assert_close(found, one)


def test_a_missing_part_is_named(folder: Path, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(folder / "two" / "positions", tmp_path / str(rank))
        shutil.rmtree(tmp_path / str(rank) / f"rank{rank}")
        acts = Activations(tmp_path / str(rank))

        assert repr(acts) == "Activations(not whole)"
        with pytest.raises(OptionError, match=rf"the part of rank {rank} of 2, .*, is missing"):
            acts["0"]


def test_a_part_of_something_else_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "two" / "positions", tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "rank1")
    shutil.copytree(folder / "two" / "tokens" / "rank1", tmp_path / "rank1")

    with pytest.raises(OptionError, match=r"rank 1 of 2, .*, is of other layers or settings"):
        Activations(tmp_path)["0"]


def test_parts_are_made_one_after_the_other_too(tmp_path: Path) -> None:
    parts = [collect(model(), loader(data(), rank), ["0", "1"], tmp_path) for rank in range(2)]

    torch.testing.assert_close(parts[1]["0"][:], model()[0](data().tensors[0]).detach())
    assert parts[1].ids.tolist() == [*range(N)]


def test_parts_with_rows_of_two_kinds_are_not_read_as_one(tmp_path: Path) -> None:
    for rank, kind in enumerate((torch.float32, torch.int32)):
        batches = loader(data(), rank)
        acts = collect(model(), batches, "0", tmp_path, hook=lambda o, kind=kind: o.to(kind))

    with pytest.raises(OptionError, match=r"rank 1 of 2, .*, is of other layers or settings"):
        acts["0"]


def test_a_number_of_rows_is_of_one_process(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"collect\(n=7\): how many rows each of 2 processes"):
        collect(model(), loader(data(), 0), "0", tmp_path, n=7)
