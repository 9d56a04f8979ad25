"""Read the file that `Fingerprint` writes: `read_run` returns its steps.

A file has a line of JSON for each of these:

- the header, `HEADER`;
- a layout, which says what the steps after it consist of: for each batch its calls, as they begin
  (name, class, whether it is in training mode, `extra_repr`) and end (name), rows (what, batch,
  name, call, path, number of a sketch or -1, dtype, shape), the mode of the model at the end, and
  whether only selected modules are recorded;
- a step: its number, its hyperparameters, and its sketches, an array of `SKETCH` in base64.

What a row is of: `before` (a weight or buffer before the step), `random` (a random state), `input`,
`output`, `loss`, `grad` (the gradient of an output), `param_grad`, `scale` (of a GradScaler),
`weight` and `buffer` (after the step).
"""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hookkit.errors import OptionError
from hookkit.inspection.first_difference import Call, CallTree

HEADER = '{"hookkit": "fingerprint", "version": 1}'
SKETCH = np.dtype([("hash", "<i8"), ("numbers", "<f4", (5,))])
"""The hash of a tensor, then its norm and projections; see `recorders/sketch.py`."""


class Key(NamedTuple):
    """Names the tensor of a row; for a gradient, `call` counts those that came there before."""

    what: str
    batch: int
    name: str
    call: int
    path: str


class Seen(NamedTuple):
    """Holds a tensor's hash (None if it could not be read), norm and projections, dtype, shape."""

    hash: int | None
    numbers: npt.NDArray[np.float64]
    dtype: str
    shape: tuple[int, ...]


class Layout:
    """Holds the calls and tensors of a step, without the values.

    Attributes:
        rows: for each tensor its key, the number of its sketch, its dtype and shape.
        trees: the calls of each batch.
        kinds: for each batch, call → the module's class, its mode, and its `extra_repr`.
        training: whether the model was in training mode as the step was made.
        selected: whether only the modules that `modules=` selects are recorded.
    """

    def __init__(
        self, calls: list[Any], rows: list[Any], training: bool = True, selected: bool = False
    ) -> None:
        self.training, self.selected = training, selected
        self.rows = [(Key(*row[:5]), int(row[5]), str(row[6]), tuple(row[7])) for row in rows]
        self.trees: list[CallTree] = []
        self.kinds: list[dict[Call, list[Any]]] = []
        for batch in calls:
            tree, kinds = CallTree(), dict[Call, list[Any]]()
            for name, *kind in batch:
                if kind:
                    kinds[tree.begin(name)] = kind
                else:
                    tree.end(name)
            self.trees.append(tree)
            self.kinds.append(kinds)


@dataclass
class RunStep:
    """Holds a recorded step: number, hyperparameters by name, layout, sketches (n,) of `SKETCH`."""

    number: int
    settings: dict[str, Any]
    layout: Layout
    sketches: npt.NDArray[Any]

    @cached_property
    def seen(self) -> dict[Key, Seen]:
        """Return all tensors of the step, in the order in which they were seen."""
        hashes = [*self.sketches["hash"].tolist(), None]  # at -1, for tensors that have no sketch
        numbers = [*self.sketches["numbers"].astype(float), np.full(5, np.nan)]
        rows = self.layout.rows
        return {key: Seen(hashes[i], numbers[i], dtype, shape) for key, i, dtype, shape in rows}

    def start(self) -> dict[str, int]:
        """Return the hash of each weight and buffer before the step, by name."""
        rows, hashes = self.layout.rows, self.sketches["hash"]
        return {k.name: int(hashes[i]) for k, i, *_ in rows if k.what == "before" and i >= 0}

    def same_bits(self, other: RunStep) -> bool:
        """Return whether two steps have the same rows, settings and hashes."""
        rows = self.layout.rows
        same = rows == other.layout.rows and self.settings == other.settings
        same &= all(row[1] >= 0 for row in rows)  # every tensor could be read
        return same and np.array_equal(self.sketches["hash"], other.sketches["hash"])


def read_run(path: str | Path) -> tuple[dict[int, RunStep], bool]:
    """Read a file; return its steps by number, and whether its last line was cut off.

    Raises:
        OptionError: there is no such file, it is another kind of file or of another version of
            hookkit, has no step, or is damaged.
    """
    path = Path(path)

    def error(found: str, cure: str = "Give a file that Fingerprint wrote.") -> OptionError:
        return OptionError(f"compare_runs: {str(path)!r} {found}. {cure}")

    try:
        header, *lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as e:
        raise error("is no fingerprint") from e
    except OSError as e:
        ranks = [f"Each process wrote its own, such as {str(p)!r}."
                 for p in sorted(path.parent.glob(f"{path.name}.rank*"))]  # fmt: skip
        raise error(f"cannot be read ({e.strerror})", *ranks[:1]) from e
    if header != HEADER:
        is_other = header.startswith(HEADER[: HEADER.index("version")])
        other = "was written by another version of hookkit" if is_other else "is no fingerprint"
        raise error(other if header else "is empty")
    steps, layout = dict[int, RunStep](), None
    for i, line in enumerate(lines, 2):
        try:
            found = json.loads(line) if line else {}
            if "layout" in found:
                layout = Layout(**found["layout"])
            elif line:
                sketches = np.frombuffer(b64decode(found["sketches"], validate=True), SKETCH)
                if layout is None or max(row[1] for row in layout.rows) >= len(sketches):
                    raise ValueError("it has no layout")
                n = int(found["step"])
                steps[n] = RunStep(n, dict(found["settings"]), layout, sketches)
        except (ValueError, TypeError, LookupError) as e:
            if i <= len(lines):  # not the last line, which may be cut off
                raise error(f"is damaged in line {i} ({e})", "Record the run again.") from e
    if not steps:
        raise error("has no step", "The run had ended before its first step had.")
    return steps, lines[-1] != ""
