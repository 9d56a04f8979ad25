"""Wrappers, state, attributes and names that break assumptions."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import add, rand

B = 2


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


SMALL, SMALL_MACS = 72 + 18, B * 80


# wrappers

add(
    "scripted",
    lambda: torch.jit.script(small().eval()),
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    tags={"scripted", "no_fake"},
    note="a ScriptModule refuses forward hooks",
)
add(
    "traced",
    lambda: torch.jit.trace(small().eval(), torch.randn(B, 8)),
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    tags={"scripted", "no_fake"},
    note="submodules accept hooks that never fire",
)


class ScriptPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.jit.script(small())
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fast(x))


add(
    "script_part",
    lambda: ScriptPart().eval(),
    rand(B, 8),
    params=SMALL + 6,
    macs=SMALL_MACS + B * 4,
    tags={"scripted", "no_fake"},
)
add(
    "compiled_cold",
    lambda: torch.compile(small().eval(), backend="eager"),
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    calls={"": 1, "0": 1, "2": 1},
    tags={"compiled"},
    note="not yet called; calls and names are those of the model inside",
)
add(
    "data_parallel",
    lambda: nn.DataParallel(small().eval()),
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    calls={"": 1, "module": 1, "module.0": 1},
    note="names begin with module.",
)


class Recorder:
    """A user's own hook, picklable."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, *_: Any) -> None:
        self.n += 1


def user_hooks() -> nn.Module:
    net = small().eval()
    net[0].register_forward_hook(Recorder())
    net[1].register_forward_pre_hook(Recorder())
    net[2].register_full_backward_hook(Recorder())
    return net


add(
    "user_hooks",
    user_hooks,
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    note="forward, forward-pre and full backward hooks of the user are there already",
)


class Doubling:
    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2


def editing_hook() -> nn.Module:
    net = small().eval()
    net[0].register_forward_hook(Doubling())
    return net


add(
    "user_hook_edits",
    editing_hook,
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    note="a user's hook replaces an output: later hooks see the replaced one",
)


def instance_forward() -> nn.Module:
    net = small().eval()
    inner = net[0].forward
    net[0].forward = lambda x: inner(x) + 1
    return net


add(
    "patched_forward",
    instance_forward,
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    calls={"0": 1},
    note="as accelerate and monkey-patchers do: forward is an instance attribute",
)


# modes and state

add(
    "dropout_train",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(),
    rand(B, 4),
    params=20,
    macs=B * 16,
    tags={"train_rng"},
)
add(
    "dropout_inplace",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, inplace=True)).train(),
    rand(B, 4),
    params=20,
    macs=B * 16,
    tags={"train_rng", "inplace"},
)


def mixed_modes() -> nn.Module:
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout()
    )
    net.train()
    net[1].eval()
    return net


add(
    "mixed_modes",
    mixed_modes,
    rand(B, 4),
    params=40 + 16 + 72,
    macs=B * (32 + 64),
    tags={"train_rng"},
    note="a batch-norm kept in eval inside a training model",
)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.n_calls += 1
        self.ema.lerp_(h.detach().mean(0), 0.1)
        self.scratch = torch.ones(2)
        return h - self.ema.clone()


add(
    "stateful_buffers",
    lambda: Stateful().eval(),
    rand(B, 4),
    params=20,
    macs=B * 16,
    tags={"mutates_buffers"},
    note="writes buffers in place, even in eval, and replaces one",
)


class CachingAttr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.cache = self.fc(x)
        return self.cache


add(
    "caches_activations",
    lambda: CachingAttr().eval(),
    rand(B, 4),
    params=20,
    macs=B * 16,
    note="keeps its last output as an ordinary attribute",
)


class MutatesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mul_(0.5))


add(
    "mutates_input",
    lambda: MutatesInput().eval(),
    rand(B, 4),
    params=20,
    macs=B * 16,
    tags={"mutates_input", "inplace"},
)


class BuffersOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.basis


add("buffers_only", BuffersOnly, rand(B, 4), params=0, macs=B * 16, tags={"no_grad_in"})
add(
    "no_params",
    lambda: nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Softmax(1)).eval(),
    rand(B, 4),
    params=0,
    macs=0,
    tags={"no_grad_in"},
)
add(
    "empty_model",
    lambda: nn.Sequential().eval(),
    rand(B, 4),
    params=0,
    macs=0,
    calls={"": 1},
    tags={"no_grad_in"},
)
add(
    "single_layer",
    lambda: nn.Linear(4, 4).eval(),
    rand(B, 4),
    params=20,
    macs=B * 16,
    calls={"": 1},
    note="the root is the only module and the only leaf",
)


# attributes


class OddAttrs(nn.Module):
    """Names torch's layers use, bound to something else."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList([nn.Linear(2, 2)])
        self.kernel_size = "big"
        self.weight = None
        self.bias = nn.Linear(2, 2)
        self.stride = None

    def forward(self, x: Tensor) -> Tensor:
        return self.bias(self.groups[0](x))


add("odd_attrs", lambda: OddAttrs().eval(), rand(B, 2), params=12, macs=2 * B * 4)


class Delegates(nn.Module):
    """Unknown attributes come from the wrapped model, as PEFT and many wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


