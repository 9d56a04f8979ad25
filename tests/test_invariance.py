"""`check_invariance` names the layer that depends on what it must not, and passes its twin."""

import copy
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookkit import ArgumentError, Invariance, OptionError, check_invariance

D = 8
KINDS = ("future", "padding", "batch", "order", "packing", "cache", "repeat")
Function = Callable[..., Any]


class Fn(nn.Module):
    """A module that calls a function."""

    def __init__(self, f: Function) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any) -> Any:
        return self.f(*args)


class Attention(nn.Module):
    """Causal attention: `see` later keys too, by chunks, without the mask, or a late cache."""

    def __init__(
        self, see: int = 0, chunk: int = 1, window: int = 99, masked: bool = True, late: int = 0
    ) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.see, self.chunk, self.window, self.masked, self.late = see, chunk, window, masked, late

    def forward(self, x: Tensor, mask: Any = None, docs: Any = None, past: Any = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        n_past = 0
        if past is not None:
            if "k" in past:
                n_past = past["k"].shape[1]
                k, v = (torch.cat([past[c][:, self.late :], t], 1) for c, t in (("k", k), ("v", v)))
                n_past -= self.late
            past["k"], past["v"] = k, v
        i, j = torch.arange(q.shape[1])[:, None] + n_past, torch.arange(k.shape[1])
        ok = (j // self.chunk <= i // self.chunk + self.see) & (j > i - self.window)
        ok = ok[None].expand(len(x), -1, -1)
        if mask is not None and self.masked:
            ok = ok & mask[:, None].bool()
        if docs is not None and self.masked:
            ok = ok & (docs[:, :, None] == docs[:, None])
        scores = (q @ k.mT).masked_fill(~ok, -torch.inf)
        return self.out(scores.softmax(-1).nan_to_num() @ v)


class LM(nn.Module):
    """A language model of three layers, the second of which is given."""

    def __init__(self, second: nn.Module | None = None, places: int = 0) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, D)
        self.pos = nn.Embedding(places, D) if places else None
        self.a, self.b, self.c = Attention(), second or Attention(), Attention()
        self.head = nn.Linear(D, 50)

    def forward(
        self,
        ids: Tensor,
        mask: Any = None,
        docs: Any = None,
        position_ids: Any = None,
        past: Any = None,
    ) -> Any:
        x = self.emb(ids)
        if self.pos is not None:
            x = x + self.pos(torch.arange(x.shape[1]) if position_ids is None else position_ids)
        for i, layer in enumerate((self.a, self.b, self.c)):
            own = None if past is None else past.setdefault(i, {})
            more = (mask, docs, own) if isinstance(layer, Attention) else ()
            x = x + layer(x, *more)
        return {"logits": self.head(x), "hidden": (x,)}


def made(model: nn.Module, train: bool = False) -> nn.Module:
    """Return the model with large weights of a fixed seed, in evaluation mode."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return model.train(train)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


IDS = torch.randint(1, 50, (3, 16), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(3, 16, dtype=torch.long)
MASK[0, :5], MASK[1, :2] = 0, 0
PLACES = (MASK.cumsum(1) - 1).clamp(min=0)
DOCS = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4] * 3)
DOC_PLACES = torch.cat([torch.arange(n) for n in (5, 7, 4)]).expand(3, -1)


def decode(model: nn.Module, inputs: Any, past: Any) -> Any:
    past = {} if past is None else past
    model(inputs[0], past=past)
    return past


def turned(*layers: nn.Module) -> nn.Sequential:
    """Return layers that take channels first."""
    turn = Fn(lambda x: x.transpose(1, 2))
    return nn.Sequential(turn, *layers, Fn(lambda x: x.transpose(1, 2)))


class Cell(nn.Module):
    """A GRUCell in a loop; it may begin with the mean of what comes."""

    def __init__(self, peek: bool = False) -> None:
        super().__init__()
        self.cell, self.peek = nn.GRUCell(D, D), peek

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.mean(1) if self.peek else torch.zeros(len(x), D), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out.append(h)
        return torch.stack(out, 1)


class Experts(nn.Module):
    """A mixture of experts, of which each takes a share of the tokens."""

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(D, 4), capacity
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        choice, out = self.gate(flat).argmax(-1), torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            at = (choice == i).nonzero()[:, 0][: max(1, int(len(flat) / 4 * self.capacity))]
            if len(at):
                out[at] = expert(flat[at])
        return out.view_as(x)


class Scores(nn.Module):
    """Attention by heads in the batch; the softmax is a module."""

    def __init__(self, see: int = 0) -> None:
        super().__init__()
        self.softmax, self.see = nn.Softmax(-1), see

    def forward(self, x: Tensor) -> Tensor:
        n, seq, _ = x.shape
        h = x.view(n, seq, 2, 4).transpose(1, 2).reshape(2 * n, seq, 4)
        seen = torch.ones(seq, seq).tril(self.see).bool()
        h = self.softmax((h @ h.mT).masked_fill(~seen, -1e9)) @ h
        return h.view(n, 2, seq, 4).transpose(1, 2).reshape(n, seq, D)


def name_of(found: Invariance) -> str | None:
    """Return the module in which the dependence begins, without the path in its output."""
    return None if found.first is None else found.first.name.removesuffix(found.first.path)


FUTURE: list[tuple[str, nn.Module, str | None]] = [
    ("causal", Attention(), None),
    ("a mask off by one", Attention(see=1), "b"),
    ("chunks", Attention(chunk=4), "b"),
    ("a sliding window", Attention(window=4), None),
    ("mean over the sequence", Fn(lambda x: x - x.mean(1, keepdim=True)), "b"),
    ("a tiny part of it", Fn(lambda x: x + 1e-6 * x.mean(1, keepdim=True)), "b"),
    ("without gradient", Fn(lambda x: x - x.detach().amax(1, keepdim=True)), "b"),
    ("cumulative sum", Fn(lambda x: x.cumsum(1)), None),
    ("from the end", Fn(lambda x: x.flip(1).cumsum(1)), "b"),
    ("softmax over positions", Fn(lambda x: x.softmax(1)), "b"),
    ("softmax over features", Fn(lambda x: x.softmax(-1)), None),
    ("roll", Fn(lambda x: x.roll(-1, 1)), "b"),
    ("shift", Fn(lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1]), None),
    ("GroupNorm over positions", turned(nn.GroupNorm(2, D)), "b.1"),
    ("conv, padded on both sides", turned(nn.Conv1d(D, D, 3, padding=1)), "b.1"),
    ("conv, padded in front", turned(Fn(lambda x: F.pad(x, (2, 0))), nn.Conv1d(D, D, 3)), None),
    ("LSTM", nn.Sequential(nn.LSTM(D, D, batch_first=True), Fn(lambda x: x[0])), None),
    (
        "LSTM, both directions",
        nn.Sequential(nn.LSTM(D, 4, batch_first=True, bidirectional=True), Fn(lambda x: x[0])),
        "b.0",
    ),
    ("a cell in a loop", Cell(), None),
    ("a cell that begins with the mean", Cell(peek=True), "b"),
    ("flattened", Fn(lambda x: x.flatten(0, 1).tanh().view_as(x)), None),
    ("experts", Experts(9.0), None),
    ("heads in the batch", Scores(), None),
    ("heads in the batch, mask off by one", Scores(see=1), "b"),
]
BATCH: list[tuple[str, nn.Module, str | None]] = [
    ("attention", Attention(), None),
    ("softmax over the batch", Fn(lambda x: x.softmax(0)), "b"),
    ("mean of the batch", Fn(lambda x: x - x.mean(0, keepdim=True)), "b"),
    ("statistic of the batch", Fn(lambda x: x / x.std()), "b"),
    ("cumulative over the batch", Fn(lambda x: x.cumsum(0)), "b"),
    ("by the batch's size", Fn(lambda x: x * len(x)), "b"),
    ("a batch of one squeezed", Fn(lambda x: x.squeeze(0).softmax(0).view(x.shape)), "b"),
    ("a view that mixes", Fn(lambda x: x.view(x.shape[1], -1, D).transpose(0, 1)), "b"),
    ("experts without a limit", Experts(9.0), None),
    ("experts with a capacity", Experts(0.5), "b"),
    ("BatchNorm, evaluating", turned(nn.BatchNorm1d(D)), None),
    ("InstanceNorm", turned(nn.InstanceNorm1d(D)), None),
]


@pytest.mark.parametrize(("second", "name"), [c[1:] for c in FUTURE], ids=[c[0] for c in FUTURE])
def test_the_layer_that_sees_later_positions_is_named(second: nn.Module, name: Any) -> None:
    found = check_invariance(made(LM(second)), IDS, to="future")

    assert name_of(found) == name, found


@pytest.mark.parametrize(("second", "name"), [c[1:] for c in BATCH], ids=[c[0] for c in BATCH])
def test_the_layer_that_sees_other_samples_is_named(second: nn.Module, name: Any) -> None:
    found = check_invariance(made(LM(second)), IDS, to="batch")

    assert name_of(found) == name, found


@pytest.mark.parametrize(
    ("model", "kwargs", "name"),
    [
        (LM(Fn(lambda x: torch.cat([x[:1] * 2, x[1:]]))), {"to": "order"}, "b"),
        (LM(), {"to": "order"}, None),
        (LM(), {"to": "padding", "mask": MASK}, None),
        (LM(), {"to": "padding", "padded": MASK == 0}, "a"),
        (LM(Attention(masked=False)), {"to": "padding", "mask": MASK}, "b"),
        (LM(places=16), {"to": "padding", "mask": MASK, "position_ids": PLACES}, None),
        (LM(places=16), {"to": "padding", "mask": MASK}, ""),  # places count the padding
        (LM(), {"to": "packing", "docs": DOCS, "position_ids": DOC_PLACES}, None),
        (LM(), {"to": "packing", "position_ids": DOC_PLACES}, "a"),
        (LM(Attention(masked=False)), {"to": "packing", "docs": DOCS, "documents": DOCS}, "b"),
        (LM(places=16), {"to": "packing", "docs": DOCS, "documents": DOCS}, ""),
        (LM(), {"to": "cache", "decode": decode}, None),
        (LM(Attention(late=1)), {"to": "cache", "decode": decode}, "b"),
        (LM(places=16), {"to": "cache", "decode": decode}, ""),  # each token is at place 0
        (LM(), {"to": "repeat"}, None),
        (LM(Fn(lambda x: F.dropout(x, 0.5))), {"to": "repeat"}, "b"),
        (LM(Fn(lambda x: x + np.random.default_rng().normal())), {"to": "repeat"}, "b"),
    ],
)
def test_the_layer_of_each_other_kind_is_named(
    model: nn.Module, kwargs: dict[str, Any], name: str | None
) -> None:
    found = check_invariance(made(model), IDS, **kwargs)

    assert name_of(found) == name, found


class Stateful(nn.Module):
    """A layer whose output depends on what it keeps from call to call."""

    def __init__(self, step: Function) -> None:
        super().__init__()
        self.step, self.n, self.kept = step, 0, list[Tensor]()
        self.torch, self.python = torch.Generator().manual_seed(3), random.Random(3)
        self.numpy, self.old_numpy = np.random.default_rng(3), np.random.RandomState(3)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.step(self)


def count(m: Any) -> int:
    m.n += 1
    return m.n


def keep_one(m: Any) -> int:
    m.kept.append(m.total)
    return len(m.kept)


@pytest.mark.parametrize(
    "step",
    [
        count,
        keep_one,
        lambda m: m.total.add_(1).clone(),
        lambda m: torch.rand((), generator=m.torch),
        lambda m: m.python.random(),
        lambda m: m.numpy.normal(),
        lambda m: m.old_numpy.normal(),
        lambda m: random.random(),
        lambda m: np.random.random(),
    ],
)
def test_a_layer_that_differs_from_call_to_call_is_named(step: Function) -> None:
    model = made(LM(Stateful(step)))
    before = model.b.n, model.b.python.getstate(), model.b.torch.get_state()

    found = check_invariance(model, IDS, to="repeat")

    assert name_of(found) == "b"
    assert (model.b.n, model.b.kept, float(model.b.total)) == (before[0], [], 0.0)
    assert model.b.python.getstate() == before[1]
    assert torch.equal(model.b.torch.get_state(), before[2])


def test_a_layer_that_keeps_its_state_without_use_or_sets_a_seed_repeats() -> None:
    def seeded(m: Any) -> Tensor:
        count(m)
        keep_one(m)
        m.total.add_(1)
        return torch.rand((), generator=m.torch.manual_seed(0))

    assert check_invariance(made(LM(Stateful(seeded))), IDS, to="repeat").first is None


def test_dropout_differs_by_another_random_state_alone() -> None:
    found = check_invariance(made(LM(nn.Dropout(0.5)), train=True), IDS, to="repeat")

    assert name_of(found) == "b"
    assert found.first is not None
    assert found.first.change == "another random state"


@pytest.mark.parametrize(
    "noise", [lambda m, x: np.random.rand(*x.shape), lambda m, x: m.numpy.random(x.shape)]
)
def test_another_layout_is_not_tried_with_random_numbers_of_numpy(noise: Function) -> None:
    layer = Stateful(count)
    layer.forward = lambda x: x + torch.as_tensor(noise(layer, x)).float()  # type: ignore[method-assign]

    with pytest.raises(ArgumentError, match=r"draws random numbers"):
        check_invariance(made(LM(layer)), IDS, to="order")


def leak(to: int) -> nn.Module:
    """Return a layer in which one position takes the value of the next one."""

    def step(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, to] += x[:, to + 1]
        return x

    return Fn(step)


def prefix(n: int) -> nn.Module:
    """Return a layer in which the first `n` positions see each other."""
    return Fn(lambda x: torch.cat([x[:, :n] + x[:, :n].mean(1, keepdim=True), x[:, n:]], 1))


@pytest.mark.parametrize(
    "second", [prefix(2), prefix(4), prefix(8), leak(0), leak(1), leak(2), leak(7), leak(14)]
)
def test_a_layer_of_which_some_positions_see_later_ones_is_named(second: nn.Module) -> None:
    assert name_of(check_invariance(made(LM(second)), IDS, to="future")) == "b"


def test_the_position_that_shows_a_dependence_is_named_or_all_that_were_tried() -> None:
    found = check_invariance(made(LM(leak(2))), IDS, to="future")
    clean = check_invariance(made(LM()), IDS, to="future")

    assert found.first is not None
    assert found.first.change == "other values of ids from position 3 on"
    words = "nothing depends on later positions, from 1, 2, 3, 5, 8, 9, 13, 15 on: "
    assert clean.verdict.startswith(words)
    assert len(clean.text().splitlines()) == 3


def test_a_leak_is_named_whose_output_lacks_the_first_position() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = LM(leak(0))

        def forward(self, ids: Tensor) -> Tensor:
            return self.lm(ids)["logits"][:, 1:]

    assert name_of(check_invariance(made(Shifted()), IDS, to="future")) == "lm.b"


def first_tokens(x: Tensor) -> Tensor:
    """Add to each sample what the last sample has at its first position."""
    return torch.cat([x[:, :1], x[:, 1:] + x[-1:, :1]], 1)


def test_a_token_that_all_samples_share_is_changed_too() -> None:
    ids = IDS.clone()
    ids[:, 0] = 7

    for batch in (ids, ids[:2]):
        found = check_invariance(made(LM(Fn(first_tokens))), batch, to="batch")
        assert name_of(found) == "b"
        assert found.first is not None
        assert found.first.change == "tokens from anywhere in ids in the other samples"
        assert check_invariance(made(LM()), batch, to="batch").first is None


def test_columns_with_vocabularies_of_their_own_take_no_values_of_others() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few, self.many = nn.Embedding(2, D), nn.Embedding(50, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.few(x[:, 0]) + self.many(x[:, 1])

    found = check_invariance(made(Table()), torch.tensor([[1, 30], [1, 40], [1, 49]]), to="batch")

    assert found.first is None
    assert found.not_judged == (
        "tokens from anywhere in x in the other samples (no Embedding takes all of x)",
    )


def test_a_model_that_refuses_tokens_from_anywhere_is_judged_by_the_others() -> None:
    class Picky(LM):
        def forward(self, ids: Tensor) -> Any:
            if (ids[:, 0] != 7).any():
                raise ValueError("a sample begins with 7")
            return super().forward(ids)

    ids = IDS.clone()
    ids[:, 0] = 7
    found = check_invariance(made(Picky()), ids, to="batch")

    assert found.first is None
    assert "(ValueError: a sample begins with 7)" in found.not_judged[0]


@pytest.mark.parametrize(("over_padding", "name"), [(True, ""), (False, None)])
def test_a_loss_over_padded_positions_is_named(over_padding: bool, name: str | None) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = LM()

        def forward(self, ids: Tensor, mask: Tensor) -> Any:
            logits, real = self.lm(ids, mask)["logits"][:, :-1], mask[:, 1:].bool()
            each = logits.square().mean(-1)
            real = real & mask[:, :-1].bool()
            return {"loss": each.mean() if over_padding else each[real].mean(), "logits": logits}

    found = check_invariance(made(Loss()), IDS, to="padding", mask=MASK)

    assert name_of(found) == name, found


def test_the_place_in_the_layer_and_the_change_are_named() -> None:
    found = check_invariance(made(LM(Attention(see=1))), IDS, to="future")
    by_place = check_invariance(made(LM(places=16)), IDS, to="padding", mask=MASK)

    words = "depends on later positions, in its own forward, after qkv and before out"
    assert found.verdict == f"b (Attention) {words}"
    assert len(found.verdict) < 100
    assert str(found).splitlines()[1] == "  with other values of ids from position 8 on"
    assert re.search(r"^→ b \(Attention\) +3×16×8 +samples × positions × –", str(found), re.M)
    assert by_place.verdict.endswith("in its own forward, after pos and before a")
    assert by_place.first is not None
    assert by_place.first.change == "one sample without its padding"


def test_batchnorm_in_training_mode_is_named_as_what_it_is() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    found = check_invariance(net, floats(4, 3, 8, 8), to="batch")

    assert found.verdict == "1 (BatchNorm2d) depends on the other samples, in training mode"
    assert check_invariance(net.eval(), floats(4, 3, 8, 8), to="batch").first is None


class Sequence(nn.Module):
    """A GRU of (positions, samples, features), with its first state."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(D, D, 2, bidirectional=both), nn.Linear(D * (1 + both), 3)

    def forward(self, x: Tensor, h: Any = None) -> Tensor:
        return self.head(self.rnn(x, h)[0])


@pytest.mark.parametrize("n", [3, 12])  # 12: as many samples as positions
def test_axes_of_the_input_can_be_said(n: int) -> None:
    for to in ("future", "batch"):
        clean = check_invariance(made(Sequence()), floats(12, n, D), to=to, batch_dim=1)
        assert clean.first is None

    found = check_invariance(made(Sequence(both=True)), floats(12, n, D), to="future", batch_dim=1)

    assert name_of(found) == "rnn"
    assert found.notes[0] == f"Of x, 12×{n}×8, axis 1 samples, axis 0 positions"


def test_the_state_of_an_rnn_follows_its_samples() -> None:
    found = check_invariance(
        made(Sequence()), floats(12, 3, D), floats(2, 3, D), to="batch", batch_dim=1
    )

    assert found.first is None
    assert not any("takes no other" in note for note in found.notes)


def test_the_input_that_is_changed_can_be_said() -> None:
    class Translation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.Transformer(D, 2, 1, 1, 16, batch_first=True)

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
            return self.t(src, tgt, tgt_mask=mask)

    model, inputs = made(Translation()), (floats(2, 9, D), floats(2, 12, D))

    assert check_invariance(model, *inputs, to="future", vary="tgt").first is None
    assert name_of(check_invariance(model, *inputs, to="future")) == "t.encoder.layers.0.self_attn"


@dataclass
class Output:
    logits: Tensor
    more: tuple[Tensor, dict[str, Tensor]]


def test_outputs_in_containers_and_keyword_inputs_are_seen() -> None:
    class Model(nn.Module):
        def __init__(self, f: Function) -> None:
            super().__init__()
            self.emb, self.out = nn.Embedding(50, D), Fn(f)

        def forward(self, *, batch: dict[str, Any]) -> Output:
            return self.out(self.emb(batch["ids"]))

    clean = Model(lambda x: Output(x, (x, {"k": x[:, :1]})))
    leak = Model(lambda x: Output(x, (x.flip(1), {"k": x[:, :1]})))
    batch = {"ids": IDS, "n": 3}

    assert check_invariance(made(clean), batch=batch, to="future").first is None
    first = check_invariance(made(leak), batch=batch, to="future").first
    assert first is not None
    assert first.name == "out.more[0]"


def test_equal_lengths_of_all_axes_are_told_apart() -> None:
    square = torch.randint(0, 50, (8, 8), generator=torch.Generator().manual_seed(2))

    for to in ("future", "batch", "order"):
        assert check_invariance(made(LM()), square, to=to).first is None
    assert name_of(check_invariance(made(LM(Attention(see=1))), square, to="future")) == "b"
    over_the_batch = Fn(lambda x: x.softmax(0))
    assert name_of(check_invariance(made(LM(over_the_batch)), square, to="batch")) == "b"


def test_pairs_of_samples_and_positions_are_known_whatever_the_size() -> None:
    mix = nn.Sequential(Fn(lambda x: x.flatten(0, 1)), Fn(lambda x: x - x.mean(0)))
    model = nn.Sequential(nn.Embedding(50, D), mix, Fn(lambda x: x.view(3, -1, D)[:, :1]))

    found = check_invariance(made(model), IDS[:, :8], to="future")  # 3 · 8 = 4 · 6

    assert name_of(found) == "1.1"


def test_a_batch_of_one_is_enough() -> None:
    over_the_batch = Fn(lambda x: x - x.mean(0))

    assert name_of(check_invariance(made(LM(over_the_batch)), IDS[:1], to="batch")) == "b"
    for to in ("future", "batch", "order"):
        assert check_invariance(made(LM()), IDS[:1], to=to).first is None


def test_a_model_of_one_length_is_judged_by_lengths_and_this_is_said() -> None:
    class Fixed(nn.Module):
        def __init__(self, see: int) -> None:
            super().__init__()
            self.emb, self.places = nn.Embedding(50, D), nn.Parameter(floats(8, D))
            self.mix = Attention(see)

        def forward(self, ids: Tensor) -> Tensor:
            return self.mix(self.emb(ids) + self.places)

    clean, leak = (check_invariance(made(Fixed(n)), IDS[:, :8], to="future") for n in (0, 1))

    assert clean.first is None
    assert clean.notes[1].startswith("No other number of positions runs")
    assert name_of(leak) == "mix"


def test_a_model_that_gives_a_loss_alone_is_judged_by_its_layers() -> None:
    class Loss(nn.Module):
        def __init__(self, leaks: bool) -> None:
            super().__init__()
            self.emb, self.head, self.leaks = nn.Embedding(50, D), nn.Linear(D, 50), leaks

        def forward(self, ids: Tensor) -> Tensor:
            x = self.emb(ids)
            x = x - x.mean(1, keepdim=True) if self.leaks else x
            return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    leak = check_invariance(made(Loss(True)), IDS, to="future")

    assert check_invariance(made(Loss(False)), IDS, to="future").first is None
    assert leak.verdict == (
        "(model) (Loss) depends on later positions, in its own forward, after emb and before head"
    )


def test_what_has_no_effect_outside_does_not_count() -> None:
    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.mix = Fn(lambda x: x.flip(1)), Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x) + 0 * self.all(x)

    found = check_invariance(made(LM(Scratch())), IDS, to="future")

    assert found.first is None
    assert found["b.all"][0].differs
    assert "differ without effect" in found.verdict


