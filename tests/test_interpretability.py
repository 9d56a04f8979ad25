"""Twelve jobs of mechanistic interpretability, each equal to what plain PyTorch hooks give.

Each test does a job as a user would, over public names, then again with `register_forward_hook` by
hand, and compares. The models are tiny and untrained: a GPT of our own, and transformers' GPT-2,
Llama and BERT. Where a job needs no gradients, it runs without.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from hookkit import (
    add,
    edit_function,
    edit_input,
    edit_output,
    edit_outputs,
    hook_output,
    hook_outputs,
    patch_from,
    replace,
    select,
    zero,
)

DIM, HEADS, VOCAB, LENGTH = 16, 2, 32, 6
CLEAN = torch.tensor([[5, 9, 3, 7, 2, 8]])
CORRUPT = torch.tensor([[5, 9, 11, 7, 2, 8]])  # another token at position 2
SUBJECT = 2


# -- models ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(o.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(16, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))

    def generate(self, ids: Tensor, max_new_tokens: int, do_sample: bool) -> Tensor:
        for _ in range(max_new_tokens):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


@dataclass
class Case:
    """A model, the names of its parts by layer, and what makes logits of a block's output."""

    model: Any
    embed: str
    blocks: list[str]
    attns: list[str]
    projs: list[str]  # what maps the heads' outputs, side by side, to the residual stream
    mlps: list[str]
    unembed: Callable[[Tensor], Tensor]
    generates: bool = True

    def answer(self, ids: Tensor) -> Tensor:
        """How much one token is preferred to another one at the end of each sample."""
        out = self.model(ids)
        logits = getattr(out, "logits", out)[:, -1]
        return logits[:, 1] - logits[:, 2]

    def module(self, name: str) -> Any:
        return self.model.get_submodule(name.partition("[")[0])


def own() -> Case:
    names = [f"blocks.{i}" for i in range(2)]
    model = GPT()
    parts = [[f"{n}.{part}" for n in names] for part in ("attn", "attn.proj", "mlp")]
    return Case(model, "wte", names, *parts, lambda x: model.head(model.ln(x)))


def gpt2() -> Case:
    tf = pytest.importorskip("transformers")
    sizes = {"n_embd": DIM, "n_layer": 2, "n_head": HEADS, "n_positions": 16}
    config = tf.GPT2Config(**sizes, vocab_size=VOCAB, initializer_range=0.3, **SPECIAL)
    model = tf.GPT2LMHeadModel(config)
    names, body = [f"transformer.h.{i}" for i in range(2)], model.transformer
    parts = [[f"{n}.{part}" for n in names] for part in ("attn[0]", "attn.c_proj", "mlp")]
    return Case(model, "transformer.wte", names, *parts, lambda x: model.lm_head(body.ln_f(x)))


def llama() -> Case:
    tf = pytest.importorskip("transformers")
    config = tf.LlamaConfig(**SIZES, num_key_value_heads=1, **SPECIAL)
    model = tf.LlamaForCausalLM(config)
    names, body = [f"model.layers.{i}" for i in range(2)], model.model
    parts = [[f"{n}.{part}" for n in names] for part in ("self_attn[0]", "self_attn.o_proj", "mlp")]
    return Case(model, "model.embed_tokens", names, *parts, lambda x: model.lm_head(body.norm(x)))


def bert() -> Case:
    tf = pytest.importorskip("transformers")
    model = tf.BertForMaskedLM(tf.BertConfig(**SIZES))
    names = [f"bert.encoder.layer.{i}" for i in range(2)]
    inside = ("attention[0]", "attention.output.dense", "output.dense")
    parts = [[f"{n}.{part}" for n in names] for part in inside]
    embed = "bert.embeddings.word_embeddings"
    return Case(model, embed, names, *parts, model.cls, generates=False)


SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": 2 * DIM, "vocab_size": VOCAB, "max_position_embeddings": 16,
    "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(params=[own, gpt2, llama, bert], ids=lambda make: make.__name__)
