"""A capture that `Hooks.save` wrote, as one side of a comparison.

So a port is compared with a reference that runs in another environment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hookkit.comparing.sides import WHO, Key, Side
from hookkit.errors import OptionError, missing_extra


def read(path: str | Path) -> Side:
    """The outputs in a file that `Hooks.save` wrote, containers after what is inside them.

    In a file of another writer a key is read as `name`.

    Raises:
        OptionError: the file is missing, damaged, or has no outputs.
        MissingExtraError: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise missing_extra("safetensors", "collect", "read a saved capture") from None
    try:
        with safe_open(path, framework="pt") as file:
            about = {k: _json(text) for k, text in (file.metadata() or {}).items()}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as why:
        raise OptionError(
            f"{WHO}: {path} cannot be read ({why}). Give a file that Hooks.save wrote."
        ) from why
    if (kind := about.get("kind", "forward")) != "forward":
        raise OptionError(
            f"{WHO}: {path} has what hooks of kind {kind!r} stored, which are no outputs. Save "
            "what hook_outputs stored."
        )
    keys = about.get("keys") or [(key, key, None, "") for key in sorted(tensors)]
    leaves = about.get("leaves") or {}
    side = Side(last=all(call is None for _, _, call, _ in keys))
    for text, name, call, inner in keys:
        leaf = leaves.get(name, "")
        module = name.removesuffix(leaf)
        side.paths[module] = (*side.paths.get(module, ()), leaf)
        side.types[module] = (about.get("types") or {}).get(name, "")
        key = Key(module, "output", call or 0)
        side.values.setdefault(key, []).append((leaf + inner, tensors[text]))
    side.values = {key: side.values[key] for key in _inside_out([*side.values])}
    return side


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
