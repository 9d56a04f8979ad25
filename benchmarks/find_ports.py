"""Ports whose weights others converted: are their modules paired, and is a wrong detail named?

    python -m benchmarks.find_ports

Each reference is a tiny model of transformers with random weights; its port is torchtune's model of
the same family, loaded by torchtune's own converter. Needs `transformers`, `torchtune` and
`torchao==0.10.0`; packages that torchtune only imports for its data are replaced by empty ones.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

import torch  # noqa: E402
import transformers as hf  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from hookkit import compare_models  # noqa: E402


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a package that is not installed as one with empty classes."""

    def __init__(self, *names: str) -> None:
        self.names = [name for name in names if importlib.util.find_spec(name) is None]

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        class Module(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(
    _Empty("datasets", "torchvision", "tiktoken", "sentencepiece", "blobfile", "kagglehub")
)
from torchtune.models import convert_weights as cw  # noqa: E402
from torchtune.models.clip._component_builders import clip_text_encoder  # noqa: E402
from torchtune.models.clip._convert_weights import clip_text_hf_to_tune  # noqa: E402
from torchtune.models.gemma._component_builders import gemma  # noqa: E402
from torchtune.models.gemma2._component_builders import gemma2  # noqa: E402
from torchtune.models.gemma2._convert_weights import gemma2_hf_to_tune  # noqa: E402
from torchtune.models.llama2._component_builders import llama2  # noqa: E402
from torchtune.models.llama3_1._component_builders import llama3_1  # noqa: E402
from torchtune.models.mistral._component_builders import mistral  # noqa: E402
from torchtune.models.phi3._component_builders import phi3  # noqa: E402
from torchtune.models.phi3._convert_weights import phi3_hf_to_tune  # noqa: E402
from torchtune.models.qwen2._component_builders import qwen2  # noqa: E402
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune  # noqa: E402
from torchtune.models.t5._component_builders import t5_encoder  # noqa: E402
from torchtune.models.t5._convert_weights import t5_encoder_hf_to_tune  # noqa: E402

V, D, N, H, KV, F, T = 99, 32, 3, 4, 2, 64, 24  # vocabulary, width, layers, heads, hidden, tokens
SMALL = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": N,
    "num_attention_heads": H,
    "intermediate_size": F,
    "num_key_value_heads": KV,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TUNE = {
    "vocab_size": V,
    "num_layers": N,
    "num_heads": H,
    "num_kv_heads": KV,
    "embed_dim": D,
    "max_seq_len": 64,
    "intermediate_dim": F,
}
IDS = torch.randint(1, V, (2, T), generator=torch.Generator().manual_seed(0))


def randomised(model: nn.Module) -> nn.Module:
    """Return the model with a random value in every parameter, norms near one."""
    random = torch.Generator().manual_seed(0)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=random)
        p.data = 0.15 * noise if p.ndim > 1 else p.data + 0.1 * noise
    return model.eval()