def test_what_cannot_be_judged_is_listed_with_the_reason() -> None:
    pooled = nn.Sequential(LM(), Fn(lambda out: out["hidden"][0].mean(1)))

    found = check_invariance(made(pooled), IDS, to="future")
    alone = check_invariance(made(LM(places=16)), IDS, to="padding", mask=MASK, position_ids=PLACES)

    assert "1, (model): no axis holds positions" in found.not_judged
    assert found.first is None
    assert alone.not_judged == ()


def test_another_layout_is_not_tried_if_random_numbers_are_drawn() -> None:
    model = made(LM(nn.Dropout(0.5)), train=True)

    found = check_invariance(model, IDS, to="batch")

    assert found.first is None
    assert found.not_judged[0].startswith("one sample alone (the model draws random numbers")
    with pytest.raises(ArgumentError, match=r"draws random numbers.*Call model.eval\(\)"):
        check_invariance(model, IDS, to="order")


def test_rounding_of_another_layout_is_none_and_a_dependence_below_it_is_one() -> None:
    def sums(x: Tensor) -> Tensor:  # float32 loses what float64 keeps
        big = torch.full_like(x, 3e3 * len(x))
        return (x + big) - big

    rounds = check_invariance(made(LM(Fn(sums))), IDS, to="batch")
    depends = check_invariance(made(LM(Fn(lambda x: x * (1 + 1e-3 * len(x))))), IDS, to="batch")

    assert rounds.first is None
    assert any("by rounding, in float64" in note for note in rounds.notes)
    assert name_of(depends) == "b"


