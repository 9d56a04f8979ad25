"""edit_output(s), edit_input(s), edit_grad(s) and the ready-made edits."""

from functools import partial
from typing import Any

import pytest
import torch
from backwards import BackwardIn, here, pytorchs_thread
from hooked import Checkpointed, Gives
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from hookkit._core.pytree import Inputs, tree_leaves
from hookkit.edits import (
    add,
    edit_grad,
    edit_input,
    edit_output,
    edit_outputs,
    patch_from,
    replace,
    scale,
    zero,
)
from hookkit.errors import (
    ArgumentError,
    HookError,
    NeverFiredWarning,
    OptionError,
    SelectionError,
)
from hookkit.hooks import hook_input, hook_output, hook_outputs
from hookkit.hooks.selection import select


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))


# --- outputs


def test_f_gets_module_inputs_and_output_and_its_result_goes_on() -> None:
    net, x = mlp(), torch.randn(5, 4)
    seen: list[Any] = []

    def f(module: nn.Module, input: Inputs, output: Tensor) -> Tensor:
        seen.append((module, input[0], output))
        return output + 1

    with edit_output(net[0], f) as edits:
        y = net(x)

    torch.testing.assert_close(y, net[2]((net[0](x) + 1).relu()))
    assert seen[0][0] is net[0]
    assert seen[0][1] is x
    assert edits.n_calls == {"0": 1}


def test_none_leaves_the_output_and_keyword_inputs_are_seen() -> None:
    layer, seen = Gives(lambda x, *, shift: x + shift), []

    with edit_output(layer, lambda m, i, o: seen.append(i["shift"])) as edits:
        assert layer(torch.ones(1), shift=3) == 4

    assert seen == [3]
    assert edits.n_calls == {"0": 1}


def test_a_sequential_is_one_module_and_a_list_of_modules_is_several() -> None:
    net = nn.Sequential(nn.Identity(), nn.Identity())

    assert edit_outputs is edit_output
    for modules, wanted in ((net, 2), (list(net), 4), (nn.ModuleList(net), 4)):
        with edit_output(modules, scale(2)):
            assert net(torch.ones(1)).item() == wanted


