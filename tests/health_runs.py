"""Runs made by hand for the tests of health: they look healthy, but for what a test changes."""

import dataclasses

import numpy as np

from hookkit.health import Finding, diagnose
from hookkit.records import Record, Run

N = 100  # records in each hand-made run


def record(kind, names, types, values, n=N, **meta):
    axis = np.arange(n)
    table = {
        k: np.array([np.broadcast_to(row, (n,)) for row in v], float) for k, v in values.items()
    }
    return Record(
        kind, tuple(names), tuple(types), axis, axis // 50, axis, np.ones(n, np.int64), table,
        meta=meta,
    )  # fmt: skip


def acts(types=("Linear", "ReLU", "Linear"), n=N, **values):
    """Activations of layers "0", "1", … that look healthy, but for `values`."""
    k = len(types)
    plain = {"mean": 0.1, "std": 1.0, "rms": 1.0, "min": -3.0, "max": 3.0, "zero": 0.1}
    table = {s: [v] * k for s, v in {**plain, "nonfinite": 0.0}.items()}
    return record("activation", map(str, range(k)), types, {**table, **values}, n)


def weights(k=4, n=N, ndim=2, **values):
    """Weights "0.weight", … of Linears that move healthily, but for `values`; meta likewise."""
    plain = {"weight_norm": 5.0, "grad_norm": 0.1, "update_norm": 5e-3, "update_ratio": 1e-3}
    table = {s: [v] * k for s, v in {**plain, "grad_rms": 1e-3, "nonfinite": 0.0}.items()}
    meta = {"ndim": [ndim] * k, "numel": [64] * k}
    meta |= {"requires_grad": [True] * k, "in_optimizer": [True] * k}
    meta |= {key: values.pop(key) for key in list(values) if key in meta}
    names = [f"{i}.weight" for i in range(k)]
    return record("param", names, ["Linear"] * k, {**table, **values}, n, **meta)


def sized(rms, k=4, **values):
    """The same, 64 × 64 and of this RMS at first: 8 times it is their gain."""
    made = weights(k, weight_rms=[rms] * k, **values)
    return dataclasses.replace(made, meta={**made.meta, "shape": [[64, 64]] * k})


def falling(n=300, start=2.3, end=0.1):
    noise = np.random.default_rng(0).normal(0, 0.02, n)
    return end + (start - end) * np.exp(-np.arange(n) / (n / 5)) + np.abs(noise)


FLAT = np.full(300, 2.3) + np.random.default_rng(1).normal(0, 0.01, 300)


def found(run: Run, rule: str) -> Finding:
    hits = [f for f in diagnose(run) if f.rule == rule]
    assert hits, f"{rule} is silent: {diagnose(run)}"
    return hits[0]


def alarms(run: Run) -> set[str]:
    return {f.rule for f in diagnose(run) if f.severity != "note"}


CE = {"n_classes": 10, "loss_func": "CrossEntropyLoss"}


EVEN = np.arange(N) % 2 == 0


def first(run):
    return diagnose(run)[0].rule


MSE = {"loss_func": "MSELoss"}


def slow(fall, n=300, noise=0.02):
    return 2.3 - np.linspace(0, fall, n) + np.random.default_rng(4).normal(0, noise, n)


def first_layer(weight_grad, bias_grad=0.1, **facts):
    """Parameters of which "0" has 16 × 64 weights and a bias."""
    p = weights(4, grad_norm=[weight_grad, bias_grad, 0.1, 0.1], **facts)
    meta = {**p.meta, "ndim": [2, 1, 2, 2], "numel": [1024, 16, 256, 256]}
    return dataclasses.replace(p, names=("0.weight", "0.bias", "2.weight", "4.weight"), meta=meta)
