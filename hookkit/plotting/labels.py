"""Names of layers and parameters that fit where they are drawn, in the order of the model.

Nothing here imports matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hookkit.records import Record
from hookkit.records import label as full_label


def shorten(name: str, width: int = 24) -> str:
    """`name` in at most `width` characters: its end, and the last number before that.

    Blocks are alike but for their numbers. A name of one part is cut in the middle.

    >>> shorten("layers.11.self_attn.out_proj", 20), shorten("a_layer_with_a_name_of_its_own", 20)
    ('…11…out_proj', 'a_layer_w…of_its_own')
    """
    if len(name) <= width:
        return name
    if "." not in name:
        half = width // 2
        return f"{name[: width - half - 1]}…{name[-half:]}"
    end = tail(name, width)
    lost = [part for part in name[: 1 - len(end)].split(".") if part.isdigit()]
    if not lost or len(lost[-1]) > width // 2:
        return end
    return f"…{lost[-1]}{tail(name, width - len(lost[-1]) - 1)}"


def listed(names: Sequence[str], width: int) -> str:
    """As many of `names` as fit in about `width` characters, and how many there are besides.

    >>> listed(["conv1", "conv2", "fc"], 12), listed(["fc"], 12)
    ('conv1, conv2 and 1 more', 'fc')
    """
    fit = [name for i, name in enumerate(names) if len(", ".join(names[: i + 1])) <= width]
    fit = fit or [shorten(name, width) for name in names[:1]]
    more = len(names) - len(fit)
    return ", ".join(fit) + (f" and {more} more" if more else "")


def tail(name: str, width: int) -> str:
    """The end of `name` in at most `width` characters, cut at a dot unless little would be left.

    >>> tail("transformer.h.11.attn.q_proj", 18), tail("vision_language_projector.weight", 24)
    ('…h.11.attn.q_proj', '…nguage_projector.weight')
    """
    if len(name) <= width:
        return name
    end = name[1 - width :]
    whole = end if name[-len(end) - 1] == "." else end.partition(".")[2]
    return f"…{whole if 3 * len(whole) > width else end}"


def layer_ticks(
    names: Sequence[str], types: Sequence[str], most: int = 16, width: int = 34
) -> list[tuple[int, str]]:
    """Row and label of the layers to name on an axis, at most about `most`, evenly readable.

    All of them where they fit; else the first layer of each block (`h.0`, `h.1`, …), at the
    finest level that still fits, or of every second, fourth, fifth, tenth block. The first label is
    whole; what it shares with the other blocks stands there only.

    >>> layer_ticks(["0", "1"], ["Conv2d", "ReLU"])
    [(0, '0 Conv2d'), (1, '1 ReLU')]
    >>> names = [f"net.h.{i}.{part}" for i in range(8) for part in ("attn", "mlp")]
    >>> layer_ticks(names, ["Linear"] * 16, most=4)
    [(0, 'net.h.0'), (4, '…h.2'), (8, '…h.4'), (14, '…h.7')]
    """
    if len(names) <= most:
        return [(i, label(names[i], types[i], width)) for i in range(len(names))]
    paths = [name.split(".") for name in names]
    shown: list[int] = []
    heads = paths
    for depth in range(1, max(map(len, paths)) + 1):
        heads = [path[:depth] for path in paths]
        shown = _apart(heads, len(names) / most)
        if len(shown) * 3 >= most:
            break
    blocks = [heads[i] for i in shown if i == 0 or heads[i][-1].isdecimal()]
    shared = [a for a, *b in zip(*blocks, strict=False) if all(a == each for each in b)]
    return [
        # a block has no type
        (i, label(_end(heads[i], shared * (i > 0)), types[i] * (heads[i] == paths[i]), width))
        for i in shown
    ]


def _apart(heads: list[list[str]], apart: float) -> list[int]:
    """Where blocks start, those that are `apart`: both ends, regular numbers, then the others."""
    starts = [i for i in range(len(heads)) if i == 0 or heads[i] != heads[i - 1]]
    numbers = {i: int(heads[i][-1]) for i in starts if heads[i][-1].isdecimal()}
    first, regular = min(numbers.values(), default=0), list[int]()
    for every in (each * 10**power for power in range(9) for each in (1, 2, 4, 5)):
        regular = [i for i, number in numbers.items() if (number - first) % every == 0]
        if all(later - i >= apart for i, later in pairwise(regular)):
            break
    kept: list[int] = []
    for i in (starts[0], starts[-1], *regular, *(i for i in starts if i not in numbers)):
        if all(abs(i - other) >= apart for other in kept):
            kept.append(i)
    return sorted(kept)


def _end(path: list[str], shared: list[str]) -> str:
    """`path` without the parts that are `shared`, but for the name of a number: `…h.2`."""
    if path[: len(shared)] != shared:
        return ".".join(path)
    cut = min(len(shared), len(path) - (2 if path[-1].isdecimal() else 1))
    return ("…" if cut > 0 else "") + ".".join(path[max(0, cut) :])


def label(name: str, kind: str, width: int = 34) -> str:
    """A layer's name and type in at most `width` characters; of a long name the end.

    >>> label("0", "Conv2d"), label("model.layers.11.self_attn.out_proj", "Linear", 24)
    ('0 Conv2d', '…11…out_proj Linear')
    """
    whole = full_label(name, kind)
    if len(whole) <= width:
        return whole
    kind = shorten(kind, max(8, width // 2))
    return full_label(shorten(name or "(model)", max(8, width - len(kind) - 1)), kind)


def row_label(record: Record, row: int, width: int = 200) -> str:
    """`label` of a row of `record`."""
    return label(record.names[row], record.types[row], width)
