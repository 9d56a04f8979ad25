"""The small data, models and Learners of `hookkit.testing`."""

import pytest

from hookkit.testing import synth_dbunch, synth_learner


def test_the_synthetic_data_are_a_line_with_noise() -> None:
    dls = synth_dbunch(a=5, b=-1, bs=8, n_train=3, n_valid=2)

    x, y = dls.train_ds.tensors

    assert (len(dls.train), len(dls.valid), x.shape) == (3, 2, (24, 1))
    assert (y - 5 * x + 1).abs().max() < 1


@pytest.mark.usefixtures("cuda")
def test_a_synthetic_learner_on_cuda() -> None:
    learn = synth_learner(cuda=True)
    learn.logger = lambda row: None

    learn.fit(1)

    assert learn.model.a.is_cuda