def loaded(port: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    port.load_state_dict(weights)
    return port.eval()


# -- the families: the reference, and its port as `make(**what is wrong)` -------------------------

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3() -> tuple[nn.Module, Callable[..., nn.Module]]:
    a = randomised(
        hf.LlamaForCausalLM(
            hf.LlamaConfig(**SMALL, rms_norm_eps=1e-5, rope_parameters=ROPE, max_window_layers=0)
        )
    )

    def port(heads: int = H, **wrong: Any) -> nn.Module:
        weights = cw.hf_to_tune(a.state_dict(), heads, heads * KV // H, D, D // heads)
        return loaded(llama3_1(**TUNE | wrong), weights)

    return a, port


def llama() -> tuple[nn.Module, Callable[..., nn.Module]]:
    config = hf.LlamaConfig(**SMALL | {"num_key_value_heads": H}, rms_norm_eps=1e-5)
    a = randomised(hf.LlamaForCausalLM(config))
    tune = TUNE | {"num_kv_heads": H, "norm_eps": 1e-5}
    return a, lambda **wrong: loaded(llama2(**tune | wrong), cw.hf_to_tune(a.state_dict(), H, H, D))


def mistral_() -> tuple[nn.Module, Callable[..., nn.Module]]:
    config = hf.MistralConfig(**SMALL, rms_norm_eps=1e-5, sliding_window=None, head_dim=D // H)
    a = randomised(hf.MistralForCausalLM(config))
    return a, lambda **wrong: loaded(
        mistral(**TUNE | wrong), cw.hf_to_tune(a.state_dict(), H, KV, D)
    )


def qwen2_() -> tuple[nn.Module, Callable[..., nn.Module]]:
    a = randomised(
        hf.Qwen2ForCausalLM(
            hf.Qwen2Config(
                **SMALL,
                rms_norm_eps=1e-6,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            )
        )
    )

    def port(**wrong: Any) -> nn.Module:
        weights = qwen2_hf_to_tune(a.state_dict(), H, KV, D)
        return loaded(qwen2(**TUNE | {"norm_eps": 1e-6} | wrong), weights)

    return a, port


def gemma_() -> tuple[nn.Module, Callable[..., nn.Module]]:
    config = hf.GemmaConfig(**SMALL, head_dim=8, hidden_activation="gelu_pytorch_tanh")
    a = randomised(hf.GemmaForCausalLM(config))

    def port(**wrong: Any) -> nn.Module:
        weights = cw.hf_to_tune(a.state_dict(), H, KV, D, 8)
        weights.pop("output.weight", None)
        return loaded(gemma(**TUNE | {"head_dim": 8} | wrong), weights)

    return a, port


def gemma2_() -> tuple[nn.Module, Callable[..., nn.Module]]:
    config = hf.Gemma2Config(
        **SMALL,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=4096,
        final_logit_softcapping=None,
    )
    a = randomised(hf.Gemma2ForCausalLM(config).eval())
    a.set_attn_implementation("eager")

    def port(as_released: bool = False, caps: bool = False, **wrong: Any) -> nn.Module:
        weights = gemma2_hf_to_tune(a.state_dict(), H, KV, D, 8)
        weights.pop("output.weight", None)
        for i in range(N if not as_released else 0):  # torchtune 0.6.1 confuses the two
            one, other = f"layers.{i}.mlp_norm.scale", f"layers.{i}.mlp_scale.scale"
            weights[one], weights[other] = weights[other], weights[one]
        b = gemma2(**TUNE | {"head_dim": 8, "query_pre_attn_scalar": 8} | wrong)
        if not caps:  # torchtune 0.6.1 caps what the last norm gives, in place of the logits
            b.norm.logit_capping = nn.Identity()
        return loaded(b, weights)

    return a, port


def phi3_() -> tuple[nn.Module, Callable[..., nn.Module]]:
    a = randomised(hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL | {"num_key_value_heads": H})))
    tune = TUNE | {"num_kv_heads": H}
    return a, lambda **wrong: loaded(phi3(**tune | wrong), phi3_hf_to_tune(a.state_dict(), H, H, D))


def clip() -> tuple[nn.Module, Callable[..., nn.Module]]:
    config = hf.CLIPTextConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=4 * D,
        num_hidden_layers=N,
        num_attention_heads=H,
        max_position_embeddings=T,
        hidden_act="quick_gelu",
        eos_token_id=V - 1,
        pad_token_id=0,
        bos_token_id=1,
    )
    a = randomised(hf.CLIPTextModel(config))
    return a, lambda **wrong: loaded(
        clip_text_encoder(
            **{"embed_dim": D, "num_heads": H, "num_layers": N, "vocab_size": V, "max_seq_len": T}
            | wrong
        ),
        clip_text_hf_to_tune({f"text_model.{k}": w for k, w in a.state_dict().items()}),
    )


