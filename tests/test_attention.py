"""`attention_weights` against a softmax that is written out."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hooked import n_hooks
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from hookkit import hook_attention
from hookkit.edits import edit_function, scale
from hookkit.errors import HookError
from hookkit.hooks import attention_weights

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "bool mask": {"attn_mask": torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) > 0.4},
    "float mask": {"attn_mask": torch.randn(2, 1, 5, 7)},
    "a row without a key": {"attn_mask": torch.ones(5, 7).tril(-1).bool()},
    "dropout": {"dropout_p": 0.5},
    "groups": {"enable_gqa": True},
    "upper left": {"attn_mask": causal_upper_left(5, 7)},
    "lower right": {"attn_mask": causal_lower_right(5, 7)},
}


class Attend(nn.Module):
    """Gives what SDPA gives; asks for no weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def queries(dtype: torch.dtype = torch.float32, groups: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    heads = 2 if groups else 4
    return torch.randn(2, 4, 5, 8, dtype=dtype), torch.randn(2, heads, 7, 8, dtype=dtype)


@pytest.mark.parametrize("name", CALLS)
def test_weights_are_what_the_attention_gives_for_an_identity_as_values(name: str) -> None:
    q, k = queries(groups=name == "groups")
    model = nn.Sequential(Attend(**CALLS[name]))[0]
    identity = torch.eye(7).expand(*k.shape[:-1], 7)

    (found,) = attention_weights(model, q, k, k).values()

    expected = F.scaled_dot_product_attention(q, k, identity, **CALLS[name] | {"dropout_p": 0.0})
    torch.testing.assert_close(found, expected)
    rows = found.sum(-1)
    assert ((rows - 1).abs() < 1e-5).logical_or(rows == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_dtypes_are_those_of_a_softmax_in_float32_or_more(
    dtype: torch.dtype,
) -> None:
    q, k = queries(dtype)

    (found,) = attention_weights(Attend(), q, k, k).values()

    exact = (q.double() @ k.double().mT / math.sqrt(8)).softmax(-1)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype))


MHA: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias_k and bias_v": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "no bias": {"bias": False},
    "sequence first": {"batch_first": False},
    "dropout": {"dropout": 0.5},
    "other sizes": {"kdim": 6, "vdim": 6},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"attn_mask": torch.full((5, 5), -math.inf).triu(1)},
    "bool": {"attn_mask": torch.ones(5, 5).triu(2).bool()},
    "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    "per head": {"attn_mask": torch.randn(4, 5, 5)},
    "averaged": {"need_weights": True},
    "by head": {"need_weights": True, "average_attn_weights": False},
}


class Wrapped(nn.Module):
    def __init__(self, options: dict[str, Any], call: dict[str, Any]) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, **{"batch_first": True} | options)
        self.call = {"need_weights": False} | call

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return self.attn(x, k, k, **self.call)[0]


@pytest.mark.parametrize("options", MHA)
@pytest.mark.parametrize("masks", MASKS)
def test_multihead_attention_gives_what_it_would_return(options: str, masks: str) -> None:
    torch.manual_seed(0)
    model = Wrapped(MHA[options], MASKS[masks])
    x = torch.randn(2, 5, 8)
    k = torch.randn(2, 5, 6) if options == "other sizes" else x
    if options == "sequence first":
        x, k = x.transpose(0, 1), k.transpose(0, 1)

    found = attention_weights(model, x, k)

    with torch.no_grad():
        call = {**model.call, "need_weights": True, "average_attn_weights": False}
        expected = model.eval().attn(x, k, k, **call)[1]
    assert list(found) == ["attn"]
    torch.testing.assert_close(found["attn"], expected)


@pytest.mark.parametrize("norm_first", [True, False])
def test_fused_encoder_layers_in_eval_mode_and_without_a_batch(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True, norm_first=norm_first, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    found = attention_weights(model, x, src_key_padding_mask=padding)
    single = attention_weights(model, x[0])

    first: Any = model.layers[0]
    y = first.norm1(x) if norm_first else x
    call = {"key_padding_mask": padding, "average_attn_weights": False}
    expected = first.self_attn(y, y, y, **call)[1]
    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(found["layers.0.self_attn"], expected)
    assert single["layers.1.self_attn"].shape == (1, 2, 5, 5)
    torch.testing.assert_close(single["layers.0.self_attn"], found["layers.0.self_attn"][:1])


def test_the_run_is_the_models_own_and_nothing_stays() -> None:
    model = Wrapped({"dropout": 0.5}, {})
    x = torch.randn(2, 5, 8)
    with edit_function(F.scaled_dot_product_attention, scale(2.0), inputs=True):
        attention_weights(Attend(), *queries(), queries()[1])

    found = attention_weights(model, x, k=x)["attn"]

    assert model.training
    assert not found.requires_grad
    assert torch.is_grad_enabled()
    assert n_hooks(model) == torch._C._len_torch_function_stack() == 0


def test_a_device_without_autocast() -> None:
    q = torch.randn(2, 3, 5, 4, device="meta")

    found = attention_weights(Attend(), q, q, q)

    assert found[""].shape == (2, 3, 5, 5)


def test_pytree_tensors_are_an_error() -> None:
    x = torch.nested.nested_tensor(
        [torch.randn(2, 3, 8), torch.randn(2, 5, 8)], layout=torch.jagged
    )
    x = x.transpose(1, 2) if x.dim() == 4 else x

    with pytest.raises(HookError, match="the attention scores of nested tensors cannot be put int"):
        attention_weights(Attend(), x, x, x)


def test_a_softmax_that_writes_into_a_tensor_is_left_alone() -> None:
    scores = torch.randn(1, 2, 3, 3)
    expected = scores.softmax(-1)

    with hook_attention(None) as h:
        torch.softmax(scores, -1, out=scores)
        expected.softmax(-1)

    torch.testing.assert_close(scores, expected)
    assert h.names == ("attention:0",)
