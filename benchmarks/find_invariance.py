"""How often is `check_invariance` right? Beside the outputs of models of transformers and timm.

    python benchmarks/find_invariance.py {causal,encoders,vision,costs} [CLASS …]

Builds tiny models with random weights, and asks each question twice: of `check_invariance`, and of
the outputs alone, by code that shares nothing with it. Prints a line for each flag and for each
disagreement, and a table. Nothing is downloaded.
"""

import argparse
import copy
import inspect
import logging
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
import torch
from torch import Tensor, nn

from hookkit import check_invariance

logging.disable(logging.CRITICAL)
warnings.filterwarnings("ignore")
LENGTH, CUT, TIMEOUT_S = 24, 13, 90
CAUSAL = ("repeat", "future", "batch", "order", "padding", "packing", "cache")
ENCODERS = ("repeat", "batch", "order", "padding")
TABLE = Counter[Any]()  # the kind, what is said, what the outputs say → how often
MODELS = Counter[str]()  # built, not built
# --- tiny models of transformers

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "ffn_dim", "moe_intermediate_size"), 32),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "intermediate_size"), 64),
    **dict.fromkeys(("head_dim", "state_size", "rotary_dim"), 8),
    "vocab_size": 99, "num_experts_per_tok": 2, "is_decoder": True,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_DEEPSEEK = {
    **_LATENT,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK, "glm4_moe": _GROUPS, "dots1": _GROUPS,
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
    "bamba": {**_MAMBA, "mamba_expand": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, "mamba_expand": 2, "layer_types": ["mamba", "attention"],
                         "shared_intermediate_size": 32},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "qwen3_next": {"shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
                   "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8,
                   "layer_types": ["linear_attention", "full_attention"]},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 1,
               "chunk_size": 8, "attention_hidden_size": 64, "attention_head_dim": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
                   "chunk_size": 8, "hybrid_override_pattern": "M*"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "lfm2": {"full_attn_idxs": [1], "block_ff_dim": 32, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 16, "num_key_value_heads": 1,
                        "block_types": ("recurrent", "recurrent", "attention"),
                        "num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    "xlstm": {"embedding_dim": 32, "num_blocks": 2, "chunk_size": 8},
    "big_bird": {"attention_type": "original_full"},
    "gemma3_text": _WINDOWS, "gpt_oss": _WINDOWS,
    "gemma2": {"sliding_window": 8}, "mistral": {"sliding_window": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "mpt": {"n_heads": 4, "max_seq_len": 64}, "bloom": {"n_head": 4}, "ctrl": {"dff": 32},
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds": False,
                 "feed_forward_size": 32, "local_attn_chunk_length": 4, "attention_head_size": 8},
    "cpmant": {"prompt_length": 4, "dim_head": 8, "dim_ff": 32, "prompt_types": 4,
               "segment_types": 4, "position_bias_num_buckets": 8,
               "position_bias_max_distance": 32},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "longcat_flash": {**_LATENT, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "moe_topk": 2,
                      "num_key_value_heads": 4, "zero_expert_num": 1},
}  # fmt: skip
_ENCODERS = """
bert roberta albert distilbert electra mpnet deberta deberta-v2 roformer funnel xlm-roberta
camembert ernie layoutlm mobilebert nystromformer rembert squeezebert yoso megatron-bert big_bird
longformer convbert fnet modernbert esm splinter ibert mra data2vec-text nomic_bert eurobert xmod
xlm flaubert canine luke roberta-prelayernorm jina_embeddings_v3 bros markuplm visual_bert
"""


def build(kind: str, name: str, **more: Any) -> nn.Module:
    """Build a small model of transformers with random weights."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    make = CONFIG_MAPPING[kind]
    known = {"is_decoder", *getattr(make, "attribute_map", {})}
    for c in make.__mro__[:-1]:
        known |= {*inspect.signature(c.__init__).parameters, *getattr(c, "__annotations__", {})}
    options = {k: v for k, v in SMALL.items() if k in known}
    config = make(**{**options, **EXTRA.get(kind, {}), **more})
    with torch.device("meta"):
        n = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
    if n > 40e6:
        raise MemoryError(f"{n / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(config).float().eval()
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.2)
    return model


def padded(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return every second sample with padding in the place of tokens, as transformers pads.

    On the left if the model generates, else on the right.
    """
    mask = torch.ones_like(ids)
    mask[::2, : ids.shape[1] // 4] = 0
    mask = mask if getattr(model, "can_generate", bool)() else mask.flip(1)
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return inputs


def asked(model: nn.Module, ids: Tensor, to: str) -> Any:
    """Return what `check_invariance` says of a model of transformers."""
    names = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"input_ids": ids}
    if to == "padding" and "attention_mask" in names:
        inputs = padded(model, ids)
    if to == "packing" and "position_ids" in names:
        places = torch.cat([torch.arange(CUT), torch.arange(ids.shape[1] - CUT)])[None]
        inputs = {"input_ids": ids[:1], "position_ids": places}
        inputs |= {"use_cache": False} if "use_cache" in names else {}
    return check_invariance(model, to=to, **inputs)


# --- the truth: what the outputs alone say


def output(model: nn.Module, **inputs: Any) -> Tensor:
    """Return the first output with logits or hidden states."""
    torch.manual_seed(0)
    with torch.no_grad():
        return first(model(**inputs))


def first(out: Any) -> Tensor:
    names = ("logits", "last_hidden_state", "prediction_logits", "prelogits")
    if isinstance(out, Tensor | tuple | list):
        return out if isinstance(out, Tensor) else out[0]
    return next(out[name] for name in names if out.get(name) is not None)


def far(a: Tensor, b: Tensor) -> float:
    """Return the largest difference over the root mean square, of what is finite in both."""
    a, b = a.double(), b.double()
    both = a.isfinite() & b.isfinite()
    if not both.any():
        return 0.0
    return float((a - b)[both].abs().max() / (a[both].pow(2).mean().sqrt() + 1e-30))


def truth(model: nn.Module, kind: str, ids: Tensor) -> tuple[float, float]:
    """Return how much the output changes by other values, and by another layout.

    Small changes are measured again in float64, where rounding of another order is gone.
    """
    values, layout = changes(model, kind, ids)
    if 0 < values < 1e-4 or 1e-5 < layout < 1e-2:
        model = copy.deepcopy(model).double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products take no float64
        return changes(model, kind, ids)
    return values, layout


def changes(model: nn.Module, kind: str, ids: Tensor) -> tuple[float, float]:
    """Return what `truth` does, in the model's own dtype."""
    names = inspect.signature(model.forward).parameters
    n, has_positions = len(ids), "position_ids" in names
    other = torch.randint(3, 90, ids.shape, generator=torch.Generator().manual_seed(99))

    def run(x: Tensor, **more: Any) -> Tensor:
        return output(model, input_ids=x, **more)

    if kind == "repeat":
        a, b = run(ids), run(ids)
        torch.manual_seed(5)
        with torch.no_grad():
            return max(far(a, b), far(a, first(model(input_ids=ids)))), 0.0
    if kind == "future":
        later = torch.cat([ids[:, :CUT], other[:, CUT:]], 1)
        return far(run(ids)[:, :CUT], run(later)[:, :CUT]), 0.0
    if kind == "batch":
        a, exact, layout = run(ids), 0.0, 0.0
        for i in (0, n - 1):
            beside = other.clone()
            beside[i] = ids[i]
            exact = max(exact, far(a[i], run(beside)[i]))
            layout = max(layout, far(a[i : i + 1], run(ids[i : i + 1])))
        return exact, layout
    if kind == "order":
        return 0.0, far(run(ids).flip(0), run(ids.flip(0)))
    if kind == "padding":
        on_the_left = getattr(model, "can_generate", bool)()
        pad, real = torch.zeros(n, 6, dtype=torch.long), torch.ones_like(ids)

        def joined(p: Tensor, x: Tensor) -> Tensor:
            return torch.cat([p, x] if on_the_left else [x, p], 1)

        def placed(mask: Tensor) -> dict[str, Tensor]:
            more = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if has_positions else {}
            return {"attention_mask": mask, **more}

        at = slice(6, None) if on_the_left else slice(0, LENGTH)
        mask = placed(joined(pad, real))
        a = run(joined(pad, ids), **mask)
        b = run(joined(other[:, :6], ids), **mask)
        alone = [far(a[i : i + 1, at], run(ids[i : i + 1], **placed(real[:1]))) for i in range(n)]
        return far(a[:, at], b[:, at]), max(alone)
    if kind == "packing":
        if not has_positions:
            raise NotImplementedError("no position_ids")
        places = torch.cat([torch.arange(CUT), torch.arange(LENGTH - CUT)])[None]
        off = {"use_cache": False} if "use_cache" in names else {}
        a, exact, layout = run(ids[:1], position_ids=places, **off), 0.0, 0.0
        for at in (slice(0, CUT), slice(CUT, LENGTH)):
            beside = other[:1].clone()
            beside[:, at] = ids[:1, at]
            b = run(beside, position_ids=places, **off)
            c = run(ids[:1, at], position_ids=places[:, at], **off)
            exact, layout = max(exact, far(a[:, at], b[:, at])), max(layout, far(a[:, at], c))
        return exact, layout
    caches = ("past_key_values", "cache", "cache_params", "state")
    name = next((c for c in caches if c in names), None)
    if name is None:
        raise NotImplementedError("no cache")
    a, past, parts = run(ids), None, list[Tensor]()
    with torch.no_grad():
        for i, j in [(0, 12), *((i, i + 1) for i in range(12, LENGTH))]:
            out = model(input_ids=ids[:, i:j], use_cache=True, **{name: past})
            past = out[name]
            parts.append(out.logits)
    return 0.0, far(a, torch.cat(parts, 1))


# --- trials


def within(f: Callable[[], Any]) -> Any:
    """Return what `f` returns, or the error that it raises, also if it takes too long."""
    signal.alarm(TIMEOUT_S)
    try:
        return f()
    except Exception as error:
        return error
    finally:
        signal.alarm(0)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {TIMEOUT_S} s")


def judge(name: str, kind: str, found: Any, real: Any, rounding: float = 1e-4) -> None:
    """Count one question, and print it if somebody says yes or the two disagree."""
    said = real_said = "error"
    text = f"{type(found).__name__}: {found}"[:150].replace("\n", " ")
    if not isinstance(found, Exception):
        said, text = "flag" if found.first is not None else "clean", found.verdict
        text += f" [{found.first.change}, {found.first.rel_error:.1e}]" if found.first else ""
    if isinstance(real, Exception):
        numbers = f"{type(real).__name__}: {real}"[:60].replace("\n", " ")
    else:
        real_said = "flag" if real[0] > 1e-9 or real[1] > rounding else "clean"
        numbers = f"values {real[0]:.1e}, layout {real[1]:.1e}"
    TABLE[kind, said, real_said] += 1
    if (said, real_said) != ("clean", "clean"):
        mark = "  " if said == real_said else "≠ "
        print(
            f"{mark}{name:32} {kind:8} {said:5} | outputs: {real_said} ({numbers}) | {text}",
            flush=True,
        )


def print_table() -> None:
    """Print the counts of each kind as a Markdown table."""
    print(f"\n{dict(MODELS)} models\n\n| to | asked | flag | clean | wrong | not judged |")
    print("|---|---|---|---|---|---|")
    for kind in dict.fromkeys(k for k, *_ in TABLE):
        rows = {(said, real): n for (k, said, real), n in TABLE.items() if k == kind}
        errors = sum(n for pair, n in rows.items() if "error" in pair)
        flag, clean = rows.get(("flag", "flag"), 0), rows.get(("clean", "clean"), 0)
        total = sum(rows.values())
        print(
            f"| {kind} | {total} | {flag} | {clean} | {total - flag - clean - errors} | {errors} |"
        )


def transformers_models(which: str, only: list[str]) -> None:
    """Ask of all classes of transformers that can be built small."""
    from transformers.models.auto import modeling_auto as auto

    causal = which == "causal"
    names = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if not causal:
        every = {**auto.MODEL_MAPPING_NAMES, **auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
        names = {kind: every[kind] for kind in _ENCODERS.split() if kind in every}
    for kind, name in names.items():
        name = name if isinstance(name, str) else name[0]
        if only and name not in only and kind not in only:
            continue
        more = {} if causal else {"is_decoder": False}
        model = within(partial(build, kind, name, **more))
        ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        works = (
            model if isinstance(model, Exception) else within(partial(output, model, input_ids=ids))
        )
        if isinstance(works, Exception):
            MODELS["not built"] += 1
            print(
                f"  {name:32} not built: {type(works).__name__}: {works}"[:120].replace("\n", " ")
            )
            continue
        MODELS["built"] += 1
        for to in CAUSAL if causal else ENCODERS:
            found = within(partial(asked, model, ids, to))
            judge(name, to, found, within(partial(truth, model, to, ids)))


_VISION = """
resnet10t vit_tiny_patch16_224 swin_tiny_patch4_window7_224 convnext_atto mixer_s32_224
resmlp_12_224 efficientnet_b0 mobilenetv3_small_050 regnetx_002 densenet121 ghostnet_050
xcit_nano_12_p16_224 poolformer_s12 tiny_vit_5m_224 edgenext_xx_small mobilevit_xxs fastvit_t8
repvit_m0_9 efficientformer_l1 efficientvit_b0 levit_128s pvt_v2_b0 cait_xxs24_224 hiera_tiny_224
halonet26t skresnet18 nf_regnet_b0 visformer_tiny gmlp_ti16_224 starnet_s1 mambaout_femto
"""


def vision_models(only: list[str]) -> None:
    """Ask of models of timm, in evaluation and in training mode."""
    import timm

    for name in only or _VISION.split():
        torch.manual_seed(0)
        model = within(partial(timm.create_model, name))
        if isinstance(model, Exception):
            print(f"  {name:32} not built: {model}"[:120])
            continue
        for p in model.parameters():  # zeros hide what a layer does
            if p.std() == 0 or p.abs().max() < 1e-3:
                nn.init.normal_(p, mean=float(p.mean()), std=0.05)
        x = torch.randn(3, *model.default_cfg["input_size"])
        MODELS["built"] += 1
        for mode, to in (("eval", "batch"), ("eval", "order"), ("train", "batch")):
            model.train(mode == "train")

            def values(x: Tensor) -> Tensor:
                state = {k: v.clone() for k, v in model.state_dict().items()}  # noqa: B023
                torch.manual_seed(0)
                with torch.no_grad():
                    out = first(model(x))  # noqa: B023
                model.load_state_dict(state)  # noqa: B023
                return out

            def real() -> tuple[float, float]:
                a = values(x)  # noqa: B023
                if to == "order":  # noqa: B023
                    return 0.0, far(a.flip(0), values(x.flip(0)))  # noqa: B023
                beside = torch.randn_like(x)  # noqa: B023
                beside[0] = x[0]  # noqa: B023
                alone = 0.0 if mode == "train" else far(a[:1], values(x[:1]))  # noqa: B023
                return far(a[:1], values(beside)[:1]), alone

            found = within(partial(check_invariance, model, x, to=to))
            judge(name, f"{to}, {mode}", found, within(real), 1e-3)


def costs() -> None:
    """Print what each kind costs in forwards: a GPT-2 of 6 layers, 4 sequences of 128 tokens."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=256, n_layer=6, n_head=4, n_positions=128, vocab_size=2000
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 2000, (4, 128))

    def seconds(f: Callable[[], Any]) -> float:
        begin = time.process_time()
        f()
        return time.process_time() - begin

    with torch.no_grad():
        forward = sorted(seconds(lambda: model(ids)) for _ in range(7))[3]
    print("| to | forwards |\n|---|---|")
    for to in CAUSAL:
        took = sorted(seconds(partial(asked, model, ids, to)) for _ in range(3))
        print(f"| {to} | {took[1] / forward:.0f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("which", choices=("causal", "encoders", "vision", "costs"))
    parser.add_argument("only", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # what was asked by then is counted
    begin = time.time()
    try:
        if args.which == "vision":
            vision_models(args.only)
        elif args.which == "costs":
            costs()
        else:
            transformers_models(args.which, args.only)
    finally:
        if TABLE:
            print_table()
    print(f"{time.time() - begin:.0f} s, torch {torch.__version__}", file=sys.stderr)
