"""`@resid`, `@attn`, `@mlp`: the same parts in families that name them otherwise."""

from typing import Any

import pytest
import torch
from torch import nn

from hookkit.edits import edit_outputs, zero
from hookkit.errors import SelectionError
from hookkit.hooks.roles import ROLES
from hookkit.hooks.selection import select

FAMILIES = {
    "GPT2Model": ("h.1", "h.1.attn", "h.1.mlp"),
    "LlamaModel": ("layers.1", "layers.1.self_attn", "layers.1.mlp"),
    "BertModel": (
        "encoder.layer.1",
        "encoder.layer.1.attention.output.dense",
        "encoder.layer.1.output.dense",
    ),
    "ViTModel": ("layers.1", "layers.1.attention", "layers.1.mlp"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers(family: str) -> None:
    t: Any = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 2}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(t, family.replace("Model", "Config"))(**sizes)
    with torch.device("meta"):
        model = getattr(t, family)(config)

    found = [list(select(model, f"@{role}.1")) for role in ("resid", "attn", "mlp")]

    assert found == [[name] for name in FAMILIES[family]]
    assert len(select(model, "@resid")) == 2


def test_pytorchs_own_encoder_children_of_a_role_and_parts_of_outputs() -> None:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)

    assert list(select(net, "@attn.0", "@mlp.1")) == ["layers.0.self_attn", "layers.1.linear2"]
    assert list(select(net, "@resid.*.norm1")) == ["layers.0.norm1", "layers.1.norm1"]
    assert list(select(net, "@attn[0]")) == ["layers.0.self_attn[0]", "layers.1.self_attn[0]"]


def test_a_family_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"mixing": nn.Linear(2, 2)})])})
    with pytest.raises(SelectionError, match="Add the model's names"):
        select(net, "@attn")

    monkeypatch.setitem(ROLES, "attn", (*ROLES["attn"], "@resid.#.mixing"))

    assert list(select(net, "@attn")) == ["blocks.0.mixing"]


def test_an_unknown_role() -> None:
    with pytest.raises(SelectionError, match='"@head" is no role of a module: there are @resid'):
        select(nn.Linear(2, 2), "@head.0")


SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"n_layers": 2, "n_layer": 2, "n_heads": 2, "n_head": 2, "d_model": 16, "d_head": 8}
SIZES |= {"d_inner": 16, "intermediate_size": 16, "embedding_size": 16, "block_sizes": [1, 1]}
SIZES |= {"intra_bottleneck_size": 16, "true_hidden_size": 16, "max_position_embeddings": 32}


@pytest.mark.parametrize("role", ["@attn", "@mlp"])
@pytest.mark.parametrize(
    "family",
    ["Bert", "MPNet", "MobileBert", "Funnel", "Bloom", "Falcon", "Mpt", "GPTNeoX", "Llama"],
)
def test_without_attention_or_feed_forward_the_residual_stream_goes_on(
    family: str, role: str
) -> None:
    t: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = SIZES if family != "Funnel" else {k: SIZES[k] for k in SIZES if "num_" not in k}
    model = getattr(t, f"{family}Model")(getattr(t, f"{family}Config")(**sizes)).eval()
    x = torch.arange(3, 15).reshape(2, 6)

    with torch.no_grad(), edit_outputs(select(model, role), zero()):
        y = model(x).last_hidden_state

    assert not torch.allclose(y[0], y[1], atol=1e-2)
