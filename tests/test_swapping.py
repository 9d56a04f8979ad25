"""swap, Wrapper, Catcher, GramWrapper: other modules in, the originals back."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hooked import Checkpointed
from torch import Tensor, nn

from hookkit._core.modules import submodules
from hookkit.edits.swapping import Catcher, GramWrapper, Wrapper, swap
from hookkit.errors import ArgumentError, HookError, HookkitWarning, NeverFiredWarning, OptionError


class Doubled(Wrapper):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.wrapped(*args, **kwargs)


class Lora(Wrapper):
    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__(wrapped)
        self.down = nn.Linear(self.in_features, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.wrapped(x) + self.scale * self.down(x)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 2))


def places(model: nn.Module) -> list[tuple[int, str, int]]:
    parents = model.modules()
    return [(id(p), key, id(m)) for p in parents for key, m in submodules(p).items()]


def test_a_replacement_runs_and_the_original_is_restored() -> None:
    net = mlp()
    relu, x = net[1], torch.randn(5, 4)

    with swap(net, {"1": nn.Tanh()}) as new:
        assert isinstance(net[1], nn.Tanh)
        assert new == {"1": net[1]}

    assert net[1] is relu
    torch.testing.assert_close(net[:2](x), net[0](x).relu())


def test_selectors_match_several_modules_each_with_a_wrapper_of_its_own() -> None:
    net = mlp()

    with swap(net, {nn.Linear: Doubled, "[1-2]": nn.Identity()}) as new:
        net(torch.ones(1, 4))
        assert list(new) == ["0", "3", "1", "2"]
        assert new["0"] is not new["3"]
        assert new["1"] is new["2"] is net[1]


def test_places_are_as_before_after_errors_in_the_block_and_in_a_function() -> None:
    net = mlp()
    before = places(net)

    def fails_later(m: nn.Module) -> nn.Module:
        return Doubled(m) if isinstance(m, nn.Linear) else nn.Linear()  # type: ignore[call-arg]

    with pytest.raises(ZeroDivisionError), swap(net, {"**": Doubled}):
        _ = 1 / 0
    with pytest.raises(TypeError), swap(net, {"*": fails_later}):
        pass

    assert places(net) == before


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["b"] = model["a"]
    return model


@pytest.mark.parametrize(
    "wanted", [{"a": Catcher, "c": Catcher, "b": Catcher}, {("a", "c", "b"): Catcher}]
)
def test_both_names_of_a_shared_module_give_its_replacement(wanted: Any) -> None:
    model = tied()

    with pytest.warns(NeverFiredWarning, match='never called: "c"'), swap(model, wanted) as new:
        model["b"](torch.ones(1, 2))

    assert list(new) == ["a", "c", "b"]
    assert new["a"] is new["b"]
    assert len(new["b"].calls) == 1


def test_an_original_follows_its_model_into_another_mode() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Dropout())
    model[2].eval()

    with swap(model, {"0": nn.Identity(), "1.1": nn.Identity()}):
        model.eval()
    assert [m.training for m in model.modules()] == [False] * 6

    with swap(model, {"0": nn.Identity(), "2": nn.Identity()}):
        model[1].train()
    assert [m.training for m in model.modules()] == [False, False, True, True, True, False]


def test_made_modules_get_the_mode_of_the_original_and_given_ones_keep_theirs() -> None:
    net = mlp().train()
    net[3].eval()
    given = nn.Dropout()

    with swap(net, {"0": Lora, "3": Lora, "1": given}):
        assert net[0].training
        assert net[0].down.training
        assert not net[3].training
        assert not net[3].down.training
        assert net[1].training
        net(torch.ones(2, 4))

    assert net[0].training
    assert not net[3].training


# --- wrappers


def test_a_wrapper_has_the_attributes_of_what_it_wraps() -> None:
    wrapper = Doubled(nn.Linear(4, 3))

    assert wrapper.in_features == 4
    assert wrapper.weight is wrapper.wrapped.weight
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        wrapper.nope  # noqa: B018


# --- Catcher


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_calls_are_not_recorded_twice(reentrant: bool) -> None:
    net = Checkpointed(reentrant)
    x = torch.randn(5, 3, requires_grad=True)

    with swap(net, {"fc": Catcher}) as caught:
        net(x).sum().backward()
    with swap(net, {"fc": GramWrapper}) as summed:
        net(x).sum().backward()

    assert len(caught["fc"].calls) == 1
    assert summed["fc"].n_rows == 5


# --- GramWrapper


def test_gram_is_the_sum_of_outer_products_over_batches() -> None:
    torch.manual_seed(0)
    net = mlp().eval()
    batches = [torch.randn(n, 4) for n in (5, 1, 8)]

    with swap(net, {nn.Linear: GramWrapper}) as new:
        for x in batches:
            net(x)

    rows = torch.cat(batches).double()
    assert new["0"].n_rows == 14
    torch.testing.assert_close(new["0"].gram.double(), rows.T @ rows, rtol=1e-5, atol=1e-5)
    assert new["3"].gram.shape == (3, 3)


# --- what cannot be swapped


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ({"a": 3}, ArgumentError, "the replacement of a Linear is 3, which gives an int"),
        ({"a": lambda m: None}, ArgumentError, "of a Linear is <lambda>, which gives None. Give"),
        ({"a": nn.ReLU}, ArgumentError, r"the class ReLU would be called with .*Give a module, Re"),
        ({"": Catcher}, HookError, "the model itself has no place"),
        (
            {"a": Catcher, "b": Doubled},
            OptionError,
            "two entries have a replacement for \"b\", 'b'",
        ),
        ({"conv": GramWrapper}, OptionError, "a Conv2d has its channels in another. Derive"),
    ],
)
def test_what_cannot_be_swapped_changes_nothing(wanted: Any, error: Any, message: str) -> None:
    net = tied()
    net["conv"] = nn.Conv2d(1, 1, 3)
    before = places(net)

    with pytest.raises(error, match=message), swap(net, wanted):
        pass

    assert places(net) == before


def test_a_module_that_other_code_put_there_is_kept_and_reported() -> None:
    net = mlp()
    relu, other = net[1], nn.Tanh()

    swapped = swap(net, {"0": nn.Identity(), "1": Doubled})
    swapped.__enter__()
    net(torch.ones(2, 4)[:, :3])
    net[0] = other
    with pytest.warns(HookkitWarning, match='put a Tanh in the place of "0" of the Sequential'):
        swapped.__exit__(None, None, None)

    assert net[0] is other
    assert net[1] is relu


@pytest.mark.parametrize("name", ["0.self_attn.out_proj", "0.linear2"])
def test_a_wrapper_that_pytorch_passes_by_warns_or_runs(name: str) -> None:
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    x = torch.randn(2, 3, 8)
    never: Any = nullcontext()
    if "out_proj" in name:  # attention reads its weights; for linear2 the fused path is off
        never = pytest.warns(NeverFiredWarning, match=f'never called: "{name}" ')

    with torch.no_grad(), never, swap(net, {name: Doubled}):
        y = net(x)

    assert torch.allclose(y, net(x)) == ("out_proj" in name)
