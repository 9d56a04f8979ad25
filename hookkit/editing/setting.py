"""One tensor with a part of it replaced, or an error that says what does not fit there.

What the edits of `changes` share: the layer that is changed (`Where`), the part of a tensor that
`at=` means (`part_of`), and a new tensor with something else in its place (`with_part`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import kind_of
from hookkit.errors import HookError
from hookkit.hooks.entries import brief, recomputing
from hookkit.nested import describe, is_container, leaves, parts_of


@dataclass(frozen=True)
class Where:
    """The layer that is changed: its name if known, its leaf path, the number of the call."""

    module: nn.Module
    name: str | None = None
    leaf: str = ""
    count: int = 0

    @property
    def names(self) -> tuple[str | None, ...]:
        """What it may be called in another run, whose calls may have names of their own."""
        n = 0 if recomputing() and self.count == 1 else self.count
        return self.name, f"{self.name}:{n}"

    @property
    def label(self) -> str:
        """The layer in words, for messages."""
        if self.name is None:
            return brief(self.module)
        return f"'{self.name}' ({type(self.module).__name__})"


def check_holds_tensors(value: Any, change: str, where: Where) -> None:
    """Raises if no tensor is found in `value`, unless nothing at all is there: None, or ()."""
    if not leaves(value) and not _is_empty(value):
        what = describe(value) if is_container(value) else kind_of(value)
        raise HookError(
            f"{change} on {where.label}: what is there is {what}, in which hookkit finds no tensor "
            "to change. Give a function of it that returns the changed one (lambda value: …), or "
            "edit a layer before it."
        )


def _is_empty(x: Any) -> bool:
    return x is None or (is_container(x) and all(_is_empty(part) for _, part in parts_of(x)))


def part_of(x: Tensor, at: Any, word: str, where: Where) -> Tensor:
    """The part of `x` that `at` means, all of it for None; of a quantized tensor its values."""
    x = x.dequantize() if x.is_quantized else x
    if at is None:
        return x
    try:
        return x[at]
    except (IndexError, TypeError) as e:
        raise HookError(
            f"{word} at {_index(at)} of {where.label}: it is {describe(x)}, and {e}. Give an index "
            f'that it has, or select the tensor that you mean (as "lstm[0]").'
        ) from e


def with_part(x: Tensor, at: Any, value: Any, word: str, where: Where) -> Tensor:
    """A new tensor: `x` with `value`, broadcast, at `at`; of its shape, dtype and device."""
    # compiled code has no sparse tensors, and may not ask a gradient for its layout
    sparse = not torch.compiler.is_compiling() and x.layout is not torch.strided
    nested, tensor = x.is_nested or sparse, isinstance(value, Tensor)
    (_check_whole if nested else _check_fits)(x, at, value, word, where)
    if at is None and tensor and (nested or (value.shape, value.dtype) == (x.shape, x.dtype)):
        return value  # type: ignore[no-any-return]
    if x.is_quantized:
        return _requantized(x, at, value, word, where)
    new = x.clone()
    if at is None and not tensor:
        return new.fill_(value)  # nested tensors and DTensors cannot be assigned to
    new[... if at is None else at] = value
    return new


def _requantized(x: Tensor, at: Any, value: Any, word: str, where: Where) -> Tensor:
    """As `with_part`, rounded to a step of the scale of `x`, which is quantized."""
    wanted = x.dequantize()
    wanted[... if at is None else at] = value
    new = x.clone().copy_(wanted)
    one = x.qscheme() == torch.per_tensor_affine
    step = x.q_scale() if one else float(x.q_per_channel_scales().max())
    if not ((new.dequantize() - wanted).abs() <= step).all():  # sync: of quantized tensors only
        raise HookError(
            f"{word} on {where.label}: there is a quantized tensor of {x.dtype}, which cannot hold "
            f"values from {float(wanted.min()):.3g} to {float(wanted.max()):.3g} in its steps of "
            f"{step:.3g}. Give a function that quantizes them anew: lambda output: …"
        )
    return new


def _check_whole(x: Tensor, at: Any, value: Any, word: str, where: Where) -> None:
    """Raises if a part of `x`, which is nested or sparse, would be set."""
    like = (value.is_nested, value.layout) if isinstance(value, Tensor) else (True, x.layout)
    if at is not None or like != (x.is_nested, x.layout):
        raise HookError(
            f"{word} on {where.label}: there is {describe(x)}, a nested or sparse tensor, of which "
            "no part can be set. Give a function of it: lambda output: …"
        )


def _check_fits(x: Tensor, at: Any, value: Any, word: str, where: Where) -> None:
    """Raises if `value` cannot be in `x`, or in its part `at`."""
    target = x.shape if at is None else x[at].shape
    shape = value.shape if isinstance(value, Tensor) else torch.Size()
    try:
        fits = torch.empty(shape, device="meta").expand(target).shape == target
    except RuntimeError:
        fits = False
    if not fits:
        raise HookError(
            f"{word} on {where.label}: {describe(value)} does not fit what is there, "
            f"{'scalar' if not target else '×'.join(map(str, target))}. Give a number, or a tensor "
            f"that broadcasts to that shape."
        )
    if _complex(value) and not x.is_complex():
        raise HookError(
            f"{word} on {where.label}: there is a tensor of {x.dtype}, which cannot hold complex "
            f"numbers ({describe(value)}). Give their real part, or abs()."
        )
    if _fraction(value) and not (x.is_floating_point() or x.is_complex() or x.is_quantized):
        raise HookError(
            f"{word} on {where.label}: there is a tensor of {x.dtype}, which cannot hold "
            f'{describe(value)} of fractions. Select the tensor that you mean (as "lstm[0]").'
        )


def _complex(v: Any) -> bool:
    return v.is_complex() if isinstance(v, Tensor) else isinstance(v, complex)


def _fraction(v: Any) -> bool:
    """True if `v` would lose something in an integer tensor."""
    if isinstance(v, Tensor):
        return v.is_floating_point()
    return isinstance(v, float) and not v.is_integer()


def _index(at: Any) -> str:
    return describe(at) if leaves(at) else repr(at)
