"""Rule on attention: logits so large that a softmax picks one key, and queries learn no more.

Judged from whatever of it was recorded, the most direct first:

scores    where attention applies an `nn.Softmax`, its input is recorded on request, exactly:
          `ActivationStats(modules=nn.Softmax, hook=lambda m, i, o: i[0])`.
weights   what that `nn.Softmax` gives; or `nn.MultiheadAttention`, asked for by its type and called
          with `need_weights=True` (and `average_attn_weights=False`: a mean over heads looks less
          sure than each of them). Rows sum to 1, so mean(p²) / mean(p) is exactly the mean over
          rows of Σp²: 1 where one key gets everything, and never more than the heaviest key gets.
q and k   where they are layers of their own (`q_proj` and `k_proj`, and so on). |q·k| / √d has the
          RMS rms(q) · rms(k), if the directions have nothing to do with each other.

Out of reach, and left unjudged: `F.scaled_dot_product_attention` shows nobody its logits. So do
`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` (their weights are bare parameters), and
one fused layer for queries, keys and values, whose three parts share a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from hookkit.health import loss_expectations
from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding
from hookkit.records import Floats, Record, Run

MOST = 100.0
"""Of a logit: where QK-clip steps in."""

ONE_KEY = 0.95
"""Mean Σp²: on average the heaviest key gets at least so much."""

VIT = "Dehghani et al. 2023 (ViT-22B, arXiv 2302.05442): huge logits, almost one-hot weights"
CLIP = "100 for the largest logit: Megatron-core, qk_clip_threshold"

_QUERY = re.compile(r"(?:^|(?<=_)|(?<=^w))(?:q|query)(?=_|$)", re.IGNORECASE)
_OF_EITHER = re.compile(r"(?:^|_)(?:q|k|qk|query|key)(?:_|$)", re.IGNORECASE)
_PROJECTIONS = frozenset({"Linear", "Conv1d", "Conv2d"})


def attention_logits(run: Run) -> Iterator[Finding]:
    """Attention logits that are huge, or weights that are all on one key."""
    record = read.activations(run)
    softmaxes = _softmaxes(record)
    scores = [i for i in softmaxes if not _are_weights(record, i)]
    weights = [i for i in softmaxes if i not in scores and _many_keys(record, i)]
    pairs = _pairs(record)
    if not (scores or weights or pairs) and any("att" in name.lower() for name in record.names):
        raise read.Missing("no attention scores, weights, or separate queries and keys")
    largest = {record.names[i]: read.table(record, "max")[i] for i in scores}
    yield from _huge(run, record, largest, "the largest logit")
    sizes = {record.names[q]: _rms(record, q) * _rms(record, k) for q, k in pairs}
    yield from _huge(run, record, sizes, "the RMS of logits, by queries and keys,")
    yield from _one_key(run, record, weights)


def _huge(run: Run, record: Record, sizes: dict[str, Floats], what: str) -> Iterator[Finding]:
    window = read.last_half(record)
    ends = {name: float(read.median(size[window])) for name, size in sizes.items()}
    hit = [name for name, end in ends.items() if end > MOST]
    if not hit:
        return
    worst = max(hit, key=lambda name: ends[name])
    first = sizes[worst][np.isfinite(sizes[worst])][0]
    exact = what.startswith("the largest")
    yield _finding(
        "note" if exact and loss_expectations.learns(run) is not False else "warning",
        tuple(hit),
        read.span(record, window),
        f"{what} is {ends[worst]:.3g} in {worst}, and was {first:.3g} at first",
        f"above {MOST:.0f}" + ("" if exact else ", which the largest of them then exceeds by far"),
        f"{CLIP}; {VIT}",
    )


def _one_key(run: Run, record: Record, rows: list[int]) -> Iterator[Finding]:
    window = read.last_half(record)
    ends = {i: float(read.median(_purity(record, i)[window])) for i in rows}
    hit = [i for i, end in ends.items() if end > ONE_KEY]
    if hit:
        yield _finding(
            "warning" if loss_expectations.learns(run) is False else "note",
            read.names(record, hit),
            read.span(record, window),
            f"on average the heaviest key gets {max(ends[i] for i in hit):.1%} of the weight or "
            f"more, and got {float(_purity(record, hit[0])[0]):.1%} at first",
            f"mean of Σp² over rows above {ONE_KEY}, an alarm if the loss does not fall",
            f"{VIT}; {ONE_KEY}: hookkit, measured",
        )


def _finding(
    severity: str, layers: tuple[str, ...], steps: tuple[int, int], evidence: str, line: str,
    source: str,
) -> Finding:  # fmt: skip
    return Finding(
        "attention_logits",
        severity,
        layers,
        steps,
        evidence,
        line,
        source,
        "queries and keys that grow, at a learning rate too high for them, or began too large: a "
        "softmax that picks one key passes almost no gradient back to them",
        "normalise queries and keys (QK-norm), or lower their learning rate",
    )


def _softmaxes(record: Record) -> list[int]:
    """Rows of softmaxes inside the model (the last decides), or of attention's own weights."""
    names = record.names
    inner = [i for i in read.rows(record, ("Softmax",)) if "." in names[i]]
    if len(inner) < len(names):
        inner = [i for i in inner if i != len(names) - 1]
    heads = read.rows(record, ("MultiheadAttention",))
    own = [i for i in heads if names[i].endswith("[1]")]
    ran = np.asarray(np.isfinite(read.table(record, "rms")).any(axis=1))
    return [i for i in inner + own if ran[i]]


def _are_weights(record: Record, row: int) -> bool:
    low, high = read.table(record, "min")[row], read.table(record, "max")[row]
    return not (np.nanmin(low) < 0 or np.nanmax(high) > 1.001)  # float16 rounds


def _many_keys(record: Record, row: int) -> bool:
    """Whether there are 4 keys or more: with one, its weight is always 1."""
    return bool(read.median(read.table(record, "mean")[row]) < 0.26)


def _purity(record: Record, row: int) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(_rms(record, row) ** 2 / read.table(record, "mean")[row])


def _rms(record: Record, row: int) -> Floats:
    return np.asarray(read.table(record, "rms")[row])


def _pairs(record: Record) -> list[tuple[int, int]]:
    """Rows of queries and keys that are layers of their own, and go into the product as they are.

    Where a norm of the same module stands behind them (`q_norm`), that bounds the logits.
    """
    rows = {name: i for i, name in enumerate(record.names)}
    found = []
    for name, i in rows.items():
        parent, _, last = name.rpartition(".")
        if record.types[i] not in _PROJECTIONS or not _QUERY.search(last):
            continue
        key = _QUERY.sub(_key_of, last)
        k = rows.get(f"{parent}.{key}" if parent else key)
        if k is not None and not _normed(record, parent):
            found.append((i, k))
    return found


def _key_of(found: re.Match[str]) -> str:
    word = {"q": "k", "query": "key"}[found[0].lower()]
    return word.upper() if found[0].isupper() else word.title() if found[0][0].isupper() else word


def _normed(record: Record, parent: str) -> bool:
    norms = [record.names[i].rpartition(".") for i, t in enumerate(record.types) if "Norm" in t]
    return any(where == parent and _OF_EITHER.search(last) for where, _, last in norms)
