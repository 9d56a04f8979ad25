"""Inputs, outputs and control flow: structures, reuse, recursion, data-dependent paths."""

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint
from zoo_base import add, rand

B = 2


# reuse


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.act(self.fc(x))
        return x


add(
    "reused_layer",
    lambda: Reused().eval(),
    rand(B, 8),
    params=8 * 8 + 8,
    macs=3 * B * 64,
    calls={"": 1, "fc": 3, "act": 3},
)


def shared() -> nn.Sequential:
    fc = nn.Linear(8, 8)
    return nn.Sequential(fc, nn.ReLU(), fc, nn.Sequential(nn.Linear(8, 8), fc))


add(
    "shared_module",
    lambda: shared().eval(),
    rand(B, 8),
    params=2 * (8 * 8 + 8),
    macs=4 * B * 64,
    calls={"0": 3, "3": 1, "3.0": 1},
    note="one Linear under three names; named_modules gives the first",
)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.fc(x))
        return self(x, depth - 1) if depth else self.out(x)


add(
    "recursive",
    lambda: Recursive().eval(),
    rand(B, 8),
    params=8 * 8 + 8 + 8 * 2 + 2,
    macs=B * (3 * 64 + 16),
    calls={"": 3, "fc": 3, "out": 1},
    note="the module calls itself",
)


class ReEntrant(nn.Module):
    """A child that calls back into its parent through a plain (unregistered) reference."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(8, 8)
        self.child = _CallsParent(self)

    def forward(self, x: Tensor, inner: bool = True) -> Tensor:
        return self.child(self.leaf(x)) if inner else self.leaf(x)


class _CallsParent(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "parent", parent)

    def forward(self, x: Tensor) -> Tensor:
        return self.parent(x, inner=False)


add(
    "re_entrant",
    lambda: ReEntrant().eval(),
    rand(B, 8),
    params=72,
    macs=2 * B * 64,
    calls={"": 2, "leaf": 2, "child": 1},
)


# in-place


class InplaceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act = nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc1(x))
        y = self.fc2(h)
        y += 1
        y.mul_(2)
        return y


add(
    "inplace",
    lambda: InplaceNet().eval(),
    rand(B, 8),
    params=144,
    macs=2 * B * 64,
    tags={"inplace"},
    note="fc1's and fc2's outputs are overwritten after their hooks ran",
)


class InplaceResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x += block(x.clone())
        return x


add(
    "inplace_residual",
    lambda: InplaceResidual().eval(),
    rand(B, 8),
    params=3 * 72,
    macs=3 * B * 64,
    calls={"stem": 1, "blocks.0": 1, "blocks.1": 1},
    tags={"inplace"},
)


class Chunked(nn.Module):
    """Outputs that are views: chunk, then an in-place write into one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.fc = _Split(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.split(self.fc(x))
        return torch.cat([a * 2, b], 1)


class _Split(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.tensor_split(x, 2, 1)
        return a, b


add("view_outputs", lambda: Chunked().eval(), rand(B, 8), params=72, macs=B * 64)
add(
    "identity_outputs",
    lambda: nn.Sequential(nn.Identity(), nn.Linear(8, 8), nn.Dropout(), nn.Sequential()).eval(),
    rand(B, 8),
    params=72,
    macs=B * 64,
    calls={"0": 1, "2": 1, "3": 1},
    note="output is the input object: Identity, Dropout in eval, empty Sequential",
)
add(
    "flatten_unflatten",
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Unflatten(1, (2, 4))).eval(),
    rand(B, 2, 4),
    params=72,
    macs=B * 64,
)


# structures


class DictInOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(6, 8)
        self.head = _DictHead()

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return self.head({"h": self.a(batch["x"]) + self.b(batch["z"])})


class _DictHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, d: dict[str, Tensor]) -> dict[str, Any]:
        return {"logits": self.fc(d["h"]), "hidden": {"last": d["h"], "n": 8}}


add(
    "dict_in_out",
    lambda: DictInOut().eval(),
    lambda: ({"x": torch.randn(B, 4), "z": torch.randn(B, 6)},),
    params=(4 * 8 + 8) + (6 * 8 + 8) + 8 * 3 + 3,
    macs=B * (4 * 8 + 6 * 8 + 8 * 3),
)

Pair = namedtuple("Pair", "mean scale")


class NamedTupleOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Pair:
        a, b = self.fc(x).chunk(2, 1)
        return Pair(a, F.softplus(b))


add("namedtuple_out", lambda: NamedTupleOut().eval(), rand(B, 4), params=40, macs=B * 32)


@dataclass
class Batch:
    x: Tensor
    mask: Tensor | None = None


class DataclassIO(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, batch: Batch) -> Batch:
        return Batch(self.fc(batch.x), batch.mask)


add(
    "dataclass_io",
    lambda: DataclassIO().eval(),
    lambda: (Batch(torch.randn(B, 4), torch.ones(B, dtype=torch.bool)),),
    params=40,
    macs=B * 32,
)


