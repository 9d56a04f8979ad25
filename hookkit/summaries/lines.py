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
        run: "fake" (on tensors without values), "real" (values were needed: a copy ran), "shared"
            (a copy that shares the parameters, of more than 1 GiB), "itself" (the model, which
            cannot be copied, ran and was restored) or "none" (no input).
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
    def macs(self) -> int | None:
        """Multiply-accumulates of one forward; None if they were not counted."""
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
        """Peak memory of a training step, in bytes.

        The sum of parameters, buffers, gradients, optimizer state and saved tensors; without
        workspaces of kernels and passing intermediates, which depend on the device.
        """
        state = (self.optimizer or {}).get("state_bytes") or 0
        held = self.param_bytes + self.buffer_bytes
        return held + self.grad_bytes + int(state) + self.saved_bytes

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class Line:
    """One line of a drawing: a row, or equal siblings as their first, with the lines below it.

    Attributes:
        label: the name below its parent, `0..11` for folded siblings.
        fold: how many siblings are drawn as this one.
        times: rows of the model that it represents.
        shown: numbers of one of them: its own, or its total when it is closed.
        closed: the lines below it are not drawn.
        kind: equal for lines that look alike, with all below them; `size` says how many those are.
    """

    row: Row
    label: str
    inside: list[Line] = field(default_factory=list)
    fold: int = 1
    times: int = 1
    shown: Totals = field(default_factory=Totals)
    closed: bool = False
    kind: int = 0
    size: int = 1


def tree(rows: tuple[Row, ...], fold: bool = True) -> Line:
    """The rows as a tree, equal neighbouring siblings folded into their first."""
    root = Line(rows[0], rows[0].name)
    above = [root]
    order = [root]
    for row in rows[1:]:
        del above[row.depth :]
        parent = above[-1]
        line = Line(row, row.name.removeprefix(f"{parent.row.name}."))
        parent.inside.append(line)
        above.append(line)
        order.append(line)
    kinds: dict[Any, int] = {}
    for line in reversed(order):
        line.size = 1 + sum(below.size for below in line.inside)
        line.kind = kinds.setdefault(_looks(line), len(kinds))
        if fold:
            line.inside = _folded(line.inside)
    return root


def _looks(line: Line) -> Any:
    """What two subtrees must share to be drawn as one; names inside count, its own does not."""
    row = line.row
    parent = row.name.rpartition(".")[0] + "."
    notes = tuple(note.replace(parent, "") if parent != "." else note for note in row.notes)
    numbers = tuple(getattr(row, n) for n in NUMBERS)
    inside = tuple((below.label, below.kind) for below in line.inside)
    return (row.kind, row.type, row.outputs, numbers, row.trainable, row.calls, notes,
            row.dtype, row.training, row.extra, inside)  # fmt: skip


def _folded(found: list[Line]) -> list[Line]:
    """Runs of equal, numbered lines as their first; where that saves one line only, as they are.

    Names that are not numbered (`q`, `k`, `v`) say something: they stay.
    """
    out: list[Line] = []
    i = 0
    while i < len(found):
        j, first, word = i, found[i], _word(found[i].label)
        while word is not None and j + 1 < len(found) and found[j + 1].kind == first.kind:
            if _word(found[j + 1].label) != word:
                break
            j += 1
        n = j - i + 1
        if (n - 1) * first.size >= 2:
            first.fold, first.label = n, f"{first.label}..{found[j].label}"
            out.append(first)
        else:
            out += found[i : j + 1]
        i = j + 1
    return out


def _word(label: str) -> str | None:
    """What comes before the number at the end of `label`; None without a number."""
    word = label.rstrip("0123456789")
    return None if word == label else word


def lines(rows: tuple[Row, ...], *, fold: bool = True, depth: int | None = None) -> list[Line]:
    """The lines of a drawing of `rows`, the model's own line first."""
    out: list[Line] = []
    stack = [tree(rows, fold)]
    while stack:
        line = stack.pop()
        out.append(line)
        line.closed = bool(line.inside) and depth is not None and line.row.depth >= depth
        line.shown = line.row.total if line.closed else line.row.own
        line.times *= line.fold
        for below in () if line.closed else reversed(line.inside):
            below.times = line.times
            stack.append(below)
    return out
