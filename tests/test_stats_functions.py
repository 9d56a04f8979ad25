"""`ActivationStats(functions=…)`: calls of torch functions, recorded as layers are."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hooked import n_hooks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookkit import ActivationStats, DataLoaders, Learner, watch
from hookkit.errors import ArgumentError, OptionError
from hookkit.stats.functions import allowed_logits, type_of

SDPA = F.scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8)

    def heads(self, x: Tensor) -> Tensor:
        return self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        x = x + SDPA(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return F.relu(x + self.down(F.relu(self.up(x))))


class Net(nn.Module):
    """Its activations and attention are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean((1, 2))


def modes() -> int:
    return int(torch._C._len_torch_function_stack())


def batch(i: int) -> Tensor:
    return torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(i))


def trained(net: nn.Module, *cbs: Any, n: int = 4, model: Any = None, lr: float = 0.1) -> Any:
    """Trains in a plain loop; gives the watcher and all parameters at the end."""
    model = net if model is None else model
    opt = torch.optim.SGD(net.parameters(), lr=lr)
    with watch(model, opt, *cbs) as w:
        for i in range(n):
            model(batch(i)).sum().backward()
            opt.step()
            opt.zero_grad()
            assert modes() == 0
    return w, [p.detach().clone() for p in net.parameters()]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_a_row_for_each_call_in_a_forward(net: Net) -> None:
    stats = ActivationStats(modules=[], functions=[F.relu, SDPA])
    trained(net, stats)

    record = stats.record()
    calls = ("scaled_dot_product_attention:0", "relu:0", "relu:1")
    assert record.names == tuple(f"blocks.{i}/{call}" for i in (0, 1) for call in calls)
    assert record.types == ("scaled_dot_product_attention", "ReLU", "ReLU") * 2
    assert record.steps.tolist() == [0, 1, 2, 3]


