"""What `collect` writes is what plain hooks see, whatever the loader gives."""

import copy
import io
import os
import pickle
import random
import signal
import sys
import threading
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import started
from test_summaries_zoo import fingerprint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from zoo import ZOO, Entry

from hookkit import Activations, collect, edit_output, scale, unwrap, zero
from hookkit.collecting import Mean
from hookkit.collecting import shards as shards_module
from hookkit.collecting.batches import alike, digest, sketch
from hookkit.collecting.parts import CODES, Progress, load
from hookkit.errors import (
    ArgumentError,
    HookError,
    ModelRunError,
    OptionError,
    SelectionError,
)
from hookkit.modelinfo import progress


def net(seed: int = 0) -> nn.Sequential:
    """Quarters all through: sums of their products are exact, in whatever order a CPU adds them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)).eval()
    for p in model.parameters():
        p.data = torch.randint(-8, 9, p.shape) / 4
    return model


def rows(n: int = 11) -> Tensor:
    return torch.randint(-8, 9, (n, 4), generator=torch.Generator().manual_seed(1)) / 4


def loader(n: int = 11, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows(n), torch.arange(100, 100 + n)), batch_size=4, **options)


def seen(model: nn.Module, inner: nn.Module, batches: list[Any]) -> Tensor:
    """What plain PyTorch sees, in rows."""
    found: list[Tensor] = []
    handle = inner.register_forward_hook(lambda m, i, o: found.append(o.clone()))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    return torch.cat(found)


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
        id_ = torch.arange(start, start + n) * 10
        made.append({"input_ids": ids, "attention_mask": mask, "id": id_})
    return made


@dataclass
class Graph:
    """A batch of one's own, which only the model can read."""

    x: Tensor
    idx: Tensor
    moved: int = 0


class Opaque:
    def __init__(self, x: Tensor, idx: Any) -> None:
        self.x, self.idx, self.moved = x, idx, 0

    def to(self, device: Any) -> "Opaque":
        new = Opaque(self.x.to(device), self.idx)
        new.moved = self.moved + 1
        return new


class OnGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, g: Any) -> Any:
        return self.fc(g.x)


def test_rows_are_what_plain_hooks_see(tmp_path: Path) -> None:
    model = net()

    acts = collect(model, loader(), ["0", nn.ReLU], to=tmp_path)

    assert list(acts) == ["0", "1"]
    linear = seen(model, model[0], list(rows().split(4)))
    # the ReLU writes into the output of the layer before it
    torch.testing.assert_close(acts["0"][:], linear, rtol=0, atol=0)
    torch.testing.assert_close(acts["1"][:], linear.relu(), rtol=0, atol=0)
    assert acts.ids.tolist() == [*range(11)]
    assert acts["0"].shape == (11, 6)


