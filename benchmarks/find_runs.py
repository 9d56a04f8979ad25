"""Where two trainings part: planted faults, their twins without one, and what a Fingerprint costs.

    python benchmarks/find_runs.py [plain] [transformers] [lightning] [cost]

Each fault is planted in the second of two trainings. It is right if step, kind and layer of
`compare_runs(…).first` are those where the fault begins. A twin without a fault has to agree.
"""

from __future__ import annotations

import copy
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookkit import Fingerprint, compare_runs, watch

FOLDER = Path(tempfile.mkdtemp())
Expected = tuple[int, str, str] | None  # step, kind, layer; None where nothing may differ
totals = {"right": 0, "wrong": 0}


def judge(name: str, a: str, b: str, expected: Expected, **how: Any) -> None:
    """Compare two files, and print whether the first difference is the expected one."""
    found = compare_runs(FOLDER / a, FOLDER / b, **how)
    first = found.first and (found.first.step, found.first.what, found.first.name)
    right = first == expected
    totals["right" if right else "wrong"] += 1
    print(f"{'right' if right else f'WRONG, not {expected}'}  {name}: {found.verdict}", flush=True)


# --- a plain loop


class Block(nn.Module):
    """A residual block of a language model without attention."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.act, self.drop, self.scale = nn.GELU(), nn.Dropout(0.1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x))) * self.scale))


class Net(nn.Module):
    """An embedding, three blocks, a batch norm, a head."""

    def __init__(self, vocab: int = 50, d: int = 32) -> None:
        super().__init__()
        self.emb, self.blocks = nn.Embedding(vocab, d), nn.ModuleList(Block(d) for _ in range(3))
        self.bn, self.head = nn.BatchNorm1d(d), nn.Linear(d, vocab)

    def forward(self, i: Tensor) -> Tensor:
        x = self.emb(i)
        for block in self.blocks:
            x = block(x)
        return self.head(self.bn(x.transpose(1, 2)).transpose(1, 2))


class Training:
    """A plain loop with a schedule, dropout, and places where a fault is planted."""

    def __init__(self, adam: bool = True, scaler: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        self.opt: Any = torch.optim.AdamW(self.net.parameters(), 1e-3)
        if not adam:
            self.opt = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda s: 1 / (1 + s))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler)
        self.parts = {"net": self.net, "opt": self.opt, "sched": self.sched, "scaler": self.scaler}
        self.factor, self.smoothing, self.relabel = 1.0, 0.0, 0

    def batch(self, step: int) -> Tensor:
        return torch.randint(0, 50, (16, 10), generator=torch.Generator().manual_seed(100 + step))

    def run(
        self, path: str, faults: dict[tuple[int, str], Callable[[Training], Any]] | None = None,
        first: int = 0, last: int = 8, split: int = 1,
    ) -> Training:  # fmt: skip
        def at(place: str) -> None:
            if fault := (faults or {}).get((step, place)):
                fault(self)

        with watch(self.net, self.opt, Fingerprint(FOLDER / path)) as w:
            for step in range(first, last):
                self.ids = self.batch(step)
                at("batch")
                for ids in self.ids.chunk(split):
                    labels = (ids * 7 + 1 + self.relabel) % 50
                    out = self.net(ids).flatten(0, 1)
                    loss = nn.functional.cross_entropy(
                        out, labels.flatten(), label_smoothing=self.smoothing
                    )
                    w.loss(loss)
                    self.scaler.scale(loss * self.factor / split).backward()
                at("grads")
                self.scaler.step(self.opt)
                self.scaler.update()
                if (step, "no zero") not in (faults or {}):
                    self.opt.zero_grad()
                self.sched.step()
                at("end")
        return self

    def state(self) -> Any:
        return copy.deepcopy({k: part.state_dict() for k, part in self.parts.items()}
                             | {"random": torch.get_rng_state()})  # fmt: skip

    def load(self, state: Any, lost: str) -> Training:
        for name, part in self.parts.items():
            if name != lost:
                part.load_state_dict(copy.deepcopy(state[name]))  # optimizers keep its tensors
        if lost != "random":
            torch.set_rng_state(state["random"])
        return self


def sets(path: str, name: str, value: Any) -> Callable[[Training], Any]:
    return lambda t: setattr(t.net.get_submodule(path) if path != "loop" else t, name, value)


def group(**values: Any) -> Callable[[Training], Any]:
    return lambda t: t.opt.param_groups[0].update(values)


def token(t: Training) -> None:
    t.ids[5, 2] = (t.ids[5, 2] + 1) % 50


def rounded(t: Training) -> None:
    t.net.blocks[1].down.register_forward_pre_hook(lambda m, a: (a[0].bfloat16().float(),))


@torch.no_grad()
def moved(t: Training) -> None:
    t.net.head.bias.data += 1e-6


PLAIN: list[tuple[str, int, str, Callable[[Training], Any], Expected]] = [
    ("a token", 3, "batch", token, (3, "input", "")),
    ("the samples' order", 3, "batch", lambda t: setattr(t, "ids", t.ids.flip(0)),
     (3, "input", "")),
    ("the batches' order", 3, "batch", lambda t: setattr(t, "ids", t.batch(4)), (3, "input", "")),
    ("a random number", 4, "batch", lambda t: torch.rand(1), (4, "output", "blocks.0.drop")),
    ("the random state", 4, "batch", lambda t: torch.manual_seed(9),
     (4, "output", "blocks.0.drop")),
    ("GELU's other formula", 2, "batch", sets("blocks.1.act", "approximate", "tanh"),
     (2, "output", "blocks.1.act")),
    ("an eps", 2, "batch", sets("blocks.1.norm", "eps", 1e-6), (2, "output", "blocks.1.norm")),
    ("one layer's precision", 2, "batch", rounded, (2, "output", "blocks.1.down")),
    ("a factor in a forward", 3, "batch", sets("blocks.2", "scale", 1 + 1e-6),
     (3, "output", "blocks.2")),
    ("evaluation mode", 4, "batch", lambda t: t.net.blocks[1].eval(),
     (4, "output", "blocks.1.drop")),
    ("labels", 3, "batch", sets("loop", "relabel", 1), (3, "grad", "head")),
    ("label smoothing", 3, "batch", sets("loop", "smoothing", 0.01), (3, "grad", "head")),
    ("a factor of the loss", 3, "batch", sets("loop", "factor", 2.0), (3, "grad", "head")),
    ("a clip", 6, "grads", lambda t: nn.utils.clip_grad_norm_(t.net.parameters(), 0.1),
     (6, "param_grad", "head.bias")),
    ("one gradient", 6, "grads", lambda t: t.net.blocks[1].up.weight.grad.mul_(0.999),
     (6, "param_grad", "blocks.1.up.weight")),
    ("no zero_grad", 3, "no zero", print, (4, "param_grad", "head.bias")),
    ("a learning rate", 4, "grads", group(lr=1e-2), (4, "setting", "lr of group 0")),
    ("betas", 3, "grads", group(betas=(0.9, 0.95)), (3, "setting", "betas of group 0")),
    ("a schedule's step", 2, "batch", lambda t: t.sched.step(), (2, "setting", "lr of group 0")),
    ("the optimizer's state", 5, "grads", lambda t: t.opt.state.clear(),
     (5, "weight", "emb.weight")),
    ("a weight within a step", 4, "grads", moved, (4, "weight", "head.bias")),
    ("a weight between steps", 4, "end", moved, (5, "before", "head.bias")),
    ("batch norm's momentum", 3, "batch", sets("bn", "momentum", 0.2),
     (3, "buffer", "bn.running_mean")),
]  # fmt: skip


def plain() -> None:
    warnings.simplefilter("ignore")  # a schedule is stepped before its optimizer
    Training().run("a", last=200)
    Training().run("b", last=200)
    judge("twin, 200 steps", "a", "b", None)
    if (pid := os.fork()) == 0:
        Training().run("b")
        os._exit(0)
    os.waitpid(pid, 0)
    judge("twin, another process", "a", "b", None)
    Training(seed=1).run("b")
    judge("a seed", "a", "b", (0, "before", "emb.weight"))
    for name, step, place, fault, expected in PLAIN:
        Training().run("b", {(step, place): fault})
        judge(name, "a", "b", expected)
    kinds = {"AdamW": {}, "SGD": {"adam": False}, "SGD, scaler": {"adam": False, "scaler": True}}
    lr, drop = (4, "setting", "lr of group 0"), (4, "output", "blocks.0.drop")
    expected = {
        "": None,
        "opt": lr,
        "sched": (5, *lr[1:]),
        "random": drop,
        "net": (0, "before", ""),
    }
    for kind, how in kinds.items():
        Training(**how).run("whole")
        state = Training(**how).run("half", last=4).state()
        for lost in ("", "opt", "sched", "random"):
            Training(**how).load(state, lost).run("b", first=4)
            judge(f"resumed, {kind}, without {lost or 'loss'}", "whole", "b", expected[lost])
    quiet = [("blocks.0", "blocks.1", "blocks.2", "bn")]

    def without_chance(t: Training) -> Training:
        for name in quiet[0]:
            t.net.get_submodule(name).eval()
        return t

    without_chance(Training()).run("a")
    without_chance(Training()).run("b", split=2)
    judge("split batches, exact", "a", "b", (0, "input", ""))
    judge("split batches, rtol=1e-3", "a", "b", None, rtol=1e-3)
    fault = {(3, "grads"): lambda t: t.net.blocks[1].up.weight.grad.mul_(1.02)}
    without_chance(Training()).run("b", fault, split=2)
    one = (3, "param_grad", "blocks.1.up.weight")
    judge("split batches, one gradient x 1.02", "a", "b", one, rtol=1e-3)


# --- the Hugging Face Trainer


def hugging_face() -> None:
    os.environ["WANDB_DISABLED"] = "true"
    from transformers import (  # type: ignore[import-not-found]
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from hookkit.bridges.transformers import HookkitCallback

    logging.disable(logging.CRITICAL)
    ids = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": x, "labels": x} for x in ids]

    def run(path: str, resume: Any = None, save: bool = False, fix: Any = None, cb: Any = None,
            bridge: bool = True, **kw: Any) -> None:  # fmt: skip
        set_seed(0)
        size = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        model = GPT2LMHeadModel(GPT2Config(**size))
        if fix:
            fix(model)
        args = {"output_dir": FOLDER / "checkpoints", "per_device_train_batch_size": 8,
                "max_steps": 8, "learning_rate": 1e-3, "report_to": [], "disable_tqdm": True,
                "save_strategy": "steps" if save else "no", "save_steps": 4, "use_cpu": True,
                "logging_strategy": "no"} | kw  # fmt: skip
        trainer = Trainer(model, TrainingArguments(**args), train_dataset=data,
                          callbacks=[cb] if cb else None)  # fmt: skip
        recorder = Fingerprint(FOLDER / path)
        if bridge:
            trainer.add_callback(HookkitCallback(recorder))
            trainer.train(resume_from_checkpoint=resume)
        else:
            with watch(trainer.model, None, recorder):
                trainer.train(resume_from_checkpoint=resume)

    class Extra(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                torch.rand(1)

    class Factor(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if state.global_step == 2:
                for p in kw["model"].parameters():
                    p.grad.mul_(1.02)

    def no_dropout(model: Any) -> None:
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0

    ln = lambda m: setattr(m.transformer.h[1].ln_2, "eps", 1e-6)  # noqa: E731
    drop = "transformer.drop"
    run("gold", save=True)
    cases: list[tuple[str, dict[str, Any], Expected]] = [
        ("twin", {}, None),
        ("twin, by watch", {"bridge": False}, None),
        ("the data's order", {"data_seed": 7}, (0, "input", "")),
        ("a warm-up", {"warmup_steps": 1}, (0, "setting", "lr of group 0")),
        ("Adam's eps", {"adam_epsilon": 1e-7}, (0, "setting", "eps of group 0")),
        ("a clip", {"max_grad_norm": 0.5}, (0, "param_grad", "transformer.ln_f.bias")),
        ("bfloat16", {"bf16": True}, (0, "output", "transformer.h.0.attn.c_attn")),
        ("weight decay", {"weight_decay": 0.01}, (0, "setting", "weight_decay of group 0")),
        ("an eps", {"fix": ln}, (0, "output", "transformer.h.1.ln_2")),
        ("a random number", {"cb": Extra()}, (3, "output", drop)),
    ]
    for name, how, expected in cases:
        run("b", **how)
        judge(name, "gold", "b", expected)
    whole = FOLDER / "checkpoints" / "checkpoint-4"
    for bridge in (True, False):
        run("b", resume=whole, bridge=bridge)
        judge(f"twin, resumed{'' if bridge else ', by watch'}", "gold", "b", None)
    for gone, expected in (("scheduler.pt", (4, "setting", "lr of group 0")),
                           ("rng_state.pth", (4, "output", drop))):  # fmt: skip
        part = FOLDER / f"without {gone}" / "checkpoint-4"
        part.mkdir(parents=True)
        for file in whole.iterdir():
            if file.name != gone:
                (part / file.name).write_bytes(file.read_bytes())
        run("b", resume=part)
        judge(f"resumed without {gone}", "gold", "b", expected)
    half = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "fix": no_dropout}
    run("gold", fix=no_dropout)
    run("b", **half)
    judge("twin, 2 x 4 samples, rtol=1e-3", "gold", "b", None, rtol=1e-3)
    run("b", cb=Factor(), **half)
    first = (2, "param_grad", "transformer.ln_f.bias")
    judge("2 x 4 samples, gradients x 1.02", "gold", "b", first, rtol=1e-3)


# --- Lightning


def lightning() -> None:
    import lightning as L  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader, TensorDataset

    from hookkit.bridges.lightning import HookkitCallback

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 20), torch.randint(0, 5, (64,)))

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self, drop: float, eps: float, extra: bool) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.GELU(),
                                     nn.Dropout(drop), nn.Linear(64, 5))  # fmt: skip
            self.eps, self.extra = eps, extra

        def training_step(self, batch: Any, i: int) -> Tensor:
            if self.extra and self.global_step == 3:
                torch.rand(1)
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            opt = torch.optim.AdamW(self.parameters(), 1e-3, eps=self.eps)
            sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
            return [opt], [{"scheduler": sched, "interval": "step"}]

    def run(path: str, seed: int = 0, order: int = 1, size: int = 8, drop: float = 0.1,
            eps: float = 1e-8, extra: bool = False, bridge: bool = True,
            **kw: Any) -> None:  # fmt: skip
        L.seed_everything(seed, verbose=False)
        model = Module(drop, eps, extra)
        shuffle = torch.Generator().manual_seed(order)
        loader = DataLoader(data, size, shuffle=True, generator=shuffle)
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        recorder = Fingerprint(FOLDER / path)
        how = {"max_steps": 8, "accelerator": "cpu"} | dict.fromkeys(off, False) | kw
        if bridge:
            L.Trainer(callbacks=[HookkitCallback(recorder)], **how).fit(model, loader)
        else:
            with watch(model, None, recorder):
                L.Trainer(**how).fit(model, loader)

    run("gold")
    cases: list[tuple[str, dict[str, Any], Expected]] = [
        ("twin", {}, None),
        ("twin, by watch", {"bridge": False}, None),
        ("the data's order", {"order": 2}, (0, "input", "net")),
        ("a random number", {"extra": True}, (3, "output", "net.3")),
        ("Adam's eps", {"eps": 1e-7}, (0, "setting", "eps of group 0")),
        ("a clip", {"gradient_clip_val": 0.1}, (0, "param_grad", "net.4.bias")),
        ("bfloat16", {"precision": "bf16-mixed"}, (0, "output", "net.0")),
        ("a seed", {"seed": 1}, (0, "before", "net.0.weight")),
        ("dropout's p", {"drop": 0.2}, (0, "output", "net.3")),
    ]
    for name, how, expected in cases:
        run("b", **how)
        judge(name, "gold", "b", expected)
    run("gold", drop=0.0)
    run("b", drop=0.0, size=4, accumulate_grad_batches=2)
    judge("twin, 2 x 4 samples, rtol=1e-3", "gold", "b", None, rtol=1e-3)


# --- what it costs


def cost() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": 2000, "n_embd": 256, "n_layer": 6, "n_head": 4, "n_positions": 128,
            "resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(**size))
    opt = torch.optim.AdamW(model.parameters(), 1e-4)

    def seconds(ids: Tensor, n: int, *cbs: Any) -> float:
        """Return the CPU time of a step, in the mean of n after the first."""
        with watch(model, opt, *cbs):
            begin = 0.0
            for i in range(n + 1):
                begin = begin if i != 1 else time.process_time()
                model(ids, labels=ids).loss.backward()
                opt.step()
                opt.zero_grad()
            return (time.process_time() - begin) / n

    print("| tokens | a step, ms | every=1 | every=10 |\n|---|---|---|---|")
    for shape in ((1, 32), (1, 128), (8, 128)):
        ids = torch.randint(0, 2000, shape)
        rounds = []
        for i in range(3):  # paired: what else runs on the machine meets all three
            each = [Fingerprint(FOLDER / f"{shape}{i}{every}", every) for every in (1, 10)]
            alone = seconds(ids, 5)
            rounds.append((alone, *(seconds(ids, 10, cb) / alone for cb in each)))
        ms, one, ten = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {shape[0]} × {shape[1]} | {ms * 1000:.0f} | {one:.2f} | {ten:.2f} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = {"plain": plain, "transformers": hugging_face, "lightning": lightning, "cost": cost}
    for part in sys.argv[1:] or parts:
        print(f"\n## {part}", flush=True)
        totals.update(right=0, wrong=0)
        parts[part]()
        if part != "cost":
            print(f"{part}: {totals['right']} right, {totals['wrong']} wrong")
