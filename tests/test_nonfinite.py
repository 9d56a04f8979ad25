"""`find_nonfinite` names the function and the line; `replay` runs a saved batch again."""

import math
import os
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hookkit import FlightRecorder, find_nonfinite, hook_outputs, replay, select, watch
from hookkit.errors import ArgumentError, OptionError

X = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.25, 2.0, -1.0, 4.0]])


class Lambda(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


def around(*middle: nn.Module) -> nn.Sequential:
    """A model whose layers before and after `middle` pass values on as they are."""
    parts = nn.Linear(4, 4, bias=False), *middle, nn.Linear(4, 4, bias=False)
    names = ["before", *(f"block{i or ''}" for i in range(len(middle))), "after"]
    model = nn.Sequential(OrderedDict(zip(names, parts, strict=True)))
    for m in (parts[0], parts[-1]):
        nn.init.eye_(m.weight)  # type: ignore[arg-type]
    return model


# --- the forward


def masked_row(x: Tensor) -> Tensor:
    scores = x @ x.T
    scores = scores.masked_fill(torch.tensor([[True, True], [False, False]]), -math.inf)
    return scores.softmax(-1) @ x  # bad


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[0].sub_(10)
    y.sqrt_()  # bad
    return y


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = y[0] / 0.0  # bad
    return y


def cancelled(x: Tensor) -> Tensor:
    large = (x * 1000).exp()  # bad
    return large - large


FORWARD: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("sqrt", lambda x: torch.sqrt(torch.sqrt(x - 100))),
    ("div", lambda x: (x - x) / (x - x)),
    ("log", lambda x: F.relu(x).log() * F.relu(x)),
    ("exp", cancelled),
    ("half", lambda x: (x * 1e5).half().float()),
    ("linear", lambda x: F.linear((x * 1e4).half(), torch.full((4, 4), 100.0).half()).float()),
    ("softmax", masked_row),
    ("std", lambda x: x / x[:1].std(dim=0)),
    ("rsqrt", lambda x: x * (x * 0).var(-1, keepdim=True).rsqrt()),
    ("div", lambda x: x / x.new_tensor(1e-45).clamp(max=1e-45)),
    ("sqrt", in_place),
    ("div", written),
    ("cross_entropy", lambda x: x + F.cross_entropy(x, torch.tensor([-100, -100]))),
]


@pytest.mark.parametrize(("function", "f"), FORWARD)
@pytest.mark.filterwarnings("ignore:std")
def test_the_function_the_line_and_the_module_of_a_forward(
    function: str, f: Callable[[Tensor], Tensor]
) -> None:
    first = find_nonfinite(around(Lambda(f)), X).first

    assert first is not None
    assert (first.function, first.name, first.type) == (function, "block", "Lambda")
    assert Path(first.file) == Path(__file__)
    assert not first.backward
    assert first.inputs_finite == (function != "softmax")


FINITE: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.sqrt(x.abs() + 1),
    lambda x: F.relu(x).clamp(min=1e-6).log() * F.relu(x),
    lambda x: ((x @ x.T) + torch.full((2, 2), -math.inf).triu(1)).softmax(-1) @ x,
    lambda x: torch.where(x > 0, x, torch.log(x.detach()).nan_to_num()),
    lambda x: x + (x * 0).norm(dim=-1, keepdim=True),
    lambda x: x / (1 + (x * 0).std(dim=-1, keepdim=True)),
    lambda x: x + torch.atan2(x * 0, x * 0),
    lambda x: (x * 1e4).bfloat16().float(),
    lambda x: x + x.masked_fill(x < 0, -math.inf).exp(),
    lambda x: torch.where(x > 1e9, F.relu(x * 0).log(), x),  # relu's backward takes the NaN away
]


@pytest.mark.parametrize("f", FINITE)
def test_a_finite_twin_has_none(f: Callable[[Tensor], Tensor]) -> None:
    found = find_nonfinite(around(Lambda(f)), X, backward=True)

    assert found.first is None
    assert found.verdict.startswith("no NaN or Inf")


