"""`@resid`, `@attn`, `@mlp`: the same parts in families that name them otherwise."""

from typing import Any

import pytest
import torch
from torch import nn

from hookkit.errors import SelectionError
from hookkit.roles import ROLES
from hookkit.selecting import select

FAMILIES = {
    "GPT2Model": ("h.1", "h.1.attn", "h.1.mlp"),
    "LlamaModel": ("layers.1", "layers.1.self_attn", "layers.1.mlp"),
    "BertModel": ("encoder.layer.1", "encoder.layer.1.attention", "encoder.layer.1.output.dense"),
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
