"""A capture in a safetensors file: what `Hooks.save` writes and `compare_models` reads.

A tensor is called `name`, or `name:call` where each call was kept, with `/path` behind it in a
structure. The metadata have the keys in their order, and the modules' classes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from hookkit.comparing.sides import Key
from hookkit.errors import OptionError, missing_extra


class Saved:
    """The tensors of a file, read when they are needed.

    Args:
        path: of the file.

    Raises:
        OptionError: it is missing, damaged, or not a safetensors file.
        MissingExtraError: safetensors is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise missing_extra("safetensors", "collect", "read a saved capture") from None
        try:
            opened: Any = safe_open
            self.file: Any = opened(path, framework="pt")
        except (OSError, SafetensorError) as why:
            raise OptionError(
                f"compare_models: {path} cannot be read ({why}). Give a file that Hooks.save wrote."
            ) from why
        about = self.file.metadata() or {}
        self.types: dict[str, str] = json.loads(about.get("types", "{}"))
        self._values: dict[Key, list[tuple[str, str]]] = {}  # with paths, and keys of the file
        for text in json.loads(about.get("keys", "null")) or sorted(self.file.keys()):
            key, path_in = split(text)
            self._values.setdefault(key, []).append((path_in, text))
        self._values = {key: self._values[key] for key in _inside_out(list(self._values))}

    @property
    def keys(self) -> list[Key]:
        """The outputs' keys, in order."""
        return list(self._values)

    def read(self, key: Key) -> list[tuple[str, Tensor]]:
        """The tensors of one call, with their paths in what the module returned."""
        return [(path, self.file.get_tensor(text)) for path, text in self._values.get(key, ())]


def _inside_out(keys: list[Key]) -> list[Key]:
    """`keys` in their order, but a container's after those of what is inside it."""
    last: dict[str, int] = {}
    for i, key in enumerate(keys):
        parts = key.name.split(".") if key.name else []
        last |= {".".join(parts[:n]): i for n in range(len(parts) + 1)}
    return sorted(keys, key=lambda key: (last[key.name], -len(key.name)))


def split(text: str) -> tuple[Key, str]:
    """Module, call and path of a tensor in a file.

    >>> split("blocks.3.attn:1/[0]")
    (Key(name='blocks.3.attn', what='output', call=1), '[0]')
    """
    whole, _, path = text.partition("/")
    name, colon, call = whole.rpartition(":")
    key = Key(name, "output", int(call)) if colon and call.isdigit() else Key(whole, "output", 0)
    return key, path
