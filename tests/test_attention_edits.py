"""`hook_attention` and `edit_attention`, beside eager attention that is changed by hand."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookkit.edits import edit_attention, patch_from, replace, scale, zero
from hookkit.errors import HookError
from hookkit.hooks import attention_weights, hook_attention, hook_function
from hookkit.hooks.selection import select

Models = tuple[Any, Any, dict[str, Any]]


class Written(nn.Module):
    """Attention in four lines, with `change` of its pattern."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda w: w) -> None:
        super().__init__()
        self.change = change

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
        return self.change(scores.softmax(-1)) @ v


class Fused(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=dtype, requires_grad=True) for n in (5, 7, 7))
    return q, k, v, torch.ones(5, 7).tril(2).bool()


def without(w: Tensor, part: Any) -> Tensor:
    w = w.clone()
    w[part] = 0
    return w


@pytest.mark.parametrize("part", [(..., 4, 2), (slice(None), 1), (..., 0), (0, 2, slice(1, 3))])
def test_a_part_of_the_pattern_is_zeroed_and_gradients_follow(part: Any) -> None:
    q, k, v, mask = tensors()
    expected = Written(lambda w: without(w, part))(q, k, v, mask)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))

    with edit_attention(model := Fused(), zero(at=part)) as edits:
        y = model(q, k, v, mask)

    assert edits.n_calls == {"attention": 1}
    torch.testing.assert_close(y, expected)
    for g, h in zip(torch.autograd.grad(y.square().sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(g, h)


def test_of_edited_scores_the_rest_sums_to_one() -> None:
    q, k, v, mask = tensors()
    fewer = mask.clone()
    fewer[4, 2] = False

    edit = replace(-math.inf, at=(..., 4, 2))
    with edit_attention(model := Fused(), edit, scores=True), hook_attention(model) as h:
        y = model(q, k, v, mask)

    torch.testing.assert_close(y, Fused()(q, k, v, fewer))
    torch.testing.assert_close(h[0].stored.sum(-1), torch.ones(2, 3, 5))


def test_a_run_that_is_only_read_and_a_call_that_is_not_wanted_stay_bit_identical() -> None:
    q, k, v, mask = tensors()
    own = Fused()(q, k, v, mask)
    model = Fused()

    with hook_attention(model) as h, hook_attention(model, scores=True) as scores:
        read = model(q, k, v, mask)
    with edit_attention(model, zero(), calls=1):
        first, second = model(q, k, v, mask), model(q, k, v, mask)

    assert torch.equal(read, own)
    assert torch.equal(first, own)
    assert not second.any()
    assert torch.equal(scores[0].stored.softmax(-1), h[0].stored)


def test_blocks_inside_each_other_see_what_the_outer_one_edits() -> None:
    q, k, v, mask = tensors()
    model = Fused()

    with (
        hook_attention(model) as before,
        edit_attention(model, scale(2.0)),
        hook_attention(model) as after,
        hook_function(F.scaled_dot_product_attention) as fused,
    ):
        y = model(q, k, v, mask)

    torch.testing.assert_close(after[0].stored, 2 * before[0].stored)
    torch.testing.assert_close(y, 2 * Fused()(q, k, v, mask))
    assert len(fused) == 1  # the innermost saw the model's own call


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch", [True, False])
def test_multihead_attention_with_and_without_weights_and_batch(
    need_weights: bool, batch: bool
) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8) if batch else torch.randn(5, 8)
    shapes = list[Any]()

    def without_head(pattern: Tensor) -> Tensor:
        shapes.append(tuple(pattern.shape))
        return without(pattern, (..., 1, slice(None), slice(None)))

    with edit_attention(attention, without_head):
        y, weights = attention(x, x, x, need_weights=need_weights)

    assert shapes == [(3 if batch else 1, 2, 5, 5)]
    with torch.no_grad():
        _, full = attention(x, x, x, average_attn_weights=False)
        attention.out_proj.weight[:, 4:] = 0
    torch.testing.assert_close(y, attention(x, x, x)[0])
    if need_weights:
        torch.testing.assert_close(weights, full[..., 0, :, :] / 2)


def test_dropout_of_the_call_is_applied_to_the_edited_pattern() -> None:
    q, k, v, _ = tensors()

    class Dropped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    with edit_attention(model := Dropped(), lambda w: torch.ones_like(w)):
        y = model(q, k, torch.ones_like(v))

    kept = y / 2  # of seven ones, each kept at an even chance and doubled
    assert torch.equal(kept, kept.round())
    assert 1 < kept.mean() < 6


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (zero(at=(..., 9)), "index 9 is out of bounds"),
        (zero(at=(slice(None), 3)), "index 3 is out of bounds"),
        (replace(torch.zeros(2, 3, 5, 8)), "attention"),
        (lambda w: w[..., :1], r"the shape \(2, 3, 5, 1\), and the layer's is \(2, 3, 5, 7\)"),
    ],
)
def test_wrong_heads_positions_and_shapes_stop_before_the_pattern_is_used(
    edit: Any, says: str
) -> None:
    with (
        pytest.raises((RuntimeError, IndexError), match=says),
        edit_attention(model := Fused(), edit),
    ):
        model(*tensors())
    assert torch._C._len_torch_function_stack() == 0