def test_the_path_goes_from_the_first_call_to_the_output() -> None:
    found = find_nonfinite(around(Lambda(torch.sqrt), nn.GELU()), X)

    assert [row.function for row in found] == ["sqrt", "gelu", "linear"]
    assert found["after"][0].inputs_finite is False
    assert found.text().splitlines()[0].endswith("in block (Lambda), of finite inputs")
    assert found.to_dict()["first"]["made"].endswith("2 of 8 NaN")


def memory(x: Tensor) -> Tensor:
    """Memory that a function writes into, and that is NaN before."""
    return torch.full_like(x, math.nan)


def in_parts(x: Tensor) -> Tensor:
    y = memory(x)
    y[:1] = x[:1]
    y[1:] = x[1:].log()  # bad
    return y


def part_left_out(x: Tensor) -> Tensor:
    y = memory(x)
    y[1, :2] = x[1, 2:].log()  # bad
    y[1, 2:] = 1.0
    y[0] = 1.0
    return y


def in_views(x: Tensor) -> Tensor:
    y = memory(x)
    y[0].copy_(x[0].log())  # bad
    y[1].zero_()
    return y


def at(y: Tensor, key: Any, value: Any) -> Tensor:
    y[key] = value
    return y


ROWS, BOTH = torch.tensor([0, 1]), torch.arange(2)[:, None].expand(2, 4)
MASK = torch.ones(2, 4, dtype=torch.bool)
WRITES: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    ("copy_", lambda y, v: y.copy_(v)),
    ("setitem", lambda y, v: at(y, slice(None), v)),
    ("setitem by a mask", lambda y, v: at(y, y.isnan(), v.flatten())),
    ("index_copy_", lambda y, v: y.index_copy_(0, ROWS, v)),
    ("index_put_", lambda y, v: y.index_put_((ROWS,), v)),
    ("masked_scatter_", lambda y, v: y.masked_scatter_(MASK, v)),
    ("scatter_", lambda y, v: y.scatter_(0, BOTH, v)),
    ("put_", lambda y, v: y.put_(torch.arange(8).view(2, 4), v)),
    ("zero_", lambda y, v: y.zero_().add_(v)),
    ("fill_", lambda y, v: y.fill_(2.0).add_(v)),
    ("masked_fill_", lambda y, v: y.masked_fill_(MASK, 2.0).add_(v)),
    ("index_fill_", lambda y, v: y.index_fill_(0, ROWS, 2.0).add_(v)),
    ("index_copy", lambda y, v: y.index_copy(0, ROWS, v)),
    ("where", lambda y, v: torch.where(MASK, v, y)),
    ("where out=", lambda y, v: torch.where(MASK, v.detach(), v.detach(), out=y)),
    ("stack out=", lambda y, v: torch.stack([v[0].detach(), v[1].detach()], out=y)),
]


@pytest.mark.parametrize("write", [w for _, w in WRITES], ids=[name for name, _ in WRITES])
def test_a_write_over_memory_that_was_nan_is_made_by_what_was_written(
    write: Callable[[Tensor, Tensor], Tensor],
) -> None:
    bad = find_nonfinite(around(Lambda(lambda x: write(memory(x), torch.log(x)))), X)
    fine = find_nonfinite(around(Lambda(lambda x: write(memory(x), torch.exp(x)))), X)

    assert bad.verdict.startswith("first non-finite: log (test_nonfinite.py:")
    assert bad.verdict.endswith("in block (Lambda), of finite inputs")
    assert fine.first is None


