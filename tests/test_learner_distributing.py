"""distrib_ctx: the Learner runs on accelerate's model, optimizer and loaders, then on its own."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from hookkit.callbacks import Callback
from hookkit.errors import MissingExtraError
from hookkit.testing import synth_learner

accelerate = pytest.importorskip("accelerate")


def quiet(**kwargs: Any) -> Any:
    learn = synth_learner(n_trn=4, n_val=2, **kwargs)
    learn.logger = lambda row: None
    return learn


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def test_alone_it_trains_as_without() -> None:
    torch.manual_seed(0)
    plain = quiet()
    torch.manual_seed(1)
    plain.fit(2)
    torch.manual_seed(0)
    learn = quiet()

    with learn.distrib_ctx(cpu=True) as same:
        assert same is learn
        torch.manual_seed(1)
        learn.fit(2)

    assert len(learn.recorder.losses) == len(plain.recorder.losses) == 8
    assert learn.n_steps == 8
    assert learn.recorder.values[-1][1] < plain.recorder.values[0][0]


def test_afterwards_everything_is_the_learners_own_again() -> None:
    learn = quiet()
    learn.create_opt()
    before = (learn.model, learn.opt, list(learn.dls.loaders), learn.dls.device, learn.logger)

    with pytest.raises(ZeroDivisionError), learn.distrib_ctx(cpu=True):
        learn.fit(1, cbs=Callback(after_loss=lambda cb: 1 / 0))

    after = (learn.model, learn.opt, list(learn.dls.loaders), learn.dls.device, learn.logger)
    assert all(a is b or a == b for a, b in zip(after, before, strict=True))
    assert learn.accelerator is None
    assert len(learn.cbs) == 2
    learn.fit(1)
    assert learn.n_steps == 4


def test_what_accelerate_cannot_prepare_leaves_the_learner_as_it_was(monkeypatch: Any) -> None:
    learn = quiet()
    device = learn.dls.device
    engine = accelerate.Accelerator(cpu=True)
    prepare = engine.prepare

    def refuse(*given: Any) -> Any:
        if given[0] is learn.dls.valid:
            raise ValueError("no such loader")
        return prepare(*given)

    monkeypatch.setattr(engine, "prepare", refuse)
    with pytest.raises(ValueError, match="no such loader"), learn.distrib_ctx(engine):
        pass

    assert (learn.accelerator, learn.dls.device) == (None, device)
    assert type(learn.opt) is torch.optim.SGD
    learn.fit(1)
    assert learn.n_steps == 4


def test_accumulation_is_accelerates() -> None:
    steps: list[bool] = []
    look = Callback(after_batch=lambda cb: steps.append(cb.stepped))
    look.run_valid = False
    learn = quiet(cbs=look)

    with learn.distrib_ctx(cpu=True, gradient_accumulation_steps=2):
        learn.fit(1)

    assert steps == [False, True, False, True]
    assert learn.n_steps == 2
    assert learn.steps_now


def test_without_accelerate_the_pip_command_is_reported(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)

    with pytest.raises(MissingExtraError, match=r'pip install "hookkit\[distributed\]"'):
        quiet().distrib_ctx().__enter__()


RANK = """
import torch, sys
from hookkit.testing import synth_learner
torch.manual_seed(0)
learn = synth_learner(n_trn=4, n_val=2)
with learn.distrib_ctx(cpu=True):
    learn.fit(1)
    rank, world = learn.accelerator.process_index, learn.accelerator.num_processes
    batches = len(learn.recorder.losses)
weights = [p.item() for p in learn.model.parameters()]
found = f"{rank}/{world} {batches} {learn.n_steps} {type(learn.model).__name__} {weights}"
sys.stderr.write(f"RESULT {found}\\n")
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_share_the_batches_and_end_with_the_same_weights(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    out = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120)

    results = sorted(
        line.split("RESULT ")[1] for line in out.stderr.splitlines() if "RESULT" in line
    )
    assert [r.split(" ")[0] for r in results] == ["0/2", "1/2"], out.stderr[-2000:]
    first, second = (r.split(" ", 1)[1] for r in results)
    assert first == second
    assert first.startswith("2 2 RegModel")
    assert out.stdout.count("[0, ") == 1
