"""What a summary is drawn from: its content, and its rows as lines, folded and cut at a depth.

Builds on `rows`. Text, HTML and comparison read a `Content`; `result.Summary` is one that can draw
itself. A line may represent many rows, so that the sum of `shown × times` over all lines is the
total of the summary, whatever is folded or cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hookkit.summaries.rows import NUMBERS, Row, Totals


@dataclass(frozen=True)
class View:
    """How a summary is drawn by default; `columns=None` are the usual ones."""

    fold: bool = True
    depth: int | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, repr=False)
class Content:
    """The rows of a summary and what is true of all of them; plain values, no model.

    Attributes:
        dtype: the dtype of most parameters.
        grad_bytes: bytes of the gradients of one backward pass.
        run: "fake" (on tensors without values), "real" (values were needed) or "none" (no input).
        why: what needed values, for a real run.
        uncounted: operations for which no MAC formula is known, with how often each ran.
        optimizer: name, groups and state of the optimizer that was given.
        failed: names of the modules that were running when the model raised, outermost first.
    """

    rows: tuple[Row, ...]
    inputs: str = ""
    output: str = ""
    dtype: str = ""
    grad_bytes: int = 0
    run: str = "none"
    why: str = ""
    wrappers: tuple[str, ...] = ()
    uncounted: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    footnotes: tuple[str, ...] = ()
    optimizer: dict[str, Any] | None = None
    failed: tuple[str, ...] = ()
    error: str = ""
    view: View = View()

    @property
    def total(self) -> Totals:
        """All sums at once."""
        return self.rows[0].total

    @property
    def n_params(self) -> int:
        """Distinct parameters, in elements."""
        return self.total.n_params

    @property
    def n_trainable(self) -> int:
        """Distinct parameters with `requires_grad`, in elements."""
        return self.total.n_trainable

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward."""
        return self.total.macs

    @property
    def saved_bytes(self) -> int:
        """Bytes of the tensors that autograd saves for the backward pass of one forward."""
        return self.total.saved_bytes

    @property
    def param_bytes(self) -> int:
        """Bytes of the distinct storages of the parameters."""
        return self.total.param_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the distinct storages of the buffers."""
        return self.total.buffer_bytes

    @property
    def step_bytes(self) -> int:
        """Peak of a training step: parameters, buffers, gradients, optimizer state, saved tensors.

        Without workspaces of kernels and passing intermediates, which depend on the device.
        """
        state = (self.optimizer or {}).get("state_bytes") or 0
        held = self.param_bytes + self.buffer_bytes
        return held + self.grad_bytes + int(state) + self.saved_bytes

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


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
        times: rows of the model that it represents.
        shown: numbers of one of them: its own, or its total when it is closed.
        closed: the rows below it are not drawn.
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
        j, first, word = i, nodes[i], _word(nodes[i].label)
        while word is not None and j + 1 < len(nodes) and nodes[j + 1].kind == first.kind:
            if _word(nodes[j + 1].label) != word:
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


def _word(label: str) -> str | None:
    """What comes before the number at the end of `label`; None without a number."""
    word = label.rstrip("0123456789")
    return None if word == label else word


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