def test_rounding_does_not_hide_a_dependence_behind_it() -> None:
    noise = Fn(lambda x: x + 1e-6 * x.double().std().float() if x.dtype == torch.float32 else x)
    model = LM(noise)
    model.c = Attention(see=1)

    assert name_of(check_invariance(made(model), IDS, to="future")) == "c"


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch before 2.10")
def test_experts_by_a_grouped_product_are_confirmed_in_float64() -> None:
    class Grouped(Experts):
        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            order = (choice := self.gate(flat).argmax(-1)).argsort()
            ends = choice.bincount(minlength=4).cumsum(0).to(torch.int32)
            weights = torch.stack([e.weight.T for e in self.experts])
            out = torch.zeros_like(flat)
            out[order] = F.grouped_mm(flat[order], weights, offs=ends)
            noise = 1e-6 * x.double().std() if x.dtype == torch.float32 else 0.0
            return out.view_as(x) + torch.as_tensor(noise, dtype=x.dtype)

    found = check_invariance(made(LM(Grouped(9.0))), IDS, to="future")

    assert found.first is None
    assert "in float64 by 0" in found.notes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_judged(dtype: torch.dtype) -> None:
    for to in ("future", "batch", "order"):
        assert check_invariance(made(LM()).to(dtype), IDS, to=to).first is None
    leak = made(LM(Attention(see=1))).to(dtype)
    assert name_of(check_invariance(leak, IDS, to="future")) == "b"


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, pytest.param(torch.compile, marks=pytest.mark.slow)]
)
def test_a_wrapped_model_is_judged_under_its_own_names(wrap: Function) -> None:
    model = wrap(made(LM(Attention(see=1))))

    assert name_of(check_invariance(model, IDS, to="future")) == "b"