KINDS = {
    "tensor": lambda x, y: x,
    "tuple": lambda x, y: (x, y),
    "list of one": lambda x, y: [x],
    "dict": lambda x, y: {"input": x},
    "user dict": lambda x, y: UserDict(input=x),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_every_kind(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    batches = [KINDS[kind](x, x.sum(1)) for x in rows().split(4)]

    acts = collect(model, batches, "0", to=tmp_path)

    torch.testing.assert_close(acts["0"][:], model[0](rows()).detach())


@pytest.mark.parametrize("kind", [Graph, Opaque])
def test_batches_of_ones_own_class(kind: Any, tmp_path: Path) -> None:
    model = OnGraph()
    batches = [kind(x, [7 + i for i in range(len(x))]) for x in rows(5).split(3)]

    acts = collect(model, batches, "fc", to=tmp_path, ids="idx")

    assert acts.ids.tolist() == [7, 8, 9, 7, 8]
    torch.testing.assert_close(acts["fc"][:], model.fc(rows(5)).detach())


def test_tokens_without_padding_have_their_sample_and_position(tmp_path: Path) -> None:
    model, batches = Text(), texts()

    acts = collect(
        model, batches, ["embed", "body[0]"], tmp_path, per="token", mask="attention_mask", ids="id"
    )

    wanted, where = [], []
    for b in batches:
        out = model.body(model.embed(b["input_ids"]) * b["attention_mask"][..., None])[0].detach()
        for i, t in b["attention_mask"].nonzero().tolist():
            wanted.append(out[i, t])
            where.append([int(b["id"][i]), t])
    torch.testing.assert_close(acts["body[0]"][:], torch.stack(wanted))
    assert acts.ids.tolist() == where
    assert acts["embed"].shape == (len(where), 6)


def test_a_function_of_the_batch_is_mask_and_ids(tmp_path: Path) -> None:
    model = net()

    acts = collect(model, loader(), "0", tmp_path, ids=lambda b: b[1], mask=lambda b: b[1] % 3 == 0)

    assert acts.ids.tolist() == [102, 105, 108]
    assert torch.equal(acts["0"][:], model[0](rows())[2::3].detach())


def test_ids_by_position_are_not_an_input(tmp_path: Path) -> None:
    batches = [(torch.tensor([5, 3]), torch.ones(2, 4), torch.zeros(2))]

    acts = collect(net(), batches, "0", tmp_path, ids=0)

    assert acts.ids.tolist() == [5, 3]


def test_a_hook_reduces_and_inputs_are_rows_too(tmp_path: Path) -> None:
    model, batches = Text(), texts()

    mean = collect(model, batches, "embed", tmp_path / "a", hook=lambda o: o.mean(1), ids="id")
    last = collect(
        model, batches, "body", tmp_path / "b", inputs=True, hook=lambda m, i: i[0][:, -1], ids="id"
    )

    x = model.embed(batches[0]["input_ids"]).detach()
    torch.testing.assert_close(mean["embed"][:3], x.mean(1))
    torch.testing.assert_close(
        last["body"][:3], (x * batches[0]["attention_mask"][..., None])[:, -1]
    )


def test_calls_of_a_shared_module_are_layers(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)

    acts = collect(model, loader(), "0", tmp_path)

    assert list(acts) == ["0:0", "0:1"]
    torch.testing.assert_close(acts["0:1"][:], model(rows()).detach())


@pytest.mark.parametrize("n", [1, 4, 6, 11, 50])
def test_n_rows_and_no_more(n: int, tmp_path: Path) -> None:
    model = net()

    acts = collect(model, loader(), "0", tmp_path, n=n)

    assert acts["0"].shape == (min(n, 11), 6)
    assert torch.equal(acts["0"][:], model[0](rows())[:n].detach())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn], ids=str
)
def test_rows_are_stored_in_the_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = net()

    acts = collect(model, loader(), "2", tmp_path, dtype=dtype)

    wanted = model(rows()).detach().to(dtype)
    assert acts["2"].dtype is dtype
    assert torch.equal(acts["2"][[10, 0]].double(), wanted[[10, 0]].double())
    np.testing.assert_array_equal(acts["2"].to_numpy(), wanted.to(acts_numpy(dtype)).numpy())