@pytest.mark.parametrize(
    ("function", "f"),
    [
        ("log", in_parts),
        ("log", part_left_out),
        ("log", in_views),
        ("log", lambda x: torch.log(x.detach(), out=memory(x))),
        ("div", lambda x: torch.div(x.detach(), 0, out=memory(x))),
        ("copy", lambda x: memory(x).half().copy_(x * 1e5)),
        ("fill", lambda x: memory(x).fill_(math.nan)),
        ("full_like", lambda x: memory(x) + x),
        ("full_like", lambda x: at(memory(x), 0, x[0])),
        ("full_like", lambda x: at(at(memory(x), 1, x[1].log()), 1, x[1])),
        ("full_like", lambda x: at(at(at(memory(x), 1, 1.0), 1, x[1].log()), 1, x[1])),
        ("log", lambda x: at(x.log(), 0, x[0].exp())),
        ("log", lambda x: at(at(x.log(), 0, (x[0] - 9).sqrt()), 0, x[0])),
        ("sqrt", lambda x: at(at(x.log(), 0, (x[0] - 9).sqrt()), 1, x[1])),
    ],
)
def test_a_write_into_a_part_leaves_the_maker_of_the_rest(
    function: str, f: Callable[[Tensor], Tensor]
) -> None:
    first = find_nonfinite(around(Lambda(f)), X).first

    assert first is not None
    assert (first.function, first.name) == (function, "block")


