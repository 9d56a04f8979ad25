"""The rule on attention's logits, on runs made by hand and on real ones."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from health_runs import FLAT, N, alarms, falling, found, record
from torch import Tensor, nn

from hookkit import ActivationStats, ParamStats, watch
from hookkit.health import diagnose
from hookkit.records import Run

INNER = ["block.q_proj", "block.k_proj", "block.softmax", "block.norm", "head"]


TYPES = ["Linear", "Linear", "Softmax", "LayerNorm", "Linear"]


def attention(names=INNER, types=TYPES, **values):
    """Activations of an attention layer that look healthy, but for `values`."""
    k = len(names)
    table = {"mean": [0.125] * k, "rms": [0.2] * k, "min": [0.0] * k, "max": [0.9] * k}
    table |= {"std": [0.2] * k, "nonfinite": [0.0] * k, "zero": [0.0] * k}
    return record("activation", names, types, {**table, **values})


def with_row(row, value, k=5, plain=0.2):
    rows = [plain] * k
    rows[row] = value
    return rows


def logits_finding(run):
    return [f for f in diagnose(run) if f.rule == "attention_logits"]


def test_ordinary_attention_is_no_finding():
    assert logits_finding(Run(attention(), losses=FLAT)) == []


def test_scores_recorded_in_place_of_the_weights_are_read_as_they_are():
    scores = attention(min=with_row(2, -90.0), max=with_row(2, np.linspace(2, 240, N)))

    f = found(Run(scores, losses=FLAT), "attention_logits")
    calm = found(Run(scores, losses=falling()), "attention_logits")

    assert f.severity == "warning"
    assert "the largest logit is 181 in block.softmax, and was 2 at first" in f.evidence
    assert "above 100" in f.threshold
    assert calm.severity == "note"


QK = {"rms": [12.0, 12.0, 0.2, 0.2, 0.2]}


def test_queries_and_keys_that_must_give_huge_logits_are_a_warning():
    f = found(Run(attention(**QK), losses=falling()), "attention_logits")

    assert (f.severity, f.layers) == ("warning", ("block.q_proj",))
    assert "RMS of logits, by queries and keys, is 144" in f.evidence


@pytest.mark.parametrize("norm", ["block.q_norm", "block.qk_norm", "block.norm_k"])
def test_queries_and_keys_behind_a_norm_of_their_own_are_bounded(norm):
    run = Run(attention([*INNER[:3], norm, INNER[4]], **QK), losses=FLAT)

    assert logits_finding(run) == []


@pytest.mark.parametrize(
    ("query", "key"),
    [("query", "key"), ("to_q", "to_k"), ("wq", "wk"), ("q", "k"), ("Q", "K"), ("W_q", "W_k"),
     ("q_lin", "k_lin"), ("a.b.query_proj", "a.b.key_proj")],
)  # fmt: skip
def test_queries_and_keys_are_known_under_many_names(query, key):
    run = Run(attention([query, key, *INNER[2:]], **QK), losses=FLAT)

    assert found(run, "attention_logits").layers == (query,)


@pytest.mark.parametrize("names", [("sequence", "skew"), ("qkv", "kv"), ("query_key_value", "k")])
def test_other_names_are_no_queries(names):
    assert logits_finding(Run(attention([*names, *INNER[2:]], **QK), losses=FLAT)) == []


def test_attention_that_shows_no_logits_is_unjudged():
    fused = Run(attention(["h.0.attn.qkv", "head"], ["Linear", "Linear"]))
    other = Run(attention(["a", "b"], ["Linear", "Linear"]))

    why = dict(diagnose(fused).unjudged)["attention_logits"]

    assert why == "no attention scores, or separate queries and keys"
    assert "attention_logits" not in dict(diagnose(other).unjudged)


def test_a_softmax_that_never_ran_is_ignored():
    absent = {s: with_row(2, np.nan) for s in ("rms", "mean", "min", "max")}

    assert alarms(Run(attention(**absent), losses=falling())) == set()


class Attention(nn.Module):
    def __init__(self, d=16, heads=2, scale=1.0):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, d) for _ in range(3))
        self.softmax = nn.Softmax(-1)
        with torch.no_grad():
            self.q_proj.weight.mul_(scale)
            self.k_proj.weight.mul_(scale)

    def forward(self, x: Tensor) -> Tensor:
        split = [f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                 for f in (self.q_proj, self.k_proj, self.v_proj)]  # fmt: skip
        q, k, v = split
        self.weights = self.softmax(q @ k.mT / math.sqrt(q.shape[-1]))
        return x + (self.weights @ v).transpose(1, 2).flatten(-2)


def trained(scale, *callbacks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), Attention(scale=scale), nn.Linear(16, 3))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    with watch(model, opt, *callbacks) as w:
        for _ in range(20):
            x = torch.randn(8, 6, 4)
            opt.zero_grad()
            loss = F.cross_entropy(model(x).mean(1), x[:, :, :3].sum(1).argmax(1))
            loss.backward()
            opt.step()
            w.loss(loss)
    return model, w


@pytest.mark.parametrize(("scale", "alarmed"), [(1.0, False), (30.0, True)])
def test_a_real_run_is_judged_by_its_queries_and_keys(scale, alarmed):
    _, w = trained(scale, ActivationStats(include_paramless=True), ParamStats())

    assert ("attention_logits" in alarms(w.run_record())) is alarmed


def test_the_scores_of_a_real_run_are_recorded_by_a_hook():
    stats = ActivationStats(modules=nn.Softmax, hook=lambda m, i, o: i[0])
    _, w = trained(30.0, stats)

    (f,) = [f for f in w.diagnose() if f.rule == "attention_logits"]
    assert "the largest logit" in f.evidence