@pytest.mark.parametrize("name", CODES)
def test_the_safetensors_library_reads_the_files(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    dtype = getattr(torch, name)
    wanted = (net()(rows()).detach() * 16).abs().to(dtype)

    collect(net(), loader(), "2", tmp_path, hook=lambda o: (o * 16).abs().to(dtype))

    found = library.load_file(tmp_path / "rank0" / "00000" / "00000-00000.safetensors")
    assert (list(found), found["2"].dtype) == (["2"], dtype)
    assert torch.equal(found["2"].view(torch.uint8), wanted.view(torch.uint8))
    read = Activations(tmp_path)["2"][:]
    assert (read.dtype, read.shape) == (dtype, (11, 3))
    assert torch.equal(read.view(torch.uint8), wanted.view(torch.uint8))


def acts_numpy(dtype: torch.dtype) -> torch.dtype:
    """What numpy has no dtype for is float32 there."""
    return dtype if dtype in (torch.float16, torch.float64) else torch.float32


@pytest.mark.parametrize("made", [torch.int16, torch.bool, torch.uint8, torch.int64])
def test_whole_numbers_and_scalars_are_rows(made: torch.dtype, tmp_path: Path) -> None:
    acts = collect(net(), loader(), "2", tmp_path, hook=lambda o: (o[:, 0] > 0).to(made))

    assert (acts["2"].shape, acts["2"].dtype) == ((11,), made)
    assert torch.equal(acts["2"][:], (net()(rows())[:, 0] > 0).to(made))


def test_nothing_of_the_model_and_the_process_is_changed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[1].eval()
    before = fingerprint(model, (), {})

    collect(model, loader(shuffle=True), "2", tmp_path)
    with pytest.raises(ZeroDivisionError):
        collect(model, loader(), "2", tmp_path / "b", hook=lambda o: 1 / 0)

    assert fingerprint(model, (), {}) == before


def test_random_states_are_restored_while_another_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, others = threading.active_count, threading.active_count() - 1  # of tests before this one
    monkeypatch.setattr(threading, "active_count", lambda: max(count() - others, 1))

    def hook(o: Tensor) -> Tensor:
        random.random(), np.random.rand(), torch.rand(1)
        return o

    model = net()
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    collect(model, loader(), "2", tmp_path, hook=hook, shard_bytes=40)

    after = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    assert states == after


def test_a_model_that_runs_in_inference_mode_is_seen(tmp_path: Path) -> None:
    class Frozen(nn.Sequential):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = net()

    acts = collect(Frozen(*model), loader(), "0", tmp_path)

    assert torch.equal(acts["0"][:], model[0](rows()).detach())


def test_a_compiled_model_is_seen(tmp_path: Path) -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    compiled(rows())

    acts = collect(compiled, loader(), "0", tmp_path)

    assert torch.equal(acts["0"][:], model[0](rows()).detach())


def plain(e: Entry) -> dict[str, Tensor]:
    """The outputs that are rows: of modules that run once and return one tensor of them."""
    model, args = e.build(), e.args()
    found: dict[str, list[Any]] = {}
    for name, m in unwrap(model).named_modules():
        m.register_forward_hook(
            lambda m, i, o, name=name: found.setdefault(name, []).append(copy.deepcopy(o))
        )
    n = args[0].shape[0]
    with torch.no_grad():
        model(*args)
    return {
        name: calls[0]
        for name, calls in found.items()
        if len(calls) == 1 and type(calls[0]) is Tensor and calls[0].shape[:1] == (n,)
    }


ODD = ("raises", "needs_grad", "lazy", "meta", "scripted", "sparse", "compiled", "train_rng")
RUNS = [
    e
    for e in ZOO
    if not e.tags & {*ODD} and not e.kwargs() and e.args()
    and isinstance(e.args()[0], Tensor) and e.args()[0].ndim
]  # fmt: skip


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("e", RUNS, ids=lambda e: e.name)
def test_models_of_the_zoo(e: Entry, tmp_path: Path) -> None:
    try:
        wanted = plain(e)
    except (RuntimeError, TypeError):
        pytest.skip("it cannot run without gradients, or its outputs cannot be copied")
    wanted = {k: v for k, v in wanted.items() if not (v.is_complex() or v.is_quantized)}
    if not wanted:
        pytest.skip("no module of it gives rows")
    model = e.build()

    acts = collect(model, [(*e.args(), 0)], list(wanted), tmp_path)

    assert list(acts) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(acts[name][:], value, rtol=1e-5, atol=1e-6, equal_nan=True)


class Cache:
    """An object that layers hand on, and write into."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        cache.states.append(self.fc(x))
        return cache.states[-1], cache


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Cached(), Cached()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(*self.a(x, Cache()))[0]


@pytest.mark.parametrize("inputs", [False, True])
def test_the_tensor_beside_an_object_is_the_row(inputs: bool, tmp_path: Path) -> None:
    model = Decoder()

    acts = collect(model, [rows()], ["a", "b"], tmp_path, inputs=inputs)

    first = model.a.fc(rows()).detach()
    torch.testing.assert_close(acts["b" if inputs else "a"][:], first)


def test_rows_are_shared_out_over_files_whatever_the_batches(tmp_path: Path) -> None:
    kinds = {"0": lambda o: o, "2": lambda o: o[:, ::2].half()}  # columns of several widths

    def hook(m: nn.Module, i: Any, o: Tensor) -> Tensor:
        return kinds["0" if o.shape[1] == 6 else "2"](o)

    acts = collect(net(), loader(23), ["0", "2"], tmp_path, hook=hook, shard_bytes=36 * 9)

    whole = net()[0](rows(23)).detach()
    assert torch.equal(acts["0"][:], whole)
    assert torch.equal(acts["2"][:], net()(rows(23)).detach()[:, ::2].half())
    assert shard_rows(tmp_path) == [12, 11]


def shard_rows(folder: Path) -> list[int]:
    return load(folder / "rank0" / "progress.json", "x").rows


def test_an_error_leaves_whole_files_only(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        collect(net(), [*rows(9).split(3), torch.ones(2, 5)], "0", tmp_path, shard_bytes=128)

    assert shard_rows(tmp_path) == [6]
    assert [f.name for f in sorted((tmp_path / "rank0").iterdir())] == ["00000", "progress.json"]


def test_rows_are_written_as_the_layers_run(tmp_path: Path) -> None:
    """So that what is in memory is one layer's output, not a batch of all of them."""
    written = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes = {f.name[:5]: f.stat().st_size for f in tmp_path.rglob("*.safetensors")}
            written.append(sizes)
            return x

    model = nn.Sequential(nn.Linear(4, 6), Looks(), nn.Linear(6, 3), Looks(), nn.ReLU()).eval()

    collect(model, [torch.ones(4096, 4)], ["0", "2", "4"], tmp_path)

    first, second = (4096 + 4096 * width * 4 for width in (6, 3))  # behind the header
    assert written == [{"00000": first}, {"00000": first, "00001": second}]


def test_more_layers_than_files_may_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "_OPEN", 2)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]).eval()

    acts = collect(model, loader(23), nn.Linear, tmp_path / "a", shard_bytes=700)

    monkeypatch.undo()
    all_open = collect(model, loader(23), nn.Linear, tmp_path / "b", shard_bytes=700)
    assert shard_rows(tmp_path / "a") == shard_rows(tmp_path / "b") == [8, 8, 7]
    for name in all_open:
        assert torch.equal(acts[name][:], all_open[name][:])