@pytest.fixture
def nan_memory() -> Any:
    """Have PyTorch fill memory that it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("new", [torch.empty_like, lambda x: x.new_empty(2, 4)])
def test_an_allocation_is_named_only_if_it_is_read_unwritten(
    new: Callable[[Tensor], Tensor],
) -> None:
    def unrelated(x: Tensor) -> Tensor:
        new(x)
        raise ValueError("no NaN here")

    written = find_nonfinite(around(Lambda(lambda x: new(x).copy_(x))), X, backward=True)
    bad = find_nonfinite(around(Lambda(lambda x: new(x).copy_(x.log()))), X)
    unwritten = find_nonfinite(around(Lambda(lambda x: at(new(x), 0, x[0]))), X)
    of_bad = find_nonfinite(around(Lambda(lambda x: new(x.log()) + x)), X)

    assert written.first is None
    assert bad.first is not None
    assert bad.first.function == "log"
    for found in (unwritten, of_bad):
        assert "empty" in found.verdict
        assert "memory that no seen function wrote (test_nonfinite.py:" in found.verdict
        assert found.verdict.endswith("in block (Lambda)")
    with pytest.raises(ValueError, match="no NaN here"):
        find_nonfinite(around(Lambda(unrelated)), X)


def test_what_was_there_before_is_named() -> None:
    model = around(nn.BatchNorm1d(4).eval())
    spoiled = around(nn.BatchNorm1d(4).eval())
    spoiled.block.running_var[1] = math.nan  # type: ignore[index,union-attr]

    of_data, of_buffer = find_nonfinite(model, X / 0), find_nonfinite(spoiled, X)

    assert "the input [0] of the model" in of_data.verdict
    assert "the buffer block.running_var" in of_buffer.verdict


def test_a_mask_that_is_an_input_or_a_buffer_is_no_origin() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x, causal = X[None], torch.full((2, 2), -math.inf).triu(1)
    all_masked = torch.full((1, 2), -math.inf)

    fine = find_nonfinite(attention, x, x, x, attn_mask=causal)
    bad = find_nonfinite(attention, x, x, x, attn_mask=causal, key_padding_mask=all_masked)

    assert fine.first is None
    assert bad.first is not None
    assert bad.first.function == "multi_head_attention_forward"


def test_what_is_no_torch_function_is_named_by_its_module() -> None:
    def by_numpy(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * np.float32(np.nan))

    found = find_nonfinite(around(nn.Sequential(nn.ReLU(), Lambda(by_numpy))), X)

    assert found.verdict == (
        "first non-finite: a function that was not seen in block.1 (Lambda), of finite inputs"
    )


def test_a_model_that_raises_after_it_is_judged() -> None:
    def check(x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("NaN")
        return x

    found = find_nonfinite(around(Lambda(torch.log), Lambda(check)), X)

    assert found.first is not None
    assert found.first.function == "log"
    assert found.not_judged == ("what follows on ValueError: NaN",)
    with pytest.raises(ValueError, match="no NaN here"):
        find_nonfinite(around(Lambda(lambda x: exec('raise ValueError("no NaN here")'))), X)  # type: ignore[func-returns-value]


def test_values_that_cannot_be_read_are_listed() -> None:
    vmapped = Lambda(lambda x: torch.vmap(torch.sqrt_)(x * 0 - 1).isfinite() * x)

    assert "torch.func" in find_nonfinite(around(vmapped), X).text()


def test_the_model_is_put_back() -> None:
    model = around(nn.BatchNorm1d(4), nn.Dropout(0.5), Lambda(torch.sqrt))
    model(X).sum().backward()
    grad, state = model.before.weight.grad, {k: v.clone() for k, v in model.state_dict().items()}
    n_hooks, rng = len(model.block._forward_hooks), torch.get_rng_state()  # type: ignore[arg-type]

    find_nonfinite(model, X, backward=True)

    assert model.before.weight.grad is grad
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert len(model.block._forward_hooks) == n_hooks  # type: ignore[arg-type]


def test_a_model_without_a_backward_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no output of the model needs a gradient"):
        find_nonfinite(around(nn.ReLU()).requires_grad_(False), X, backward=True)


# --- the backward


class OwnSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0).sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / (2 * ctx.saved_tensors[0].clamp(min=0).sqrt())


BACKWARD: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("sqrt", lambda x: torch.where(x > 1e9, torch.sqrt(x * 0), x)),
    ("pow", lambda x: x + (x * 0).abs().pow(0.5)),
    ("acos", lambda x: x + torch.acos(torch.tanh(x * 1e3))),
    ("own_sqrt", lambda x: x + OwnSqrt.apply(x)),  # type: ignore[no-untyped-call]
    ("sqrt", lambda x: x + (x * 0).pow(2).sum(-1, keepdim=True).sqrt().clamp(min=1e-8)),
    ("div", lambda x: x + torch.where(x > 1e9, x / (x * 0), 0 * x.detach())),
    ("log", lambda x: torch.where(x > 1e9, (x * 0).log(), x)),
    ("sqrt", lambda x: checkpoint(lambda y: y + (y * 0).sqrt(), x, use_reentrant=False)),
]


@pytest.mark.parametrize(("function", "f"), BACKWARD)
@pytest.mark.filterwarnings("ignore:Anomaly", "ignore:Error detected")
def test_the_function_of_a_backward_agrees_with_anomaly_detection(
    function: str, f: Callable[[Tensor], Tensor]
) -> None:
    model = around(Lambda(f))

    found = find_nonfinite(model, X, backward=True)

    first = found.first
    assert first is not None
    assert first.backward
    assert (first.function, first.name) == (function, "block")
    assert Path(first.file) == Path(__file__)
    assert first.inputs_finite
    with torch.autograd.detect_anomaly():
        try:
            model(X).sum().backward()
        except RuntimeError as error:
            named = str(error).split("'")[1].removesuffix("0").removesuffix("Backward").lower()
            assert named in [row.function.replace("_", "") for row in found]  # it waits for NaN


def test_a_value_that_the_forward_hides_is_named_if_the_backward_shows_it() -> None:
    def attention(x: Tensor) -> Tensor:
        q = torch.log(x)  # bad
        return x * F.scaled_dot_product_attention(*(t.view(1, 1, 2, 4) for t in (q, x, x)))[0, 0]

    found = find_nonfinite(around(Lambda(attention)), X, backward=True)

    assert found.first is not None
    assert (found.first.function, found.first.backward) == ("log", False)


def test_gradients_that_overflow_in_a_sum_are_named() -> None:
    def twice(x: Tensor) -> Tensor:
        y = x.mul(0.1)
        return (y * 2e38 + y * 2e38) * 1e-38

    found = find_nonfinite(around(Lambda(twice)), X, loss=lambda out: out.sum() * 1e38)

    assert found.first is not None
    assert found.first.made == "an overflow"


def test_a_loss_of_the_users_is_searched() -> None:
    model = around(nn.Tanh())

    of_forward = find_nonfinite(model, X, loss=lambda out: (out * 0).mean().log())
    of_backward = find_nonfinite(model, X, loss=lambda out: (out * 0).pow(2).mean().sqrt())

    assert of_forward.first is not None
    assert (of_forward.first.function, of_forward.first.backward) == ("log", False)
    assert of_backward.first is not None
    assert (of_backward.first.function, of_backward.first.backward) == ("sqrt", True)


def test_a_reentrant_checkpoint_is_refused_in_a_backward() -> None:
    model = around(Lambda(lambda x: checkpoint(torch.tanh, x, use_reentrant=True)))

    with pytest.raises(ArgumentError, match="use_reentrant=False"):
        find_nonfinite(model, X, backward=True)


# --- replay


class Draws(nn.Module):
    """Adds random numbers of all three generators, and is NaN for large inputs."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x) + random.random() + float(np.random.rand())
        return torch.log(noise.clamp(min=0.1) + (10 - x).clamp(max=1))


