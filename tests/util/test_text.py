"""Rows, numbers and lines as text."""

from __future__ import annotations

import pytest

from zbsolve.util.text import (
    aligned,
    counted,
    exact_bytes,
    format_bytes,
    format_gap,
    format_time,
    format_times,
    plural,
    printable,
)


def test_columns_stand_left_or_right_two_blanks_apart() -> None:
    rows = [("name", "µs", "by"), ("a", "1,000", "x"), ("long name", "2", "")]
    assert aligned(rows) == ["name          µs  by", "a          1,000   x", "long name      2    "]
    assert aligned(rows, left=(0, -1)) == ["name          µs  by", "a          1,000  x", "long name      2"]
    assert aligned(rows, left=range(3)) == ["name       µs     by", "a          1,000  x", "long name  2"]


def test_one_and_several() -> None:
    assert plural(rank=1, more_stage=2, pass_=3, microbatch=1_000) == "1 rank, 2 more stages, 3 passes, 1,000 microbatches"
    assert plural(pass_=1) == "1 pass"


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0 µs"), (850, "850 µs"), (9_999, "9,999 µs"), (12_400, "12.40 ms"), (1e7, "10.00 s"), (32e6, "32.00 s")],
)
def test_times(us: float, text: str) -> None:
    assert format_time(us) == text


def test_times_side_by_side_have_the_unit_of_the_largest() -> None:
    assert format_times(8_172, 62_460, 0) == ["8.17 ms", "62.46 ms", "0.00 ms"]
    assert format_times(9_999, 1) == ["9,999 µs", "1 µs"]
    assert format_times(1e7, 12_345) == ["10.00 s", "0.01 s"]


def test_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 20 << 20, 3.2 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "20.0 MiB",
        "3.20 GiB",
    ]
    assert exact_bytes(12091588608) == "12091588608 bytes (11.3 GiB)"
    assert exact_bytes(300) == "300 bytes"


def test_a_gap_of_nothing_is_optimal() -> None:
    assert [format_gap(gap) for gap in (0.0124, 0.0, -0.1)] == ["1.24%", "optimal", "optimal"]


def test_repeated_values_are_counted() -> None:
    assert counted([5, 4, 4, 4, 5]) == "5 4×3 5"
    assert counted([]) == ""


def test_control_characters_become_blanks() -> None:
    assert printable("a\x1b[31m\nb\u2028c µ") == "a [31m b c µ"