def test_a_module_of_two_names_is_two_layers(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)

    acts = collect(model, loader(), ["2", "0"], tmp_path)

    assert sorted(acts) == ["0:0", "0:1", "2:0", "2:1"]
    assert torch.equal(acts["0:1"][:], acts["2:1"][:])


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (shards_module.Shards, "_opened")])
def test_an_error_of_the_disk_is_the_users(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, name, full)

    with pytest.raises(OSError, match="No space left"):
        collect(net(), loader(), "0", tmp_path)
    assert not list(tmp_path.rglob("*.*"))


# -- interrupted, and gone on with


def collected(folder: Path, die_at: int = -1, model: Any = None, **options: Any) -> list[int]:
    """Collects to `folder` in small shards; the batches that were run. Kills itself in one."""
    ran = []

    def hook(o: Tensor) -> Tensor:
        ran.append(len(ran))
        if len(ran) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return o

    options = {"shard_bytes": 200, **options}  # 32 bytes a row: 6 rows in a shard
    collect(model or net(), loader(23), "0", folder, hook=hook, **options)
    return ran


def dies(folder: Path, at: int, **options: Any) -> None:
    collected(folder, at, **options)


def dies_between(folder: Path, at: int) -> None:
    """Kills itself between a shard and the file that names it."""
    saved, save = [], Progress.save

    def dying(progress: Progress, file: Path) -> None:
        saved.append(file)
        if len(saved) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        save(progress, file)

    Progress.save = dying  # type: ignore[method-assign]
    collected(folder)


