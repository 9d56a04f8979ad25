"""`compare_models` on the zoo: equal copies, and each layer found whose weights are others.

What it says is held against what plain hooks see: `.first` is the first output that changes, or the
module around it if its inputs change too.
"""

import copy
from typing import Any

import pytest
import torch
from hooked import fingerprint
from torch import Tensor, nn
from zoo import ZOO, Entry

from hookkit import compare_models, select
from hookkit._core.pytree import tree_leaves

# those whose forward differentiates, or without values, or without hooks; one gives a generator
WITHOUT = ("needs_grad", "meta_device", "lazy", "scripted", "traced", "generator_out")
RUNS = [e for e in ZOO if "raises" not in e.tags and e.name not in WITHOUT]
WEIGHTED = [e for e in RUNS if e.n_params and "compiled" not in e.tags]
MOST = 4  # layers of a model; each costs a comparison

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception:
        pytest.skip("it cannot be copied")


def weights(m: nn.Module) -> list[Tensor]:
    return [p for p in m.parameters(recurse=False) if p.is_floating_point() or p.is_complex()]


def nudged(model: nn.Module, *names: str) -> nn.Module:
    """A copy of the model, in which the first weight of each of these layers is another."""
    other, random = copied(model), torch.Generator().manual_seed(1)
    for name in names:
        weight = weights(dict(other.named_modules())[name])[0].data
        weight += torch.randn(weight.shape, generator=random).to(weight.dtype)
    return other


def outputs(model: nn.Module, e: Entry) -> list[tuple[str, list[Tensor]]]:
    """What plain hooks see of a copy, in the order in which modules finish."""
    copy_, seen = copied(model), list[tuple[str, list[Tensor]]]()
    inner = dict(select(copy_)) if next(copy_.children(), None) is not None else {}
    for name, m in {**inner, "": copy_}.items():
        if not isinstance(m, torch.jit.ScriptModule):
            m.register_forward_hook(
                lambda m, i, o, name=name: seen.append((name, [plain(t) for t in tree_leaves(o)]))
            )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        e.run(copy_)
    return seen


def plain(t: Tensor) -> Tensor:
    if t.is_nested:
        return torch.cat([part.flatten() for part in t.unbind()])
    return (t if t.layout is torch.strided else t.to_dense()).clone()


def first_change(before: list[Any], after: list[Any]) -> str | None:
    for (name, old), (_, new) in zip(before, after, strict=False):
        try:
            torch.testing.assert_close(new, old, equal_nan=True)
        except AssertionError:
            return name
    return None


def changes(model: nn.Module, e: Entry) -> dict[str, str]:
    """Layers whose weights change something, and the module whose output changes first by it."""
    layers = [name for name, m in model.named_modules() if weights(m)]
    before, found = outputs(model, e), {}
    for name in layers[:: -(-len(layers) // MOST)]:
        if (first := first_change(before, outputs(nudged(model, name), e))) is not None:
            found[name] = first
    return found


def layer_of(row: Any, model: nn.Module) -> str:
    """The module's name: a row of an LSTM is called `lstm[0]`."""
    names = dict(model.named_modules())
    return row.name if row.name in names else row.name.partition("[")[0]


@pytest.mark.zoo
@pytest.mark.parametrize("e", RUNS, ids=lambda e: e.name)
def test_a_copy_does_not_differ_and_nothing_is_changed(e: Entry) -> None:
    model = e.build()
    other = copied(model)
    args, kwargs = e.args(), e.kwargs()
    before = fingerprint(model, args, kwargs)

    found = compare_models(model, other, *args, **kwargs)
    assert found.first is None, str(found)
    assert fingerprint(model, args, kwargs) == before


@pytest.mark.zoo
@pytest.mark.parametrize("e", WEIGHTED, ids=lambda e: e.name)
def test_layers_with_other_weights_are_found(e: Entry) -> None:
    model = e.build()
    expected = changes(model, e)
    args, kwargs = e.args(), e.kwargs()

    for name, first in expected.items():
        found = compare_models(model, nudged(model, name), *args, **kwargs).first
        assert found, name
        named = layer_of(found, model)
        # a weight of a layer that no hook sees makes a difference in the module around it
        around = f"{name}.".startswith(f"{named}." if named else "")
        assert named == first or around, "another first layer"
        if f"{name}.".startswith(f"{first}."):
            assert named == first
