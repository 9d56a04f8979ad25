"""What `collect` writes is what plain hooks see, whatever the loader gives."""

import os
import pickle
import resource
from collections import UserDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hooked import fingerprint
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

from hookkit import Activations, Mean, TopK, collect, hook_output
from hookkit.errors import (
    ArgumentError,
    HookError,
    HookkitWarning,
    ModelRunError,
    OptionError,
    SelectionError,
)
from hookkit.inspection.activations import Layer


def net() -> nn.Sequential:
    """Quarters all through: sums of their products are exact, in whatever order a CPU adds them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)).eval()
    for p in model.parameters():
        p.data = torch.randint(-8, 9, p.shape) / 4
    return model


def inputs(n: int = 11) -> Tensor:
    return torch.randint(-8, 9, (n, 4), generator=torch.Generator().manual_seed(1)) / 4


def loader(n: int = 11, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(inputs(n), torch.arange(100, 100 + n))
    return DataLoader(data, batch_size=4, **options)


class Text(nn.Module):
    """Tokens, a mask, and options by keyword; returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(20, 6), nn.LSTM(6, 5, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, scale: float = 1.0) -> Any:
        x = self.embed(input_ids) * scale * attention_mask[..., None]
        return {"hidden": self.body(x)[0], "cache": None}


def texts() -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    made = []
    for start, (n, length) in zip((0, 3), ((3, 7), (2, 4)), strict=True):
        lengths = torch.randint(1, length + 1, (n, 1), generator=g)
        mask = (torch.arange(length) < lengths).long()
        ids = torch.randint(0, 20, (n, length), generator=g)
        number = torch.arange(start, start + n) * 10
        made.append({"input_ids": ids, "attention_mask": mask, "id": number})
    return made


def test_rows_are_what_plain_hooks_see(tmp_path: Path) -> None:
    model = net()

    acts = collect(model, loader(), ["0", nn.ReLU], tmp_path)

    assert list(acts) == ["0", "1"]
    linear = model[0](inputs()).detach()
    # the ReLU writes into the output of the layer before it
    assert torch.equal(acts["0"][:], linear)
    assert torch.equal(acts["1"][:], linear.relu())
    assert acts.ids.tolist() == [*range(11)]
    assert np.array_equal(np.load(tmp_path / "layer1.npy"), acts["1"][:])


