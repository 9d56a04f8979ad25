"""How often does `find_nonfinite` name the right function and layer, and what does a recorder cost?

    python benchmarks/find_nonfinite.py cases models trainings costs

`cases` plants what makes NaN or Inf in plain PyTorch, each beside a finite twin. `models` breaks
one random Linear of a language model of transformers with random weights, in the forward and in the
backward; healthy models must give None. Whether there is a NaN at all is decided without hookkit,
and what the backward names by `detect_anomaly`. `trainings` breaks one batch of a plain loop, and
runs its file again. Needs transformers; no network.
"""

from __future__ import annotations

import inspect
import logging
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookkit import FlightRecorder, find_nonfinite, replay, watch
from hookkit.errors import NonFiniteError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Function = Callable[[Tensor], Tensor]


def masked(x: Tensor, rows: slice) -> Tensor:
    scores = x @ x.T
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[3, rows] = True
    return scores.masked_fill(mask, -torch.inf).softmax(-1) @ x


def in_place(x: Tensor, low: float) -> Tensor:
    y = x + low
    y.pow_(0.5)
    return y


# What makes something that is not finite, where (the forward or the backward), and a finite twin.
# The first three are the complaints of pytorch#160016: a later function gets the blame, the loss
# alone is NaN, and only the backward is.
CASES: list[tuple[str, str, Function, Function]] = [
    ("forward", "sqrt", lambda x: (x - 100).sqrt().sqrt(), lambda x: (x + 100).sqrt().sqrt()),
    ("forward", "log", lambda x: F.relu(x).log() * 0 + x, lambda x: (F.relu(x) + 1).log() + x),
    (
        "backward", "sqrt", lambda x: torch.where(x > 1e9, (x * 0).sqrt(), x),
        lambda x: torch.where(x > 1e9, (x * 0 + 1).sqrt(), x),
    ),
    ("forward", "div", lambda x: (x - x) / (x - x), lambda x: (x - x) / (x - x + 1)),
    ("forward", "exp", lambda x: F.normalize((x * 200).exp()), lambda x: F.normalize(x.exp())),
    ("forward", "softmax", lambda x: masked(x, slice(8)), lambda x: masked(x, slice(7))),
    ("forward", "pow", lambda x: in_place(x, -100), lambda x: in_place(x, 100)),
    ("forward", "exp", lambda x: (x * 0 + 100).exp() * 0, lambda x: (x * 0 + 10).exp() * 0),
    ("forward", "half", lambda x: (x * 1e5).half().float(), lambda x: (x * 1e3).half().float()),
    ("forward", "matmul", lambda x: ((x * 1e3).half() @ torch.full((4, 4), 300.0).half()).float(),
     lambda x: (x.half() @ torch.full((4, 4), 300.0).half()).float()),
    ("forward", "bfloat16", lambda x: (x.sign() * 3.4e38).bfloat16().float() * 0,
     lambda x: (x.sign() * 3e38).bfloat16().float() * 0),
    ("forward", "std", lambda x: x / x[:1].std(0), lambda x: x / x[:2].std(0)),
    ("forward", "rsqrt", lambda x: x * (x * 0).var(-1, keepdim=True).rsqrt(),
     lambda x: x * ((x * 0).var(-1, keepdim=True) + 1e-5).rsqrt()),
    ("forward", "cross_entropy", lambda x: x + F.cross_entropy(x, torch.full((8,), -100)),
     lambda x: x + F.cross_entropy(x, torch.full((8,), 1))),
    ("backward", "pow", lambda x: x + (x * 0).abs().pow(0.5), lambda x: x + (x * 0).abs().pow(2)),
    ("backward", "acos", lambda x: torch.acos((x * 1e3).tanh()) + x,
     lambda x: torch.acos((x * 1e3).clamp(-1, 1)) + x),
    ("backward", "div", lambda x: torch.where(x > 1e9, x / (x * 0), 0) + x,
     lambda x: torch.where(x > 1e9, x / (x * 0 + 1), 0) + x),
    ("backward", "sqrt", lambda x: x / (x * 0).pow(2).sum(-1, keepdim=True).sqrt().clamp(min=1e-8),
     lambda x: x / (x * 0).pow(2).sum(-1, keepdim=True).clamp(min=1e-8).sqrt()),
]  # fmt: skip


class Block(nn.Module):
    def __init__(self, f: Function) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