def c(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    case = request.param()
    case.model.eval()
    return case


# -- plain hooks, for what is expected ------------------------------------------------------------


@contextmanager
def plain(c: Case, **hooks: Any) -> Iterator[None]:
    """`register_forward_hook` of functions of one tensor, by the name of the layer."""
    with ExitStack() as stack:
        for name, f in hooks.items():

            def hook(m: Any, i: Any, o: Any, f: Any = f) -> Any:
                if not isinstance(o, tuple):
                    return f(o)
                new = f(o[0])
                return None if new is None else (new, *o[1:])

            stack.callback(c.module(name).register_forward_hook(hook).remove)
        yield


def plain_values(c: Case, names: list[str], ids: Tensor) -> dict[str, Tensor]:
    values = dict[str, Tensor]()

    def keep(name: str) -> Callable[[Tensor], None]:
        return lambda o: values.update({name: o.detach().clone()})

    with plain(c, **{name: keep(name) for name in names}):
        c.model(ids)
    return values


def put(value: Tensor, at: Any = ...) -> Callable[[Tensor], Tensor]:
    """A function that gives a copy of a tensor, with `value` in one place."""

    def changed(o: Tensor) -> Tensor:
        o = o.clone()
        o[at] = value
        return o

    return changed


# -- the jobs -------------------------------------------------------------------------------------


@torch.no_grad()
def test_activation_patching_by_layer_and_position(c: Case) -> None:
    with hook_outputs(select(c.model, *c.blocks)) as clean:
        c.model(CLEAN)
    found = torch.empty(len(c.blocks), LENGTH)
    for i, block in enumerate(c.blocks):
        for p in range(LENGTH):
            with edit_output(c.module(block), patch_from(clean, at=(slice(None), p))):
                found[i, p] = c.answer(CORRUPT)

    expected, kept = torch.empty_like(found), plain_values(c, c.blocks, CLEAN)
    for i, block in enumerate(c.blocks):
        for p in range(LENGTH):
            at = (slice(None), p)
            with plain(c, **{block: put(kept[block][at], at)}):
                expected[i, p] = c.answer(CORRUPT)
    assert_close(found, expected)
    assert found.std() > 0.01


@torch.no_grad()
def test_steering_in_generate(c: Case) -> None:
    if not c.generates:
        pytest.skip("a model of masked tokens does not generate")
    layer = c.module(c.blocks[0])
    with hook_output(layer, keep="all") as h:
        c.model(CLEAN)
        c.model(CORRUPT)
    steer = 3 * (h.calls[1] - h.calls[0]).mean(1)
    with edit_output(layer, add(steer), calls=lambda n: n > 0) as edits:  # after the prompt
        found = c.model.generate(CLEAN, max_new_tokens=5, do_sample=False)

    numbers = count()
    a, b = (plain_values(c, c.blocks, ids)[c.blocks[0]] for ids in (CLEAN, CORRUPT))
    steered = {c.blocks[0]: lambda o: o + 3 * (b - a).mean(1) if next(numbers) else o}
    with plain(c, **steered):
        expected = c.model.generate(CLEAN, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, expected)
    assert not torch.equal(found, c.model.generate(CLEAN, max_new_tokens=5, do_sample=False))
    assert [*edits.n_calls.values()] == [5]


@torch.no_grad()
def test_logit_lens(c: Case) -> None:
    with hook_outputs(select(c.model, *c.blocks)) as h:
        out = c.model(CLEAN)
    found = c.unembed(torch.stack(h.stored))

    kept = plain_values(c, c.blocks, CLEAN)
    assert_close(found, torch.stack([c.unembed(kept[block]) for block in c.blocks]))
    assert_close(found[-1], getattr(out, "logits", out))


def fitted_probe(x: Tensor, y: Tensor) -> nn.Linear:
    torch.manual_seed(0)
    probe = nn.Linear(DIM, 1)
    optimizer = torch.optim.Adam(probe.parameters(), 0.05)
    for _ in range(150):
        F.binary_cross_entropy_with_logits(probe(x)[:, 0], y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return probe


def test_a_linear_probe(c: Case) -> None:
    data = torch.randint(0, VOCAB, (24, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = (c.module(c.embed).weight[data, 0].detach() > 0).flatten().float()
    with torch.no_grad(), hook_output(c.module(c.blocks[0]), keep="all") as h:
        for batch in data.split(8):
            c.model(batch)
    acts = torch.cat(h.calls).flatten(0, 1)
    probe = fitted_probe(acts, labels)

    expected = torch.cat([plain_values(c, c.blocks, xb)[c.blocks[0]] for xb in data.split(8)])
    assert torch.equal(acts, expected.flatten(0, 1))
    assert_close(probe.weight, fitted_probe(expected.flatten(0, 1), labels).weight)
    assert ((probe(acts)[:, 0] > 0) == labels.bool()).float().mean() > 0.7


def trained_sae(c: Case, attach: Callable[[nn.Module], Any]) -> nn.Module:
    """A sparse autoencoder that is trained in its place, so that the model's loss stays low."""
    torch.manual_seed(0)
    sae = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, DIM))
    optimizer = torch.optim.Adam(sae.parameters(), 1e-2)
    for _ in range(4):
        with attach(sae), hook_output(sae[1], detach=False) as features:
            out = c.model(CLEAN)
        logits = getattr(out, "logits", out)
        loss = F.cross_entropy(logits[0], CLEAN[0]) + 1e-2 * features.stored.abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return sae


def test_a_sparse_autoencoder_is_attached_and_trained(c: Case) -> None:
    block = c.blocks[0]
    found = trained_sae(c, lambda sae: edit_output(c.module(block), sae))

    expected = trained_sae(c, lambda sae: plain(c, **{block: sae}))
    for name, weight in found.state_dict().items():
        assert_close(weight, expected.state_dict()[name], msg=name)


@torch.no_grad()
def test_causal_tracing(c: Case) -> None:
    at = slice(None), SUBJECT
    noise = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0))
    with hook_outputs(select(c.model, *c.mlps, *c.blocks)) as clean:
        c.model(CLEAN)
    broken, found = CLEAN.expand(8, -1), {}
    with edit_output(c.module(c.embed), add(noise, at=at)):
        for name in clean.names:
            with edit_output(c.module(name), patch_from(clean, at=at)):
                found[name] = c.answer(broken).mean()

    kept = plain_values(c, clean.names, CLEAN)
    for name in clean.names:
        blur = {c.embed: lambda o: put(o[at] + noise, at)(o)}
        with plain(c, **blur, **{name: put(kept[name][at], at)}):
            assert_close(found[name], c.answer(broken).mean())


