"""Summaries of the whole zoo: right totals, columns that add up, and nothing changed."""

import contextlib
from typing import Any

import pytest
from hooked import fingerprint
from zoo import ZOO, Entry

from hookkit.inspection import Summary, summary, tracing
from hookkit.inspection.preserve import preserve_state
from hookkit.inspection.summary_drawing import tree
from hookkit.inspection.summary_rows import NUMBERS

# What models of the zoo warn of in a real run.
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")

# Work beside the layer's own product: one power iteration and the norm, as matrix-vector products.
EXTRA_MACS = {"spectral_norm": 3 * 6 * 8 + 6}
# What has no formula is listed, not guessed.
UNCOUNTED = {
    "complex": ["aten::_fft_r2c"],
    "sparse_param": ["aten::_sparse_addmm"],
    "quantised_dynamic": ["quantized::linear_dynamic"],
}
PARAMS = {"built_on_first_call": (20, 20)}  # its second layer is none before its first call
# An LSTM's kernel saves more on real tensors; sparse ones have no fake.
SAVED_DIFFERS = ("lstm_tuple",)


@pytest.mark.parametrize("e", ZOO, ids=lambda e: e.name)
def test_a_summary_is_right_and_changes_nothing(e: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = e.build(), e.args(), e.kwargs()
    before = fingerprint(model, args, kwargs)

    assert_counts_without_a_run(summary(model), e)
    assert fingerprint(model, args, kwargs) == before, "changed without an input"
    with contextlib.suppress(ValueError), preserve_state(model, params=True):
        model(*args, **kwargs)
        assert "raises" not in e.tags
    assert fingerprint(model, (), {})[0] == before[0], "changed by a run inside preserve_state"
    args, kwargs = e.args(), e.kwargs()
    before = fingerprint(model, args, kwargs)
    if "raises" in e.tags:
        with pytest.raises(ValueError, match="cannot work"):
            summary(model, *args, model_kwargs=kwargs)
        assert fingerprint(model, args, kwargs) == before, "changed by a run that fails"
        return

    s = summary(model, *args, model_kwargs=kwargs)
    assert fingerprint(model, args, kwargs) == before, "changed by a real run"
    monkeypatch.setattr(tracing, "MAX_MACS", -1)
    fake = summary(model, *args, model_kwargs=kwargs)
    assert fingerprint(model, args, kwargs) == before, "changed by a fake run"

    assert_totals(s, e)
    assert_columns_add_up(s)
    assert_drawn_within_bounds(s)
    assert isinstance(s.to_json(), str)
    assert (s.failed, s.not_restored, fake.not_restored) == ((), (), ())
    assert [(r.name, r.outputs, r.calls, r.macs) for r in fake] == [
        (r.name, r.outputs, r.calls, r.macs) for r in s
    ]
    assert fake.saved_bytes == s.saved_bytes or e.name in SAVED_DIFFERS


def assert_counts_without_a_run(s: Summary, e: Entry) -> None:
    assert s.run == "none"
    if "lazy" not in e.tags:
        assert (s.n_params, s.n_trainable) == (e.n_params, e.n_trainable)
    assert all(r.calls is None and not r.macs for r in s)
    assert "No input given" in s.text(width=80)


def assert_totals(s: Summary, e: Entry) -> None:
    """The hand-derived ones."""
    assert (s.n_params, s.n_trainable) == PARAMS.get(e.name, (e.n_params, e.n_trainable))
    if e.macs is not None:
        assert s.macs == e.macs + EXTRA_MACS.get(e.name, 0)
    assert [*s.uncounted] == UNCOUNTED.get(e.name, [])
    for name, n in (e.calls or {}).items():
        assert (s[name].calls or 0) == n, name


def assert_columns_add_up(s: Summary) -> None:
    """Folded or not, at any depth."""
    for n in NUMBERS:
        assert sum(getattr(r, n) for r in s) == getattr(s, n), n
        for fold in (True, False):
            for depth in (None, 0, 1, 2):
                drawn = tree(s.rows, fold=fold, depth=depth)
                assert summed(drawn, n) == getattr(s, n), (n, fold, depth)


def summed(line: Any, n: str) -> int:
    """Of a line, with its folds, and all below it."""
    own: int = getattr(line.shown, n)
    return line.fold * (own + sum(summed(below, n) for below in line.inside))


def assert_drawn_within_bounds(s: Summary) -> None:
    """The text keeps to its width, and the HTML is small and loads nothing."""
    for n in (60, 100):
        table = s.text(width=n, fold=False).split("─\n")[:2]
        assert all(len(line) <= n for part in table for line in part.split("\n"))
    style, _, drawn = s.html(fold=False).partition("</style>")
    assert "<script" not in drawn
    assert "http" not in style + drawn
    assert len(drawn.encode()) < 1000 * (len(s) + 3)
    assert drawn.count('<span class="l"') == len(s) + 1  # and the heading
