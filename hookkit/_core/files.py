"""Write files whole: `atomic_write` replaces one, `append_lines` adds to one."""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE
from typing import IO, Any


@contextmanager
def atomic_write(path: str | Path, *, text: bool = False) -> Iterator[IO[Any]]:
    """Open a file to write to, which becomes `path` at the end of the `with` block.

    Until then it is `.hookkit-….tmp` in the same folder. After an error it is removed, and the file
    at `path` is unchanged; a process that is killed leaves it there. Missing parent folders are
    made, a symbolic link is followed, an existing file keeps its permissions. A device such as
    `/dev/stdout` is written to directly.

    Args:
        path: of the file.
        text: in UTF-8, with line ends as they are written; otherwise bytes.

    Raises:
        OSError: as `open` does: a folder that cannot be written to, a full disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "a.txt"), text=True) as file:
    ...         _ = file.write("whole")
    ...     Path(folder, "a.txt").read_text()
    'whole'
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with _opened(target, "w", text) as file:
            yield file
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".hookkit-{secrets.token_hex(6)}.tmp")
    try:
        with _opened(temporary, "x", text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a crash may leave the new name on an empty file
        if target.exists():
            temporary.chmod(S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except BaseException as error:
        with suppress(OSError):  # a read-only file system refuses this too
            temporary.unlink()
        if isinstance(error, OSError):  # which may say nothing of a file, or name the other one
            error.filename = str(target)
        raise


def _opened(path: Path, mode: str, text: bool) -> IO[Any]:
    return path.open(mode, encoding="utf-8", newline="") if text else path.open(f"{mode}b")


def first_line(path: str | Path) -> str:
    """Return the first line of a text file, without its end; "" if the file is missing or empty."""
    path = Path(path)
    if not path.exists():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().rstrip("\n")


def append_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Add lines to a text file, each by one write, so that a killed process leaves whole lines.

    Missing parent folders and the file are made. If the file ends within a line, that line is ended
    first.

    Raises:
        OSError: as `open` does: a folder that cannot be written to, a full disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for line in "ab": append_lines(Path(folder, "a.txt"), [line])
    ...     Path(folder, "a.txt").read_text()
    'a\\nb\\n'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        start = b"" if file.read(1) in (b"", b"\n") else b"\n"
        written = 0
        try:
            for line in lines:
                data = start + line.encode() + b"\n"
                n, start = file.write(data), b""
                written += n
                if n < len(data):  # a full disk takes a part of it
                    raise OSError(28, "No space left on device", str(path))
        except BaseException:
            if file.seek(0, os.SEEK_END) == end + written:  # no other process has added lines
                file.truncate(end)
            raise


def check_zip(file: IO[bytes]) -> None:
    """Raise a ValueError if a member of a zip file fails its CRC."""
    with zipfile.ZipFile(file) as parts:
        if (bad := parts.testzip()) is not None:
            raise ValueError(f"{bad} has another check sum")
    file.seek(0)
