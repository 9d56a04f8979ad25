"""A capture in a safetensors file: what `Hooks.save` writes and `compare_models` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from hookkit.comparing.sides import WHO, Key
from hookkit.errors import OptionError, missing_extra


class Saved:
    """The tensors of a file, read when they are needed.

    Args:
        path: of the file. One that something else wrote has its keys read as `Hooks.save` writes
            them: `name`, `name:call`, `name:call/path`.

    Attributes:
        types: the modules' classes by name, `""` where they are not known.
        leaves: the paths in what the modules return that are meant, by name.
        kind: of the hooks, `"forward"` for outputs.
        named: whether the hooks had names, not positions alone.
        last: whether only the last call of each module was stored.

    Raises:
        OptionError: it is missing, damaged, or not a safetensors file.
        MissingExtraError: safetensors is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, _opened(path)
        about = {key: _json(text) for key, text in (self.file.metadata() or {}).items()}
        keys = about.get("keys") or [(text, *split(text)) for text in sorted(self.file.keys())]
        self._values: dict[Key, list[tuple[str, str]]] = {}  # with paths, and keys of the file
        for text, name, call, inner in keys:
            self._values.setdefault(Key(name, "output", call or 0), []).append((inner, text))
        self._values = {key: self._values[key] for key in _inside_out(list(self._values))}
        self.types = {k.name: "" for k in self._values} | (about.get("types") or {})
        self.leaves: dict[str, str] = about.get("leaves") or {}
        self.kind, self.named = about.get("kind", "forward"), about.get("named", True)
        self.last = all(call is None for _, _, call, _ in keys)

    @property
    def keys(self) -> list[Key]:
        """The outputs' keys, in order."""
        return list(self._values)

    def read(self, key: Key) -> list[tuple[str, Tensor]]:
        """The tensors of one call, with their paths in what the module returned."""
        return [(path, self.file.get_tensor(text)) for path, text in self._values.get(key, ())]

    def forget_all_but_last(self) -> None:
        """Leaves of each module the last call alone, as the first."""
        self._values = {key._replace(call=0): value for key, value in self._values.items()}


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise missing_extra("safetensors", "collect", "read a saved capture") from None
    opened: Any = safe_open
    try:
        return opened(path, framework="pt")
    except (OSError, SafetensorError) as why:
        raise OptionError(
            f"{WHO}: {path} cannot be read ({why}). Give a file that Hooks.save wrote."
        ) from why


def _json(text: str) -> Any:
    """What a metadata entry holds; None where something else wrote it."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _inside_out(keys: list[Key]) -> list[Key]:
    """`keys` in their order, but a container's after those of what is inside it."""
    last: dict[str, int] = {}
    for i, key in enumerate(keys):
        parts = key.name.split(".") if key.name else []
        last |= {".".join(parts[:n]): i for n in range(len(parts) + 1)}
    return sorted(keys, key=lambda key: (last[key.name], -len(key.name)))


def split(text: str) -> tuple[str, int | None, str]:
    """Module, call and path of a tensor in a file that does not say them.

    >>> split("blocks.3.attn:1/[0]"), split("head")
    (('blocks.3.attn', 1, '[0]'), ('head', None, ''))
    """
    whole, _, path = text.partition("/")
    name, colon, call = whole.rpartition(":")
    return (name, int(call), path) if colon and call.isdecimal() else (whole, None, path)
