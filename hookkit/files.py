"""Writing files whole: the new one takes the old one's place in one move, or the old one stays.

Everything that hookkit writes goes through `write_aside`. Builds on `interrupts`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE
from typing import IO, Any

from hookkit.interrupts import block


@block
def write_aside(path: str | Path, *, text: bool = False) -> Iterator[IO[Any]]:
    """A file to write to, which becomes `path` at the end of the `with` block.

    Until then it stands beside `path`, as `.hookkit-….tmp`. After an error or Ctrl-C it is removed
    and what was at `path` is untouched; a process that is killed leaves it there. Missing parent
    folders are made, a symbolic link is followed, an existing file keeps its permissions. What is
    no regular file (a pipe, `/dev/stdout`) is written to directly.

    Args:
        path: of the file.
        text: for text, in UTF-8, with line ends as they are written; otherwise bytes.

    Raises:
        OSError: as `open` does: a folder that cannot be written to, a full disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with write_aside(Path(folder, "a.txt"), text=True) as file:
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
    aside = target.with_name(f".hookkit-{secrets.token_hex(6)}.tmp")
    try:
        with _opened(aside, "x", text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a crash may leave the new name on an empty file
        if target.exists():
            aside.chmod(S_IMODE(target.stat().st_mode))
        aside.replace(target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _opened(path: Path, mode: str, text: bool) -> IO[Any]:
    return path.open(mode, encoding="utf-8", newline="") if text else path.open(f"{mode}b")
