"""Which axes of a tensor hold samples and positions: learned from a second run at another size.

An axis that grew with the batch holds samples, one that shrank with the sequence holds positions,
one that did both holds both. The order inside such an axis cannot always be known. Then there are
several readings, and a tensor counts as changed only if it has changed by all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_READINGS = 32
_STRIDES = (2, 3, 4, 5, 8, 10, 16, 32)


class Size(NamedTuple):
    """How many samples and positions a run has; `seq` is None if its input has no positions."""

    batch: int
    seq: int | None = None


class Region(NamedTuple):
    """Some samples and positions of a run, as int64 indices in the order that counts; None: all."""

    samples: Tensor | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class Axis:
    """What the places along one axis hold.

    Attributes:
        samples, positions: whether the axis holds them; both if it holds each pair of the two.
        each: how many places there are for one sample, position or pair.
        side_by_side: whether these places are neighbours. If not, the whole sequence of samples or
            positions is repeated `each` times; an axis of both has positions outside then.
        extra: how many places there are beyond the positions; less than 0 if some are missing.
        in_front: whether the extra or missing places are at the beginning.
        stride: how many positions one place stands for.
    """

    samples: bool = False
    positions: bool = False
    each: int = 1
    side_by_side: bool = True
    extra: int = 0
    in_front: bool = False
    stride: int = 1

    def __str__(self) -> str:
        name = "samples" * self.samples + "·" * (self.samples and self.positions)
        return name + "positions" * self.positions or "–"

    def length(self, size: Size) -> int:
        """Return how long the axis is in a run at `size`."""
        n = (size.batch if self.samples else 1) * ((size.seq or 1) if self.positions else 1)
        return -(-n // self.stride) * self.each + self.extra

    def owners(self, size: Size) -> tuple[Tensor | None, Tensor | None]:
        """Return the sample and the first position of each place, int64 vectors.

        None if the axis does not hold samples, or positions. -1, or a number beyond the last, marks
        a place that belongs to none.

        >>> Axis(samples=True, each=2).owners(Size(3))[0]
        tensor([0, 0, 1, 1, 2, 2])
        """
        place, seq = torch.arange(self.length(size)), size.seq or 1
        if self.samples and self.positions:
            pair = place // self.each
            if self.side_by_side:
                return pair // seq, pair % seq
            return pair % size.batch, pair // size.batch
        n = size.batch if self.samples else seq
        if self.each > 1:
            place = place // self.each if self.side_by_side else place % n
        if self.samples:
            return place, None
        return None, place * self.stride - self.extra * self.in_front if self.positions else None


Reading = tuple[Axis, ...]
"""What each axis of a tensor holds."""


def readings(shape: tuple[int, ...], other: tuple[int, ...], a: Size, b: Size) -> list[Reading]:
    """Return all ways to read a tensor's axes; none if an axis follows neither size.

    Args:
        shape: the tensor's shape in the run at size `a`.
        other: its shape in the run at size `b`.
        a: the size of the run that is read.
        b: another size. A part that is the same in both sizes is recognised by its length.

    >>> [" × ".join(map(str, r)) for r in readings((3, 8, 16), (4, 6, 16), Size(3, 8), Size(4, 6))]
    ['samples × positions × –']
    """
    if len(shape) != len(other):
        return []
    each = [_axis_readings(m, n, a, b) for m, n in zip(shape, other, strict=True)]
    found = [r for r, _ in zip(product(*each), range(_MOST_READINGS), strict=False)]
    # samples cannot be along two axes: one of them has that length by chance
    return [r for r in found if sum(axis.samples for axis in r) <= 1] or found


def _axis_readings(m: int, n: int, a: Size, b: Size) -> list[Axis]:
    """Return how an axis can be read whose length is `m` at size `a` and `n` at size `b`."""
    if m == n:
        samples = [Axis(samples=True)] * (a.batch == b.batch == m)
        return [*samples, *[Axis(positions=True)] * (a.seq == b.seq == m), Axis()]
    seq_varies = a.seq is not None and b.seq is not None and a.seq != b.seq
    counts = [(True, False, a.batch, b.batch)]
    if a.seq is not None and b.seq is not None and seq_varies:
        counts += [(False, True, a.seq, b.seq), (True, True, a.batch * a.seq, b.batch * b.seq)]
    found = list[Axis]()
    for samples, positions, in_a, in_b in counts:
        each, rest = divmod(m, in_a)
        if rest == 0 and n == each * in_b and in_a != in_b:
            both_orders = each > 1 or (samples and positions)
            found += [
                Axis(samples, positions, each, order) for order in (True, False)[: 1 + both_orders]
            ]
    if found or a.seq is None or b.seq is None or not seq_varies:
        return found
    if m - n == a.seq - b.seq:  # padded, or with a prefix; shifted, if some are missing
        return [Axis(positions=True, extra=m - a.seq, in_front=front) for front in (False, True)]
    strides = [s for s in _STRIDES if -(-a.seq // s) == m and -(-b.seq // s) == n]
    return [Axis(positions=True, stride=s) for s in strides[:1]]


def take(
    t: Tensor, reading: Reading, size: Size, region: Region
) -> tuple[Tensor, list[Tensor]] | None:
    """Return the part of `t` that belongs to `region`, and which places that part has.

    None if the shape of `t` is not that of a run at `size`. The second result holds, for each axis
    of samples or positions, the numbers of its places counted within the region. Two parts are
    about the same samples and positions only if these are equal.

    >>> x = torch.arange(6).view(3, 2)
    >>> take(x, (Axis(samples=True), Axis()), Size(3), Region(torch.tensor([2, 0])))[0]
    tensor([[4, 5],
            [0, 1]])
    """
    places = list[Tensor]()
    for dim, axis in enumerate(reading):
        if not (axis.samples or axis.positions):
            continue
        if t.shape[dim] != axis.length(size):
            return None
        samples, positions = axis.owners(size)
        number = torch.zeros(t.shape[dim], dtype=torch.int64)
        for owner, wanted, n in (
            (samples, region.samples, size.batch),
            (positions, region.positions, size.seq or 1),
        ):
            if owner is None:
                continue
            wanted = torch.arange(n) if wanted is None else wanted
            rank = torch.full((n + 1,), -1)  # the last one is for places that belong to none
            rank[wanted] = torch.arange(len(wanted))
            last = (owner + axis.stride - 1).clamp(max=n - 1)
            at = rank[owner.masked_fill((owner < 0) | (owner >= n), n)]
            at = at.masked_fill(rank[last] < 0, -1)  # all positions of a place must be wanted
            number = torch.where((at < 0) | (number < 0), -1, number * (n + 1) + at)
        order = number.argsort(stable=True)
        order = order[number[order] >= 0]
        places.append(number[order])
        t = t.index_select(dim, order.to(t.device))
    return t, places
