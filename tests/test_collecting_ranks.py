"""Each of several processes writes its own part, and all parts read as one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hookkit import Activations, Covariance, Mean, TopK, activation_stream, collect
from hookkit.errors import OptionError

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

N = 11


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh()).eval()


def data(shape: tuple[int, ...] = (4,)) -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, *shape, generator=g), torch.arange(N) * 7 % N)


def loader(rank: int | None = None, shape: tuple[int, ...] = (4,)) -> DataLoader[Any]:
    """Rank 0 has samples 0 to 6, rank 1 the others."""
    x, ids = data(shape).tensors
    part = {None: slice(None), 0: slice(7), 1: slice(7, None)}[rank]
    return DataLoader(TensorDataset(x[part], ids[part]), batch_size=3)


def mask(batch: Any) -> Tensor:
    return batch[0][..., 0] > -0.5


def collected(folder: Path, rank: int | None) -> None:
    collect(model(), loader(rank), ["0", "1"], folder / "samples", ids=1)
    options: dict[str, Any] = {"rows": "token", "mask": mask, "ids": 1}
    collect(model(), loader(rank, (5, 4)), ["0", "1"], folder / "tokens", **options)


def read(x: Any) -> list[Any]:
    return [x.values, x.ids] if isinstance(x, TopK) else [x.n, x.mean, getattr(x, "cov", None)]


BLANK = [Mean(), Covariance(), TopK(3)]


def in_group(rank: int, folder: Path) -> None:
    collected(folder / "two", rank)
    for blank in BLANK:
        found = collect(model(), loader(rank), "1", accumulate=blank, ids=1)
        torch.save(read(found["1"]), folder / f"{type(blank).__name__}{rank}")
    with pytest.raises(OptionError, match="over several processes give ids="):
        collect(model(), loader(rank), "0", folder / "wrong")
    streamed = [*activation_stream(model(), loader(rank), "1", batch_size=2)]
    assert sum(map(len, streamed)) == len(loader(rank).dataset)
    # all of them refuse the folder, or none
    if rank == 1:
        (folder / "mine").mkdir()
        (folder / "mine" / "notes.txt").write_text("mine")
    torch.distributed.barrier()
    for overwrite in (False, True):
        with pytest.raises(OptionError, match=r"holds notes.txt"):
            collect(model(), loader(rank), "0", folder / "mine", ids=1, overwrite=overwrite)
    # of one folder, of parts of more processes too
    collect(model(), loader(rank), "0", folder / "again", ids=1)
    torch.distributed.barrier()
    if rank == 1:
        (folder / "again" / "rank1").rename(folder / "again" / "rank2")
    torch.distributed.barrier()
    acts = collect(model(), loader(rank), "1", folder / "again", ids=1, overwrite=True)
    assert [*acts] == ["1"]
    assert {p.name for p in (folder / "again").iterdir()} == {"rank0", "rank1"}
    # as many batches as a process likes, also of a model in DistributedDataParallel
    norm = nn.parallel.DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4)).eval())
    sampler: Any = DistributedSampler(data(), num_replicas=2, rank=rank, shuffle=False)
    batches = DataLoader(data(), batch_size=(6, 1)[rank], sampler=sampler)
    collect(norm, batches, "0", folder / "ddp", ids=1)
    collect(model(), loader(rank), "0", folder / "none", mask=lambda b: b[1] < 0, ids=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote."""
    made = tmp_path_factory.mktemp("ranks")
    in_ranks(in_group, made)
    collected(made / "one", None)
    return made


@pytest.mark.parametrize("name", ["samples", "tokens"])
def test_two_processes_give_what_one_gives(name: str, folder: Path) -> None:
    two, one = Activations(folder / "two" / name), Activations(folder / "one" / name)

    assert torch.equal(two.ids, one.ids)
    for rows in (slice(None), slice(None, None, 2), [5, 1, -1], 3):
        torch.testing.assert_close(two["0"][rows], one["0"][rows])
        torch.testing.assert_close(two["1"][rows], one["1"][rows])
    assert repr(two) == repr(one)


def test_processes_may_have_other_numbers_of_batches_or_no_row(folder: Path) -> None:
    ids = Activations(folder / "ddp").ids

    assert sorted(ids.tolist()) == sorted([*range(N), ids[0]])  # the sampler repeats its first
    assert Activations(folder / "none")["0"][:].shape == (0, 6)


@pytest.mark.parametrize("blank", BLANK, ids=lambda b: type(b).__name__)
def test_accumulators_are_those_of_one_process(blank: Any, folder: Path) -> None:
    one = read(collect(model(), loader(), "1", accumulate=blank, ids=1)["1"])

    for rank in range(2):
        found = torch.load(folder / f"{type(blank).__name__}{rank}")
        torch.testing.assert_close(found, one)
