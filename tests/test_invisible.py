"""Training with hooks, statistics and everything else on is training without, to the last bit.

And a pass without learning leaves everything as it was that a later fit sees.
"""

import copy
import random
import types
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from learners import conv_net, quiet
from torch import Tensor, nn

from hookkit.callbacks import (
    Callback,
    CSVLogger,
    EarlyStoppingCallback,
    GradientAccumulation,
    GradientClip,
    LogTo,
    MixedPrecision,
    SaveModelCallback,
    SchedulerCallback,
)
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.recorders import Fingerprint
from hookkit.testing import synth_learner


class InPlace(nn.Module):
    """In-place layers, a residual written in place, dropout, a module and a ReLU used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Linear(6, 8), nn.ReLU(inplace=True)
        self.drop, self.shared = nn.Dropout(0.3), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.stem(x))
        g = self.shared(self.drop(h))
        g += h
        h = self.norm(self.act(self.shared(g)))
        out: Tensor = self.head(h)
        return out


def flat_batches() -> Any:
    return [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(4)]


def image_batches() -> Any:
    return [(torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))) for _ in range(4)]


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "in place": (InPlace, flat_batches, nn.MSELoss()),
    "conv": (conv_net, image_batches, nn.CrossEntropyLoss()),
}


def stats_callbacks() -> list[Any]:
    from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats

    return [
        ActivationStats(with_hist=True, include_paramless=True, units=True),
        GradientStats(with_hist=True),
        ParamStats(),
        FlightRecorder("report"),
    ]


GUESTS: dict[str, Callable[[], list[Any]]] = {
    "forward hooks": lambda: [HookCallback(include_paramless=True, hook=lambda m, i, o: o)],
    "backward hooks": lambda: [
        HookCallback(is_forward=False, include_paramless=True, hook=lambda m, i, o: (i, o))
    ],
    "some batches": lambda: [HookCallback(every=2, on_valid=True, hook=lambda m, i, o: o)],
    "statistics": stats_callbacks,
    "a fingerprint": lambda: [Fingerprint(Path(mkdtemp(), "run.fp"))],
    "reads between": lambda: [
        Callback(after_epoch=lambda cb: (cb.learn.validate(), cb.learn.get_preds()))
    ],
}


def trained(net: str, guests: list[Any]) -> tuple[dict[str, Tensor], list[float], list[Any]]:
    """Weights and buffers, losses, and what the generators would give next."""
    make_net, make_data, loss_func = NETS[net]
    torch.manual_seed(0)
    data = make_data()
    model = make_net()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)  # type: ignore[operator]
    learn = synth_learner(
        data=(data, data),
        model=model,
        loss_func=loss_func,
        cbs=guests,
        opt_func=lambda p, lr: torch.optim.AdamW(p, lr=lr),
        lr=1e-2,
    )
    learn.logger = lambda row: None
    learn.fit(2)
    losses = learn.losses.by_batch().tolist()
    rest = [torch.rand(1).item(), np.random.rand(), random.random()]
    return copy.deepcopy(model.state_dict()), losses, rest


@pytest.mark.slow
@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_training_is_bit_identical_with_guests(net: str, guest: str) -> None:
    if (net, guest) == ("in place", "backward hooks"):
        pytest.skip("PyTorch's full backward hooks refuse it")
    weights, losses, rest = trained(net, [])

    watched, watched_losses, watched_rest = trained(net, GUESTS[guest]())

    assert watched_losses == losses
    assert watched_rest == rest
    for name, value in weights.items():
        assert value.equal(watched[name]), name


def test_a_guest_that_draws_a_random_number_is_caught() -> None:
    """The test of the test."""
    noisy = Callback(after_pred=lambda cb: torch.rand(1))

    assert trained("in place", [noisy])[1] != trained("in place", [])[1]


# --- a pass without learning

LEFT_OUT = {"final_record", "heard"}  # its result, and a cache


def all_of(x: Any, around: tuple[int, ...] = ()) -> Any:
    """Everything that `x` holds, as values that no later change reaches."""
    if isinstance(x, Tensor):
        grad = x.grad if x.is_leaf else None
        return str(x.dtype), x.requires_grad, x.detach().tolist(), all_of(grad)
    if isinstance(x, np.ndarray):
        return x.tolist()
    if id(x) in around or isinstance(x, (type, types.ModuleType, types.FunctionType)):
        return id(x)
    around = (*around, id(x))
    if isinstance(x, dict):
        return {k: all_of(v, around) for k, v in x.items() if k not in LEFT_OUT}
    if isinstance(x, (list, tuple)):
        return [all_of(v, around) for v in x]
    if hasattr(x, "__dict__"):
        return type(x).__name__, all_of(vars(x), around)
    return x


def changes(a: Any, b: Any, path: str = "") -> set[str]:
    """Where two results of `all_of` differ; what is not there counts as False."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = (changes(a.get(k, False), b.get(k, False), f"{path}.{k}") for k in a.keys() | b)
        return set().union(*found)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return set().union(*(changes(*pair, f"{path}[{i}]") for i, pair in pairs))
    return set() if a == b or (a != a and b != b) else {path}


def everything(folder: Path, amp: str) -> list[Any]:
    """A callback of each kind, but for hooks of a user's own, which see the pass."""
    half = lambda opt, n: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)  # noqa: E731
    files = [SaveModelCallback(), CSVLogger(), LogTo(folder / "a.jsonl", every=1)]
    steps = [MixedPrecision(amp), GradientClip(1.0), GradientAccumulation(2)]
    rest = [*files, *steps, SchedulerCallback(half), EarlyStoppingCallback()]
    return [*stats_callbacks(), Callback(), *rest]


PASSES: dict[str, Callable[[Any], Any]] = {
    "validate": lambda learn: learn.validate(),
    "get_preds": lambda learn: learn.get_preds(with_input=True, with_loss=True),
    "predict": lambda learn: learn.predict(learn.dls.valid_ds[0][0]),
    "summary": lambda learn: learn.summary(),
}


@pytest.mark.parametrize("amp", ["fp16", "bf16"])
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_without_learning_changes_nothing_of_the_learner(
    name: str, amp: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
    learn = quiet(n_trn=4, model=nn.Sequential(*layers), path=tmp_path, metrics=nn.L1Loss())
    learn.add_cbs(everything(tmp_path, amp))
    learn.fit(2)
    learn.autocast = learn.autocast  # that of the class: a pass may put it back
    learn.model.train()
    learn.model[1].eval()
    before = all_of(learn)

    PASSES[name](learn)

    assert changes(before, all_of(learn)) == set()


def test_a_change_deep_within_a_learner_is_seen() -> None:
    """The test of the test."""
    learn = quiet(cbs=stats_callbacks())
    before = all_of(learn)
    learn.model.a.data += 1
    learn.param_stats._versions = None

    found = changes(before, all_of(learn))

    assert any("._parameters.a" in path for path in found)
    assert any("._versions" in path for path in found)
