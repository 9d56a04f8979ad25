"""A selector, of whatever kind, means in every training library what it means in a loop of one's
own."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_bridges import EPOCHS, N, Net, hugging_face, lightning_trainer, loader, mse, sgd
from torch import Tensor, nn

from hookkit.recording import HookCallback
from hookkit.stats import ActivationStats, GradientStats
from hookkit.watching import watch

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


class Parts(nn.Module):
    def forward(self, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return y, {"twice": 2 * y}


class NetWithParts(Net):
    """The net of the bridges' tests, with a layer at its end that gives a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()

    def forward(self, x, labels=None):
        y = self.parts(self.b(self.act(self.a(x))))[0]
        return y if labels is None else {"loss": mse(y, labels), "logits": y}


# what is selected, the names that it has in the result, and what these are in the model
SELECTORS: list[tuple[Any, dict[str, str]]] = [
    ("b", {"b": "b"}),
    ("a*", {"a": "a", "act": "act"}),
    (re.compile("^(b|act)$"), {"act": "act", "b": "b"}),
    (nn.Linear, {"a": "a", "b": "b"}),
    (lambda name, m: isinstance(m, nn.ReLU), {"act": "act"}),
    (["b", nn.ReLU], {"b": "b", "act": "act"}),
    ({"a": "first", "act": "then"}, {"first": "a", "then": "act"}),
    ("parts[1]['twice']", {"parts[1]['twice']": "twice"}),
    ([{"parts[1]": "more"}, "a"], {"more": "twice", "a": "a"}),
]


class Means(HookCallback):
    """The mean of what each selected module gave, once for each optimizer step."""

    def __init__(self, modules: Any) -> None:
        super().__init__(modules, hook=lambda m, i, o: next(iter(_tensors(o))).double().mean())
        self.rows: list[list[float]] = []

    def after_step(self) -> None:
        self.rows.append([t.item() for t in self.hooks.stored])


def _tensors(o: Any) -> Any:
    return o.values() if isinstance(o, dict) else [o]


def by_hand() -> dict[str, np.ndarray]:
    """(steps,) float64 for each layer: the mean of its outputs, and of their gradients as `grad`.

    A loop and hooks of PyTorch alone.
    """
    model = NetWithParts()
    opt = sgd(model)
    seen: dict[str, list[Tensor]] = {n: [] for n in ("a", "act", "b", "twice", "grad")}

    def note(name: str, o: Tensor, k: int = 1) -> None:
        seen[name].append(k * o.detach().double().mean())

    for name in ("a", "act", "b"):
        model.get_submodule(name).register_forward_hook(lambda m, i, o, n=name: note(n, o))
    model.parts.register_forward_hook(lambda m, i, o: note("twice", o[0], 2))
    model.b.register_forward_hook(
        lambda m, i, o: (o.register_hook(lambda g: note("grad", g)), None)[1]
    )
    for _ in range(EPOCHS):
        for x, y in loader():
            mse(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return {name: torch.stack(means).numpy() for name, means in seen.items()}


# --- the ways to train


def in_a_loop(out: Path, *callbacks: Any) -> None:
    model = NetWithParts()
    opt = sgd(model)
    with watch(model, opt, *callbacks):
        for _ in range(EPOCHS):
            for x, y in loader():
                mse(model(x), y).backward()
                opt.step()
                opt.zero_grad()


def in_the_learner(out: Path, *callbacks: Any) -> None:
    from hookkit.learner import Learner

    learn = Learner((loader(), None), NetWithParts(), mse, torch.optim.SGD, lr=0.05, cbs=callbacks)
    with learn.no_logging():
        learn.fit(EPOCHS)


def with_lightning(out: Path, *callbacks: Any) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from hookkit.bridges.lightning import HookkitCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            for name, m in NetWithParts().named_children():
                self.add_module(name, m)

        forward = NetWithParts.forward

        def training_step(self, batch, i):
            return mse(self(batch[0]), batch[1])

        def validation_step(self, batch, i):
            self(batch[0])

        def configure_optimizers(self):
            return sgd(self)

    trainer = lightning_trainer(out, 1, HookkitCallback(*callbacks))
    trainer.fit(Module(), loader(), loader())


def with_transformers(out: Path, *callbacks: Any) -> None:
    pytest.importorskip("transformers")
    from hookkit.bridges.transformers import HookkitCallback

    trainer = hugging_face(
        NetWithParts(), HookkitCallback(*callbacks), out=out, eval_strategy="epoch"
    )
    trainer.train()


WAYS = [
    in_a_loop,
    in_the_learner,
    with_lightning,
    with_transformers,
]


@pytest.mark.slow
@pytest.mark.parametrize("train", WAYS, ids=lambda way: way.__name__)
def test_every_kind_of_selector_finds_its_layers_and_their_values(train, tmp_path: Path) -> None:
    callbacks = [Means(what) for what, _ in SELECTORS]

    train(tmp_path, *callbacks)

    truth = by_hand()
    for callback, (what, names) in zip(callbacks, SELECTORS, strict=True):
        assert callback.names == list(names), what
        wanted = np.stack([truth[place] for place in names.values()], axis=1)
        assert wanted.shape == (N * EPOCHS, len(names))
        np.testing.assert_allclose(callback.rows, wanted, rtol=1e-5, atol=1e-7, err_msg=str(what))


@pytest.mark.slow
@pytest.mark.parametrize("train", WAYS, ids=lambda way: way.__name__)
def test_statistics_are_of_the_layers_selected_under_the_names_given(train, tmp_path) -> None:
    acts = ActivationStats(modules=["b", {"a": "first"}, re.compile("^act$")])
    grads = GradientStats(modules={"b": "head"})

    train(tmp_path, acts, grads)

    truth = by_hand()
    assert acts.record().names == ("b", "first", "act")
    assert grads.record().names == ("head",)
    means = np.stack([truth[name] for name in ("b", "a", "act")])
    np.testing.assert_allclose(acts.record().value("mean"), means, rtol=1e-5, atol=1e-7)
    grad = truth["grad"][None]
    np.testing.assert_allclose(grads.record().value("mean"), grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("train", WAYS, ids=lambda way: way.__name__)
def test_a_name_that_is_not_there_ends_the_training_before_it_begins(train, tmp_path) -> None:
    from hookkit.errors import SelectionError

    seen = Means("a")

    with pytest.raises(SelectionError, match=r'no module .*"ac".* Nearest: "act"'):
        train(tmp_path, seen, Means("ac"))

    assert seen.rows == []