def around(f: Function) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), Block(f), nn.Linear(4, 4))
    for m in model.children():
        for p in m.parameters():
            nn.init.eye_(p) if p.ndim > 1 else nn.init.zeros_(p)
    return model


def is_finite(model: nn.Module, run: Callable[[], Tensor]) -> bool:
    """Run a model forward and backward without hookkit; return whether all is finite."""
    model.zero_grad()
    out = run()
    out.sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return all(bool(t.isfinite().all()) for t in [out, *grads])


def anomaly(run: Callable[[], Tensor]) -> str:
    """Return the operation that `detect_anomaly` names; "" if it names none."""
    try:
        with torch.autograd.detect_anomaly():
            run().sum().backward()
    except RuntimeError as error:
        return str(error).split("'")[1].rstrip("0123456789").removesuffix("Backward").lower()
    return ""


def tell(name: str, results: list[tuple[bool, str]]) -> None:
    right = sum(ok for ok, _ in results)
    print(f"{name}: {right} of {len(results)} right")
    for ok, text in results:
        if not ok:
            print("   wrong:", text)


def judge(model: nn.Module, run: Callable[[], Tensor], found: Any, *expected: str) -> Any:
    """Return whether a result is right, and what it said, with `detect_anomaly` beside it."""
    finite, row, text = is_finite(model, run), found.first, found.verdict
    if finite:
        return row is None, text
    where, function, name = expected
    ok = row is not None and (row.function, row.name) == (function, name)
    ok &= row is not None and row.backward == (where == "backward") and row.file == __file__
    other = anomaly(run) if where == "backward" else ""
    agrees = not other or other in [r.function.replace("_", "") for r in found.rows]
    return ok and agrees, f"{text}; expected {expected}, detect_anomaly {other!r}"


def cases() -> None:
    planted, twins = [], []
    for where, function, f, twin in CASES:
        for model, into in (around(f), planted), (around(twin), twins):
            found = find_nonfinite(model, X, backward=True)
            into.append(judge(model, lambda m=model: m(X), found, where, function, "1"))
            assert is_finite(model, lambda m=model: m(X)) == (into is twins), (where, function)
    tell("planted, function and line and module", planted)
    tell("finite twins, None", twins)


KINDS = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "opt"),
    *("gpt_neox", "gptj", "bloom", "falcon", "mpt", "olmo", "olmo2", "cohere", "starcoder2"),
    *("stablelm", "mixtral", "qwen2_moe", "olmoe", "granite", "persimmon", "codegen", "biogpt"),
    *("xglm", "bert-generation", "roberta", "electra", "mamba", "mamba2", "gpt_bigcode", "glm"),
    *("helium", "nemotron", "rwkv", "gpt_oss", "deepseek_v3", "minimax", "jamba"),
)
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "intermediate_size", "ffn_dim", "n_inner"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("attention_heads", "num_local_experts", "num_experts"), 4),
    **{"vocab_size": 99, "num_key_value_heads": 4, "head_dim": 8, "rotary_dim": 8},
    **{"state_size": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_groups": 1},
    **{"expand": 2, "is_decoder": True, "pad_token_id": 0, "decoder_layers": 2},
}


