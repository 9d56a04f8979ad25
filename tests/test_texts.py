"""Texts fit, and numbers have three digits."""

import pytest

from hookkit.texts import clip, nbytes, percent, si, wrap


@pytest.mark.parametrize("n", range(1, 12))
def test_a_clipped_text_fits_and_ends_with_an_ellipsis(n: int) -> None:
    assert len(clip("TransformerEncoder", n)) == n
    assert clip("TransformerEncoder", n).endswith("…")
    assert clip("short", 5) == "short"


def test_wrap_breaks_between_parts_only() -> None:
    assert wrap(["aa", "bb", "cc dd ee"], 7) == ["aa · bb", "cc dd ee"]
    assert wrap([], 7) == []


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (1_049_000, "1.05 M"),
        (99_949, "99.9 k"),
        (99_951, "100 k"),
        (999_499, "999 k"),
        (999_500, "1.00 M"),
        (137_228_578_652_160, "137 T"),
    ],
)
def test_si_has_three_digits(n: int, text: str) -> None:
    assert si(n) == text


def test_nbytes_is_decimal() -> None:
    assert [nbytes(n) for n in (0, 1, 1024, 10**9, 5 * 10**18)] == [
        *("0 B", "1 B", "1.02 kB", "1.00 GB", "5.00 EB")
    ]


def test_percent_is_never_rounded_to_all_or_nothing() -> None:
    assert [percent(p, 1000) for p in (0, 1, 500, 995, 999, 1000)] == [
        *("0%", "<1%", "50%", ">99%", ">99%", "100%")
    ]
    assert percent(1, 0) == "0%"