class ModelOutput(OrderedDict):
    """As transformers': an ordered dict whose keys are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class HFLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, *, input_ids: Tensor, labels: Tensor | None = None) -> ModelOutput:
        h = self.emb(input_ids)
        logits = self.fc(h)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return ModelOutput(loss=loss, logits=logits, hidden_states=(h,))


def hf_kwargs() -> dict[str, Any]:
    return {"input_ids": torch.randint(20, (B, 5)), "labels": torch.randint(4, (B, 5))}


add(
    "model_output",
    lambda: HFLike().eval(),
    lambda: (),
    kwargs=hf_kwargs,
    params=20 * 8 + 8 * 4 + 4,
    macs=B * 5 * 8 * 4,
)


class KwargsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _KwInner()

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner(x=x, scale=scale)


class _KwInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, *, x: Tensor, scale: float) -> Tensor:
        return self.fc(input=x) * scale


add(
    "kwargs_only",
    lambda: KwargsOnly().eval(),
    lambda: (),
    kwargs=lambda: {"x": torch.randn(B, 4), "scale": 2.0},
    params=40,
    macs=B * 32,
)


class OptionalArgs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, bias: Tensor | None = None) -> Any:
        h = self.fc(x)
        return h if mask is None else h * mask, None


add(
    "optional_none_args",
    lambda: OptionalArgs().eval(),
    lambda: (torch.randn(B, 4), None),
    kwargs=lambda: {"bias": None},
    params=20,
    macs=B * 16,
    note="None goes in, positional and by keyword, and comes out beside a tensor",
)


class NestedOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, xs: list[Tensor], extra: tuple[Any, ...]) -> Any:
        hs = [self.fc(x) for x in xs]
        return (hs, {"deep": [(hs[0], {"deeper": extra[1]}), "text", 3]})


add(
    "nested_structures",
    lambda: NestedOut().eval(),
    lambda: ([torch.randn(B, 4), torch.randn(3, 4)], ("tag", torch.ones(1))),
    params=20,
    macs=(B + 3) * 16,
    calls={"fc": 2},
)


class ReturnType(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.top = nn.Linear(4, 8), _Top()

    def forward(self, x: Tensor) -> Any:
        return self.top(self.fc(x))


class _Top(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.max(1)


add("return_type_out", lambda: ReturnType().eval(), rand(B, 4), params=40, macs=B * 32)


class GeneratorOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = layer(x)
            yield x


add(
    "generator_out",
    lambda: GeneratorOut().eval(),
    rand(B, 4),
    params=3 * 20,
    macs=3 * B * 16,
    calls={"": 1, "layers.0": 1, "layers.2": 1},
    tags={"no_grad_in"},
    note="the layers run only when the result is iterated, after the root's hook",
)


class Returns(nn.Module):
    """A Linear(4, 4) whose result is turned into something that is no tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.fc(x)
        match self.how:
            case "none":
                return None
            case "number":
                return float(h.sum()), h.argmax(1).tolist()
            case "loss":
                return F.cross_entropy(h, y)
            case "distribution":
                return Categorical(logits=h)
            case _:
                return _Result(h)


class _Result:
    def __init__(self, value: Tensor) -> None:
        self.value = value


for how, tags in {
    "none": {"no_grad_in"},
    "number": {"no_fake", "data_dependent", "no_grad_in"},
    "loss": set[str](),
    "distribution": {"no_fake", "data_dependent"},
    "unknown_object": set[str](),
}.items():
    add(
        f"returns_{how}",
        lambda how=how: Returns(how).eval(),
        lambda: (torch.randn(B, 4), torch.zeros(B, dtype=torch.long)),
        params=20,
        macs=B * 16,
        tags=tags,
    )


class ListImages(nn.Module):
    """As torchvision's detectors: a list of images of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        feats = [self.conv(i[None]).mean((2, 3)) for i in images]
        return [{"scores": self.fc(f)} for f in feats]


add(
    "list_images",
    lambda: ListImages().eval(),
    lambda: ([torch.randn(3, 6, 6), torch.randn(3, 5, 8)],),
    params=(3 * 4 * 9 + 4) + 4 * 5 + 5,
    macs=(4 * 4 + 3 * 6) * 4 * 27 + 2 * 4 * 5,
    calls={"conv": 2, "fc": 2},
)


class Mixed(nn.Module):
    """Integer, boolean, half, double and empty outputs of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.spread = nn.Linear(4, 4), _Spread()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.spread(self.fc(x))


class _Spread(nn.Module):
    def forward(self, h: Tensor) -> dict[str, Tensor]:
        return {
            "float": h,
            "int": h.argmax(1),
            "bool": h > 0,
            "half": h.half(),
            "double": h.double(),
            "empty": h[:0],
            "scalar": h.sum(),
        }


add("mixed_output_dtypes", lambda: Mixed().eval(), rand(B, 4), params=20, macs=B * 16)


