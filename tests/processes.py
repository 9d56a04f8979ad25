"""Processes in which torch and hookkit are imported already: ranks, and one that may be killed.

They are forks of a server that has imported them, and nothing of the tests: a new interpreter would
spend two to four seconds on that.
"""

import datetime
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

multiprocessing.set_forkserver_preload(
    ["hookkit", "pytest", "torch._dynamo", "torch.distributed.fsdp", "accelerate", "torchmetrics"]
)


def started(work: Callable[..., object], *args: Any) -> BaseProcess:
    """A new process that runs `work(*args)`."""
    process = multiprocessing.get_context("forkserver").Process(target=work, args=args)
    process.start()
    return process


def in_ranks(work: Callable[[int, Path], object], folder: Path, n: int = 2) -> None:
    """Runs `work(rank, folder)` in `n` processes, a gloo group; raises what one of them raises."""
    torch.multiprocessing.start_processes(
        _rank, (work, folder, n), nprocs=n, start_method="forkserver"
    )


def _rank(rank: int, work: Callable[[int, Path], object], folder: Path, n: int) -> None:
    torch.set_num_threads(1)
    # as torchrun sets them, for accelerate
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    os.environ.update({name: str(value) for name, value in known.items()})
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=wait, rank=rank, world_size=n)
    # who ends before another has connected ends that other by an error of gloo's
    if not _meet("came", rank, folder, n):
        raise TimeoutError(f"rank {rank} of {n} waited for the others to connect")
    work(rank, folder)
    # without the destructors of gloo, which now and then abort ("terminate called without an active
    # exception") after all that a test looks at is done
    os._exit(0 if _meet("left", rank, folder, n) else 1)


def _meet(where: str, rank: int, folder: Path, n: int) -> bool:
    """Waits until all ranks have got here; False if a minute passes before that."""
    marks = [folder / f"{where}{r}" for r in range(n)]
    marks[rank].touch()
    until = time.monotonic() + 60
    while not all(mark.exists() for mark in marks):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
