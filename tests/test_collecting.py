"""What `collect` writes is what plain hooks see, whatever the loader gives."""

import copy
import json
import os
import pickle
import signal
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

from hookkit import Activations, collect, hook_output, unwrap
from hookkit.collecting import Mean, files
from hookkit.errors import (
    ArgumentError,
    HookError,
    ModelRunError,
    OptionError,
    SelectionError,
)


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


def seen(model: nn.Module, inner: nn.Module, x: Tensor) -> Tensor:
    """What plain PyTorch sees, in rows."""
    found: list[Tensor] = []
    handle = inner.register_forward_hook(lambda m, i, o: found.append(o.clone()))
    with torch.no_grad():
        model(x)
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


class Opaque:
    def __init__(self, x: Tensor, idx: Any) -> None:
        self.x, self.idx = x, idx

    def to(self, device: Any) -> "Opaque":
        return Opaque(self.x.to(device), self.idx)


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
    linear = seen(model, model[0], rows())
    # the ReLU writes into the output of the layer before it
    torch.testing.assert_close(acts["0"][:], linear, rtol=0, atol=0)
    torch.testing.assert_close(acts["1"][:], linear.relu(), rtol=0, atol=0)
    assert acts.ids.tolist() == [*range(11)]
    assert np.array_equal(np.load(tmp_path / "rank0" / "1.npy", mmap_mode="r"), acts["1"][:])


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


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, ids: Tensor, other: Any = None, attention_mask: Tensor | None = None) -> Any:
        assert other is None
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        return self.embed(ids) * mask[..., None]