def t5() -> tuple[nn.Module, Callable[..., nn.Module]]:
    config = hf.T5Config(
        vocab_size=V,
        d_model=D,
        d_kv=8,
        d_ff=F,
        num_layers=N,
        num_heads=H,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
    )
    a = randomised(hf.T5EncoderModel(config))

    def port(as_released: bool = False, **wrong: Any) -> nn.Module:
        tune = {
            "embed_dim": D,
            "mlp_dim": F,
            "num_heads": H,
            "head_dim": 8,
            "num_layers": N,
            "rel_pos_num_buckets": 8,
            "rel_pos_max_dist": 16,
            "vocab_size": V,
            "norm_eps": 1e-6,
            "max_seq_len": T,
        }
        b = t5_encoder(**tune | wrong)
        for layer in b.layers if not as_released else ():  # torchtune 0.6.1 has the exact GELU
            layer.mlp.activation = nn.GELU("tanh")
        return loaded(b, t5_encoder_hf_to_tune(a.state_dict()))

    return a, port


# -- wrong details: what makes them, and the layer that is to be named ----------------------------


def setting(path: str, name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda b: setattr(b.get_submodule(path), name, value)


def weight(path: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def changed(b: nn.Module) -> None:
        p = b.get_parameter(path)
        p.data = change(p.data.clone())

    return changed


def swapped(one: str, other: str) -> Callable[[nn.Module], None]:
    def changed(b: nn.Module) -> None:
        p, q = b.get_parameter(one), b.get_parameter(other)
        p.data, q.data = q.data.clone(), p.data.clone()

    return changed


LLAMA = [
    ("eps of a norm", setting("layers.1.sa_norm", "eps", 1e-2), "model.layers.1.input_layernorm"),
    ("eps of the last norm", setting("norm", "eps", 1e-2), "model.norm"),
    ("activation", setting("layers.1.mlp", "activation", nn.GELU()), "model.layers.1.mlp"),
    ("rope base", {"rope_base": 1000}, "model.layers.0.self_attn"),
    (
        "attention not causal",
        setting("layers.1.attn", "is_causal", False),
        "model.layers.1.self_attn",
    ),
    (
        "norms swapped",
        swapped("layers.1.sa_norm.scale", "layers.1.mlp_norm.scale"),
        "model.layers.1",
    ),
    (
        "a matrix not loaded",
        weight("layers.2.mlp.w2.weight", lambda w: w.flip(0) * 0.9),
        "model.layers.2.mlp.down_proj",
    ),
]
TRIALS: dict[str, tuple[Any, list[tuple[str, Any, str]]]] = {
    "llama 3.1": (
        llama3,
        [
            *LLAMA,
            ("heads split otherwise", {"heads": 2 * H}, "model.layers.0.self_attn"),
            ("rope scaling", {"scale_factor": 1}, "model.layers.0.self_attn"),
        ],
    ),
    "llama 2": (llama, LLAMA),
    "mistral": (mistral_, LLAMA),
    "qwen 2": (
        qwen2_,
        [
            *LLAMA,
            (
                "a bias is zero",
                weight("layers.1.attn.q_proj.bias", torch.zeros_like),
                "model.layers.1.self_attn.q_proj",
            ),
        ],
    ),
    "gemma": (gemma_, LLAMA),
    "gemma 2": (
        gemma2_,
        [
            (
                "eps of a norm",
                setting("layers.1.sa_norm", "eps", 1e-2),
                "model.layers.1.input_layernorm",
            ),
            ("converter as released", {"as_released": True}, "model.layers.0"),
            ("scale of attention", {"query_pre_attn_scalar": 64}, "model.layers.0.self_attn"),
            ("capping of the scores", {"hidden_capping_value": 2.0}, "model.layers.0.self_attn"),
            ("capping as released", {"caps": True}, ""),
            ("activation", setting("layers.1.mlp", "activation", nn.SiLU()), "model.layers.1.mlp"),
        ],
    ),
    "phi 3": (phi3_, LLAMA),
    "clip text": (
        clip,
        [
            ("eps of a norm", {"norm_eps": 1e-2}, "encoder.layers.0.layer_norm1"),
            (
                "activation",
                setting("layers.1.mlp", "activation", nn.GELU()),
                "encoder.layers.1.mlp",
            ),
            ("positions shifted", weight("position_embedding", lambda w: w.roll(1, 0)), ""),
            (
                "attention not causal",
                setting("layers.1.attn", "is_causal", False),
                "encoder.layers.1.self_attn",
            ),
        ],
    ),
    "t5 encoder": (
        t5,
        [
            (
                "eps of a norm",
                setting("layers.1.sa_norm", "eps", 1e-2),
                "encoder.block.1.layer.0.layer_norm",
            ),
            (
                "activation",
                setting("layers.1.mlp", "activation", nn.SiLU()),
                "encoder.block.1.layer.1.DenseReluDense",
            ),
            (
                "activation as released",
                {"as_released": True},
                "encoder.block.0.layer.1.DenseReluDense",
            ),
            ("distances of positions", {"rel_pos_max_dist": 64}, ""),
        ],
    ),
}


def main(only: str = "") -> None:
    """Run the trials of the families with `only` in their name; print each, and a table of all."""
    table = []
    for family, (make, faults) in TRIALS.items():
        if only not in family:
            continue
        a, port = make()
        rights = []
        for name, wrong, expected in [("(no fault)", {}, None), *faults]:
            b = port(**wrong) if isinstance(wrong, dict) else copy.deepcopy(port())
            if not isinstance(wrong, dict):
                wrong(b)
            found = compare_models(a, b, IDS)
            first = found.first
            named = None if first is None else first.name.removesuffix(first.path)
            rights.append(named == expected)
            text = "nothing" if first is None else f"{named or '(model)'} {first.place}".strip()
            print(
                f"{family:11} {name:24} {'right' if rights[-1] else 'WRONG':6} {text}", flush=True
            )
            if name == "(no fault)":
                paired = len({row.name.removesuffix(row.path) for row in found})
                n = sum(1 for m in a.modules() if next(m.parameters(), None) is not None)
        table.append(f"| {family} | {paired} of {n} | {'yes' if rights[0] else 'NO'} | "
                     f"{sum(rights[1:])} of {len(rights) - 1} |")  # fmt: skip
    print("\n".join(table))


def cost() -> None:
    """Print what a comparison of larger models costs, in forwards of both."""
    width, ids = 512, torch.randint(1, V, (4, 256))
    small = SMALL | {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 8}
    a = randomised(hf.LlamaForCausalLM(hf.LlamaConfig(**small | {"max_position_embeddings": 512})))
    tune = TUNE | {"embed_dim": width, "intermediate_dim": 4 * width, "num_layers": 8}
    b = llama2(**tune | {"max_seq_len": 512})
    b = loaded(b, cw.hf_to_tune(a.state_dict(), H, KV, width))

    def seconds(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return sorted(times)[1]

    with torch.no_grad():
        forwards = seconds(lambda: (a(ids), b(ids)))
    by_weights = seconds(lambda: compare_models(a, b, ids))
    by_name = seconds(lambda: compare_models(a, a, ids))
    names = compare_models(a, b, ids).names
    given = seconds(lambda: compare_models(a, b, ids, names=names))
    print(f"{sum(p.numel() for p in a.parameters()) / 1e6:.0f} M parameters, two forwards "
          f"{forwards:.2f} s")  # fmt: skip
    for how, t in (("by weights", by_weights), ("with names=", given), ("by name", by_name)):
        print(f"compare_models {how}: {t / forwards:.1f} of them")


if __name__ == "__main__":
    if sys.argv[1:] == ["--cost"]:
        cost()
    else:
        main(*sys.argv[1:])
