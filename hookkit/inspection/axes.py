"""Find which axes of a tensor hold samples and positions, from a second run at another size.

An axis that grew with the batch holds samples, one that shrank with the sequence holds positions,
and one that followed both holds both. If the order inside an axis is not known, the tensor has
several readings, and counts as changed only if it has changed in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Places = NDArray[np.int64]
"""Indices of places along an axis, or of their samples or positions; one dimension."""

_MOST_READINGS = 32


class Size(NamedTuple):
    """Holds how many samples and positions a run has; `seq` is None without positions."""

    batch: int
    seq: int | None = None


class Region(NamedTuple):
    """Selects samples and positions of a run, by ordered int64 indices; None selects all."""

    samples: Tensor | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class Axis:
    """Describes what the places along one axis hold.

    Attributes:
        samples, positions: whether the axis holds them; both if it holds each pair of the two.
        each: how many places there are for one sample, position or pair.
        side_by_side: whether these places are neighbours. If not, the whole sequence of samples or
            positions is repeated `each` times. An axis of pairs is sample-major if True, and
            position-major if False.
        extra: how many places there are beyond the positions; less than 0 if some are missing.
        in_front: whether the extra or missing places are at the beginning.
    """

    samples: bool = False
    positions: bool = False
    each: int = 1
    side_by_side: bool = True
    extra: int = 0
    in_front: bool = False

    def __str__(self) -> str:
        held = ["samples"] * self.samples + ["positions"] * self.positions
        return "·".join(held) or "–"

    def owners(self, size: Size) -> tuple[Places | None, Places | None]:
        """Return the sample and the position of each place, two vectors.

        A vector is None if the axis holds no samples (or positions). A place that belongs to no
        sample or position has -1 or a number beyond the last.

        >>> Axis(samples=True, each=2).owners(Size(3))[0]
        array([0, 0, 1, 1, 2, 2])
        """
        batch, seq = size.batch, size.seq or 1
        n = (batch if self.samples else 1) * (seq if self.positions else 1)
        place = np.arange(n * self.each + self.extra)
        if self.samples and self.positions:
            pair = place // self.each
            one, other = (seq, batch) if self.side_by_side else (batch, seq)
            inner, outer = pair % one, pair // one % other
            return (outer, inner) if self.side_by_side else (inner, outer)
        if self.each > 1:
            place = place // self.each if self.side_by_side else place % n
        place = place - self.extra * self.in_front
        return (place, None) if self.samples else (None, place)


Reading = tuple[Axis, ...]
"""What each axis of a tensor holds."""


def readings(shape: tuple[int, ...], other: tuple[int, ...], a: Size, b: Size) -> list[Reading]:
    """Return all readings of a tensor's axes; [] if an axis follows neither samples nor positions.

    Args:
        shape: the tensor's shape in the run at size `a`.
        other: its shape in the run at size `b`.
        a: the size of the run that is read.
        b: the other size. If it has the same number of samples (or positions), an axis of that
            length counts as holding them.

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
    """Return the readings of one axis whose length is `m` at size `a` and `n` at size `b`."""
    found = list[Axis]()
    if m == n:
        found += [Axis(samples=True)] * (a.batch == b.batch == m)
        found += [Axis(positions=True)] * (a.seq == b.seq == m)
        return [*found, Axis()]
    seq, other = a.seq or 0, b.seq or 0
    counts = [(True, False, a.batch, b.batch)]
    if seq != other:
        counts += [(False, True, seq, other), (True, True, a.batch * seq, b.batch * other)]
    for samples, positions, in_a, in_b in counts:
        each, rest = divmod(m, in_a)
        if rest == 0 and n == each * in_b and in_a != in_b:
            orders = (True, False) if each > 1 or (samples and positions) else (True,)
            found += [Axis(samples, positions, each, order) for order in orders]
    if not found and m - n == seq - other:  # padded, or with a prefix; shifted, if some are missing
        found = [Axis(positions=True, extra=m - seq, in_front=front) for front in (False, True)]
    return found


def take(
    t: Tensor, reading: Reading, size: Size, region: Region
) -> tuple[Tensor, list[Places]] | None:
    """Return the part of `t` that belongs to `region`, and the numbers of its places.

    Returns None if the shape of `t` is not that of a run at `size`. The numbers count, for each
    axis of samples or positions, within the region. Two parts hold the same samples and positions
    only if their numbers are equal.

    >>> x = torch.arange(6).view(3, 2)
    >>> take(x, (Axis(samples=True), Axis()), Size(3), Region(torch.tensor([2, 0])))[0]
    tensor([[4, 5],
            [0, 1]])
    """
    places = list[Places]()
    for dim, axis in enumerate(reading):
        if not (axis.samples or axis.positions):
            continue
        samples, positions = axis.owners(size)
        number = np.zeros(t.shape[dim], np.int64)
        of_samples = samples, region.samples, size.batch
        of_positions = positions, region.positions, size.seq or 1
        for owner, wanted, n in (of_samples, of_positions):
            if owner is None:
                continue
            if len(owner) != len(number):
                return None
            rank = np.full(n + 1, -1)  # the last one is for places that belong to none
            chosen = np.arange(n) if wanted is None else wanted.numpy()
            rank[chosen] = np.arange(len(chosen))
            at = rank[np.where((owner < 0) | (owner >= n), n, owner)]
            number = np.where((at < 0) | (number < 0), -1, number * (n + 1) + at)
        order = number.argsort(kind="stable")
        order = order[number[order] >= 0]
        places.append(number[order])
        if len(order) < len(number) or (order[1:] < order[:-1]).any():
            t = t.index_select(dim, torch.from_numpy(order).to(t.device))
    return t, places