# control flow


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos, self.neg, self.step = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pos(x) if x.sum() > 0 else self.neg(x)
        for _ in range(int(x.shape[0] + x.sign().sum().item()) // 4):
            h = self.step(h)
        return h


add(
    "data_dependent",
    lambda: DataDependent().eval(),
    lambda: (torch.ones(B, 4),),
    params=2 * 40 + 72,
    macs=B * (32 + (B + 8) // 4 * 64),
    calls={"pos": 1, "neg": 0, "step": 2},
    tags={"data_dependent", "no_fake"},
    note="ones: the positive branch, then (2 + 8) // 4 = 2 steps",
)


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.exits = nn.ModuleList(nn.Linear(4, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for i, (block, leave) in enumerate(zip(self.blocks, self.exits, strict=True)):
            x = F.relu(block(x))
            out = leave(x)
            if i * 1.0 + out.softmax(1).max() > 1.0:
                break
        return out


add(
    "early_exit",
    lambda: EarlyExit().eval(),
    rand(B, 4),
    params=4 * 20 + 4 * 10,
    macs=2 * B * (16 + 8),
    calls={"blocks.0": 1, "exits.1": 1, "blocks.2": 0, "blocks.3": 0},
    tags={"data_dependent", "no_fake"},
    note="a softmax maximum lies between 1/2 and 1, so the second exit is always taken",
)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        top = self.gate(x).argmax(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            where = (top == i).nonzero()[:, 0]
            if len(where):
                out[where] = expert(x[where])
        return out


add(
    "moe_top1",
    lambda: MoE().eval(),
    rand(6, 4),
    params=4 * 3 + 3 + 3 * (4 * 8 + 8 + 8 * 4 + 4),
    macs=6 * (4 * 3 + 4 * 8 + 8 * 4),
    tags={"data_dependent", "no_fake", "inplace"},
    note="each row meets one expert; an expert without rows is not called",
)


class DirectForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a.forward(x)
        return self.c(F.linear(h, self.b.weight, self.b.bias))


add(
    "direct_forward",
    lambda: DirectForward().eval(),
    rand(B, 4),
    params=2 * 20 + 10,
    macs=B * (2 * 16 + 8),
    calls={"a": 0, "b": 0, "c": 1},
    note="a runs by .forward, b's weight is used by a function: no hook can see them",
)


class UnusedHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleDict({k: nn.Linear(6, 3) for k in ("seg", "cls", "aux")})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["cls"](self.body(x))


add(
    "unused_heads",
    lambda: UnusedHeads().eval(),
    rand(B, 4),
    params=30 + 3 * 21,
    macs=B * (24 + 18),
    calls={"heads": 0, "heads.cls": 1, "heads.seg": 0, "heads.aux": 0},
)


class MultiNet(nn.Module):
    """A GAN in one module: only the generator is called by forward."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleDict(
            {"gen": nn.Linear(4, 8), "dis": nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))}
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.nets["gen"](z)

    def score(self, z: Tensor) -> Tensor:
        return self.nets["dis"](self(z))


add(
    "multi_net",
    lambda: MultiNet().eval(),
    rand(B, 4),
    params=40 + 36 + 5,
    macs=B * 32,
    calls={"nets.gen": 1, "nets.dis": 0},
)


class Swallows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.try_me, self.instead = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            h = self.try_me(x)
        except Exception:
            h = self.instead(x)
        return h * 2


add(
    "swallows_exceptions",
    lambda: Swallows().eval(),
    rand(B, 4),
    params=40,
    macs=B * 16,
    calls={"try_me": 1, "instead": 0},
    note="`except Exception` in forward would swallow an early stop",
)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ok, self.bad = nn.Linear(4, 4), _Bad()

    def forward(self, x: Tensor) -> Tensor:
        return self.bad(self.ok(x))


class _Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"cannot work with {tuple(self.fc(x).shape)}")


add(
    "raises",
    lambda: Raises().eval(),
    rand(B, 4),
    params=40,
    macs=2 * B * 16,
    tags={"raises"},
    note="raises ValueError inside bad, after bad.fc ran",
)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if not torch.is_grad_enabled():
            return self.block(h)
        return checkpoint(self.block, h, use_reentrant=self.reentrant)


for reentrant in (False, True):
    add(
        "checkpointed_reentrant" if reentrant else "checkpointed",
        lambda r=reentrant: Checkpointed(r).train(),
        rand(B, 8),
        params=144,
        macs=2 * B * 64,
        calls={"stem": 1, "block.0": 1, "block.2": 1},
        tags={"train_rng", "checkpoint"} | ({"checkpoint_reentrant"} if reentrant else set()),
        note="the block runs again in backward: still one call",
    )


class NeedsGrad(nn.Module):
    """An energy model: its output is the gradient of its energy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.out(torch.tanh(self.fc(x))).sum()
        return torch.autograd.grad(energy, x)[0]


add(
    "needs_grad",
    lambda: NeedsGrad().eval(),
    rand(B, 4),
    params=30 + 7,
    macs=B * (4 * 6 + 6) * 2,
    tags={"needs_grad", "no_grad_in"},
    note="the backward inside forward costs both products once more",
)


class NeedsGradMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = self.fc(x)
        with torch.enable_grad():
            return self.fc(x) - frozen


add(
    "grad_mode_switches",
    lambda: NeedsGradMode().eval(),
    rand(B, 4),
    params=20,
    macs=2 * B * 16,
    calls={"fc": 2},
    note="one call without grad, one with",
)