@pytest.mark.parametrize(
    # a shard has 2 batches, and one may still wait for the disk
    ("work", "at", "kept"),
    [(dies, 1, {0}), (dies, 2, {0}), (dies, 6, {2, 4}), (dies_between, 2, {2})],
)
def test_what_was_killed_goes_on_where_it_was(
    work: Any, at: int, kept: set[int], tmp_path: Path
) -> None:
    process = started(work, tmp_path / "acts", at)
    process.join()
    assert process.exitcode == -signal.SIGKILL

    ran = collected(tmp_path / "acts")
    again = collected(tmp_path / "acts")

    checked = kept != {0}  # what the first batch gives
    assert 6 + checked - len(ran) in kept  # batches without a whole file are run again
    assert len(again) == 1
    collected(tmp_path / "whole")
    a, b = Activations(tmp_path / "acts"), Activations(tmp_path / "whole")
    assert torch.equal(a["0"][:], b["0"][:])
    assert a.ids.tolist() == b.ids.tolist() == [*range(23)]


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        collected(tmp_path, n=0)
    (tmp_path / "rank0").mkdir()
    (tmp_path / "rank0" / ".hookkit-0123.tmp").write_bytes(b"half")
    (tmp_path / "rank0" / ".hookkit-3.tmp").mkdir()

    collected(tmp_path)

    assert not list(tmp_path.rglob("*.tmp"))


def trained(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[0].weight += 1e-4
    return model


def buffered() -> nn.Module:
    model = net()
    model.register_buffer("steps", torch.ones(1))
    return model


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"model": trained(net())},
            "of something else: model is Sequential with parameters and .* ther",
        ),
        ({"model": net().train()}, "mode is evaluation there and training here. Give another fold"),
        ({"model": buffered()}, "model is Sequential with parameters and buffers"),
        ({"dtype": torch.float16}, "dtype is None there and torch.float16 here"),
        ({"n": 5}, "n is None there and 5 here"),
        ({"inputs": True}, "inputs is False there and True here"),
        ({"ids": 1}, "ids is None there and 1 here"),
    ],
)
def test_rows_of_something_else_are_not_gone_on_with(
    options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    collected(tmp_path)

    with pytest.raises(OptionError, match=match):
        collected(tmp_path, **options)


def test_other_layers_or_batches_are_not_gone_on_with(tmp_path: Path) -> None:
    collect(net(), loader(), "0", tmp_path)

    with pytest.raises(OptionError, match=r"layers is \['0'\] there and \['2'\] here"):
        collect(net(), loader(), "2", tmp_path)
    with pytest.raises(OptionError, match=r"the first batch of the loader is not the one"):
        collect(net(), loader(8, shuffle=True), "0", tmp_path)


class Twice(nn.Module):
    def __init__(self, k: float) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return self.k * x


@pytest.mark.parametrize("into", [None, Mean()])
def test_what_gives_other_rows_is_seen_by_the_first_batch(into: Any, tmp_path: Path) -> None:
    model, options = nn.Sequential(net(), Twice(1.0)), {"into": into}
    before = collect(model, loader(), "1", tmp_path / "a", **options)
    twice = collect(model, loader(), "1", tmp_path / "b", hook=lambda o: 1.0 * o, **options)
    assert len(before) == len(twice) == 1

    refused = pytest.raises(OptionError, match='for the first batch "1" gives other values here')
    with refused, edit_output(model[1], scale(1.01)):
        collect(model, loader(), "1", tmp_path / "a", **options)
    with refused, edit_output(model[0], zero(at=slice(0, 1))):
        collect(model, loader(), "1", tmp_path / "a", **options)
    with refused:
        collect(model, loader(), "1", tmp_path / "b", hook=lambda o: 2.0 * o, **options)
    model[1].k = 2.0
    with refused:
        collect(model, loader(), "1", tmp_path / "a", **options)


def test_rows_that_random_numbers_are_part_of_are_gone_on_with(tmp_path: Path) -> None:
    model = nn.Sequential(net(), nn.Dropout(0.5).train())

    first = collect(model, loader(), "1", tmp_path)["1"][:]

    assert torch.equal(collect(model, loader(), "1", tmp_path)["1"][:], first)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in CODES])
def test_one_value_of_many_gives_another_digest(dtype: torch.dtype) -> None:
    t = (torch.arange(512 * 512) % 2).view(512, 512).to(dtype)
    before = digest([t])
    t[300, 7] = 0

    assert digest([t]) != before
    assert digest([t.t()]) != digest([t])
    assert alike(sketch(t), sketch(t.clone()))
    assert not alike(sketch(t), sketch(t.t()))