IDS, MASK = torch.arange(6).view(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize("mask", [None, 1, lambda batch: batch[1]])
def test_a_mask_that_is_a_batchs_last_item_is_used(mask: Any, tmp_path: Path) -> None:
    model = Masked()

    acts = collect(model, [(IDS, MASK)], "", tmp_path, per="token", mask=mask)

    every = model(IDS, attention_mask=MASK).detach().flatten(0, 1)
    wanted = every if mask is None else every[MASK.flatten() != 0]
    assert torch.equal(acts[""][:], wanted)


@pytest.mark.parametrize("target", [torch.tensor([1, 0]), IDS, MASK * 0.5])
def test_a_target_that_is_a_batchs_last_item_is_not(target: Tensor, tmp_path: Path) -> None:
    model = Masked()

    acts = collect(model, [(IDS, target)], "", tmp_path, per="token")

    assert torch.equal(acts[""][:], model(IDS).detach().flatten(0, 1))


def test_a_function_of_the_batch_is_mask_and_ids(tmp_path: Path) -> None:
    model = net()

    acts = collect(model, loader(), "0", tmp_path, ids=lambda b: b[1], mask=lambda b: b[1] % 3 == 0)

    assert acts.ids.tolist() == [102, 105, 108]
    assert torch.equal(acts["0"][:], model[0](rows())[2::3].detach())


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


def test_a_layer_that_is_called_twice_is_refused_or_gives_its_first_call(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Identity())

    with pytest.raises(HookError, match=r'"0" is called more than once for a batch.*stop=True'):
        collect(model, loader(), "0", tmp_path)
    acts = collect(model, loader(), ["0", "3"], tmp_path, stop=True)

    assert torch.equal(acts["0"][:], shared(rows()).detach())


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
    is_numpys = dtype in (torch.float16, torch.float64)
    as_numpy = wanted.to(dtype if is_numpys else torch.float32).numpy()
    np.testing.assert_array_equal(acts["2"].to_numpy(), as_numpy)


@pytest.mark.parametrize("made", [torch.int16, torch.bool, torch.uint8, torch.complex64])
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


@pytest.mark.slow
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


def test_a_recorder_of_the_user_sees_the_run_and_not_the_loader(tmp_path: Path) -> None:
    model = net()

    def calls_the_model() -> Any:
        for x in rows().split(4):
            model(x)
            yield x

    with hook_output(model[0]) as h:
        acts = collect(model, calls_the_model(), "0", tmp_path)

    assert h.n_calls == 6
    assert torch.equal(acts["0"][:], model[0](rows()).detach())


def test_rows_are_written_as_the_layers_run(tmp_path: Path) -> None:
    """So that what is in memory is one layer's output, not a batch of all of them."""
    written = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            written.append({f.name: f.stat().st_size for f in tmp_path.rglob("*.npy")})
            return x

    model = nn.Sequential(nn.Linear(4, 6), Looks(), nn.Linear(6, 3), Looks(), nn.ReLU()).eval()

    collect(model, [torch.ones(4096, 4)], ["0", "2", "4"], tmp_path)

    first, second = (128 + 4096 * width * 4 for width in (6, 3))  # behind the header
    assert written == [{"0.npy": first}, {"0.npy": first, "1.npy": second}]


# -- interrupted, and gone on with


def collected(folder: Path, die_at: int = -1, model: Any = None, **options: Any) -> int:
    """Collects to `folder`, saving after each 200 bytes; the number of batches that were run."""
    files._EVERY_BYTES = 200  # 32 bytes a row: after two batches
    ran = []

    def hook(o: Tensor) -> Tensor:
        ran.append(len(ran))
        if len(ran) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return o

    n = options.pop("size", 23)
    collect(model or net(), loader(n), "0", folder, hook=hook, **options)
    return len(ran)


@pytest.fixture(autouse=True)
def saving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_EVERY_BYTES", files._EVERY_BYTES)


def dies_in_between(folder: Path, at: int) -> None:
    """Kills itself between the rows of a batch and the index that counts them."""
    saved, save = [], files.Files.save

    def dying(self: Any, **options: Any) -> None:
        saved.append(self)
        if len(saved) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, **options)

    files.Files.save = dying  # type: ignore[method-assign]
    collected(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "at", "n_whole"),
    [(collected, 1, 0), (collected, 2, 0), (collected, 3, 2), (collected, 6, 4),
     (dies_in_between, 1, 0), (dies_in_between, 2, 2), (dies_in_between, 4, 6)],
)  # fmt: skip
def test_what_was_killed_goes_on_where_it_was(
    work: Any, at: int, n_whole: int, tmp_path: Path
) -> None:
    process = started(work, tmp_path / "acts", at)
    process.join()
    assert process.exitcode == -signal.SIGKILL

    assert collected(tmp_path / "acts") == 6 - n_whole
    assert collected(tmp_path / "acts") == 0  # complete
    collected(tmp_path / "whole")

    for file in ("0.npy", "ids.npy"):
        a, b = (tmp_path / name / "rank0" / file for name in ("acts", "whole"))
        assert a.read_bytes() == b.read_bytes()


def test_an_error_keeps_what_was_whole(tmp_path: Path) -> None:
    x = rows(12)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        collect(net(), [*x.split(4)[:2], torch.ones(4, 5)], "0", tmp_path)
    assert "in batch 2, for which the model was given (4×5)" in caught.value.__notes__[-1]

    ran = []
    acts = collect(net(), [*x.split(4)], "0", tmp_path, hook=None)
    model = net()
    model.register_forward_hook(lambda *_: ran.append(1))
    assert torch.equal(acts["0"][:], net()[0](x).detach())


