"""What hookkit writes is whole: the new file, or the one that was there."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from torch import nn

from hookkit import Learner, report
from hookkit._core import files
from hookkit._core.files import atomic_write
from hookkit.records import Record, Run

Write = Callable[[Path], object]


def record() -> Record:
    axis = [np.arange(2)] * 3 + [np.ones(2, np.int64)]
    return Record("activation", ("fc",), ("Linear",), *axis, {"mean": np.ones((1, 2))})


def picture(path: Path) -> None:
    plt = pytest.importorskip("matplotlib.figure")
    from hookkit import plotting

    plotting.save(plt.Figure(), path)


def page(path: Path) -> None:
    report(Run(activations=record()), path)


def table(path: Path) -> object:
    pytest.importorskip("pandas")
    return record().to_csv(path)


WRITERS: dict[str, Write] = {
    "run.npz": lambda path: record().save(path),
    "run.csv": table,
    "net.pth": lambda path: Learner(None, nn.Linear(2, 2)).save(path.absolute()),
    "picture.png": picture,
    "page.html": page,
}
writers = pytest.mark.parametrize(("name", "write"), WRITERS.items(), ids=WRITERS)


class Full:
    """A file on a disk with room for so many bytes, or one whose writer is interrupted there."""

    def __init__(self, file: IO[Any], room: int, error: BaseException) -> None:
        self._file, self._room, self._error = file, room, error

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise self._error
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


@writers
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl_c"]
)
def test_a_write_that_fails_leaves_the_old_file(
    name: str, write: Write, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path := tmp_path / name)
    before, opened = path.read_bytes(), files._opened
    monkeypatch.setattr(files, "_opened", lambda *how: Full(opened(*how), 30, error))

    with pytest.raises((OSError, KeyboardInterrupt, RuntimeError)):
        write(path)

    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [name]


@writers
def test_a_file_is_written_over_a_whole_one(name: str, write: Write, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    write(path := tmp_path / "made" / name)
    write(path)

    assert os.listdir(tmp_path / "made") == [name]
    assert path.stat().st_size


def test_a_new_file_gets_the_usual_permissions_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    usual, new, old = tmp_path / "usual", tmp_path / "new", tmp_path / "old"
    usual.touch()
    old.touch()
    old.chmod(0o640)

    for path in (new, old):
        with atomic_write(path) as file:
            file.write(b"x")

    assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link", tmp_path / "far" / "target"
    target.write_text("old")
    link.symlink_to(target)

    with atomic_write(link, text=True) as file:
        file.write("new")

    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_written_to_directly(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    with atomic_write(pipe) as file:
        file.write(b"through")

    assert os.read(reader, 100) == b"through"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=tmp_path.name), atomic_write(tmp_path):
        pass


def test_where_nothing_can_be_written_the_error_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)

    with (
        pytest.raises(OSError, match=r"Read-only file system: '.*run\.npz'"),
        atomic_write(tmp_path / "run.npz"),
    ):
        pass
