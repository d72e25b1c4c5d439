"""Columns in files: what is written comes back, and regular ones are short."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbsolve.kinds import KINDS
from zbsolve.util.columns import packed, packed_words, unpacked, unpacked_words
from zbsolve.util.errors import BadInput

RUNS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.booleans()))


@given(RUNS)
def test_what_is_packed_comes_back(runs: list[tuple[int, int, bool]]) -> None:
    values = [first + (i if rising else 0) for first, count, rising in runs for i in range(count)]
    said = packed(np.array(values, np.int64))
    assert (unpacked(said, "x").tolist() if isinstance(said, str) else said) == values
    words = packed_words(np.array(values, np.int64) % 5, KINDS)
    expected = [value % 5 for value in values]
    found = unpacked_words(words, KINDS.index, "x").tolist() if isinstance(words, str) else [*map(KINDS.index, words)]
    assert found == expected


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0, 1, 2, 3, 0, 1, 2, 3], "0..3 0..3"),
        ([5, 5, 5, 6, 6, 6, 7], "5*3 6*3 7"),
        ([4, 7, 1, 9], [4, 7, 1, 9]),
        ([-1, -1, -1, -1], [-1, -1, -1, -1]),
        ([], []),
        ([0, 0, 0, 1, 2, 3, 3, 3], "0*3 1..2 3*3"),
    ],
)
def test_runs_are_written_where_they_are_shorter(values: list[int], said: str | list[int]) -> None:
    assert packed(np.array(values, np.int64)) == said


@pytest.mark.parametrize("text", ["x", "3..1", "1*", "*3", "-1", "1..2..3", "1*2*3", "1.5", "9" * 19])
def test_what_is_no_run_is_named(text: str) -> None:
    with pytest.raises(BadInput, match=r"rank: '.*' is no run such as"):
        unpacked(f"0*3 {text}", "rank")


def test_a_short_text_does_not_fill_the_memory() -> None:
    for text in ("0*99999999999999999", "0..99999999999999999"):
        with pytest.raises(BadInput, match="rows are more than a column has"):
            unpacked(text, "rank")
