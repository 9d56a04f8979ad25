"""Where two trainings part is named by step, layer and kind; two equal ones agree."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit import Fingerprint, compare_runs, watch
from hookkit.errors import NeverFiredWarning, OptionError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 6)
        self.act, self.drop, self.scale = nn.GELU(), nn.Dropout(0.1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.act(self.fc(self.norm(x))) * self.scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.bn, self.head = Block(), Block(), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.b(self.a(x))))


class Loop:
    """A training whose parts a fault can change at a point of a step."""

    def __init__(self, fault: str = "", at: int = 2) -> None:
        torch.manual_seed(0)
        self.net, self.fault, self.at = Net(), fault, at
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda n: 0.9**n)

    def batch(self, step: int) -> Tensor:
        return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))

    def run(self, path: Path, first: int = 0, last: int = 4, split: int = 1, **how: Any) -> "Loop":
        with watch(self.net, self.opt, Fingerprint(path, **how)) as w:
            for step in range(first, last):
                self.x, self.now = self.batch(step), step == self.at
                self.do("batch")
                for x in self.x.chunk(split):
                    y = (x[:, 0] > 0).long() ^ int(self.now and self.fault == "labels")
                    loss = nn.functional.cross_entropy(self.net(x), y)
                    w.loss(loss)
                    factor = 2 if self.now and self.fault == "loss scale" else 1
                    (loss * factor / split).backward()
                self.do("grads")
                self.opt.step()
                self.opt.zero_grad()
                self.sched.step()
                self.do("end")
        return self

    def do(self, point: str) -> None:
        if self.now and self.fault and FAULTS[self.fault][0] == point:
            FAULTS[self.fault][1](self)

    def state(self) -> Any:
        parts = [part.state_dict() for part in (self.net, self.opt, self.sched)]
        return copy.deepcopy(parts), torch.get_rng_state()

    def load(self, state: Any, but: str = "") -> "Loop":
        for name, part, saved in zip(
            ("net", "opt", "sched"), (self.net, self.opt, self.sched), state[0], strict=True
        ):
            if name != but:
                part.load_state_dict(saved)
        if but != "rng":
            torch.set_rng_state(state[1])
        return self


@torch.no_grad()
def _moved(loop: Loop) -> None:
    loop.net.head.bias.data += 1e-6  # without a new version


def _set(path: str, name: str, value: Any) -> Callable[[Loop], None]:
    return lambda loop: setattr(loop.net.get_submodule(path), name, value)


def _group(**values: Any) -> Callable[[Loop], None]:
    return lambda loop: loop.opt.param_groups[0].update(values)


def _rounded(loop: Loop) -> None:
    loop.net.b.fc.register_forward_hook(lambda m, i, o: o.bfloat16().float(), prepend=True)


# where it happens in step 2, what it is, and the first row: step, what, name; a part of the verdict
FAULTS: dict[str, Any] = {
    "data": ("batch", lambda loop: loop.x[3].add_(1e-6), 2, "input", "", "the batch differs"),
    "random": ("batch", lambda _: torch.rand(1), 2, "output", "a.drop", "other random numbers"),
    "mode": ("batch", lambda loop: loop.net.b.eval(), 2, "output", "b.drop", "evaluation mode"),
    "eps": ("batch", _set("b.norm", "eps", 1e-4), 2, "output", "b.norm", "eps=0.0001"),
    "functional": ("batch", _set("b", "scale", 1.0001), 2, "output", "b", "after act and"),
    "precision": ("batch", _rounded, 2, "output", "b.fc", "another computation"),
    "labels": ("", None, 2, "grad", "head", "the loss differs too: labels"),
    "loss scale": ("", None, 2, "grad", "head", "all by the factor 2,"),
    "clip": ("grads", lambda loop: nn.utils.clip_grad_norm_(loop.net.parameters(), 0.01),
             2, "param_grad", "head.bias", "clipping"),
    "one gradient": ("grads", lambda loop: loop.net.b.fc.weight.grad.mul_(1.01),
                     2, "param_grad", "b.fc.weight", "1 of 12 do"),
    "lr": ("batch", _group(lr=0.5), 2, "setting", "lr of group 0", "in a, 0.5 in b"),
    "betas": ("batch", _group(betas=(0.8, 0.9)), 2, "setting", "betas of group 0", "0.9] in b"),
    "state": ("grads", lambda loop: loop.opt.state.clear(),
              2, "weight", "a.norm.weight", "its gradient does not: the optimizer's state"),
    "outside": ("grads", _moved, 2, "weight", "head.bias", "a change outside of it"),
    "average": ("end", _moved, 3, "before", "head.bias", "after step 2, outside of the optimizer"),
    "momentum": ("batch", _set("bn", "momentum", 0.2), 2, "buffer", "bn.running_mean", "no weight"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_step_layer_and_kind(fault: str, tmp_path: Path) -> None:
    Loop().run(tmp_path / "a")
    Loop(fault).run(tmp_path / "b")

    found = compare_runs(tmp_path / "a", tmp_path / "b")

    *first, text = FAULTS[fault][2:]
    assert found.first is not None
    assert [found.first.step, found.first.what, found.first.name] == first
    assert text in found.verdict


def test_equal_runs_agree_in_all_steps(tmp_path: Path) -> None:
    for name in "ab":
        Loop().run(tmp_path / name, last=20)

    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.first is None
    assert found.not_judged == ()
    assert found.verdict == "20 steps compared: no difference, bit for bit"


@pytest.mark.parametrize("lost", ["", "opt", "sched", "rng"])
def test_a_resumed_run_is_aligned_by_its_weights(lost: str, tmp_path: Path) -> None:
    state = Loop().run(tmp_path / "half", last=3).state()
    Loop().run(tmp_path / "a", last=6)
    Loop().load(state, but=lost).run(tmp_path / "b", first=3, last=6)

    found = compare_runs(tmp_path / "a", tmp_path / "b")
    other_way = compare_runs(tmp_path / "b", tmp_path / "a")

    assert "(step 0 of b is step 3 of a, by the weights before)" in found.verdict
    assert "only a has: steps 0 to 2" in found.not_judged
    first = found.first and (found.first.step, found.first.what, found.first.name)
    expected = {"": None, "opt": (3, "setting", "lr of group 0"), "rng": (3, "output", "a.drop")}
    assert first == expected.get(lost, (4, "setting", "lr of group 0"))
    assert (other_way.first is None) == (lost == "")


def test_a_weight_that_was_not_loaded_is_named(tmp_path: Path) -> None:
    Loop().run(tmp_path / "a", last=5)
    resumed = Loop().run(tmp_path / "half", last=3)
    nn.init.zeros_(resumed.net.head.weight)
    resumed.run(tmp_path / "b", first=3, last=5)

    found = compare_runs(tmp_path / "a", tmp_path / "b")

    assert found.verdict.startswith("before step 3: head.weight differs (1 of 15 do)")


def _without_chance(loop: Loop) -> Loop:
    for name in ("a.drop", "b.drop", "bn"):
        loop.net.get_submodule(name).eval()
    return loop


def test_another_split_of_the_batch_agrees_within_a_tolerance(tmp_path: Path) -> None:
    _without_chance(Loop()).run(tmp_path / "a")
    _without_chance(Loop()).run(tmp_path / "b", split=2)
    _without_chance(Loop("one gradient")).run(tmp_path / "c", split=2)

    exact = compare_runs(tmp_path / "a", tmp_path / "b")
    found = compare_runs(tmp_path / "a", tmp_path / "b", rtol=1e-3)
    wrong = compare_runs(tmp_path / "a", tmp_path / "c", rtol=1e-3)

    assert "the batch differs ([0] 8×6 in a, 4×6 in b)" in exact.verdict
    assert found.first is None
    assert "the batches of a step are split otherwise" in found.not_judged[0]
    assert wrong.first is not None
    assert (wrong.first.step, wrong.first.name) == (2, "b.fc.weight")
    assert 0.003 < wrong.first.rel_error < 0.03


def test_another_scale_of_the_loss_is_no_difference(tmp_path: Path) -> None:
    for name, scale in ("a", 256.0), ("b", 1024.0):
        torch.manual_seed(0)
        net, scaler = nn.Linear(4, 2), torch.amp.GradScaler("cpu", init_scale=scale)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        with watch(net, opt, Fingerprint(tmp_path / name)):
            for _ in range(3):
                opt.zero_grad()
                scaler.scale(net(torch.ones(3, 4)).pow(2).mean()).backward()
                scaler.step(opt)
                scaler.update()

    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.first is None
    assert "scales of a GradScaler: gradients of outputs" in found.not_judged[0]


def test_what_only_one_run_computes_is_listed(tmp_path: Path) -> None:
    Loop().run(tmp_path / "a")
    more = Loop()
    more.net.b.act = nn.Sequential(nn.GELU(), nn.Identity())  # type: ignore[assignment]
    more.run(tmp_path / "b")

    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.first is None
    assert "only b has: b.act.0, b.act.1" in found.not_judged


def test_a_result_is_read_as_text_and_as_values(tmp_path: Path) -> None:
    Loop().run(tmp_path / "a")
    Loop("eps").run(tmp_path / "b")

    found = compare_runs(tmp_path / "a", tmp_path / "b")

    assert "→ output b.norm (LayerNorm)" in found.text()
    assert json.loads(json.dumps(found.to_dict()))["first"]["name"] == "b.norm"
    with pytest.raises(OptionError, match="the runs agree"):
        bool(found)


def test_files_that_cannot_be_compared_are_errors(tmp_path: Path) -> None:
    good, other = tmp_path / "good", tmp_path / "other"
    Loop().run(good)
    Loop().run(tmp_path / "tens", last=11, every=10)
    text = good.read_text()
    net = nn.Linear(2, 1)
    with watch(net, opt := torch.optim.SGD(net.parameters(), 0.1), Fingerprint(other)):
        net(torch.ones(1, 2)).sum().backward()
        opt.step()
    bad = {
        "is no fingerprint": "step,loss\n1,2\n",
        "is empty": "",
        "another version": text.replace('"version": 1', '"version": 9'),
        "has no step": text.split("\n")[0] + "\n",
        "is damaged in line 3": text.replace('"sketches": "', '"sketches": "?', 1),
    }

    for message, content in bad.items():
        (tmp_path / "bad").write_text(content)
        with pytest.raises(OptionError, match=message):
            compare_runs(good, tmp_path / "bad")
    with pytest.raises(OptionError, match="cannot be read"):
        compare_runs(good, tmp_path / "none")
    with pytest.raises(OptionError, match="of different models"):
        compare_runs(good, other)


def test_a_line_that_was_cut_is_said(tmp_path: Path) -> None:
    Loop().run(tmp_path / "a")
    text = (tmp_path / "a").read_text()
    (tmp_path / "b").write_text(text[:-100])

    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.first is None
    assert found.verdict.startswith("3 steps compared")
    assert found.not_judged == ("only a has: step 3", "cut as it was written: the last line of b")


class Noise:
    """A training with AdamW, in which the bias before a batch norm has a gradient of rounding."""

    def __init__(self, seed: int, layer_at: int = 99, grad_at: int = 99) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
        self.noise = torch.Generator().manual_seed(seed)
        self.layer_at, self.grad_at = layer_at, grad_at

    def run(self, path: Path, n: int = 20, **how: Any) -> Path:
        net, opt = self.net, torch.optim.AdamW(self.net.parameters(), lr=0.01)
        with watch(net, opt, Fingerprint(path, **how)):
            for step in range(n):
                x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
                if step == self.layer_at:
                    net[1].eps = 0.1
                nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long()).backward()
                net[0].bias.grad = 1e-9 * torch.randn(6, generator=self.noise)
                if step == self.grad_at:
                    net[3].weight.grad.mul_(1.1)
                opt.step()
                opt.zero_grad()
        return path


@pytest.mark.parametrize("every", [1, 5])
def test_steps_that_adam_makes_of_rounding_are_not_judged(every: int, tmp_path: Path) -> None:
    a = Noise(1).run(tmp_path / "a", every=every)
    b = Noise(2).run(tmp_path / "b", every=every)

    found = compare_runs(a, b, rtol=1e-3)
    assert found.first is None
    (reason,) = found.not_judged
    assert reason.startswith("depends on a gradient that may be rounding")
    assert "0.bias" in reason
    assert compare_runs(a, b).first is not None


def test_a_fault_is_found_beside_steps_made_of_rounding(tmp_path: Path) -> None:
    a = Noise(1).run(tmp_path / "a")
    grad = compare_runs(a, Noise(2, grad_at=10).run(tmp_path / "b"), rtol=1e-3).first
    layer = compare_runs(a, Noise(2, layer_at=10).run(tmp_path / "c"), rtol=1e-3)

    assert grad is not None
    assert (grad.step, grad.what, grad.name) == (10, "param_grad", "3.weight")
    assert layer.first is not None
    assert (layer.first.step, layer.first.what, layer.first.name) == (10, "output", "1")
    assert (
        "1 (BatchNorm1d) differs, its inputs were not judged: eps=1e-05 in a, eps=0.1 in b"
        in layer.verdict
    )


def _with_fused_bias(path: Path, seed: int, at: int = 99, forgets: bool = False) -> Path:
    torch.manual_seed(0)
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), nn.Linear(8, 2))
    opt, noise = torch.optim.AdamW(net.parameters(), 0.01), torch.Generator().manual_seed(seed)
    bias = net[0].self_attn.in_proj_bias
    with watch(net, opt, Fingerprint(path)):
        for step in range(8):
            x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(step))
            net(x).pow(2).mean().backward()
            bias.grad[8:16] = 1e-7 * torch.randn(8, generator=noise)
            if step == at and forgets:
                opt.state.clear()
            elif step == at:
                net[1].weight.grad.mul_(1.1)
            opt.step()
            opt.zero_grad()
    return path


def test_rounding_in_a_part_of_a_gradient_hides_no_fault(tmp_path: Path) -> None:
    a = _with_fused_bias(tmp_path / "a", 1)
    twin = compare_runs(a, _with_fused_bias(tmp_path / "b", 2), rtol=1e-3)
    grad = compare_runs(a, _with_fused_bias(tmp_path / "c", 2, at=4), rtol=1e-3).first
    state = compare_runs(a, _with_fused_bias(tmp_path / "d", 2, 4, forgets=True), rtol=1e-3).first

    assert twin.first is None
    assert "weight 0.self_attn.in_proj_bias" in twin.not_judged[0]
    assert grad is not None
    assert (grad.step, grad.what, grad.name) == (4, "param_grad", "1.weight")
    assert state is not None
    assert (state.step, state.what) == (4, "weight")


def _in_mode(path: Path, training: bool, factor: float = 1.0) -> Path:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).train(training)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeverFiredWarning)
        with watch(net, opt, Fingerprint(path)):
            for _ in range(2):
                (net(torch.ones(4, 2)).pow(2).mean() * factor).backward()
                opt.step()
    return path


@pytest.mark.parametrize("rtol", [None, 1e-3])
def test_a_step_whose_forward_was_in_evaluation_mode_says_so(
    rtol: float | None, tmp_path: Path
) -> None:
    a, b = _in_mode(tmp_path / "a", False), _in_mode(tmp_path / "b", False, factor=2.0)
    train = _in_mode(tmp_path / "c", True)
    doubled = _in_mode(tmp_path / "d", True, factor=2.0)

    same, both = compare_runs(a, a, rtol=rtol), compare_runs(a, b, rtol=rtol)
    one, agree = compare_runs(a, doubled, rtol=rtol), compare_runs(train, a, rtol=rtol)

    unseen = "no forward was recorded in {} (the model was in evaluation mode): step 0"
    assert unseen.format("a") + ", step 1" in same.not_judged
    assert {unseen.format("a"), unseen.format("b")} == {*both.not_judged}
    assert both.verdict.endswith("; no forward was recorded, so the layer is not known")
    assert one.first is not None
    assert one.first.what == "param_grad"
    assert one.verdict.startswith(
        "step 0: the model was in evaluation mode in a, in training mode in b, so no forward was "
        "recorded in a; after it, the gradient of 1.bias differs"
    )
    assert agree.first is None
    assert unseen.format("b") + ", step 1" in agree.not_judged


def test_selected_modules_do_not_blame_what_may_come_from_others(tmp_path: Path) -> None:
    faults = {"": "a", "eps": "b"}  # of b.norm
    for name, verdict in ("b.fc", "the batch differs"), ("a.fc", "the gradient of the output of"):
        for fault, run in faults.items():
            Loop(fault).run(tmp_path / run, modules=name)
        found = compare_runs(tmp_path / "a", tmp_path / "b").verdict
        assert found.startswith(f"step 2: {verdict}")
        assert found.endswith("; or a module that is not recorded (modules=) makes the difference")
