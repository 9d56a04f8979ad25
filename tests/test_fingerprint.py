"""A fingerprint has each step that ended, in any loop; and it sees what a tensor holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookkit import DataLoaders, Fingerprint, Learner, compare_runs, watch
from hookkit.errors import HookError, OptionError
from hookkit.inspection.run_file import Key, RunStep, read_run
from hookkit.recorders import sketch as sketches
from hookkit.recorders.sketch import sketch
from hookkit.testing import mlp, synth_learner


def steps_of(path: Any) -> dict[int, RunStep]:
    steps, is_cut = read_run(path)
    assert not is_cut
    return steps


def train(
    model: nn.Module, path: Any, n: int = 3, *cbs: Any, accumulate: int = 1, **how: Any
) -> None:
    torch.manual_seed(1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Fingerprint(path, **how), *cbs):
        for _ in range(n):
            for _ in range(accumulate):
                model(torch.randn(8, 4)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(4, 6, 2)


# --- the sketch of a tensor


def hash_of(t: Tensor) -> int:
    found = sketch(t)
    assert found is not None
    return int(found[0])


def numbers_of(t: Tensor) -> Tensor:
    found = sketch(t)
    assert found is not None
    return found[1:].to(torch.int32).view(torch.float32)


def test_a_hash_sees_every_value_and_their_order() -> None:
    x = torch.randn(70, 300)
    last, first = x.clone(), x.clone()
    last[-1, -1] += 1e-6
    first[0, 0] = -first[0, 0]

    assert len({hash_of(t) for t in (x, last, first, x.flip(0), x.flip(1), x.roll(1, 1))}) == 6
    assert hash_of(x.t().contiguous().t()) == hash_of(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("n", [0, 3, 4096, 70001])
def test_tensor_operations_give_the_sketch_that_numpy_gives(
    dtype: torch.dtype, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_device(words: Tensor, x: Tensor, i: int) -> tuple[int, Any]:
        value, numbers = sketches._on_device(words, x, i)
        return int(value), numbers.numpy()

    monkeypatch.setattr(sketches, "_PART", 2**15)  # several parts
    x = torch.randint(-4, 5, (n,)).to(dtype)
    value, numbers = hash_of(x), numbers_of(x)

    monkeypatch.setattr(sketches, "_on_cpu", on_device)
    assert hash_of(x) == value
    torch.testing.assert_close(numbers_of(x), numbers)


def test_projections_tell_how_far_two_tensors_are_apart() -> None:
    a = torch.randn(200, 100)
    shares = []
    for _ in range(50):
        d = torch.randn(200, 100) * 1e-3
        gap = numbers_of(a + d)[1:] - numbers_of(a)[1:]
        shares.append(float(gap.square().mean() / d.square().sum()))

    assert 0.7 < sum(shares) / 50 < 1.3


# --- steps


def test_a_step_has_all_that_it_computed(tmp_path: Path) -> None:
    train(net(), tmp_path / "a", 2)

    step = steps_of(tmp_path / "a")[1]
    what = {key.what for key in step.seen}
    assert what == {"before", "random", "input", "output", "grad", "param_grad", "weight"}
    assert [c.name for c in step.layout.trees[0].ended] == ["0", "1", "2", ""]
    assert step.settings["lr of group 0"] == 0.1
    assert step.seen[Key("output", 0, "0", 0, "")].shape == (8, 6)
    grads = [key.name for key in step.seen if key.what == "grad"]
    assert grads == ["2", "1", "0"]


def test_every_counts_optimizer_steps(tmp_path: Path) -> None:
    train(net(), tmp_path / "a", 7, every=3, accumulate=2)

    steps = steps_of(tmp_path / "a")
    assert [*steps] == [0, 3, 6]
    assert all(len(step.layout.trees) == 2 for step in steps.values())


def test_a_forward_that_does_not_train_is_not_recorded(tmp_path: Path) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Fingerprint(tmp_path / "a")):
        loss = model(torch.ones(2, 4)).pow(2).mean()
        with torch.no_grad():
            model.eval()(torch.ones(5, 4))
            model[0](torch.ones(5, 4))
        model.train()
        loss.backward()
        opt.step()

    step = steps_of(tmp_path / "a")[0]
    assert {seen.shape[0] for key, seen in step.seen.items() if key.what == "input"} == {2}


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_is_no_second_call(tmp_path: Path, reentrant: bool) -> None:
    train(Checkpointed(reentrant), tmp_path / "a", 1)

    seen = steps_of(tmp_path / "a")[0].seen
    outputs = [(key.name, key.call) for key in seen if key.what == "output"]
    grads = [(key.name, key.call) for key in seen if key.what == "grad"]
    assert outputs == [(f"inner.{i}", 0) for i in range(3)] + [("inner", 0), ("", 0)]
    assert grads == [(f"inner.{i}", 0) for i in (2, 1, 0)]


def test_each_call_of_a_shared_module_is_a_row(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    train(nn.Sequential(shared, nn.Tanh(), shared), tmp_path / "a", 1)

    seen = steps_of(tmp_path / "a")[0].seen
    assert [key.call for key in seen if key.what == "output" and key.name == "0"] == [0, 1]
    assert [key.call for key in seen if key.what == "grad" and key.name == "0"] == [0, 1]


@pytest.mark.slow
@pytest.mark.traces_gradients
def test_a_compiled_model_has_the_rows_of_an_eager_one(tmp_path: Path) -> None:
    train(net(), tmp_path / "eager")
    train(torch.compile(net(), backend="aot_eager"), tmp_path / "compiled")  # type: ignore[arg-type]

    eager, compiled = (steps_of(tmp_path / name)[2] for name in ("eager", "compiled"))
    assert eager.seen.keys() == compiled.seen.keys()
    assert compare_runs(tmp_path / "eager", tmp_path / "compiled", rtol=1e-5).first is None


def test_each_optimizer_of_a_step_has_its_gradients_and_settings(tmp_path: Path) -> None:
    g, d = nn.Linear(2, 4), nn.Linear(4, 1)
    opts = [torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.Adam(d.parameters(), lr=0.2)]
    with watch({"g": g, "d": d}, opts, Fingerprint(tmp_path / "a")):
        for _ in range(2):
            d(g(torch.ones(3, 2)).detach()).mean().backward()
            opts[1].step()
            d.zero_grad()
            d(g(torch.ones(3, 2))).mean().backward()
            opts[0].step()
            g.zero_grad()

    steps = steps_of(tmp_path / "a").values()
    names = {key.name for step in steps for key in step.seen if key.what == "param_grad"}
    assert names == {"g.weight", "g.bias", "d.weight", "d.bias"}
    assert {v for step in steps for k, v in step.settings.items() if k.startswith("lr")} == {
        0.1,
        0.2,
    }


def test_a_learner_records_what_a_watched_loop_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]
    model, recorder = net(), Fingerprint(tmp_path / "learner")
    learn = Learner(DataLoaders(batches), net(), nn.MSELoss(), torch.optim.SGD, cbs=recorder)
    with learn.no_logging():
        learn.fit(1, 0.1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, Fingerprint(tmp_path / "watched")):
        for x, y in batches:
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()

    assert compare_runs(tmp_path / "learner", tmp_path / "watched").first is None


# --- the file


def test_a_step_is_in_the_file_as_soon_as_it_has_ended(tmp_path: Path) -> None:
    path, model = tmp_path / "folder" / "a", net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    with watch(model, opt, Fingerprint(path)):
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            opt.step()
            counts.append(len(steps_of(path)))

    assert counts == [1, 2, 3]
    assert sum("layout" in json.loads(line) for line in path.read_text().splitlines()) == 1


def _in_rank(rank: int, folder: Path) -> None:
    model = net()
    train(nn.parallel.DistributedDataParallel(model), folder / "a")


@pytest.mark.slow
def test_each_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    in_ranks(_in_rank, tmp_path)

    assert compare_runs(tmp_path / "a.rank0", tmp_path / "a.rank1").first is None
    with pytest.raises(OptionError, match=r"give|such as .*a\.rank0"):
        compare_runs(tmp_path / "a", tmp_path / "a")


def test_another_fingerprint_is_overwritten_and_another_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for n in (3, 1):
        train(net(), tmp_path / "a", n)

    assert len(steps_of(tmp_path / "a")) == 1
    with pytest.raises(OptionError, match="there is a file that is no fingerprint"):
        train(net(), tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_second_run_of_the_same_recorder_is_appended_or_an_error(tmp_path: Path) -> None:
    recorder = Fingerprint(tmp_path / "a")
    learn = synth_learner(n_trn=2, cbs=recorder)
    with learn.no_logging():
        learn.fit(1)
        learn.fit(1)

    assert [*steps_of(tmp_path / "a")] == [0, 1, 2, 3]
    with pytest.raises(HookError, match="has recorded another run"), watch(net(), None, recorder):
        pass
