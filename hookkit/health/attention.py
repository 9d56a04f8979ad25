"""The rule on attention: logits so large that a softmax picks one key, and queries learn no more.

Judged from whatever of it was recorded, the most direct first:

scores    where attention applies an `nn.Softmax`, a hook records its input, exactly:
          `ActivationStats(modules=nn.Softmax, hook=lambda m, i, o: i[0])`.
weights   what that `nn.Softmax` gives; or `nn.MultiheadAttention`, selected by its type and called
          with `need_weights=True` (and `average_attn_weights=False`: a mean over heads looks less
          sure than each of them). Rows sum to 1, so mean(p²) / mean(p) is exactly the mean over
          rows of Σp²: 1 where one key gets everything, and never more than the heaviest key gets.
calls     of `F.softmax` (weights) and `F.scaled_dot_product_attention` (scores), which
          `ActivationStats(functions=[F.softmax, F.scaled_dot_product_attention])` records.
q and k   where they are layers of their own (`q_proj` and `k_proj`, and so on). |q·k| / √d has the
          RMS rms(q) · rms(k), if the directions have nothing to do with each other.

Not judged without `functions=`: `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and
`nn.TransformerEncoderLayer` (their weights are bare parameters), and one fused layer for queries,
keys and values, whose three parts share a row.
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
# Mean Σp²: on average the heaviest key gets at least so much (hookkit, measured)
ONE_KEY = 0.95

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
    """Attention logits that are huge, or weights that are all on one key."""
    record = run.activations
    softmaxes = _softmaxes(record)
    scores = [i for i in softmaxes if not _are_weights(record, i)]
    weights = [i for i in softmaxes if i not in scores and _has_many_keys(record, i)]
    pairs = _queries_and_keys(record)
    if not (scores or weights or pairs) and any("att" in name.lower() for name in record.names):
        raise read.Missing("no attention scores, weights, or separate queries and keys")
    largest = {record.names[i]: read.table(record, "max")[i] for i in scores}
    severity = "warning" if run.fails else "note"
    yield from _huge(run, largest, HUGE_LOGIT, "the largest logit", attention_logits, severity)
    rms = read.table(record, "rms") if pairs else np.zeros(0)
    sizes = {record.names[q]: rms[q] * rms[k] for q, k in pairs}
    what = "the RMS of logits, by queries and keys,"
    yield from _huge(run, sizes, HUGE_LOGIT / 3, what, _BY_RMS, "warning")
    yield from _one_key(run, weights, severity)


_BY_RMS = attention_logits.but(
    threshold="above 33, where the largest of a hundred logits or more is above 100: three times "
    "their RMS, if they are normal",
)

_ON_ONE_KEY = attention_logits.but(
    threshold=f"mean of Σp² over rows above {ONE_KEY}, which the heaviest key gets at least",
    source=f"{_VIT}; {ONE_KEY}: hookkit, measured",
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


def _one_key(run: RunView, rows: list[int], severity: str) -> Iterator[Finding]:
    """A finding for softmaxes that give almost all weight to one key in the later half."""
    record = run.activations
    window = read.last_half(record)
    # mean Σp² over the rows of a softmax: mean(p²) / mean(p), since each row sums to 1
    purity = {i: read.table(record, "rms")[i] ** 2 / read.table(record, "mean")[i] for i in rows}
    ends = {i: float(read.median(series[window])) for i, series in purity.items()}
    hit = [i for i, end in ends.items() if end > ONE_KEY]
    if hit:
        worst = max(hit, key=lambda i: ends[i])
        what = f"on average the heaviest key gets {ends[worst]:.1%} of the weight or more, and got "
        what += f"{purity[worst][0]:.1%} at first"
        yield _ON_ONE_KEY.found(severity, what, *read.where(record, hit, window))


def _softmaxes(record: Record) -> list[int]:
    """Rows of softmaxes inside the model (not the one at its end), or of attention's weights."""
    names = record.names
    found = read.rows(record, ("Softmax",))
    calls = [i for i in found if "/" in names[i]]  # of functions, by modules
    layers = [i for i, name in enumerate(names) if "/" not in name and ":" not in name]
    inner = [i for i in found if i in layers and "." in names[i]]
    if len(inner) < len(layers):
        inner = [i for i in inner if i != layers[-1]]
    inner += [*calls, *read.rows(record, ("scaled_dot_product_attention",))]
    inner += [i for i in read.rows(record, ("MultiheadAttention",)) if names[i].endswith("[1]")]
    ran = np.asarray(np.isfinite(read.table(record, "rms")).any(axis=1))
    return [i for i in inner if ran[i]]


def _are_weights(record: Record, row: int) -> bool:
    low, high = read.table(record, "min")[row], read.table(record, "max")[row]
    return not (np.nanmin(low) < 0 or np.nanmax(high) > 1.001)  # float16 rounds


def _has_many_keys(record: Record, row: int) -> bool:
    """Whether there are 4 keys or more: with one, its weight is always 1."""
    return bool(read.median(read.table(record, "mean")[row]) < 0.26)


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