def test_a_loader_that_shuffles_gives_positions_in_its_order(tmp_path: Path) -> None:
    def shuffled() -> DataLoader[Any]:
        return loader(shuffle=True, generator=torch.Generator().manual_seed(3))

    order = torch.cat([y for _, y in shuffled()]) - 100

    positions = collect(net(), shuffled(), "0", tmp_path / "a")
    ids = collect(net(), shuffled(), "0", tmp_path / "b", ids=1, hook=lambda m, i, o: o)

    assert positions.ids.tolist() == [*range(11)]
    assert torch.equal(positions["0"][:], net()[0](rows()[order]).detach())
    assert ids.ids.tolist() == (order + 100).tolist()


def test_a_terminal_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress, "_WAIT_S", 0.0)
    monkeypatch.setattr(progress, "_PAUSE_S", 0.0)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())

    collect(net(), loader(), "0", tmp_path / "a")
    collect(net(), iter([rows()]), "0", tmp_path / "b")

    assert "2 of 3 batches, 0 s" in terminal.getvalue()
    assert "1 of ? batches, 0 s" in terminal.getvalue()
    assert not terminal.getvalue().split("\r")[-1].strip()


# -- where a forward ends


@pytest.mark.parametrize(("stop", "n_calls"), [(False, 3), (True, 0)])
def test_what_follows_the_layers_runs_unless_a_forward_stops(
    stop: bool, n_calls: int, tmp_path: Path
) -> None:
    later: list[Any] = []
    model = nn.Sequential(net(), nn.Identity())
    model[1].register_forward_hook(lambda m, i, o: later.append(1))

    acts = collect(model, loader(), ["0.0", "0.2"], tmp_path, stop=stop)

    assert len(later) == n_calls
    assert torch.equal(acts["0.2"][:], model(rows()).detach())


def test_a_layer_called_again_gives_its_first_call_where_the_forward_stops() -> None:
    layer = nn.ReLU()
    model = nn.Sequential(layer, nn.Linear(4, 4), layer)

    assert [*collect(model, loader(), "0", into=Mean())] == ["0:0", "0:1"]
    assert [*collect(model, loader(), "0", into=Mean(), stop=True)] == ["0"]


# -- errors


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (OptionError, "per=.*give one of", {"per": "row"}),
        (OptionError, r"collect\(n=0\): n is how many rows", {"n": 0}),
        (OptionError, r"shard_bytes=0", {"shard_bytes": 0}),
        (ArgumentError, r"collect\(ids=1.5\): give the name of a field", {"ids": 1.5}),
        (OptionError, "ids='y'.*has no such field; it is .*4×4", {"ids": "y"}),
        (OptionError, "needs a whole number, and this is 4×4 of torch.f", {"ids": 0}),
        (OptionError, "this is 2 for 4 samples", {"ids": lambda b: torch.arange(2)}),
        (OptionError, "and this is a list. Number the samples", {"ids": lambda b: ["a"] * 4}),
        (OptionError, "the mask is 2, and the rows of", {"mask": lambda b: torch.ones(2)}),
        (HookError, "gives 6×4 for a batch of 4 samples, .* first d", {"hook": lambda o: o.T}),
        (HookError, "for a batch of 4 samples and 6 tokens", {"per": "token"}),
        (HookError, "tensor is needed to make rows, and there is none", {"hook": lambda o: None}),
        (HookError, "tensor of .*sparse.*rows are dense", {"hook": lambda o: o.to_sparse()}),
        (HookError, "a tensor of torch.complex64", {"dtype": torch.complex64}),
        (HookError, "a tensor of torch.complex128", {"hook": lambda o: o + 1j * o.double()}),
        (ArgumentError, "hook must be a function, found an int", {"hook": 1}),
        (ArgumentError, r"into=<class.*give an accumulator, such as Mean", {"into": dict}),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said(
    error: type[Exception], match: str, options: dict[str, Any], tmp_path: Path
) -> None:
    to = {} if "into" in options else {"to": tmp_path}

    with pytest.raises(error, match=match):
        collect(net(), loader(), ["0", "2"][: 1 + (options.get("per") == "token")], **to, **options)


