"""Messages for a selector that matches nothing: what is near it, and what to write instead.

Builds on `patterns`.
"""

from __future__ import annotations

import re
from collections import Counter

from torch import nn

from hookkit.errors import nearest
from hookkit.modules import children, find
from hookkit.selecting.patterns import ModelNames, parts

# A key without its quotes: head[logits]. And the brackets at the end of a name: attn[0]['x'].
_BARE_KEY = re.compile(r"(.*?)\[([^\W\d]\w*)\](.*)", re.DOTALL)
_BRACKETS = re.compile(r"""(.*?)((?:\[-?\d+\]|\['[^']*'\]|\["[^"]*"\])*)""", re.DOTALL)


def unknown(model: ModelNames, text: str) -> str:
    """The message for a name or glob that matches nothing, with what is near it."""
    owner, _, last = text.rpartition(".")
    found = find(model.root, owner)
    if found is not None and last in tensors_of(found[1]):
        return (
            f'no module matches "{text}": it is a tensor of the {type(found[1]).__name__} '
            f'"{owner}", and hooks go on modules. Use "{owner}", or hook_tensor for a tensor.'
        )
    if (bare := _BARE_KEY.fullmatch(text)) and find(model.root, bare[1]) is not None:
        name, key, rest = bare.groups()
        return (
            f'no module matches "{text}". A key of an output is written in quotes: '
            f"\"{name}['{key}']{rest}\"."
        )
    name, leaf = _BRACKETS.fullmatch(text).groups()  # type: ignore[union-attr]
    corrected = _corrected(model, name) or _corrected(model, text)
    hits = [name for name, _ in model.named(corrected)] if corrected else _similar(model, text)
    if corrected and len(hits) == 1:  # its siblings may be as near
        parent, _, _ = hits[0].rpartition(".")
        siblings = [n for n in model.names.values() if n.rpartition(".")[0] == parent and n]
        hits = list(dict.fromkeys([*hits, *nearest(name, siblings)]))[:3]
    kind = _of_class(model, last, whole=bool(hits))
    if not hits:
        return f'no module matches "{text}". {kind or listing(model)}'
    near = ", ".join(f'"{name}"' for name in hits)
    if len(hits) > 3:
        near = f'"{hits[0]}" … "{hits[-1]}" ({len(hits)})'
    use = f'Use "{corrected or hits[0]}{leaf if corrected else ""}", or'
    return (
        f'no module matches "{text}". Nearest: {near}. {use} select(model) to list all '
        f"{model.n_names} names.{' ' if kind else ''}{kind}"
    )


def _of_class(model: ModelNames, word: str, whole: bool) -> str:
    """A sentence on the modules whose class is called `word`, or begins with it; "" if none."""
    word = word.replace("_", "").lower()
    kinds = Counter(type(m) for _, m, first in model.places if first)
    names = {kind: kind.__name__.lower() for kind in kinds}
    hits = [kind for kind, name in names.items() if word in (name, f"{name}s")]
    if not hits and not whole and len(word) > 2:
        hits = [kind for kind, name in names.items() if name.startswith(word)]
    if not hits:
        return ""
    kind, n = hits[0], kinds[hits[0]]
    spelt = f"nn.{kind.__name__}" if getattr(nn, kind.__name__, 0) is kind else kind.__name__
    few = "1 module is" if n == 1 else f"{n} modules are"
    return f"{few} of class {kind.__name__}: select(model, {spelt}) gives every module of it."


def _corrected(model: ModelNames, text: str) -> str | None:
    """`text` with each part that matches nothing replaced by the child's name nearest to it."""
    words = parts(text)
    for i, word in enumerate(words):
        if model.named(".".join(words[: i + 1])):
            continue
        above = model.named(".".join(words[:i]))
        keys = dict.fromkeys(key for _, module in above for key, _ in children(module))
        if word.isdigit() and keys and all(key.isdigit() for key in keys):
            words[i] = "*"
        elif near := nearest(word, keys, n=1):
            words[i] = near[0]
        else:
            return None
    return ".".join(words)


def _similar(model: ModelNames, text: str) -> list[str]:
    """Names that end as `text` does, else the ones that look most like it."""
    names = [name for name in model.names.values() if name]
    return [n for n in names if n.endswith(f".{text}")] or nearest(text, names)


def listing(model: ModelNames) -> str:
    """For a message without a better hint: what names look like here."""
    some = [f'"{name}"' for name in model.names.values() if name][:3]
    if not some:
        return 'It has no modules inside it: select(model, "") is the model itself.'
    return f"Names are like {', '.join(some)}: select(model) lists all {model.n_names}."


def tensors_of(module: nn.Module) -> set[str]:
    """Names of a module's parameters and buffers; no attribute is read, which could run code."""
    tables = module.__dict__.get("_parameters"), module.__dict__.get("_buffers")
    return {name for table in tables if isinstance(table, dict) for name in table}
