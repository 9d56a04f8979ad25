"""`Hooks.save`: what was captured, in a safetensors file.

A tensor is called `name`, or `name:call` where each call was kept, with `/path` behind it in a
structure or an object, such as a cache, which is saved as it is by then. The metadata say of each
key what it stands for, in the order of the hooks, and have the structures in words, the modules'
classes, the hooks' paths into what a module returns, and the kind of the hooks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookkit.checks import check_path
from hookkit.errors import HookError, missing_extra
from hookkit.files import atomic_write
from hookkit.nested import describe, parts_in


def save(hooks: Any, path: str | Path) -> Path:
    """Writes what `hooks`, a `Hooks`, stored; the path."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise missing_extra("safetensors", "collect", "save a capture") from None
    path = check_path("Hooks.save", path)
    tensors, keys, structures = dict[str, Tensor](), list[Any](), dict[str, str]()
    for key, name, call, value in _values(hooks):
        structures[key] = describe(value)
        for inner, t in parts_in(value):
            if not isinstance(t, Tensor):
                continue
            text = key + (f"/{inner}" if inner else "")
            tensors[text] = _whole(t)
            keys.append((text, name, call, inner))
    if not tensors:
        raise HookError("Hooks.save: nothing was stored. Run the model in the block first.")
    every = dict(hooks.items())  # an error where two have the same name
    by_name = {name: every[name] for name in hooks.names}
    about = {
        "keys": keys,
        "structures": structures,
        "types": {name: type(h.module).__name__ for name, h in by_name.items()},
        "leaves": {name: h.leaf for name, h in by_name.items()},
        "kind": hooks.switch.kind,
    }
    with atomic_write(path) as file:
        try:
            save_file(tensors, file.name, {key: json.dumps(value) for key, value in about.items()})
        except KeyError as e:  # the dtype
            raise _unknown(e.args[0], tensors) from None
    return path


def _values(hooks: Any) -> Iterator[tuple[str, str, int | None, Any]]:
    """The key in the file, the name, the number of the call (None: the last), what was stored."""
    each = hooks.switch.keep == "all" if len(hooks) else False
    for name, h in zip(hooks.names, hooks.hooks, strict=True):
        for i, value in enumerate(h.calls if each else [h.stored]):
            yield (f"{name}:{i}", name, i, value) if each else (name, name, None, value)


def _unknown(dtype: torch.dtype, tensors: dict[str, Tensor]) -> HookError:
    key = next(key for key, t in tensors.items() if t.dtype == dtype)
    return HookError(
        f"Hooks.save: '{key}' is of {dtype}, which safetensors {version('safetensors')} cannot "
        "hold. Give its hook a function that returns another dtype, or try a newer safetensors."
    )


def _whole(t: Tensor) -> Tensor:
    """`t` as a file holds it: dense, contiguous, with memory of its own."""
    t = t.detach()
    if t.is_nested or t.is_quantized or t.layout is not torch.strided:
        kind = "nested" if t.is_nested else "quantized" if t.is_quantized else t.layout
        raise HookError(
            f"Hooks.save: safetensors holds dense tensors only, and this one is {kind}. Store "
            "what it is made of: give the hook a function that returns its values."
        )
    return t.cpu().clone(memory_format=torch.contiguous_format)