def language_model(kind: str) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]
    known = {*inspect.signature(config.__init__).parameters, *getattr(config, "attribute_map", {})}
    known |= {name for c in config.__mro__ for name in getattr(c, "__annotations__", ())}
    small = {k: v for k, v in SMALL.items() if k in known}
    if kind == "mamba2":
        small |= {"num_heads": 8, "chunk_size": 8}
    with torch.device("meta"):
        n = sum(p.numel() for p in AutoModelForCausalLM.from_config(config(**small)).parameters())
    if n > 3e7:
        raise MemoryError(f"{n / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(**small)).float().eval()


def broken(forward: Callable[..., Tensor], where: str) -> Callable[..., Tensor]:
    def bad(*args: Any, **kwargs: Any) -> Tensor:
        y = forward(*args, **kwargs)
        if where == "forward":
            return torch.log(y - y.detach().abs() - 1)
        return y + torch.where(y > 1e9, torch.sqrt(y * 0), 0)

    return bad


def models() -> None:
    ids = torch.randint(1, 99, (2, 12), generator=torch.Generator().manual_seed(1))
    healthy, faulty, skipped = [], [], []
    for kind in KINDS:
        try:
            model = language_model(kind)
            model(input_ids=ids)
        except Exception as error:
            skipped.append(f"{kind} ({type(error).__name__})")
            continue
        run = lambda m=model: m(input_ids=ids, use_cache=False).logits  # noqa: E731
        how = {"input_ids": ids, "use_cache": False, "backward": True}
        ok, text = judge(model, run, find_nonfinite(model, **how))
        healthy.append((ok, f"{kind}: {text}"))
        linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        for where in ("forward", "backward"):
            name = random.Random(kind + where).choice(sorted(linears))
            linears[name].forward = broken(linears[name].forward, where)  # type: ignore[method-assign]
            function = "log" if where == "forward" else "sqrt"
            found = find_nonfinite(model, **how)
            ok, text = judge(model, run, found, where, function, name)
            faulty.append((ok, f"{kind} {name}: {text}"))
            del linears[name].forward
    tell(f"language models, healthy, None (not built: {', '.join(skipped) or 'none'})", healthy)
    tell("language models, one Linear broken, function and line and module", faulty)


def trainings() -> None:
    reports, replays = [], []
    for where, function, f, _ in CASES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.BatchNorm1d(4))
        bad = [False]
        block = Block(lambda x, f=f, bad=bad: f(x) if bad[0] else x)
        model.append(block).append(nn.Linear(4, 4))
        opt = torch.optim.AdamW(model.parameters(), 1e-3)
        with tempfile.TemporaryDirectory() as folder:
            recorder = FlightRecorder(save=folder)
            try:
                with watch(model, opt, recorder):
                    for step in range(5):
                        bad[0] = step == 3
                        model(torch.randn(8, 4)).pow(2).mean().backward()
                        opt.step()
                        opt.zero_grad()
            except NonFiniteError:
                pass
            note = recorder.incidents[0].note if recorder.incidents else "no incident"
            named = f"{'backward of ' * (where == 'backward')}{function} (find_nonfinite.py"
            reports.append((f"first non-finite: {named}" in note, f"{function}: {note}"))
            for path in recorder.saved:
                again = replay(path, model)
                replays.append((again.same and again.repeated, str(again)))
    tell("a training, reported with function and line", reports)
    tell("a training, the same bit for bit in a replay, and not finite again", replays)


def costs() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    sizes = {"n_embd": 256, "n_layer": 6, "n_head": 4, "n_positions": 128, "vocab_size": 2000}
    lm, ids = GPT2LMHeadModel(GPT2Config(**sizes)), torch.randint(0, 2000, (4, 128))
    mlp = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    folder = tempfile.mkdtemp()
    kinds: dict[str, Callable[[], list[Any]]] = {
        "bare": list,
        "FlightRecorder": lambda: [FlightRecorder()],
        "save=": lambda: [FlightRecorder(save=folder)],
        "save=, spike=": lambda: [FlightRecorder(save=folder, spike=6, weights=True)],
    }
    for name, model, run, n in (
        ("GPT-2, 6 layers of 256, 4 × 128 tokens", lm, lambda: lm(ids, labels=ids).loss, 3),
        ("MLP, 100-100-10, 64 samples", mlp, lambda: mlp(torch.randn(64, 100)).pow(2).mean(), 150),
    ):
        opt = torch.optim.AdamW(model.parameters(), 1e-5)
        ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(9):
            took = {}
            for kind, make in kinds.items():
                with watch(model, opt, *make()) if kind != "bare" else tempfile.TemporaryFile():
                    for _ in range(2):  # the first block to begin with
                        began = time.perf_counter()
                        for _ in range(n):
                            run().backward()
                            opt.step()
                            opt.zero_grad()
                        took[kind] = (time.perf_counter() - began) / n
            for kind, t in took.items():
                ratios[kind].append(t / took["bare"])
        words = [f"{kind} ×{statistics.median(r):.2f}" for kind, r in ratios.items()]
        print(f"{name}: {', '.join(words)}; bare {took['bare'] * 1e3:.3g} ms")
    for backward in (False, True):
        began = time.perf_counter()
        with torch.no_grad():
            lm(ids)
        one, began = time.perf_counter() - began, time.perf_counter()
        find_nonfinite(lm, ids, backward=backward)
        n_forwards = (time.perf_counter() - began) / one
        print(f"find_nonfinite(backward={backward}): {n_forwards:.1f} forwards")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for part in sys.argv[1:] or ("cases", "models", "trainings", "costs"):
        {"cases": cases, "models": models, "trainings": trainings, "costs": costs}[part]()