def made(kind: str) -> Models:
    """A small model of random weights with fused attention, the same with eager, and inputs."""
    t = pytest.importorskip("transformers")
    small = {"vocab_size": 50, "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32}
    small |= {"intermediate_size": 64}
    grouped = small | {"num_key_value_heads": 2}
    t5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    name, options = {
        "gpt2": ("GPT2LMHeadModel", {"vocab_size": 50, "n_embd": 32, "n_head": 4, "n_layer": 2}),
        "llama": ("LlamaForCausalLM", grouped),
        "bert": ("BertModel", small),
        "t5": ("T5ForConditionalGeneration", t5 | {"decoder_start_token_id": 0}),
    }[kind]
    cls: Any = getattr(t, name)
    config = cls.config_class(**options, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    fused = cls._from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    eager = cls._from_config(config, attn_implementation="eager").eval()
    eager.load_state_dict(fused.state_dict())
    ids = torch.randint(3, 50, (2, 7))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids > -1).long()}
    if kind == "t5":
        inputs["decoder_input_ids"] = ids[:, :4]
    return fused, eager, inputs


@contextmanager
def changed_softmax(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Eager attention, changed without hookkit: another `F.softmax` for tensors of four dims."""
    own: Any = F.softmax

    def softmax(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        pattern: Tensor = own(x, *args, **kwargs)
        return change(pattern) if x.dim() == 4 else pattern

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "softmax", softmax)
        yield


def result(output: Any) -> Tensor:
    found: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return found


FAMILIES = ["gpt2", "llama", "bert", "t5"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_give_what_their_eager_attention_gives(kind: str) -> None:
    fused, eager, inputs = made(kind)
    part = (slice(None), 1, 3, slice(0, 2))  # head 1: position 3 to the first two
    with torch.no_grad(), changed_softmax(lambda w: without(w, part)):
        expected = result(eager(**inputs))

    for model in (fused, eager):
        with torch.no_grad(), edit_attention(model, zero(at=part)):
            y = result(model(**inputs))
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    found, wanted = (attention_weights(m, **inputs) for m in (fused, eager))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not torch.allclose(expected, result(fused(**inputs)), atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_a_head_is_left_out_in_generate(kind: str) -> None:
    fused, eager, inputs = made(kind)
    inputs = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with changed_softmax(lambda w: without(w, (slice(None), 1))):
        expected = torch.stack(eager.generate(**inputs, **options).logits)

    with (
        edit_attention(fused, zero(at=(slice(None), 1))),
        hook_attention(select(fused, "@attn.1"), keep="last") as h,
    ):
        y = torch.stack(fused.generate(**inputs, **options).logits)

    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    last = h[-1].stored
    assert last.shape[:3] == (2, 4, 1)  # also where grouped queries are packed for one token
    assert not last[:, 1].any()


def test_gradients_under_checkpointing_are_those_without_it() -> None:
    gradients = []
    q, k, v, mask = tensors()
    model = Fused()
    again: Any = checkpoint
    for run in (model, lambda *x: again(model, *x, use_reentrant=False)):
        with edit_attention(model, zero(at=(..., 4, 2))), hook_attention(model) as h:
            y: Any = run(q, k, v, mask)
            gradients.append(torch.autograd.grad(y.square().sum(), (q, k, v)))
        assert len(h) == 1

    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("attend", [Fused, Written])
def test_reading_the_pattern_of_a_checkpoint_changes_no_gradient(
    attend: type[nn.Module], reentrant: bool
) -> None:
    q, k, v, mask = tensors()
    model, again = attend(), checkpoint
    wanted = torch.autograd.grad(model(q, k, v, mask).square().sum(), (q, k, v))

    with hook_attention(model) as h, edit_attention([nn.Identity()], zero()) as idle:
        idle.quiet = True
        again(model, q, k, v, mask, use_reentrant=reentrant).square().sum().backward()

    assert len(h) == 1
    for x, grad in zip((q, k, v), wanted, strict=True):
        torch.testing.assert_close(x.grad, grad)


def test_a_pattern_that_is_stored_with_its_graph_has_one_and_else_none() -> None:
    q, k, v, mask = tensors()
    with hook_attention(model := Fused(), detach=False) as live, hook_attention(model) as h:
        model(q, k, v, mask)

    (grad,) = torch.autograd.grad(live[0].stored[..., 0].sum(), k)
    assert grad.any()
    assert not h[0].stored.requires_grad


def test_the_column_of_an_attention_sink_is_the_last() -> None:
    class Sink(nn.Module):
        sinks = nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            scores = torch.cat([q @ k.mT, self.sinks.view(1, 3, 1, 1).expand(2, 3, 5, 1)], -1)
            return scores.softmax(-1)[..., :-1] @ v

    q, k, v, mask = tensors()
    plain, model = Sink()(q, k, v, mask), Sink()
    with hook_attention(model) as h:
        assert torch.equal(model(q, k, v, mask), plain)

    pattern = h[0].stored
    assert pattern.shape == (2, 3, 5, 8)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 3, 5))
    torch.testing.assert_close(pattern[..., :-1] @ v, plain)


def test_edits_refuse_attention_whose_heads_are_elsewhere() -> None:
    class Window(Written):
        num_heads = 3

        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return (q @ k.mT).transpose(1, 2).softmax(-1)

    q, k, v, mask = tensors()
    with hook_attention(model := Fused()) as h:
        model(q[0], k[0], v[0], mask)
    assert h[0].stored.shape == (3, 5, 7)

    joined, elsewhere = (rf"is {s}, which is not \(batch" for s in ("3×5×7", "2×5×3×7"))
    with (
        pytest.raises(HookError, match=joined),
        edit_attention(model, zero()),
        hook_attention(model),
    ):
        model(q[0], k[0], v[0], mask)
    model = Window()
    with pytest.raises(HookError, match=elsewhere), edit_attention(model, zero()):
        model(q, k, v, mask)


def test_the_pattern_of_another_prompt_is_patched_in() -> None:
    fused, eager, inputs = made("gpt2")
    other = inputs | {"input_ids": inputs["input_ids"].flip(1)}
    patterns = iter(attention_weights(eager, **other).values())
    with torch.no_grad(), changed_softmax(lambda w: next(patterns)):
        expected = result(eager(**inputs))

    with torch.no_grad():
        with hook_attention(fused) as clean:
            fused(**other)
        with edit_attention(fused, patch_from(clean)):
            y = result(fused(**inputs))

    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_a_model_without_attention_says_so() -> None:
    with pytest.raises(HookError, match="no attention was seen"):
        attention_weights(nn.Linear(2, 2), torch.ones(1, 2))
