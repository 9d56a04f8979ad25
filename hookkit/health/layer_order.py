"""In which order gradients pass the layers: what the autograd graph showed of it, else their list.

An actor and a critic stand one behind the other in the list of a model's layers, and in no graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hookkit.health import reading as read
from hookkit.health.run_view import RunView
from hookkit.records import Ints, Record

# Inputs that are so many times as large as the embedding before are others (hookkit, measured)
BESIDE = 20


def chains(run: RunView, which: Ints) -> list[Ints]:
    """The parameters `which`, by chain: each from what is given data to what gives the output.

    One chain in the order of the list where the graph is not known.
    """
    before, rows = _predecessors(run), {run.params.names[i]: i for i in which}
    if not before.keys() & rows.keys():
        return [which]
    found = []
    for name in before.keys() - set(before.values()):
        chain, seen = [], set()
        while name and name not in seen:
            seen.add(name)
            chain += [rows[name]] if name in rows else []
            name = before.get(name, "")
        found.append(np.array(chain[::-1], np.int64))
    return [chain for chain in found if len(chain)]


def gradients_fade(run: RunView) -> bool:
    """Whether the first matrix's gradients vanish against the last one's, in a chain of matrices.

    Then all but the last matrices hardly move, whatever the learning rate: `vanishing` reports why.
    """
    record = run.params
    if "grad_rms" not in record.values:
        return False
    for chain in chains(run, read.matrices(record)):
        size = read.median(record.values["grad_rms"][chain], axis=1)
        if len(chain) >= 3 and size[0] < read.VANISHED and size[0] < read.VANISHED_RATIO * size[-1]:
            return True
    return False


def given_data(run: RunView, record: Record) -> list[int]:
    """Rows of the linear and convolutional layers that are given what the model is given.

    The first one where the graph is not known, unless another kind of layer stands before it.
    """
    before = _predecessors(run)
    which = [int(i) for i in read.rows(record, read.PRE_ACTIVATION)]
    known = [i for i in which if f"{record.names[i]}.weight" in before]
    if known:
        return [i for i in known if not before[f"{record.names[i]}.weight"]]
    alone = which[:1] and not set(record.types[: which[0]]) & _GIVEN_NO_INPUTS
    return which[:1] if alone else []


def given_numbers(run: RunView, record: Record) -> list[int]:
    """Rows of all layers with a matrix that are given data, or data beside a small embedding.

    As the graph shows; what an embedding gives is no data, but numbers may stand beside it.
    """
    rows = {name: i for i, name in enumerate(record.names)}
    sizes = read.table(record, "rms")[:, 0]
    given, found = read.meta(record, "given_rms", np.nan), []
    for weight, before in _predecessors(run).items():
        at, other = (rows.get(name.rpartition(".")[0]) for name in (weight, before))
        if at is None or record.types[at] in read.EMBEDDINGS:
            continue
        embedded = other is not None and record.types[other] in read.EMBEDDINGS
        if not before or (embedded and given[at] > BESIDE * sizes[other]):
            found.append(at)
    return [*dict.fromkeys(found)]


def given_ids(run: RunView, record: Record) -> list[int]:
    """Rows of the embeddings that no other matrix is before; all of them where it is not known."""
    before = _predecessors(run)
    which = read.rows(record, read.EMBEDDINGS)
    return [int(i) for i in which if not before.get(f"{record.names[i]}.weight")]


def ends(run: RunView, record: Record) -> list[int]:
    """Rows of layers whose output no other matrix is given; the last one if that is not known."""
    before = _predecessors(run)
    if not before:
        return [len(record.names) - 1]
    last = before.keys() - set(before.values())
    return [i for i, name in enumerate(record.names) if f"{name}.weight" in last]


_GIVEN_NO_INPUTS = frozenset({"RNN", "LSTM", "GRU", "MultiheadAttention", *read.EMBEDDINGS})


def _predecessors(run: RunView) -> Mapping[str, str]:
    """Of each matrix in the graph the one before it, "" where it is given data."""
    record = run.recorded.activations
    found: Mapping[str, str] = {} if record is None else record.meta.get("predecessors", {})
    return found
