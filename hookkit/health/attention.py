"""The rule on attention: logits so large that a softmax picks one key, and queries learn no more.

Judged from whatever of it was recorded, the most direct first:

scores    where attention applies an `nn.Softmax`, a hook records its input, exactly:
          `ActivationStats(modules=nn.Softmax, hook=lambda m, i, o: i[0])`; of
          `F.scaled_dot_product_attention` with
          `ActivationStats(functions=[F.scaled_dot_product_attention])`.
q and k   where they are layers of their own (`q_proj` and `k_proj`, and so on). |q·k| / √d has the
          RMS rms(q) · rms(k), if the directions have nothing to do with each other.

Not judged else: `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` (their weights are bare
parameters), and one fused layer for queries, keys and values, whose three parts share a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding, Rule, rule
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Record

# Megatron-core, qk_clip_threshold: from where on QK-clip scales queries and keys down
HUGE_LOGIT = 100.0

_VIT = "Dehghani et al. 2023 (ViT-22B, arXiv 2302.05442): huge logits, almost one-hot weights"
_CLIP = "100 for the largest logit: Megatron-core, qk_clip_threshold"

_KEYS = {"q": "k", "Q": "K", "query": "key", "Query": "Key", "QUERY": "KEY"}
_QUERY = re.compile(rf"(?:^|(?<=_)|(?<=^[wW]))(?:{'|'.join(_KEYS)})(?=_|$)")
_OF_EITHER = re.compile(r"(?:^|_)(?:q|k|qk|query|key)(?:_|$)", re.IGNORECASE)
_PROJECTIONS = frozenset({"Linear", "Conv1d", "Conv2d"})


@rule(
    needs=("activations",),
    threshold="above 100",
    source=f"{_CLIP}; {_VIT}",
    cause="queries and keys that grow, at a learning rate too high for them, or began too large: a "
    "softmax that picks one key passes almost no gradient back to them",
    fix="normalise queries and keys (QK-norm: nn.RMSNorm on each of them), or lower their learning "
    "rate",
)
def attention_logits(run: RunView) -> Iterator[Finding]:
    """Attention logits that are huge."""
    record = run.activations
    scores, pairs = _scores(record), _queries_and_keys(record)
    if not (scores or pairs) and any("att" in name.lower() for name in record.names):
        raise read.Missing("no attention scores, or separate queries and keys")
    largest = {record.names[i]: read.table(record, "max")[i] for i in scores}
    severity = "warning" if run.fails else "note"
    yield from _huge(run, largest, HUGE_LOGIT, "the largest logit", attention_logits, severity)
    rms = read.table(record, "rms") if pairs else np.zeros(0)
    sizes = {record.names[q]: rms[q] * rms[k] for q, k in pairs}
    what = "the RMS of logits, by queries and keys,"
    yield from _huge(run, sizes, HUGE_LOGIT / 3, what, _BY_RMS, "warning")


_BY_RMS = attention_logits.but(
    threshold="above 33, where the largest of a hundred logits or more is above 100: three times "
    "their RMS, if they are normal",
)


def _huge(
    run: RunView, sizes: dict[str, Floats], line: float, what: str, says: Rule, severity: str
) -> Iterator[Finding]:
    """A finding for layers whose logits are huge in the later half."""
    record = run.activations
    window = read.last_half(record)
    ends = {name: float(read.median(size[window])) for name, size in sizes.items()}
    hit = [name for name, end in ends.items() if end > line]
    if hit:
        worst = max(hit, key=lambda name: ends[name])
        first = sizes[worst][np.isfinite(sizes[worst])][0]
        evidence = f"{what} is {ends[worst]:.3g} in {worst}, and was {first:.3g} at first"
        yield says.found(severity, evidence, hit, read.span(record, window))


def _scores(record: Record) -> list[int]:
    """Rows of what softmaxes and attention were given; where they gave it, it is from 0 to 1."""
    rows = read.rows(record, ("Softmax", "scaled_dot_product_attention"))
    low, high = read.table(record, "min")[rows], read.table(record, "max")[rows]
    # NaN where it never ran; float16 rounds
    return [int(i) for i in rows[((low < 0) | (high > 1.001)).any(axis=1)]]


def _queries_and_keys(record: Record) -> list[tuple[int, int]]:
    """Rows of queries and keys that are layers of their own, and go into the product as they are.

    Not where a norm of the same module follows them (`q_norm`): it bounds the logits.
    """
    rows = {name: i for i, name in enumerate(record.names)}
    found = []
    for name, i in rows.items():
        parent, _, last = name.rpartition(".")
        if record.types[i] not in _PROJECTIONS or not _QUERY.search(last):
            continue
        key = _QUERY.sub(lambda query: _KEYS[query[0]], last)
        k = rows.get(f"{parent}.{key}" if parent else key)
        if k is not None and not _normed(record, parent):
            found.append((i, k))
    return found


def _normed(record: Record, parent: str) -> bool:
    norms = [record.names[i].rpartition(".") for i, t in enumerate(record.types) if "Norm" in t]
    return any(where == parent and _OF_EITHER.search(last) for where, _, last in norms)