def test_layers_that_give_no_rows_are_said(tmp_path: Path) -> None:
    lengths = [torch.ones(2, 3, 4), torch.ones(2, 5, 4)]
    model = nn.Sequential(nn.Linear(4, 6), nn.ModuleList())

    with pytest.raises(HookError, match=r'rows of "0" are 5×6 of float32 in this .* and 3×6 of'):
        collect(model[:1], lengths, "0", tmp_path / "a")
    with pytest.raises(HookError, match=r'is 3×7×5, 1×3×5, 1×3×5. Select one: "body".*"\[0\]"'):
        collect(Text(), texts(), "body", tmp_path / "b", ids="id")
    with pytest.raises(HookError, match=r"Give hook= a function of the inputs, such as lambda i"):
        collect(Text(), texts(), "", tmp_path / "b", ids="id", inputs=True)
    with pytest.raises(HookError, match=r"1 of 1 modules were not called: 'body'.*Leave out what"):
        collect(UnusedBody(), [torch.ones(2, 4)], "body", tmp_path / "c")
    with pytest.raises(SelectionError, match=r'no module matches "fc"'):
        collect(net(), loader(), "fc", tmp_path)
    with pytest.raises(ModelRunError, match=r"the loader gave no batch"):
        collect(net(), [], "0", tmp_path)
    with pytest.raises(ArgumentError, match=r"'weight' has no shape yet. Run the model once"):
        collect(nn.LazyLinear(3), loader(), "", tmp_path)


class UnusedBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_an_error_of_the_model_says_which_batch(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        collect(net(), [torch.ones(2, 4), torch.ones(2, 5)], "0", tmp_path)

    assert caught.value.__notes__ == ["collect: in batch 1, for which the model was given (2×5)"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "acts").write_text("")

    with pytest.raises(OptionError, match=r"acts is a file. Give a folder in to="):
        collect(net(), loader(), "0", tmp_path / "acts")


# -- reading


@pytest.fixture
def acts(tmp_path: Path) -> Activations:
    """23 rows in files of 4."""
    return collect(net(), loader(23), ["0", "2"], tmp_path, shard_bytes=170)


INDICES: list[Any] = [
    0, -1, 7, slice(None), slice(3, 17), slice(20, 50), slice(9, 2), slice(None, None, -3),
    [5, 1, 22, 5], np.array([0, 22]), torch.tensor([[1, 2], [3, 4]]), [], -23,
    torch.arange(23) % 2 == 0, np.int64(4), torch.tensor(4),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_are_read_by_any_index(index: Any, acts: Activations) -> None:
    whole = net()[0](rows(23)).detach().numpy()
    as_numpy = index.numpy() if isinstance(index, Tensor) else index
    if isinstance(index, list) and not index:
        as_numpy = np.array([], dtype=int)

    found = acts["0"][index]

    np.testing.assert_array_equal(found.numpy(), whole[as_numpy])


@pytest.mark.parametrize(
    ("index", "error", "match"),
    [
        (23, IndexError, "23 is beyond the 23 rows of '0'"),
        ([-24], IndexError, "beyond the 23"),
        ((1, 2), ArgumentError, r"index what is read: acts\[name\]\[rows\]\[:, 3\]"),
        ("a", ArgumentError, "is no index of the 23 rows of '0'"),
        ([0.5], ArgumentError, "is no index"),
        ([True], ArgumentError, "a mask with an entry for each row"),
    ],
)
def test_other_indices_are_refused(
    index: Any, error: type[Exception], match: str, acts: Activations
) -> None:
    with pytest.raises(error, match=match):
        acts["0"][index]


def test_what_is_read_is_a_copy(acts: Activations) -> None:
    before = acts["0"][:]
    acts["0"][3:5].zero_()
    acts["0"][[3]].zero_()

    assert torch.equal(acts["0"][:], before)


def test_shuffled_batches_give_each_row_once_with_its_id(acts: Activations) -> None:
    layer = acts["0"]

    batches = list(layer.batches(5, shuffle=True, seed=1))

    ids = torch.cat([i for _, i in batches])
    assert [len(x) for x, _ in batches] == [5, 5, 5, 5, 3]
    assert sorted(ids.tolist()) == [*range(23)] != ids.tolist()
    torch.testing.assert_close(torch.cat([x for x, _ in batches]), layer[:][ids])
    assert torch.equal(torch.cat([i for _, i in layer.batches(5, shuffle=True, seed=1)]), ids)
    assert torch.cat([i for _, i in layer.batches(5)]).tolist() == [*range(23)]


def test_a_layer_is_a_torch_dataset(acts: Activations) -> None:
    whole = acts["0"][:]

    batches = list(DataLoader(pickle.loads(pickle.dumps(acts["0"])), batch_size=10))

    torch.testing.assert_close(torch.cat(batches), whole)
    np.testing.assert_array_equal(np.asarray(acts["0"]), whole.numpy())
    assert np.asarray(acts["0"], dtype=np.float64).dtype == np.float64
    assert repr(acts["0"]) == "Layer('0', 23×6 torch.float32)"
    assert (acts["0"].ndim, len(acts["0"]), acts["0"].ids is acts.ids) == (2, 23, True)


def test_an_unknown_layer_is_said_with_the_nearest(acts: Activations) -> None:
    with pytest.raises(SelectionError, match=r"has no layer '00'. Nearest: '0'"):
        acts["00"]
    assert "::ids" not in acts


def test_one_row_is_read_without_the_rest(tmp_path: Path) -> None:
    acts = collect(net(), loader(23), "0", tmp_path, shard_bytes=170)
    for shard in list((tmp_path / "rank0").glob("*.safetensors"))[1:]:
        if shard.name != "00001.safetensors":
            shard.unlink()
    acts = Activations(tmp_path)
    acts.__dict__["ids"] = torch.arange(23)

    assert torch.equal(acts["0"][9], net()[0](rows(23))[9].detach())


def progress_with(**changes: Any) -> Any:
    import json

    def damage(folder: Path) -> None:
        file = folder / PROGRESS
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


def write(name: str, data: bytes | None) -> Any:
    def damage(folder: Path) -> None:
        file = folder / name
        file.unlink() if data is None else file.write_bytes(data)

    return damage


PROGRESS = "rank0/progress.json"
SHARD = "rank0/00001/00000-00000.safetensors"


def cut(folder: Path) -> None:
    file = folder / SHARD
    file.write_bytes(file.read_bytes()[:-5])


def swapped(folder: Path) -> None:
    """A whole file, of other rows."""
    from safetensors.torch import save_file

    save_file({"0": torch.ones(9, 6)}, folder / SHARD)


DAMAGES = {
    "no json": write(PROGRESS, b"{"),
    "no text": write(PROGRESS, b"\xff\xfe\x00"),
    "a list": write(PROGRESS, b"[]"),
    "deep": write(PROGRESS, b"[" * 100_000),
    "another version": progress_with(format=99),
    "more entries": progress_with(other=1),
    "negative rows": progress_with(rows=[-4]),
    "parts of rows": progress_with(rows=[4.5]),
    "strange rows": progress_with(rows=3),
    "strange layers": progress_with(layers={"0": [["a"], "float32"]}),
    "no dtype": progress_with(layers={"0": [[6], "load"]}),
    "no settings": progress_with(settings={}),
    "strange rank": progress_with(settings={"rank": "../..", "ranks": 1}),
    "an empty shard": write(SHARD, b""),
    "another file": write(SHARD, b"PK\x03\x04" + b"\0" * 200),
    "a huge header": write(SHARD, b"\xff" * 8 + b"{}"),
    "no shard": write(SHARD, None),
    "a short shard": cut,
    "other rows": swapped,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_said_in_one_line(
    damage: str, acts: Activations, tmp_path: Path
) -> None:
    DAMAGES[damage](tmp_path)

    with pytest.raises(OptionError, match=r"cannot be read .* or remove the folder") as caught:
        Activations(tmp_path)["0"][:]

    assert "\n" not in str(caught.value)


def test_a_folder_without_activations_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"has no activations. Give a folder that collect wrote"):
        Activations(tmp_path)


def test_an_unfinished_part_is_said(acts: Activations, tmp_path: Path) -> None:
    progress_with(done=False)(tmp_path)

    unfinished = Activations(tmp_path)

    assert repr(unfinished) == "Activations(not whole)"
    with pytest.raises(OptionError, match=r"the part of rank 0 of 1, .*, is not finished"):
        unfinished["0"][:]