add(
    "getattr_delegates",
    lambda: Delegates().eval(),
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    calls={"": 1, "inner": 1},
)


class Config:
    """Answers every attribute: `hasattr` is always true."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class AnswersAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.config = nn.Linear(4, 4), Config()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = small()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


add(
    "child_named_module",
    lambda: Wrapper().eval(),
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    calls={"module": 1, "module.0": 1},
    note="no DataParallel: the prefix module. belongs to the names",
)

add("answers_every_attr", lambda: AnswersAll().eval(), rand(B, 4), params=20, macs=B * 16)


class Falsy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.items: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


add(
    "falsy_module",
    lambda: nn.Sequential(nn.Linear(4, 4), Falsy()).eval(),
    rand(B, 4),
    params=40,
    macs=2 * B * 16,
    calls={"1": 1, "1.fc": 1},
    note="`if module:` is false, `__len__` is 0, yet it has a child",
)


class EqualModule(nn.Module):
    """Compares equal to its kin and is iterable; hashing stays by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualModule)

    __hash__ = nn.Module.__hash__

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


add(
    "equal_modules",
    lambda: nn.Sequential(EqualModule(), EqualModule()).eval(),
    rand(B, 4),
    params=40,
    macs=2 * B * 16,
    calls={"0": 1, "1": 1},
    note="`a == b` is true for different layers: compare with `is`",
)


class Cyclic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.child = nn.Linear(4, 4), nn.Linear(4, 2)
        self.child.parent = self

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.fc(x))


add(
    "cyclic_ref",
    Cyclic,
    rand(B, 4),
    params=30,
    macs=B * (16 + 8),
    calls={"": 1, "fc": 1, "child": 1},
    tags={"cyclic"},
    note="child.parent is the root: repr, train() and state_dict() never end",
)


class Holder(nn.Module):
    """Modules the tree cannot see: in a plain list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.unseen = nn.Linear(4, 4), [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.unseen[0](self.seen(x))


add(
    "hidden_in_a_list",
    lambda: Holder().eval(),
    rand(B, 4),
    params=20,
    macs=2 * B * 16,
    note="a layer in a Python list is no submodule: its parameters are not the model's",
)


class OverridesCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def __call__(self, x: Tensor) -> Tensor:
        return self.fc(x)


add(
    "overrides_call",
    lambda: nn.Sequential(OverridesCall(), nn.Linear(4, 2)).eval(),
    rand(B, 4),
    params=20 + 10,
    macs=B * (16 + 8),
    calls={"0": 0, "0.fc": 1},
    note="`__call__` bypasses nn.Module's: hooks on it never fire",
)


class CatchesStop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        with contextlib.suppress(Exception):
            h = self.a(x)
        return self.b(h)


add(
    "suppresses_exceptions",
    lambda: CatchesStop().eval(),
    rand(B, 4),
    params=40,
    macs=2 * B * 16,
    calls={"a": 1, "b": 1},
)


# names and size


def named(*names: str) -> nn.Module:
    net = nn.Sequential()
    for name in names:
        net.add_module(name, nn.Linear(4, 4))
    return net.eval()


add(
    "cjk_emoji_names",
    lambda: named("编码器", "デコーダ", "head🚀", "é"),
    rand(B, 4),
    params=80,
    macs=4 * B * 16,
    note="wide characters, an emoji and a combining-free accent",
)
add(
    "awkward_names",
    lambda: named("weight", "a b", "[0]", "*", "forward_", "module"),
    rand(B, 4),
    params=120,
    macs=6 * B * 16,
    note="names with spaces, brackets and glob characters",
)


class Nest(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.act = nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()
        self.fc2, self.drop, self.out = nn.Linear(4, 4), nn.Dropout(0.0), nn.Identity()
        self.inner = Nest(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.fc2(self.act(self.fc1(self.norm(x)))))
        return self.out(x) if self.inner is None else self.inner(x)


add(
    "deep_nesting",
    lambda: Nest(49).eval(),
    rand(B, 4),
    params=50 * (8 + 20 + 20),
    macs=50 * B * 32,
    note="350 modules, 50 levels",
)
add(
    "wide_flat",
    lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(300))).eval(),
    rand(B, 4),
    params=300 * 20,
    macs=300 * B * 16,
    note="300 equal siblings",
)


class NestedDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleDict({"x": nn.Linear(4, 4), "y": nn.ModuleList([nn.Linear(4, 4)])})
        self.tree = nn.ModuleDict({"left": inner, "right": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        left: Any = self.tree["left"]
        return F.relu(left["y"][0](left["x"](x))) + self.tree["right"](x)


add(
    "nested_moduledict",
    lambda: NestedDict().eval(),
    rand(B, 4),
    params=60,
    macs=3 * B * 16,
    calls={"tree": 0, "tree.left": 0, "tree.left.y": 0, "tree.left.y.0": 1, "tree.right": 1},
)