def saved(folder: Path, wrap: Callable[[Tensor], Any] = lambda x: x, **how: Any) -> Any:
    """A model whose batch 3 of 6 gave a NaN in training, and the recorder."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Draws(), nn.Linear(4, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    recorder = FlightRecorder("skip", save=folder, **how)
    with watch(model, opt, recorder):
        for i in range(6):
            x = torch.randn(8, 4) * (1e6 if i == 3 else 1)
            model(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
            if recorder.saved:
                break
    return model, recorder


def test_a_replay_is_the_batch_bit_for_bit_under_the_users_hooks(tmp_path: Path) -> None:
    model, recorder = saved(tmp_path)
    rng, weights = torch.get_rng_state(), [p.clone() for p in model.parameters()]

    with hook_outputs(select(model, "1")) as h:
        again = replay(recorder.saved[0], model.eval())

    assert again.same
    assert again.repeated
    assert (h["1"].stored == 0).any()  # dropout was on
    assert again.inputs[0].abs().max() > 1e5
    assert set(again.grads) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert str(again).startswith("step 3")
    assert "log (test_nonfinite.py" in again.incident
    assert not model.training
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(map(torch.equal, model.parameters(), weights))


def test_a_replay_with_other_weights_says_so(tmp_path: Path) -> None:
    model, recorder = saved(tmp_path)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()

    again = replay(recorder.saved[0], model)

    assert not again.same
    assert not again.repeated
    assert "or the weights. It does not repeat the incident." in str(again)


def test_saved_weights_are_put_in_and_taken_out(tmp_path: Path) -> None:
    model, recorder = saved(tmp_path, weights=True)
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()

    again = replay(recorder.saved[0], model)

    assert again.same
    assert (model[0].weight == 0).all()
    assert not torch.equal(before, model[0].weight)
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
        replay(recorder.saved[0], nn.Sequential(nn.Linear(4, 2)))


def test_files_that_are_not_its_own_are_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no archive")

    for name in ("other.pt", "text.pt", "none.pt"):
        with pytest.raises(OptionError, match="no file that FlightRecorder wrote"):
            replay(tmp_path / name, nn.Linear(1, 1))


class Batch(dict[str, Tensor]):
    pass


def test_objects_in_a_batch_need_consent(tmp_path: Path) -> None:
    class Takes(nn.Linear):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch["x"]).sqrt()

    model, recorder = Takes(4, 4), FlightRecorder("skip", save=os.fspath(tmp_path))
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, opt, recorder):
        model(Batch(x=X)).sum().backward()
        opt.step()

    assert "weights_only=False" in recorder.incidents[0].note
    with pytest.raises(ArgumentError, match=r"test_nonfinite\.Batch.*weights_only=False"):
        replay(recorder.saved[0], model)
    assert replay(recorder.saved[0], model, weights_only=False).same