def test_attribution_patching(c: Case) -> None:
    blocks = select(c.model, *c.blocks)
    with torch.no_grad(), hook_outputs(blocks) as clean:
        c.model(CLEAN)
    with hook_outputs(blocks) as h, hook_outputs(blocks, grad=True) as g:
        c.answer(CORRUPT).sum().backward()
    pairs = [(clean[b].stored - h[b].stored, g[b].stored[0]) for b in h.names]
    found = torch.stack([(change * grad).sum(-1) for change, grad in pairs])

    kept, live = plain_values(c, c.blocks, CLEAN), list[Tensor]()

    def retain(o: Tensor) -> None:
        o.retain_grad()
        live.append(o)

    with plain(c, **dict.fromkeys(c.blocks, retain)):
        c.answer(CORRUPT).sum().backward()
    both = zip(kept.values(), live, strict=True)
    expected = torch.stack([((a - o) * o.grad).sum(-1) for a, o in both])  # type: ignore[operator]
    assert_close(found, expected.detach())
    assert found.abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("head", range(HEADS))
def test_a_head_of_fused_attention_is_ablated(c: Case, head: int) -> None:
    size = DIM // HEADS
    columns = slice(head * size, (head + 1) * size)
    fused, layer = F.scaled_dot_product_attention, c.module(c.attns[0])
    with edit_function(fused, zero(at=(slice(None), head)), within=layer):
        found = c.answer(CLEAN)
    with edit_input(c.module(c.projs[0]), zero(at=(..., columns))):
        outside = c.answer(CLEAN)

    model = copy.deepcopy(c)  # without the head's part of the projection
    proj = model.module(c.projs[0])
    (proj.weight.T if isinstance(proj, nn.Linear) else proj.weight)[columns] = 0
    assert_close(found, model.answer(CLEAN))
    assert_close(outside, model.answer(CLEAN))
    assert (found - c.answer(CLEAN)).abs() > 1e-3