@pytest.mark.parametrize("in_save", [False, True])
def test_an_error_of_the_disk_is_the_users_and_loses_nothing(
    in_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        files._EVERY_BYTES = 200
        write = files.Files._write
        m.setattr(os, "fsync", full) if in_save else m.setattr(
            files.Files, "_write",
            lambda self, *a: full() if self.counts["batches"] == 4 else write(self, *a),
        )  # fmt: skip
        with pytest.raises(OSError, match="No space left"):
            collect(net(), loader(23), "0", tmp_path)

    assert torch.equal(
        collect(net(), loader(23), "0", tmp_path)["0"][:], net()[0](rows(23)).detach()
    )


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
        ({"model": trained(net())}, "of something else: model is Sequential with weights .* there"),
        ({"model": net().train()}, "mode is training in 0 of 4 .* Give another folder"),
        ({"model": buffered()}, "model is Sequential with weights"),
        ({"dtype": torch.float16}, "dtype is None there and torch.float16 here"),
        ({"n": 5}, "n is None there and 5 here"),
        ({"inputs": True}, "inputs is False there and True here"),
        ({"ids": 1}, "ids is None there and 1 here"),
        ({"size": 24}, "data set is 23 there and 24 here"),  # as many batches
        ({"size": 100}, "batches is 6 there and 25 here"),
    ],
)
@pytest.mark.parametrize("done", [True, False])
def test_rows_of_something_else_are_not_gone_on_with(
    options: dict[str, Any], match: str, done: bool, tmp_path: Path
) -> None:
    collected(tmp_path)
    if not done:
        edit_index(tmp_path, done=False)

    with pytest.raises(OptionError, match=match):
        collected(tmp_path, **options)


def test_rows_inside_and_outside_of_autocast_are_told_apart(tmp_path: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        collect(net(), loader(), "0", tmp_path)

    with pytest.raises(OptionError, match=r"autocast is torch.bfloat16 there and False here"):
        collect(net(), loader(), "0", tmp_path)


def test_a_loader_without_a_length_that_has_grown_is_gone_on_with(tmp_path: Path) -> None:
    for n in (2, 5):
        acts = collect(net(), iter(rows(20).split(4)[:n]), "0", tmp_path)
        assert torch.equal(acts["0"][:], net()[0](rows(20)[: 4 * n]).detach())
    with pytest.raises(OptionError, match="first 5 batches of the loader are not of the size"):
        collect(net(), iter(rows(20).split(2)), "0", tmp_path)


def test_a_loader_that_shuffles_gives_positions_in_its_order(tmp_path: Path) -> None:
    def shuffled() -> DataLoader[Any]:
        return loader(shuffle=True, generator=torch.Generator().manual_seed(3))

    order = torch.cat([y for _, y in shuffled()]) - 100

    positions = collect(net(), shuffled(), "0", tmp_path / "a")
    ids = collect(net(), shuffled(), "0", tmp_path / "b", ids=1, hook=lambda m, i, o: o)

    assert positions.ids.tolist() == [*range(11)]
    assert torch.equal(positions["0"][:], net()[0](rows()[order]).detach())
    assert ids.ids.tolist() == (order + 100).tolist()


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


# -- errors


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (OptionError, "per=.*give one of", {"per": "row"}),
        (OptionError, r"collect\(n=0\): n is how many rows", {"n": 0}),
        (OptionError, "into= keeps nothing on disk", {"into": Mean(), "to": "acts"}),
        (ArgumentError, r"collect\(ids=1.5\): give the name of a field", {"ids": 1.5}),
        (OptionError, "ids='y'.*has no such field; it is .*4×4", {"ids": "y"}),
        (OptionError, "needs a whole number, and this is 4×4 of torch.f", {"ids": lambda b: b[0]}),
        (OptionError, "this is 2 for 4 samples", {"ids": lambda b: torch.arange(2)}),
        (OptionError, "and this is a list. Number the samples", {"ids": lambda b: ["a"] * 4}),
        (OptionError, "the mask is 2, and the rows of", {"mask": lambda b: torch.ones(2)}),
        (HookError, "gives 6×4 for a batch of 4 samples, .* first d", {"hook": lambda o: o.T}),
        (HookError, "for a batch of 4 samples and 6 tokens", {"per": "token"}),
        (HookError, "has None, and one dense tensor is needed", {"hook": lambda o: None}),
        (HookError, "sparse.*and one dense tensor is needed", {"hook": lambda o: o.to_sparse()}),
        (OptionError, "dtype='float16'.: give a dtype of torch", {"dtype": "float16"}),
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
    with pytest.raises(HookError, match=r'has \(3×7×5, .* Select one of "body\[0\]", "body\[1\]'):
        collect(Text(), texts(), "body", tmp_path / "b", ids="id")
    with pytest.raises(HookError, match=r"has \(input_ids=3×7, .*Give hook= a function"):
        collect(Text(), texts(), "", tmp_path / "b", ids="id", inputs=True)
    with pytest.raises(HookError, match=r"1 of 1 modules were not called: 'body'. Leave out what"):
        collect(UnusedBody(), [torch.ones(2, 4)], "body", tmp_path / "c")
    with pytest.raises(SelectionError, match=r'no module matches "fc"'):
        collect(net(), loader(), "fc", tmp_path)
    with pytest.raises(ModelRunError, match=r"the loader gave no batch"):
        collect(net(), [], "0", tmp_path)
    with pytest.raises(ArgumentError, match=r"a parameter has no shape yet. Run the model once"):
        collect(nn.LazyLinear(3), loader(), "", tmp_path)


class UnusedBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "acts").write_text("")

    with pytest.raises(OptionError, match=r"acts is a file. Give a folder in to="):
        collect(net(), loader(), "0", tmp_path / "acts")


