"""Inputs and outputs of every structure."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_base import add, module, rand

B = 2


# structures


@module(
    "dict_in_out",
    lambda: ({"x": torch.randn(B, 4), "z": torch.randn(B, 6)},),
    params=(4 * 8 + 8) + (6 * 8 + 8) + 8 * 3 + 3,
    macs=B * (4 * 8 + 6 * 8 + 8 * 3),
)
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


@dataclass
class Batch:
    x: Tensor
    mask: Tensor | None = None


@module(
    "dataclass_io",
    lambda: (Batch(torch.randn(B, 4), torch.ones(B, dtype=torch.bool)),),
    params=40,
    macs=B * 32,
)
class DataclassIO(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, batch: Batch) -> Batch:
        return Batch(self.fc(batch.x), batch.mask)


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


@module(
    "kwargs_only",
    lambda: (),
    kwargs=lambda: {"x": torch.randn(B, 4), "scale": 2.0},
    params=40,
    macs=B * 32,
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


@module(
    "optional_none_args",
    lambda: (torch.randn(B, 4), None),
    kwargs=lambda: {"bias": None},
    params=20,
    macs=B * 16,
    note="None goes in, positional and by keyword, and comes out beside a tensor",
)
class OptionalArgs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, bias: Tensor | None = None) -> Any:
        h = self.fc(x)
        return h if mask is None else h * mask, None


@module(
    "nested_structures",
    lambda: ([torch.randn(B, 4), torch.randn(3, 4)], ("tag", torch.ones(1))),
    params=20,
    macs=(B + 3) * 16,
    calls={"fc": 2},
)
class NestedOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, xs: list[Tensor], extra: tuple[Any, ...]) -> Any:
        hs = [self.fc(x) for x in xs]
        return (hs, {"deep": [(hs[0], {"deeper": extra[1]}), "text", 3]})


@module(
    "generator_out",
    rand(B, 4),
    params=3 * 20,
    macs=3 * B * 16,
    calls={"": 1, "layers.0": 1, "layers.2": 1},
    tags={"no_grad_in"},
    note="the layers run only when the result is iterated, after the root's hook",
)
class GeneratorOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = layer(x)
            yield x


class Returns(nn.Module):
    """A Linear(4, 4) whose result is turned into something that is no tensor."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.made = nn.Linear(4, 4), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.fc(x))


def nothing(h: Tensor) -> None:
    return None


def numbers(h: Tensor) -> tuple[float, list[int]]:
    return float(h.sum()), h.argmax(1).tolist()


class Result:
    def __init__(self, value: Tensor) -> None:
        self.value = value


add(
    "returns_none",
    lambda: Returns(nothing).eval(),
    rand(B, 4),
    params=20,
    macs=B * 16,
    tags={"no_grad_in"},
)
add(
    "returns_number",
    lambda: Returns(numbers).eval(),
    rand(B, 4),
    params=20,
    macs=B * 16,
    tags={"no_grad_in"},
)
add(
    "returns_unknown_object",
    lambda: Returns(Result).eval(),
    rand(B, 4),
    params=20,
    macs=B * 16,
)


@module("mixed_output_dtypes", rand(B, 4), params=20, macs=B * 16)
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
