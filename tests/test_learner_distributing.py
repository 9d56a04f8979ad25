"""distrib_ctx: the Learner runs on accelerate's model, optimizer and loaders, then on its own."""

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import quiet as quiet_learner

from hookkit.callbacks import Callback
from hookkit.errors import MissingExtraError, OptionError

accelerate = pytest.importorskip("accelerate")
PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "processes.md"


quiet = partial(quiet_learner, n_trn=4, n_val=2)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def test_afterwards_everything_is_the_learners_own_again_also_if_it_cannot_begin(
    monkeypatch: Any,
) -> None:
    def owned() -> list[Any]:
        dls = learn.dls
        return [learn.model, learn.opt, *dls.loaders, dls.device, learn.logger, learn.accelerator]

    def refuse(*given: Any) -> Any:
        if given[0] is learn.dls.valid:
            raise ValueError("no such loader")
        return prepare(*given)

    learn, engine = quiet(), accelerate.Accelerator(cpu=True)
    prepare = engine.prepare
    learn.create_opt()
    before = owned()

    with pytest.raises(ZeroDivisionError), learn.distrib_ctx(cpu=True):
        learn.fit(1, cbs=Callback(after_loss=lambda cb: 1 / 0))
    assert all(a is b or a == b for a, b in zip(owned(), before, strict=True))
    assert len(learn.cbs) == 2

    monkeypatch.setattr(engine, "prepare", refuse)
    with pytest.raises(ValueError, match="no such loader"), learn.distrib_ctx(engine):
        pass
    assert all(a is b or a == b for a, b in zip(owned(), before, strict=True))
    learn.fit(1)
    assert learn.n_steps == 4


def test_where_there_is_no_accelerate_or_it_sees_one_process_of_several_it_is_refused(
    monkeypatch: Any,
) -> None:
    engine = accelerate.Accelerator()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"2 processes were started, and accelerate sees one "):
        quiet().distrib_ctx(engine).__enter__()

    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r'pip install "hookkit\[distributed\]"'):
        quiet().distrib_ctx().__enter__()


def launchers(folder: Path) -> dict[str, list[str]]:
    """How docs/how-to/processes.md starts two processes of a script."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "hosts").write_text("127.0.0.1 slots=2\n")
    by_mpi = ["--cpu", f"--mpirun_hostfile={folder / 'hosts'}", f"--main_process_port={port}"]
    return {
        "accelerate launch": [*launch, "--multi_gpu", f"--main_process_port={port}"],
        "accelerate launch over MPI": [*launch, *by_mpi],
    }


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("way", ["accelerate launch", "accelerate launch over MPI"])
def test_the_script_of_the_page_runs_under(way: str, tmp_path: Any) -> None:
    if way.endswith("MPI") and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    code = re.findall(r"^```py\n(.*?)^```\n", PAGE.read_text(), re.M | re.S)[0]
    code += """
found = [p.tolist() for p in learn.model.parameters()], preds.tolist(), learn.recorder.values
with open(f"seen{torch.distributed.get_rank()}", "w") as file:
    file.write(repr((type(learn.model).__name__, learn.n_steps, *found)))
"""
    (tmp_path / "train.py").write_text(code)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if torch.accelerator.is_available():
        env["ACCELERATE_USE_CPU"] = "true"

    out = subprocess.run(
        [*launchers(tmp_path)[way], "train.py"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert out.returncode == 0, out.stderr[-2000:]
    first, second = ((tmp_path / f"seen{rank}").read_text() for rank in (0, 1))
    assert first == second
    kind, n_steps, _, preds, rows = ast.literal_eval(first)
    assert (kind, n_steps, len(preds), len(rows)) == ("Sequential", 3 * 8, 13, 3)
    printed = out.stdout.splitlines()
    assert [line.split()[0] for line in printed[:4]] == ["epoch", "0", "1", "2"]
    assert "2 layers, 24 steps" in "".join(printed[4:])
