"""Over the whole zoo: right totals, columns that add up, and nothing changed."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, Entry, entry

from hookkit.fastai import total_params
from hookkit.nested import leaves
from hookkit.summaries import Summary, summary
from hookkit.summaries.drawing import tree
from hookkit.summaries.rows import NUMBERS

# What models of the zoo warn of in a real run.
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad"),
]

RUNS = [e for e in ZOO if "raises" not in e.tags]

# Work beside the layer's own product: one power iteration and the norm, as matrix-vector products.
EXTRA_MACS = {"spectral_norm": 3 * 6 * 8 + 6}
# What has no formula is listed, not guessed.
UNCOUNTED = {
    "complex": ["aten::_fft_r2c"],
    "orthogonal": ["aten::linalg_matrix_exp"],
    "sparse_input": ["aten::_sparse_addmm"],
    "sparse_param": ["aten::_sparse_addmm"],
    "quantised_dynamic": ["quantized::linear_dynamic"],
}
EXTRA_MACS |= {"sparse_input": -12, "sparse_param": -16, "quantised_dynamic": -160}
PARAMS = {"built_on_first_call": (20, 20)}  # its second layer is none before its first call
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def content(t: Tensor) -> Any:
    """What a tensor holds, in a form that compares."""
    if t.device.type == "meta" or nn.parameter.is_lazy(t):
        return type(t).__name__
    if t.layout is not torch.strided or t.is_nested or t.is_quantized:
        return repr(t)
    return t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def held(value: Any) -> Any:
    if isinstance(value, list | tuple | set):
        return [type(value), [id(v) for v in value]]
    return {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)


def fingerprint(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """All that a summary must leave alone, down to the identity of every attribute."""
    state = []
    for name, m in model.named_modules():
        tensors = [*m.named_parameters(recurse=False), *m.named_buffers(recurse=False)]
        hooks = {k: list(getattr(m, k)) for k in HOOKS if k in vars(m)}
        attributes = {k: held(v) for k, v in vars(m).items()}
        values = [(n, id(t), t.requires_grad, id(t.grad), content(t)) for n, t in tensors]
        state.append((name, type(m), m.training, attributes, hooks, values))
    given = [
        (id(t), t._version, content(t)) for t in leaves((args, kwargs)) if not t.is_inference()
    ]
    numpys = np.random.get_state()
    rng = torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2]
    return state, given, rng, torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()


@cache  # the tests below read it only
def made_of(name: str) -> Summary:
    e = entry(name)
    return summary(e.build(), *e.args(), model_kwargs=e.kwargs())


def made(e: Entry) -> Summary:
    return made_of(e.name)


@pytest.mark.parametrize("e", RUNS, ids=lambda e: e.name)
def test_totals_are_the_hand_derived_ones(e: Entry) -> None:
    s = made(e)

    assert (s.n_params, s.n_trainable) == PARAMS.get(e.name, (e.n_params, e.n_trainable))
    if e.macs is not None:
        assert s.macs == e.macs + EXTRA_MACS.get(e.name, 0)
    assert [*s.uncounted] == UNCOUNTED.get(e.name, [])


@pytest.mark.parametrize("e", RUNS, ids=lambda e: e.name)
def test_calls_are_counted(e: Entry) -> None:
    s = made(e)

    for name, n in (e.calls or {}).items():
        assert (s[name].calls or 0) == n


@pytest.mark.parametrize("e", ZOO, ids=lambda e: e.name)
def test_nothing_is_changed(e: Entry) -> None:
    model, args, kwargs = e.build(), e.args(), e.kwargs()
    before = fingerprint(model, args, kwargs)

    try:
        summary(model, *args, model_kwargs=kwargs)
    except Exception:
        assert "raises" in e.tags

    assert fingerprint(model, args, kwargs) == before


@pytest.mark.parametrize("e", RUNS, ids=lambda e: e.name)
def test_columns_add_up_folded_or_not_at_any_depth(e: Entry) -> None:
    s = made(e)

    for n in NUMBERS:
        assert sum(getattr(r, n) for r in s) == getattr(s, n)
        for fold in (True, False):
            for depth in (None, 0, 1, 2):
                assert summed(tree(s.rows, fold=fold, depth=depth), n) == getattr(s, n)


def summed(line: Any, n: str) -> int:
    """Of a line, with its folds, and all below it."""
    own: int = getattr(line.shown, n)
    return line.fold * (own + sum(summed(below, n) for below in line.inside))


@pytest.mark.parametrize("e", RUNS, ids=lambda e: e.name)
def test_texts_keep_to_their_width_and_html_is_small(e: Entry) -> None:
    s = made(e)

    for n in (60, 100):
        table = s.text(width=n, fold=False).split("─\n")[:2]
        assert all(len(line) <= n for part in table for line in part.split("\n"))
    style, _, drawn = s.html(fold=False).partition("</style>")
    assert "<script" not in drawn
    assert "http" not in style + drawn
    assert len(drawn.encode()) < 1000 * (len(s) + 3)
    assert drawn.count('<span class="l"') == len(s) + 1  # and the heading


@pytest.mark.parametrize("e", RUNS, ids=lambda e: e.name)
def test_rows_have_plain_values_and_total_params_agrees(e: Entry) -> None:
    assert isinstance(made(e).to_json(), str)
    if "lazy" not in e.tags:
        assert total_params(e.build())[0] == e.n_params


@pytest.mark.parametrize("e", ZOO, ids=lambda e: e.name)
def test_without_input_there_are_names_types_and_parameters(e: Entry) -> None:
    s = summary(e.build())

    assert s.run == "none"
    if "lazy" not in e.tags:
        assert (s.n_params, s.n_trainable) == (e.n_params, e.n_trainable)
    assert all(r.calls is None and not r.macs for r in s)
    assert "No input given" in s.text(width=80)
