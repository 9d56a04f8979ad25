"""Attributes, names and sizes that break assumptions."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from zoo_base import add, module, rand
from zoo_wrapped import SMALL, SMALL_MACS, small

B = 2


# attributes


@module("odd_attrs", rand(B, 2), params=12, macs=2 * B * 4)
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


@module(
    "getattr_delegates",
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    calls={"": 1, "inner": 1},
)
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


@module(
    "child_named_module",
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    calls={"module": 1, "module.0": 1},
    note="no DataParallel: the prefix module. belongs to the names",
)
class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = small()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Odd(nn.Module):
    """Is false and iterable, and equals its kin; hashing stays by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.items: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = nn.Module.__hash__

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


add(
    "equal_and_false",
    lambda: nn.Sequential(Odd(), Odd()).eval(),
    rand(B, 4),
    params=40,
    macs=2 * B * 16,
    calls={"0": 1, "0.fc": 1, "1": 1, "1.fc": 1},
    note="`a == b` is true for different layers, `if layer:` is false, `__len__` is 0",
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


@module(
    "hidden_in_a_list",
    rand(B, 4),
    params=20,
    macs=2 * B * 16,
    note="a layer in a Python list is no submodule: its parameters are not the model's",
)
class Holder(nn.Module):
    """Modules the tree cannot see: in a plain list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.unseen = nn.Linear(4, 4), [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.unseen[0](self.seen(x))


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


# names and size


def named(*names: str) -> nn.Module:
    net = nn.Sequential()
    for name in names:
        net.add_module(name, nn.Linear(4, 4))
    return net.eval()


add(
    "awkward_names",
    lambda: named("编码器", "head🚀", "é", "weight", "a b", "[0]", "*", "forward_", "module"),
    rand(B, 4),
    params=180,
    macs=9 * B * 16,
    note="wide characters, an emoji, spaces, brackets and glob characters",
)