def test_a_checkpointed_layer_in_training_mode_is_named() -> None:
    layer = Attention(see=1)
    again = nn.Sequential(layer)
    again.forward = lambda x: checkpoint(layer, x, use_reentrant=False)  # type: ignore[method-assign]

    found = check_invariance(made(LM(again), train=True), IDS, to="future")

    assert name_of(found) == "b.0"


@pytest.mark.parametrize("to", KINDS)
def test_the_model_the_inputs_and_the_random_states_are_as_before(to: str) -> None:
    second = turned(nn.BatchNorm1d(D), nn.Dropout(0.0))
    model = made(LM(second), train=True)
    F.cross_entropy(model(IDS)["logits"].flatten(0, 1), IDS.flatten()).backward()
    kwargs = {"padding": {"mask": MASK}, "packing": {"docs": DOCS, "documents": DOCS}}.get(to, {})
    kwargs |= {"decode": decode} if to == "cache" else {}
    inputs, state, before = IDS.clone(), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    ours, of_numpy = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr, call-overload]

    check_invariance(model, inputs, to=to, **kwargs)

    assert torch.equal(inputs, IDS)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in grads)
        assert p.grad is None or torch.equal(p.grad, grads[name])
    assert all(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == ours
    assert np.random.get_state()[1].tolist() == of_numpy  # type: ignore[union-attr, call-overload]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_of_the_model_passes_and_leaves_no_hook() -> None:
    def refuse(x: Tensor) -> Tensor:
        raise ValueError("not today")

    model = made(LM(Fn(refuse)))

    with pytest.raises(ValueError, match="not today"):
        check_invariance(model, IDS, to="future")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.get_default_dtype() == torch.float32


def test_a_layout_that_the_model_refuses_is_listed() -> None:
    def several(x: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError("one sample is too few")
        return x

    found = check_invariance(made(LM(Fn(several))), IDS, to="batch")

    assert found.first is None
    assert found.not_judged[0] == "one sample alone (ValueError: one sample is too few)"


def test_the_result_is_a_table_a_dict_and_no_truth_value() -> None:
    found = check_invariance(made(LM(Attention(see=1))), IDS, to="future")

    with pytest.raises(OptionError, match=r"Ask `\.first is None`"):
        bool(found)
    assert found.first in found["b"]
    assert found.to_dict()["first"]["name"] == "b"
    assert isinstance(found, Invariance)
    assert next(r.name for r in found if r.differs) == "b.out"


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((IDS,), {"to": "futur"}, OptionError, 'Did you mean "future"'),
        ((IDS,), {"to": "future", "vary": "x"}, OptionError, "Give one of ids"),
        ((IDS,), {"to": "batch", "padded": MASK == 0}, TypeError, "unexpected keyword .*padded"),
        ((IDS,), {"to": "padding"}, ArgumentError, "no input says where padding is"),
        ((IDS,), {"to": "padding", "padded": MASK[:, 1:]}, OptionError, r"\(samples, positions\)"),
        ((IDS,), {"to": "padding", "mask": MASK * 0 + 1}, ArgumentError, "no sample has padding"),
        ((IDS,), {"to": "cache"}, ArgumentError, "Give decode="),
        ((IDS,), {"to": "packing", "documents": DOCS * 0}, ArgumentError, "the same document"),
        ((IDS[:, :1],), {"to": "future"}, OptionError, "Give seq_dim="),
        ((IDS,), {"to": "future", "seq_dim": 2}, OptionError, "ids has 2 axes"),
        ((torch.ones(2, 9).long(),), {"to": "future"}, ArgumentError, "all values of ids"),
        ((IDS[[0, 0]],), {"to": "batch"}, ArgumentError, "all samples of ids are the same"),
        ((3,), {"to": "future"}, ArgumentError, "no tensor"),
        ((IDS,), {"to": "batch", "rtol": -1}, OptionError, "rtol"),
    ],
)
def test_a_question_that_cannot_be_asked_is_an_error(
    args: Any, kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        check_invariance(made(LM()), *args, **kwargs)