# -- reading


@pytest.fixture
def acts(tmp_path: Path) -> Activations:
    return collect(net(), loader(23), ["0", "2"], tmp_path)


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
    assert repr(acts["0"]) == "Layer('0', 23×6 torch.float32)"
    assert (acts["0"].ndim, len(acts["0"]), acts["0"].ids is acts.ids) == (2, 23, True)


def test_an_unknown_layer_is_said_with_the_nearest(acts: Activations) -> None:
    with pytest.raises(SelectionError, match=r"has no layer '00'. Nearest: '0'"):
        acts["00"]


def edit_index(folder: Path, **changes: Any) -> None:
    file = folder / "rank0" / "index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


DAMAGES = {
    "no json": lambda folder: (folder / "rank0" / "index.json").write_text("{"),
    "no text": lambda folder: (folder / "rank0" / "index.json").write_bytes(b"\xff\xfe\x00"),
    "a list": lambda folder: (folder / "rank0" / "index.json").write_text("[]"),
    "another version": lambda folder: edit_index(folder, format=99),
    "no rows": lambda folder: (folder / "rank0" / "0.npy").unlink(),
    "fewer rows": lambda folder: os.truncate(folder / "rank0" / "0.npy", 500),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_said_in_one_line(
    damage: str, acts: Activations, tmp_path: Path
) -> None:
    DAMAGES[damage](tmp_path)

    for read in (
        lambda: Activations(tmp_path)["0"],
        lambda: collect(net(), loader(23), ["0", "2"], tmp_path),
    ):
        with pytest.raises(OptionError, match=r"cannot be read .* or remove this one") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_folder_without_activations_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"has no activations. Give a folder that collect wrote"):
        Activations(tmp_path)


def test_an_unfinished_part_is_said(acts: Activations, tmp_path: Path) -> None:
    edit_index(tmp_path, done=False)

    unfinished = Activations(tmp_path)

    assert repr(unfinished) == "Activations(not whole)"
    with pytest.raises(OptionError, match=r"the part of rank 0 of 1, .*, is not finished"):
        unfinished["0"]


def test_rows_that_are_conjugated_lazily_are_written(tmp_path: Path) -> None:
    acts = collect(net(), loader(), "0", tmp_path, hook=lambda o: torch.complex(o, o).conj())

    rows = acts["0"][:]
    assert rows.dtype is torch.complex64
    assert torch.equal(rows.real, -rows.imag)


def test_rows_of_too_many_dimensions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HookError, match=r"rows of 23 dimensions, .*Give hook= a function"):
        collect(net(), loader(), "0", tmp_path, hook=lambda o: o.view(len(o), *[1] * 22, -1))


def test_ids_have_one_dimension(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="each sample of a batch needs a whole number"):
        collect(net(), loader(), "0", tmp_path, ids=lambda b: torch.zeros(len(b[0]), 1).long())