KINDS = {
    "tensor": lambda x, y: x,
    "tuple": lambda x, y: (x, y),
    "list of one": lambda x, y: [x],
    "dict": lambda x, y: {"input": x},
    "user dict": lambda x, y: UserDict(input=x),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_every_kind(kind: str, tmp_path: Path) -> None:
    model = net()
    batches = [KINDS[kind](x, x.sum(1)) for x in inputs().split(4)]

    acts = collect(model, iter(batches), "0", tmp_path)

    assert torch.equal(acts["0"][:], model[0](inputs()).detach())


@dataclass
class Graph:
    """A batch of one's own, which only `forward` can read."""

    x: Tensor
    idx: list[int]


def test_forward_calls_the_model_on_a_batch_that_it_cannot_take(tmp_path: Path) -> None:
    model = net()
    batches = [Graph(x, [7 + i for i in range(len(x))]) for x in inputs(5).split(3)]
    options: dict[str, Any] = {"ids": lambda b: b.idx, "forward": lambda model, b: model(b.x)}

    acts = collect(model, batches, "0", tmp_path, **options)

    assert acts.ids.tolist() == [7, 8, 9, 7, 8]
    assert torch.equal(acts["0"][:], model[0](inputs(5)).detach())


def test_tokens_without_padding_have_their_sample_and_position(tmp_path: Path) -> None:
    model, batches = Text(), texts()
    options = {"rows": "token", "mask": "attention_mask", "ids": "id"}

    acts = collect(model, batches, ["embed", "body[0]"], tmp_path, **options)

    wanted, where = [], []
    for b in batches:
        out = model.body(model.embed(b["input_ids"]) * b["attention_mask"][..., None])[0].detach()
        for i, t in b["attention_mask"].nonzero().tolist():
            wanted.append(out[i, t])
            where.append([int(b["id"][i]), t])
    torch.testing.assert_close(acts["body[0]"][:], torch.stack(wanted))
    assert acts.ids.tolist() == where
    assert acts["embed"].shape == (len(where), 6)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        return self.embed(ids) * mask[..., None]


IDS, MASK = torch.arange(6).view(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize("mask", [1, -1, lambda batch: batch[1]])
def test_a_mask_in_the_place_of_the_target_needs_forward(mask: Any, tmp_path: Path) -> None:
    model, options = Masked(), {"rows": "token", "mask": mask}

    with pytest.raises(OptionError, match="the last item of a batch is its target"):
        collect(model, [(IDS, MASK)], "", tmp_path, **options)
    acts = collect(model, [(IDS, MASK)], "", tmp_path, forward=lambda m, b: m(*b), **options)

    assert torch.equal(acts[""][:], model(IDS, MASK).detach()[MASK == 1])


@pytest.mark.parametrize("ids", [2, -1, lambda batch: batch[2]])
def test_the_model_does_not_get_the_ids(ids: Any, tmp_path: Path) -> None:
    batches = [(x, torch.zeros(len(x)), 10 * torch.arange(len(x))) for x in inputs(6).split(3)]

    acts = collect(net(), batches, "0", tmp_path, ids=ids, hook=lambda m, i, o: i[0])

    assert acts.ids.tolist() == [0, 10, 20, 0, 10, 20]
    assert torch.equal(acts["0"][:], inputs(6))


def test_a_layer_that_is_called_twice_is_refused_or_gives_its_first_call(tmp_path: Path) -> None:
    model = nn.Sequential(shared := nn.Identity(), net()[0], shared, nn.Identity())

    with pytest.raises(HookError, match=r'"0" was called 2 times for a batch.* stop=True'):
        collect(model, loader(), ["0", "3"], tmp_path)
    acts = collect(model, loader(), ["0", "3"], tmp_path, stop=True)

    assert torch.equal(acts["0"][:], inputs())


@pytest.mark.parametrize("n", [1, 4, 6, 11, 50])
def test_max_rows_are_written_and_no_batch_beyond_them_is_loaded(n: int, tmp_path: Path) -> None:
    model, loaded = net(), []

    def batches() -> Any:
        for x in inputs().split(4):
            loaded.append(x)
            yield x

    acts = collect(model, batches(), "0", tmp_path, max_rows=n)

    assert torch.equal(acts["0"][:], model[0](inputs())[:n].detach())
    assert len(loaded) == min(-(-n // 4), 3)


DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
DTYPES += [torch.int16, torch.bool, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    acts = collect(net(), loader(), "2", tmp_path, hook=lambda o: o.to(dtype))

    wanted = net()(inputs()).detach().to(dtype)
    assert acts["2"].dtype is dtype
    for rows in (slice(None), [10, 0], 3):
        found, right = acts["2"][rows], wanted[rows]
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


def test_scalars_and_empty_rows_are_rows(tmp_path: Path) -> None:
    scalars = collect(net(), loader(), "2", tmp_path / "a", hook=lambda o: o[:, 0])
    empty = collect(net(), loader(), "2", tmp_path / "b", hook=lambda o: o[:, :0])
    none = collect(net(), loader(), "2", tmp_path / "c", mask=lambda b: b[1] < 0)

    assert torch.equal(scalars["2"][:], net()(inputs())[:, 0].detach())
    assert scalars["2"][4].shape == ()
    assert empty["2"][:].shape == (11, 0)
    assert none["2"][:].shape == (0, 3)
    assert none.ids.tolist() == []


class Restless(nn.Module):
    """Changes a buffer, an attribute and the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.fc = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.fc(self.drop(self.norm(x)))


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_nothing_of_the_model_and_the_process_is_changed(error: Any, tmp_path: Path) -> None:
    model, calls = Restless(), []
    before = fingerprint(model, (), {})

    def hook(o: Tensor) -> Tensor:
        calls.append(1)
        if error and len(calls) == 2:
            raise error
        return o

    if error:
        with pytest.raises(error):
            collect(model, loader(shuffle=True), "fc", tmp_path, hook=hook, ids=1)
    else:
        collect(model, loader(shuffle=True), "fc", tmp_path, hook=hook, ids=1)

    assert fingerprint(model, (), {}) == before


class Inference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = net()[0]

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_a_model_that_runs_in_inference_mode_gives_ordinary_tensors(tmp_path: Path) -> None:
    acts = collect(model := Inference(), loader(), "fc", tmp_path)
    mean = collect(model, loader(), "fc", accumulate=Mean())["fc"].mean
    top = collect(model, loader(), "fc", accumulate=TopK(2))["fc"].values

    assert torch.equal(acts["fc"][:], model.fc(inputs()).detach())
    assert [mean.is_inference(), top.is_inference()] == [False, False]


def test_a_recorder_of_the_user_sees_the_run_and_not_the_loader(tmp_path: Path) -> None:
    model = net()

    def calls_the_model() -> Any:
        for x in inputs().split(4):
            model(x)
            yield x

    with hook_output(model[0]) as h:
        acts = collect(model, calls_the_model(), "0", tmp_path)

    assert h.n_calls == 6
    assert torch.equal(acts["0"][:], model[0](inputs()).detach())


@pytest.mark.parametrize("stop", [False, True])
def test_what_follows_the_layers_runs_unless_a_forward_stops(stop: bool, tmp_path: Path) -> None:
    model = nn.Sequential(net(), nn.Identity())

    with hook_output(model[1]) as h:
        acts = collect(model, loader(), ["0.0", "0.2"], tmp_path, stop=stop)
        assert h.n_calls == (0 if stop else 3)
        model(inputs())

    assert torch.equal(acts["0.2"][:], net()(inputs()).detach())


def test_there_may_be_more_layers_than_files_may_be_open(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(200)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, hard))
    try:
        acts = collect(model, loader(), list(map(str, range(200))), tmp_path)
        assert all(torch.equal(layer[:], inputs()) for layer in acts.values())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- the folder


def test_a_folder_that_holds_anything_is_refused_and_never_read(tmp_path: Path) -> None:
    collect(net(), loader(), "0", tmp_path)

    with pytest.raises(OptionError, match=r"holds .* overwrite=True deletes what collect wrote"):
        collect(net(), [2 * inputs()], "0", tmp_path)
    acts = collect(net(), [2 * inputs()], "0", tmp_path, overwrite=True)

    assert torch.equal(acts["0"][:], net()[0](2 * inputs()).detach())


@pytest.mark.parametrize("name", ["notes.txt", "layer1.npy", "ids.npy"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_that_collect_did_not_write_stay(name: str, overwrite: bool, tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "acts"
    mine.write_text("mine")
    if name == "ids.npy":  # of another program: there is no index
        folder.mkdir()
        (folder / name).write_text("mine")
    else:
        collect(net(), loader(), "0", folder)
        (folder / name).symlink_to(mine)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    with pytest.raises(OptionError, match="overwrite=True"):
        collect(net(), loader(), "2", folder, overwrite=overwrite)

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_that_came_to_an_end_is_incomplete(tmp_path: Path) -> None:
    outputs = [*net()[0](inputs()).detach().split(4)[:2]]

    with pytest.raises(IndexError) as caught:
        collect(net(), loader(), "0", tmp_path, hook=lambda o: outputs.pop(0))

    assert "collect: in batch 2, [3×4, 3]" in caught.value.__notes__
    with pytest.raises(OptionError, match=r"is incomplete: 8 rows of each layer are whole"):
        Activations(tmp_path)
    assert np.array_equal(np.load(tmp_path / "layer0.npy"), net()[0](inputs(8)).detach())


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "acts").write_text("mine")

    with pytest.raises(OptionError, match=r"acts is a file. Give a folder"):
        collect(net(), loader(), "0", tmp_path / "acts", overwrite=True)


def test_a_first_batch_that_fails_leaves_the_folder_empty(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        collect(net(), [torch.ones(4, 5)], "0", tmp_path)

    assert len(collect(net(), loader(), "0", tmp_path).ids) == 11


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_runs_do_not_write_to_one_folder(at: int, overwrite: bool, tmp_path: Path) -> None:
    """The second one begins in batch `at` of the first, or after its last, and none notices it."""

    def batches() -> Any:
        for i, x in enumerate([*inputs().split(4), None]):
            if i == at:
                with suppress(OptionError):
                    collect(net(), [2 * inputs(3)], "0", tmp_path, overwrite=overwrite)
            if x is not None:
                yield x

    with suppress(OptionError):
        collect(net(), batches(), "0", tmp_path)

    wanted = {11: net()[0](inputs()).detach(), 3: net()[0](2 * inputs(3)).detach()}
    acts = Activations(tmp_path)
    assert torch.equal(acts["0"][:], wanted[len(acts.ids)])
    assert len(acts.ids) == (3 if overwrite or at == 0 else 11)


def test_two_processes_at_once_do_not_write_to_one_folder(tmp_path: Path) -> None:
    class Other(nn.Module):
        """Adds a batch of another process to the files, as if both had begun at once."""

        def forward(self, x: Tensor) -> Tensor:
            if (tmp_path / "layer0.npy").exists():
                with (tmp_path / "layer0.npy").open("ab") as file:
                    file.write(bytes(64))
            return x

    with pytest.raises(OptionError, match=r"another process or run writes to .*acts/\{rank\}"):
        collect(nn.Sequential(Other()), loader(), "0", tmp_path)


# -- errors


def turned(o: Tensor) -> Tensor:
    return o.T if o.shape[1] == 3 else o


BAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (OptionError, "give a folder for the rows", {"accumulate": Mean()}),
    (OptionError, "give a folder for the rows", {"out_dir": None}),
    (ArgumentError, r"accumulate=<class.*such as Mean", {"out_dir": None, "accumulate": Mean}),
    (OptionError, "4 whole numbers are needed, and this is 4×4", {"ids": lambda b: 1 * b[0]}),
    (OptionError, "whole numbers", {"ids": lambda b: b[1] > 0}),
    (OptionError, "zeros and ones", {"mask": lambda b: torch.arange(4)}),
    (HookError, r'"0" gives 6×4\. .* begins with 4, .*Give hook=', {"hook": lambda o: o.T}),
    (HookError, "begins with 4 × tokens", {"rows": "token", "hook": lambda o: o[:, 0]}),
    (HookError, r'"2" gives 4×3\. .* begins with 4 × 6', {"rows": "token"}),
    (HookError, r'"2" gives 3×4\. .* begins with 4,', {"hook": turned}),
    (HookError, "gives None. Rows need one dense tensor", {"hook": lambda o: None}),
    (HookError, "sparse.* Rows need one dense tensor", {"hook": lambda o: o.to_sparse()}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "match", "options"), BAD)
def test_what_cannot_work_is_said(
    error: type[Exception], match: str, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {"out_dir": tmp_path / "acts", **options}

    with pytest.raises(error, match=match):
        collect(net(), loader(), ["0", "2"], **options)

    assert not list(tmp_path.iterdir())


def test_layers_that_give_no_rows_are_said(tmp_path: Path) -> None:
    lengths = [torch.ones(2, 3, 4), torch.ones(2, 5, 4)]
    kinds = iter((torch.float32, torch.bfloat16))

    with pytest.raises(HookError, match=r'rows of "0" are .*\[5, 6\].* were .*\[3, 6\]'):
        collect(net()[:1], lengths, "0", tmp_path / "a")
    with pytest.raises(HookError, match=r"bfloat16.*, and were .*float32"):
        collect(net(), inputs(8).split(4), "0", tmp_path / "b", hook=lambda o: o.to(next(kinds)))
    with pytest.raises(HookError, match=r'gives \(3×7×5, .* Select one of "body\[0\]", "body\[1\]'):
        collect(Text(), texts(), "body", tmp_path / "c", ids="id")
    options: dict[str, Any]
    for stop in (False, True):
        options = {"stop": stop, "forward": lambda model, batch: model[0](batch[0])}
        with pytest.raises(HookError, match=r'"2" was called 0 times for a batch'):
            collect(net(), loader(), ["0", "2"], tmp_path / "d", **options)
    with pytest.raises(SelectionError, match=r'no module matches "fc"'):
        collect(net(), loader(), "fc", tmp_path)
    with pytest.raises(ModelRunError, match=r"the loader gave no batch"):
        collect(net(), [], "0", tmp_path / "e")
    with pytest.raises(ArgumentError, match=r"a parameter has no shape yet. Run the model once"):
        collect(nn.LazyLinear(3), loader(), "", tmp_path)
    with pytest.raises(ArgumentError, match=r"data loader is a Tensor, which gives no batches"):
        collect(net(), inputs(), "0", tmp_path)


# -- which samples the rows are


class Pairs(Sampler[list[int]]):
    """A batch sampler of one's own."""

    def __iter__(self) -> Any:
        return iter([[5, 3], [0, 7]])


DATA = TensorDataset(inputs(), torch.arange(11))
IN_ANOTHER_ORDER: dict[str, Any] = {
    "shuffle": DataLoader(DATA, 4, shuffle=True),
    "subset": DataLoader(DATA, 4, sampler=SubsetRandomSampler([5, 3, 8])),
    "ranks": DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 1, shuffle=False)),
    "batches": DataLoader(DATA, batch_sampler=Pairs()),
}


@pytest.mark.parametrize("kind", IN_ANOTHER_ORDER)
def test_ids_are_the_samples_numbers_or_a_warning(kind: str, tmp_path: Path) -> None:
    data = IN_ANOTHER_ORDER[kind]

    for to in ({"out_dir": tmp_path / "a"}, {"accumulate": TopK(2)}):
        with pytest.warns(HookkitWarning, match="order of the data set.* Give ids="):
            collect(net(), data, "0", **to)
    acts = collect(net(), data, "0", tmp_path / "b", ids=1)
    collect(net(), data, "0", accumulate=Mean())  # which has no ids
    collect(net(), DataLoader(Stream(), 4), "0", tmp_path / "c")

    assert torch.equal(acts["0"][:], net()[0](inputs()).detach()[acts.ids])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(inputs())


def test_rows_of_a_layer_that_gives_time_first_are_not_taken_for_samples(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.LSTM(4, 5)), torch.randn(7, 3, 4)

    with pytest.raises(HookError, match=r'"0\[0\]" has batch_first=False'):
        collect(model, [x], "0[0]", tmp_path)
    acts = collect(
        model, [x], "0[0]", tmp_path, hook=lambda o: o.transpose(0, 1), forward=lambda m, x: m(x)
    )

    assert torch.equal(acts["0[0]"][:], model(x)[0].transpose(0, 1).detach())


# -- reading


@pytest.fixture
def acts(tmp_path: Path) -> Activations:
    return collect(net(), loader(23), ["0", "2"], tmp_path)


INDICES: list[Any] = [
    0, -1, slice(None), slice(20, 50), slice(None, None, -3), [5, 1, 22, 5], np.array([0, 22]),
    torch.tensor([[1, 2], [3, 4]]), [], torch.arange(23) % 2 == 0, torch.tensor(4),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_are_read_by_any_index(index: Any, acts: Activations) -> None:
    whole = net()[0](inputs(23)).detach().numpy()
    as_numpy = index.numpy() if isinstance(index, Tensor) else index

    np.testing.assert_array_equal(acts["0"][index].numpy(), whole[as_numpy])


def test_what_is_read_is_a_copy(acts: Activations) -> None:
    before = acts["0"][:]
    acts["0"][3:5].zero_()
    acts["0"][[3]].zero_()

    assert torch.equal(acts["0"][:], before)


def test_a_layer_is_a_torch_dataset(acts: Activations) -> None:
    whole, layer = acts["0"][:], acts["0"]

    batches = list(DataLoader(pickle.loads(pickle.dumps(layer)), batch_size=10))

    assert torch.equal(torch.cat(batches), whole)
    assert repr(layer) == "23×6 float32"
    assert layer.ids is acts.ids


def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    with (file := tmp_path / "layer0.npy").open("wb") as out:
        head = {"descr": "|u1", "fortran_order": False, "shape": (2**38, 4)}
        np.lib.format.write_array_header_1_0(out, head)
        try:
            out.truncate(out.tell() + 2**40)
        except OSError:
            pytest.skip("this file system has no sparse files")

    layer = Layer(file, torch.arange(3), [4], torch.uint8)

    assert layer[[5, 2**37]].tolist() == [[0] * 4] * 2


def test_a_folder_without_activations_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"has no activations.json, which collect"):
        Activations(tmp_path)
