"""A summary fails where the model fails, in its words; bad options are errors with the cure."""

import pytest
import torch
from torch import Tensor, nn

from hookkit.summaries import summary


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_model_is_counted() -> None:
    s = summary(torch.jit.script(mlp()), torch.randn(3, 4))

    assert (s.n_params, s.macs, s.rows[0].type) == (58, 3 * (4 * 8 + 8 * 2), "Sequential")
    assert (len(s), s.run) == (4, "real")


def test_a_model_that_differentiates_by_torch_func_runs_without_saved_bytes() -> None:
    class Physics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(torch.func.jacrev(self.f))(x)

    s = summary(Physics(), torch.ones(5, 2))

    assert (s.run, s.output) == ("real", "5×1×2 float32")
    assert s.notes == (
        "torch.func runs in the forward: saved bytes are unknown, and left out of the sums.",
    )
    assert s.macs


def test_a_size_works_where_tensors_are_made_on_meta() -> None:
    with torch.device("meta"):
        assert summary(nn.Linear(4, 3), (4,)).output == "1×3 float32"


def test_lazy_parameters_that_require_grad_are_not_frozen() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))

    assert "frozen" not in str(summary(lazy))
    assert summary(lazy)["0"].trainable is True

    for p in lazy.parameters():
        p.requires_grad = False
    assert summary(lazy)["0"].trainable is False