@torch.no_grad()
def test_path_patching(c: Case) -> None:
    sender, receiver, frozen = c.projs[0], c.mlps[1], [c.mlps[0], c.projs[1]]
    with hook_outputs(select(c.model, sender)) as clean:
        c.model(CLEAN)
    with hook_outputs(select(c.model, *frozen)) as own:
        c.model(CORRUPT)
    with (
        edit_outputs(select(c.model, sender), patch_from(clean)),
        edit_outputs(select(c.model, *frozen), patch_from(own)),
        hook_outputs(select(c.model, receiver)) as received,
    ):
        c.model(CORRUPT)
    with edit_outputs(select(c.model, receiver), patch_from(received)):
        found = c.answer(CORRUPT)

    kept = {**plain_values(c, [sender], CLEAN), **plain_values(c, frozen, CORRUPT)}
    with plain(c, **{name: put(value) for name, value in kept.items()}):
        last = plain_values(c, [receiver], CORRUPT)[receiver]
    with plain(c, **{receiver: put(last)}):
        assert_close(found, c.answer(CORRUPT))
    assert (found - c.answer(CORRUPT)).abs() > 1e-4


@torch.no_grad()
def test_mean_ablation(c: Case) -> None:
    data = torch.randint(0, VOCAB, (24, LENGTH), generator=torch.Generator().manual_seed(0))
    parts = select(c.model, *c.attns, *c.mlps)
    with hook_outputs(parts, keep="all") as h:
        for batch in data.split(8):
            c.model(batch)
    means = {hook.name: torch.cat(hook.calls).mean((0, 1)) for hook in h}
    found = {}
    for name in parts:
        with edit_outputs(select(c.model, name), replace(means[name])):
            found[name] = c.answer(CLEAN)

    expected = plain_values(c, list(parts), data)
    for name in parts:
        with plain(c, **{name: put(expected[name].mean((0, 1)))}):
            assert_close(found[name], c.answer(CLEAN))
    assert torch.stack([*found.values()]).std() > 0.01


def learned_subspace(c: Case, attach: Callable[[Callable[[Tensor], Tensor]], Any]) -> Tensor:
    """Two directions along which the swapped run answers as the source does."""
    torch.manual_seed(0)
    basis, wanted = nn.Parameter(torch.randn(DIM, 2)), c.answer(CLEAN).detach()
    source = plain_values(c, c.blocks, CLEAN)[c.blocks[0]]
    optimizer = torch.optim.Adam([basis], 0.05)

    def swap(o: Tensor) -> Tensor:
        q = torch.linalg.qr(basis)[0]
        return o + (source - o) @ q @ q.T

    for _ in range(6):
        with attach(swap):
            F.mse_loss(c.answer(CORRUPT), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return basis.detach()


def test_an_interchange_in_a_learned_subspace(c: Case) -> None:
    found = learned_subspace(c, lambda f: edit_output(c.module(c.blocks[0]), f))

    expected = learned_subspace(c, lambda f: plain(c, **{c.blocks[0]: f}))
    assert_close(found, expected)


def test_a_feature_is_visualised(c: Case) -> None:
    unit, start = 3, c.module(c.embed)(CLEAN).detach()

    def ascended(run: Callable[[Tensor], Tensor]) -> Tensor:
        x = nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([x], 0.1)
        for _ in range(4):
            (-run(x)[0, -1, unit] + 0.01 * x.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return x.detach()

    def run(x: Tensor) -> Tensor:
        with (
            edit_output(c.module(c.embed), replace(x)),
            hook_output(c.module(c.mlps[1]), detach=False, stop=True) as h,
        ):
            c.model(CLEAN)
        return h.stored

    def by_hand(x: Tensor) -> Tensor:
        last = dict[str, Tensor]()
        keep = {c.mlps[1]: lambda o: last.update(o=o)}
        with plain(c, **{c.embed: lambda o: x.clone()}, **keep):
            c.model(CLEAN)
        return last["o"]

    found = ascended(run)

    assert_close(found, ascended(by_hand))
    assert run(found)[0, -1, unit] > run(start)[0, -1, unit]