def test_the_numbers_are_those_of_what_the_functions_gave(net: Net) -> None:
    seen: dict[str, Tensor] = {}

    class Noted(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            y = f(*args, **(kwargs or {}))
            if f is F.relu:
                seen[f"blocks.{len(seen) // 2}/relu:{len(seen) % 2}"] = y.detach().double()
            return y

    with Noted(), torch.no_grad():
        net(batch(0))
    stats = ActivationStats(modules=[], functions=F.relu)
    trained(net, stats, n=1)

    record = stats.record()
    for name, y in seen.items():
        row = record.layer(name)
        for stat, value in {"mean": y.mean(), "std": y.std(), "max": y.max()}.items():
            torch.testing.assert_close(
                float(record.value(stat, row)[0]), float(value), rtol=1e-4, atol=1e-6
            )


def test_the_logits_of_fused_attention_are_recorded_and_diagnosed(net: Net) -> None:
    block: Any = net.blocks[1]
    with torch.no_grad():
        block.qkv.weight[:16] *= 40
        x = net.blocks[0](batch(0))
        q, k, _ = block.heads(x)
        logits = (q @ k.mT / 2).tril()
    stats = ActivationStats(functions=[SDPA])
    w, _ = trained(net, stats, n=20, lr=1e-6)

    record = stats.record()
    row = record.layer("blocks.1/scaled_dot_product_attention:0")
    assert float(record.value("max", row)[0]) == pytest.approx(float(logits.max()), rel=1e-4)
    assert float(record.value("min", row)[0]) == pytest.approx(float(logits.min()), rel=1e-4)
    found = {f.rule: f for f in w.diagnose().findings}["attention_logits"]
    assert found.layers == ("blocks.1/scaled_dot_product_attention:0",)


def test_units_of_a_functional_relu_that_are_dead(net: Net) -> None:
    up: Any = net.blocks[0].up  # type: ignore[union-attr]
    with torch.no_grad():
        up.bias[:3] = -100.0
    stats = ActivationStats(units=True, functions=[F.relu])
    trained(net, stats)

    assert stats.dead_units("blocks.0/relu:0") == [0, 1, 2]
    assert stats.dead_units("blocks.0/relu:1") == []


def test_training_is_bit_identical_and_nothing_stays(net: Net) -> None:
    _, plain = trained(copy.deepcopy(net))
    twin = copy.deepcopy(net)
    _, recorded = trained(twin, ActivationStats(functions=[F.relu, SDPA, torch.add]))

    assert all(torch.equal(p, q) for p, q in zip(plain, recorded, strict=True))
    assert (modes(), n_hooks(twin)) == (0, 0)


def test_the_mode_is_on_in_recorded_forwards_only(net: Net) -> None:
    on: list[int] = []
    stats = ActivationStats(every=3, functions=[F.relu])
    net.blocks[0].register_forward_hook(lambda *_: on.append(modes()))
    trained(net, stats, n=7)

    assert on == [1, 0, 0, 1, 0, 0, 1]
    assert stats.record().steps.tolist() == [0, 3, 6]


def test_in_a_learner_with_validation(net: Net) -> None:
    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return batch(i)[0], torch.zeros(())

    loader: Any = torch.utils.data.DataLoader(Data(), 4)
    stats = ActivationStats(functions=[F.relu], on_valid=True)
    learn = Learner(DataLoaders(loader, loader), net, nn.MSELoss(), lr=0.01, cbs=stats)
    with learn.no_logging():
        learn.fit(2)

    assert stats.record().steps.tolist() == [0, 1, 2, 3]
    row = stats.record(valid=True).layer("blocks.1/relu:1")
    assert stats.record(valid=True).value("count", row).tolist() == [320.0, 320.0]
    assert len(stats.layer_stats("blocks.1/relu:1")[0]) == 4
    assert stats.names == [n for n in stats.record().names if "/" not in n]
    assert (modes(), n_hooks(net)) == (0, 0)
    again = pickle.loads(pickle.dumps(stats))
    assert again.record().names == stats.record().names


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_nothing(net: Net, error: type[BaseException]) -> None:
    def fail(*_: Any) -> None:
        raise error

    stats = ActivationStats(functions=[F.relu])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with watch(net, opt, stats):
        handle = net.blocks[1].register_forward_hook(fail)
        with pytest.raises(error):
            net(batch(0))
        handle.remove()
        net(batch(1)).sum().backward()
        opt.step()
        assert modes() == 0

    assert stats.record().names[-4:] == tuple(
        f"blocks.{i}/relu:{k}" for i in (0, 1) for k in (0, 1)
    )
    assert n_hooks(net) == 0


def test_recomputation_is_not_counted_twice(net: Net) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            for block in self.net.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x.mean((1, 2))

    stats = ActivationStats(modules=[], functions=[F.relu])
    trained(Checkpointed(), stats, n=1)

    assert stats.record().value("count").ravel().tolist() == [320.0, 160.0] * 2


def test_a_compiled_model_runs_eagerly_in_recorded_forwards(net: Net) -> None:
    torch.compiler.reset()
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(1)
        return graph.forward

    model = torch.compile(net, backend=backend)
    stats = ActivationStats(every=2, functions=[F.relu])
    trained(net, stats, n=4, model=model)
    torch.compiler.reset()

    assert stats.record().names[-1] == "blocks.1/relu:1"
    assert stats.record().steps.tolist() == [0, 2]
    assert graphs  # the others were compiled


def test_a_users_hook_sees_functions_too(net: Net) -> None:
    def inputs_of(m: Any, i: Any, o: Tensor) -> Tensor:
        return i[0] * 0 + 7

    stats = ActivationStats(modules=[], functions=[SDPA], hook=inputs_of)
    trained(net, stats, n=1)

    assert stats.record().value("mean").ravel().tolist() == [7.0, 7.0]


def test_masks_of_any_kind_leave_logits_that_are_finite() -> None:
    from hookkit.nested import Inputs

    q = torch.randn(1, 2, 3, 4)
    least = torch.finfo(torch.float32).min
    for mask in (torch.full((3, 3), least).triu(1), torch.ones(3, 3).tril().bool()):
        logits = allowed_logits(nn.ReLU(), Inputs((q, q, q), {"attn_mask": mask}), None)
        torch.testing.assert_close(logits, (q @ q.mT / 2).tril())


def test_types_are_those_of_modules() -> None:
    names = ("relu", "log_softmax", "hardswish", "layer_norm", "max_pool2d", "add")
    assert [type_of(name) for name in names] == [
        "ReLU",
        "LogSoftmax",
        "Hardswish",
        "LayerNorm",
        "MaxPool2d",
        "add",
    ]


def test_what_cannot_be_recorded_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="ActivationStats: <lambda> is not one of the torch"):
        ActivationStats(functions=[lambda x: x])
    with pytest.raises(ArgumentError, match="ActivationStats: f must be a torch function, found a"):
        ActivationStats(functions="relu")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="functions= records what functions give, and is_forward"):
        ActivationStats(functions=[F.relu], is_forward=False)


def test_a_recorders_modules_that_change_are_followed(net: Net) -> None:
    stats = ActivationStats(modules=[], functions=[F.relu])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with watch(net, opt, stats):
        for i in range(2):
            net(batch(i)).sum().backward()
            opt.step()
            if not i:
                net.blocks.append(Block())
    assert stats.record().names[-1] == "blocks.2/relu:1"
    assert n_hooks(net) == 0