def test_a_module_dict_with_a_forward_of_its_own_is_one_module() -> None:
    class Block(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    with edit_output(block := Block({"a": nn.Identity()}), scale(2)) as edits:
        assert block(torch.ones(1)).item() == 4

    assert len(edits) == 1


def test_a_selected_leaf_is_edited_alone() -> None:
    lstm = nn.LSTM(4, 3)
    net, x = nn.ModuleDict({"lstm": lstm}), torch.randn(2, 1, 4)
    plain = lstm(x)

    with edit_outputs(select(net, "lstm[1][0]"), zero()) as edits:
        out, (h, c) = lstm(x)

    assert torch.equal(out, plain[0])
    assert torch.equal(c, plain[1][1])
    assert h.abs().max() == 0
    assert edits.n_calls == {"lstm[1][0]": 1}


def test_gradients_flow_through_edits() -> None:
    net, x = mlp(), torch.randn(5, 4)
    v = torch.zeros(3, requires_grad=True)

    with edit_output(net[0], add(v)):
        net(x).sum().backward()

    mask = (net[0](x) > 0).float()
    torch.testing.assert_close(v.grad, (mask @ torch.diag(net[2].weight.sum(0))).sum(0))
    assert net[0].weight.grad.abs().max() > 0


def test_zero_cuts_the_gradient_and_stops_nan() -> None:
    layer = Gives(lambda x: x * float("nan"))
    x = torch.ones(2, requires_grad=True)

    with edit_output(layer, zero()):
        y = layer(x)
        y.sum().backward()

    assert y.tolist() == [0, 0]


def test_the_tensors_of_the_run_and_of_the_user_are_not_written() -> None:
    layer, x = nn.Identity(), torch.ones(3)
    mine, stored = torch.zeros(3), x.clone()
    net = nn.Sequential(layer, nn.Threshold(0.5, 9.0, inplace=True))

    for change in (zero(), zero(at=0), scale(2, at=1), add(1), replace(5, at=2), replace(mine)):
        with edit_output(layer, change):
            net(x)

    assert torch.equal(x, stored)
    assert mine.tolist() == [0, 0, 0]


@pytest.mark.parametrize("backward_in", [here, pytorchs_thread])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_with_the_edit_and_it_counts_once(
    reentrant: bool, backward_in: BackwardIn
) -> None:
    torch.manual_seed(0)
    net, x = Checkpointed(reentrant), torch.randn(5, 3, requires_grad=True)

    with edit_output(net.fc, scale(-1)) as edits:
        backward_in(net(x).sum().backward)

    wanted = torch.autograd.grad((-net.fc(x)).relu().sum(), x)[0]
    torch.testing.assert_close(x.grad, wanted)
    assert edits.n_calls == {"0": 1}


# --- order


@pytest.mark.parametrize(
    ("hook", "edit"),
    [
        (hook_output, edit_output),
        (hook_input, edit_input),
        (partial(hook_output, grad=True), edit_grad),
    ],
)
def test_capture_and_edit_see_each_other_in_the_order_written(hook: Any, edit: Any) -> None:
    layer, x = nn.Identity(), torch.ones(2, requires_grad=True)

    with (
        hook(layer) as first,
        edit(layer, add(1)),
        hook(layer) as second,
        edit(layer, scale(10)),
        hook(layer) as third,
    ):
        layer(x).sum().backward()

    assert [tree_leaves(h.stored)[0][0].item() for h in (first, second, third)] == [1, 2, 20]


# --- inputs


def test_a_single_input_is_replaced_by_a_value_or_a_tuple() -> None:
    layer = nn.Identity()

    with edit_input(layer, lambda m, i: i[0] + 1):
        assert layer(torch.zeros(1)).item() == 1
    with edit_input(layer, lambda m, i: (i[0] + 2,)):
        assert layer(torch.zeros(1)).item() == 2


def test_keyword_inputs_stay_or_are_replaced_with_inputs() -> None:
    layer = Gives(lambda x, y, *, z: x + 10 * y + 100 * z)
    one = torch.ones(())

    with edit_input(layer, lambda m, i: (i[1] * 2, i[0] * 3)):
        assert layer(one, one, z=one).item() == 132
    with edit_input(layer, lambda m, i: Inputs(i, {"z": i["z"] * 0})):
        assert layer(one, one, z=one).item() == 11
    with edit_input(layer, scale(2)):
        assert layer(one, one, z=one).item() == 222


# --- gradients


def test_a_gradient_that_runs_after_the_block_is_not_edited_and_that_is_reported() -> None:
    x = torch.ones(1, requires_grad=True)
    layer = Gives(lambda x: 2 * x)

    with (
        pytest.warns(NeverFiredWarning, match=r"1 of 1 .* fired: Gives.*no gradient arrived"),
        edit_grad(layer, zero()),
    ):
        y = layer(x)
    y.backward()

    assert x.grad.item() == 2


def test_a_gradient_of_another_shape() -> None:
    layer, x = nn.Linear(2, 3), torch.ones(4, 2)

    with (
        pytest.raises(HookError, match=r"Linear.*the replacement is 3, the gradient is 4×3"),
        edit_grad(layer, lambda m, g: g.sum(0)),
    ):
        layer(x).sum().backward()


# --- another edit for each layer


class Steps(nn.Module):
    """Three layers that add 1, 10 and 100; the first has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        for i, m in enumerate(self.blocks):
            nn.init.eye_(m.weight)  # type: ignore[arg-type]
            nn.init.constant_(m.bias, 10**i)  # type: ignore[arg-type]
        self.first = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        for m in self.blocks:
            x = m(x)
        return x


def test_the_keys_of_a_dict_of_edits_select_in_the_model() -> None:
    net, x = Steps(), torch.zeros(1, 2, requires_grad=True)

    with edit_output(net, {"blocks.[01]": add(0.5), "blocks.2": lambda o: 2 * o}) as edits:
        assert net(x).tolist() == [[224.0, 224.0]]
    with edit_input(net, {"blocks.1": zero()}):
        assert net(x).tolist() == [[110.0, 110.0]]
    with edit_grad(net, {"blocks.1": lambda grad: 3 * grad}):
        net(x).sum().backward()
    with edit_output(net, {"blocks.0": zero(), "blocks.2": zero()}, calls=1):
        assert net(x).tolist() == [[111.0, 111.0]]
        assert net(x).tolist() == [[0.0, 0.0]]

    assert edits.n_calls == {"blocks.0": 1, "blocks.1": 1, "blocks.2": 1}
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize(
    ("edits", "error", "says"),
    [
        ({"block.0": zero()}, SelectionError, 'no module matches "block'),
        ({}, OptionError, "no module was given"),
        ({"blocks.0": zero}, ArgumentError, "makes an edit, and is none itself"),
        ({"blocks.0": 3}, ArgumentError, "must be a function"),
        ({"blocks.*": zero(), "blocks.0": add(1.0)}, OptionError, 'two keys mean the layer "block'),
        ({"blocks.0": zero(), "first": add(1.0)}, OptionError, "'blocks.0' and 'first'"),
    ],
)
def test_dicts_of_edits_that_cannot_be_meant_change_nothing(
    edits: Any, error: Any, says: str
) -> None:
    net = Steps()

    with pytest.raises(error, match=says):
        edit_outputs(net, edits)

    assert not any(m._forward_hooks for m in net.modules())


def test_a_dict_of_edits_is_for_a_model_and_its_errors_name_the_layer() -> None:
    net = Steps()
    with pytest.raises(ArgumentError, match="A dict of edits selects in a model"):
        edit_outputs(select(net, "blocks.*"), {"blocks.0": zero()})

    with (
        pytest.raises(ZeroDivisionError) as caught,
        edit_outputs(net, {"blocks.1": lambda o: 1 / 0}),
    ):
        net(torch.zeros(1, 2))

    assert len(caught.value.__notes__) == 1
    assert caught.value.__notes__[0].endswith("on 'blocks.1' (Linear)")


# --- ready-made edits


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (zero(), [[0, 0], [0, 0]]),
        (zero(at=0), [[0, 0], [3, 4]]),
        (zero(at=(slice(None), 1)), [[1, 0], [3, 0]]),
        (zero(at=(..., -1)), [[1, 0], [3, 0]]),
        (zero(at=torch.tensor([True, False])), [[0, 0], [3, 4]]),
        (zero(at=[1]), [[1, 2], [0, 0]]),
        (scale(2), [[2, 4], [6, 8]]),
        (scale(torch.tensor([1.0, 0.0])), [[1, 0], [3, 0]]),
        (scale(3, at=(1, 1)), [[1, 2], [3, 12]]),
        (add(1), [[2, 3], [4, 5]]),
        (add(torch.tensor([10.0, 20.0]), at=1), [[1, 2], [13, 24]]),
        (replace(9.0), [[9, 9], [9, 9]]),
        (replace(torch.eye(2)), [[1, 0], [0, 1]]),
        (replace(torch.tensor([5.0, 6.0]), at=1), [[1, 2], [5, 6]]),
    ],
    ids=str,
)
def test_ready_made(change: Any, wanted: list[list[float]]) -> None:
    layer = nn.Identity()

    with edit_output(layer, change):
        y = layer(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    assert y.tolist() == wanted


def test_replace_takes_a_structure() -> None:
    layer = Gives(lambda x: (x, (2 * x, [3 * x])))
    new = (torch.ones(2), (torch.zeros(2), [torch.ones(2)]))

    with edit_output(layer, replace(new)):
        out = layer(torch.randn(2))

    assert torch.equal(out[1][0], torch.zeros(2))
    with edit_output(layer, replace(0.0)):
        assert all(t.abs().max() == 0 for t in tree_leaves(layer(torch.randn(2))))


# --- patch_from


def test_patching_a_leaf_from_the_whole() -> None:
    net = nn.ModuleDict({"lstm": nn.LSTM(4, 3)})
    x = torch.randn(2, 1, 4)
    with hook_outputs(select(net, "lstm")) as run:
        wanted = net["lstm"](x)

    with edit_outputs(select(net, "lstm[1][0]"), patch_from(run)):
        out, (h, _) = net["lstm"](torch.zeros_like(x))

    torch.testing.assert_close(h, wanted[1][0])
    assert not torch.equal(out, wanted[0])


def test_patching_from_a_run_that_has_not_the_layer_or_has_not_run() -> None:
    net = mlp()
    with hook_outputs(select(net, "0", "1")) as run:
        net(torch.randn(2, 4))
    idle = hook_output(net[2])
    idle.remove()
    absent = r"no value of this layer, only of "
    runs: list[tuple[Any, str]] = [
        (run, absent + r"'0' \(Linear\), '1' \(ReLU\)[^']*'2' \(Linear\)"),
        ({"0": torch.ones(2, 2)}, absent + "0"),
        (idle, "the other run stored nothing there. Run the model"),
    ]

    for other, message in runs:
        edit = edit_outputs(select(net, "2"), patch_from(other))
        with pytest.raises(HookError, match=message), edit:
            net(torch.randn(2, 4))


# --- errors and warnings


@pytest.mark.parametrize("make", [lambda x: (x,), lambda x: {"x": x}], ids=["tuple", "dict"])
def test_a_replacement_of_another_structure_names_the_layer(make: Any) -> None:
    net = nn.ModuleDict({"net": Gives(make)})

    with (
        pytest.raises(HookError, match=r"edit_output on 'net' \(Gives\): the replacement is 1×4"),
        edit_outputs(select(net, "net"), lambda m, i, o: tree_leaves(o)[0].reshape(1, 4)),
    ):
        net["net"](torch.randn(1, 4))


@pytest.mark.parametrize("maker", [zero, scale])
def test_a_maker_of_edits_that_was_not_called_is_reported(maker: Any) -> None:
    net = mlp()

    with pytest.raises(ArgumentError, match=rf"is none itself\. Call it: {maker.__name__}\(…\)"):
        edit_output(net[0], maker)

    assert not net[0]._forward_hooks


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_no_module_or_a_scripted_one_puts_nothing_in() -> None:
    relu = nn.ReLU()

    with pytest.raises(ArgumentError, match=r"expected an nn\.Module"):
        edit_outputs([relu, "fc"], zero())  # type: ignore[list-item]
    with pytest.raises(HookError, match="scripted"):
        edit_outputs([relu, torch.jit.script(nn.ReLU())], zero())

    assert not relu._forward_hooks


def test_an_edit_that_is_exported_is_in_the_graph_and_was_reached() -> None:
    net, x = mlp(), torch.ones(3, 4)

    with edit_output(net[0], zero()):
        wanted = net(x)
    with edit_output(net[0], zero()):  # no warning
        exported: Any = torch.export.export(net, (x,), strict=False).module()

    torch.testing.assert_close(exported(x), wanted)


# --- tensors and runs of other kinds


def test_values_from_the_cpu_go_to_the_layers_device(gpu: torch.device) -> None:
    net, x = mlp(), torch.randn(5, 4)
    with hook_outputs(select(net, "0")) as run:
        wanted = net(x)
    net.to(gpu)

    with edit_outputs(select(net, "0"), patch_from(run)):
        patched = net(torch.zeros(5, 4, device=gpu))
    with edit_output(net[0], add(torch.ones(3))):
        added = net(x.to(gpu))

    torch.testing.assert_close(patched.cpu(), wanted)
    assert added.device == gpu


@pytest.mark.filterwarnings("ignore")  # torch's, on nested tensors
def test_an_edit_of_whole_tensors_takes_those_that_have_no_parts() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

    assert scale(2)(nn.Identity(), torch.eye(3).to_sparse()).to_dense().sum() == 6
    assert [t.sum() for t in add(1)(nn.Identity(), ragged).unbind()] == [4, 6]
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        results = []
        for edit in (zero(), lambda o: o * 0, replace(2.0), lambda o: o * 0 + 2):
            with edit_outputs(select(encoder, "**.linear1"), edit):
                results.append(encoder(x, src_key_padding_mask=padding))
    torch.testing.assert_close(results[::2], results[1::2])


@pytest.mark.filterwarnings("ignore")  # torch's, on nested tensors
def test_a_nested_tensor_is_patched_by_one_of_the_same_sizes() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 8)
    padding, shorter = (torch.arange(5) >= torch.tensor([[5], [n]]) for n in (3, 2))
    first = [encoder.layers[0].linear1]

    with torch.no_grad():
        with hook_outputs(first) as clean:
            wanted = encoder(x, src_key_padding_mask=padding)
        with edit_outputs(first, zero()), edit_outputs(first, patch_from(clean)):
            patched = encoder(x, src_key_padding_mask=padding)
        with (
            pytest.raises(HookError, match="the other run had"),
            edit_output(first, patch_from(clean)),
        ):
            encoder(x, src_key_padding_mask=shorter)

    assert clean[0].stored.is_nested
    torch.testing.assert_close(patched, wanted)


def test_a_packed_sequence_is_one_input() -> None:
    lstm = nn.LSTM(2, 3)
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])

    with edit_input(lstm, lambda inputs: inputs[0]):
        out, _ = lstm(packed)

    assert torch.equal(out.data, lstm(packed)[0].data)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "edit",
    [
        lambda layer, run: edit_output(layer, patch_from(run, at=(slice(None), 0))),
        lambda layer, run: edit_output(layer, zero(), calls=0),
    ],
    ids=["patch", "calls"],
)
def test_which_call_it_is_is_not_guessed_in_a_checkpoint(edit: Any, reentrant: bool) -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    with hook_output(layer, keep="all") as run:
        layer(layer(x))

    with pytest.raises(HookError, match="not say which call this is"), edit(layer, run):
        checkpoint(lambda x: layer(layer(x)), x, use_reentrant=reentrant).sum().backward()
