"""The lines of a drawn summary: rows as a tree, equal siblings as one line, cut at a depth.

A line stands for `times` rows of the model, so that the sum of `shown × times` over all lines is
the total of the summary, whatever is folded or cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hookkit.summaries.result import NUMBERS, Row, Totals


@dataclass
class Node:
    """A row with the rows below it; `fold` siblings like it are drawn as this one."""

    row: Row
    label: str
    children: list[Node] = field(default_factory=list)
    fold: int = 1
    kind: int = 0  # equal for subtrees that look alike
    size: int = 1  # rows in the subtree


@dataclass(frozen=True)
class Line:
    """One line of a drawing.

    Attributes:
        label: the name below its parent, `0..11` for folded siblings.
        times: rows of the model that it stands for.
        shown: numbers of one of them: its own, or its total when it is closed.
        closed: what is below it is not drawn.
    """

    row: Row
    label: str
    depth: int
    fold: int
    times: int
    shown: Totals
    closed: bool = False


def tree(rows: tuple[Row, ...], fold: bool = True) -> Node:
    """The rows as a tree, equal neighbouring siblings folded into their first."""
    root = Node(rows[0], rows[0].name or "")
    above = [root]
    order = [root]
    for row in rows[1:]:
        del above[row.depth :]
        node = Node(row, _label(row.name, above[-1].row.name))
        above[-1].children.append(node)
        above.append(node)
        order.append(node)
    kinds: dict[Any, int] = {}
    for node in reversed(order):
        node.size = 1 + sum(c.size for c in node.children)
        node.kind = kinds.setdefault(_looks(node), len(kinds))
        if fold:
            node.children = _folded(node.children)
    return root


def _label(name: str, parent: str) -> str:
    return name.removeprefix(f"{parent}.") if parent else name


def _looks(node: Node) -> Any:
    """What two subtrees must share to be drawn as one; names inside count, its own does not."""
    row = node.row
    parent = row.name.rpartition(".")[0] + "."
    notes = tuple(note.replace(parent, "") if parent != "." else note for note in row.notes)
    numbers = tuple(getattr(row, n) for n in NUMBERS)
    inside = tuple((c.label, c.kind) for c in node.children)
    return (row.kind, row.type, row.outputs, numbers, row.trainable, row.calls, notes,
            row.dtype, row.training, row.extra, inside)  # fmt: skip


def _folded(nodes: list[Node]) -> list[Node]:
    """Runs of equal, numbered nodes as their first; where that saves one line only, as they are.

    Names that are not numbered (`q`, `k`, `v`) say something: they stay.
    """
    out: list[Node] = []
    i = 0
    while i < len(nodes):
        j, first, stem = i, nodes[i], _stem(nodes[i].label)
        while stem is not None and j + 1 < len(nodes) and nodes[j + 1].kind == first.kind:
            if _stem(nodes[j + 1].label) != stem:
                break
            j += 1
        n = j - i + 1
        if (n - 1) * first.size >= 2:
            first.fold, first.label = n, f"{first.label}..{nodes[j].label}"
            out.append(first)
        else:
            out += nodes[i : j + 1]
        i = j + 1
    return out


def _stem(label: str) -> str | None:
    """What stands before the number at the end of `label`; None without a number."""
    stem = label.rstrip("0123456789")
    return None if stem == label else stem


def lines(rows: tuple[Row, ...], *, fold: bool = True, depth: int | None = None) -> list[Line]:
    """The lines of a drawing of `rows`, the model's own line first."""
    out: list[Line] = []
    stack = [(tree(rows, fold), 0, 1)]
    while stack:
        node, at, times = stack.pop()
        closed = bool(node.children) and depth is not None and at >= depth
        shown = node.row.total if closed else node.row.own
        times *= node.fold
        out.append(Line(node.row, node.label, at, node.fold, times, shown, closed))
        if not closed:
            stack += [(child, at + 1, times) for child in reversed(node.children)]
    return out
