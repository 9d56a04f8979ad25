"""Which axes hold samples and positions, read from the shapes of two runs."""

import pytest
import torch

from hookkit.inspection.axes import Axis, Region, Size, readings, take

A, B = Size(3, 8), Size(4, 5)


def texts(shape: tuple[int, ...], other: tuple[int, ...], a: Size = A, b: Size = B) -> list[str]:
    return list(dict.fromkeys(" × ".join(map(str, r)) for r in readings(shape, other, a, b)))


@pytest.mark.parametrize(
    ("shape", "other", "read"),
    [
        ((3, 8, 16), (4, 5, 16), "samples × positions × –"),
        ((8, 3, 16), (5, 4, 16), "positions × samples × –"),
        ((3, 2, 8, 8), (4, 2, 5, 5), "samples × – × positions × positions"),
        ((24, 5), (20, 5), "samples·positions × –"),
        ((6, 8), (8, 5), "samples × positions"),  # two heads for each sample
        ((3, 10), (4, 7), "samples × positions"),  # a prefix of two
        ((16,), (10,), "positions"),  # two places for each
    ],
)
def test_an_axis_is_read_by_how_it_follows_the_size(
    shape: tuple[int, ...], other: tuple[int, ...], read: str
) -> None:
    assert texts(shape, other) == [read]


def test_axes_of_equal_length_are_told_apart() -> None:
    assert texts((8, 8, 8), (9, 6, 8), Size(8, 8), Size(9, 6)) == ["samples × positions × –"]


def test_a_shape_that_follows_neither_has_no_reading() -> None:
    assert texts((5, 16), (7, 16)) == []
    assert texts((3, 8), (4, 5, 1)) == []


def test_an_axis_is_read_by_its_length_if_no_other_size_runs() -> None:
    found = texts((3, 8, 8), (3, 8, 8), A, A)

    assert found[0] == "samples × positions × positions"
    assert "samples × positions × –" in found


def taken(t: torch.Tensor, axis: Axis, size: Size, region: Region) -> list[int]:
    part = take(t, (axis,), size, region)
    assert part is not None
    return part[0].tolist()


def test_the_places_of_a_region_come_in_its_order() -> None:
    x, last_first = torch.arange(6), Region(samples=torch.tensor([2, 0]))

    assert taken(x[:3], Axis(samples=True), Size(3), last_first) == [2, 0]
    assert taken(x, Axis(samples=True, each=2), Size(3), last_first) == [4, 5, 0, 1]
    repeated = Axis(samples=True, each=2, side_by_side=False)
    assert taken(x, repeated, Size(3), last_first) == [2, 5, 0, 3]


def test_pairs_of_samples_and_positions_are_cut_by_both() -> None:
    x, region = torch.arange(6), Region(torch.tensor([1]), torch.tensor([0, 2]))
    pairs = {"samples": True, "positions": True}

    assert taken(x, Axis(**pairs), Size(2, 3), region) == [3, 5]
    assert taken(x, Axis(**pairs, side_by_side=False), Size(2, 3), region) == [1, 5]


def test_extra_places_belong_to_no_position() -> None:
    x, region = torch.arange(6), Region(positions=torch.tensor([0, 1]))

    assert taken(x, Axis(positions=True, extra=2), Size(1, 4), region) == [0, 1]
    assert taken(x, Axis(positions=True, extra=2, in_front=True), Size(1, 4), region) == [2, 3]
    missing = Axis(positions=True, extra=-1, in_front=True)
    assert taken(x[:3], missing, Size(1, 4), region) == [0]


def test_a_length_that_does_not_follow_the_size_is_not_taken() -> None:
    assert take(torch.arange(5), (Axis(positions=True),), Size(1, 4), Region()) is None
