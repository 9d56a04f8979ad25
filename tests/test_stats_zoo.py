"""The recorders on every odd model of the zoo: training goes on as without them, all is read."""

import re

import numpy as np
import pytest
import torch
from test_recording_zoo import trained
from zoo import ZOO, Entry

from hookkit.errors import HookkitWarning
from hookkit.records import as_run
from hookkit.stats import ActivationStats, FlightRecorder, GradientStats, ParamStats


@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_training_is_the_same_and_everything_reads_and_joins(entry: Entry) -> None:
    if "compiled" in entry.tags and torch.__version__ < (2, 13):
        pytest.skip("torch < 2.13 cannot trace these tensor hooks")
    stats = ActivationStats(with_hist=True, units=True, include_paramless=True)
    grads = [GradientStats(True), GradientStats(of="params")]
    guests = [stats, *grads, ParamStats(), FlightRecorder("report")]

    plain = trained(entry, [])
    watched = trained(entry, guests)

    assert watched[:2] == plain[:2]
    for name, value in plain[2].items():
        torch.testing.assert_close(watched[2][name], value, rtol=0, atol=0, equal_nan=True)
    for guest in guests[:4]:
        assert len(guest.record()) == len(guest.record().spans)
    assert len(stats.stats) == len(stats.record())
    for i, name in enumerate(stats.names):
        stats.layer_stats(i)
        stats.hist(i)
        dead = stats.record().value("dead", name)
        if np.isfinite(dead).any():
            assert isinstance(stats.dead_units(i), list)
        elif len(dead):  # it gave nothing: that is warned about
            with pytest.warns(HookkitWarning, match=re.escape(name)):
                assert stats.dead_units(i) == []
    run = as_run([guest.record() for guest in (stats, grads[0], guests[3])])
    both = run + run
    assert both.n_steps == 2 * run.n_steps
    for once, twice in zip(run.records, both.records, strict=True):
        for name, table in once.values.items():
            np.testing.assert_array_equal(twice.values[name], np.hstack([table, table]))
    assert repr(both.diagnose())
