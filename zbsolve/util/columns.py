"""Columns of whole numbers, from lists and words, and in files: a list of values, or, if shorter, its runs in one text: `7`,
`5*32` (32 times 5), `0..31` (0, 1, … 31), separated by blanks.

Also loops over columns that numpy has no function for, and statistics of samples: quartiles, weighted medians, and the
uncertainty of a median."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import BadInput

MAX_ROWS = 1 << 26  # of one column: a short text must not fill the memory
MIN_SAVING = 2  # values per run on average; below, the column is written as a list
RUN = re.compile(r"(\d{1,18})(?:\*(\d{1,18})|\.\.(\d{1,18}))?")
WORD_RUN = re.compile(r"([A-Za-z_]{1,40})(?:\*(\d{1,18}))?")
Ints = NDArray[np.int64]


def whole_column(values: Any, what: str) -> Ints:
    """Whole numbers as an array of shape (rows,). Raises BadInput naming `what`."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists among the numbers
        raise BadInput(f"{what}: whole numbers are needed, got a list of lists") from None
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise BadInput(f"{what}: whole numbers are needed, got {array.dtype if array.ndim == 1 else 'a list of lists'}")
    return np.ascontiguousarray(array, np.int64)


def coded(words: ArrayLike, known: Sequence[str], what: str, count: int = 1) -> Ints:
    """Indices of words in `known`, shape (rows,); one word stands for `count` rows. Raises BadInput naming `what`."""
    distinct, place = np.unique(np.atleast_1d(np.asarray(words, str)), return_inverse=True)
    unknown = [word for word in distinct.tolist() if word not in known]
    if unknown:
        raise BadInput(f"unknown {what} '{unknown[0]}' (one of {' '.join(known)})")
    number = np.array([known.index(word) for word in distinct.tolist()], np.int64)
    return np.full(count, number[0]) if np.ndim(words) == 0 else number[place.reshape(-1)]


def packed(column: Ints) -> list[int] | str:
    """Whole numbers of shape (rows,) for a file: see `unpacked`."""
    values, counts = runs(column)
    goes_on = (counts[:-1] == 1) & (counts[1:] == 1) & (np.diff(values) == 1)
    first = np.flatnonzero(np.append(True, ~goes_on)[: len(values)])
    if len(column) == 0 or int(column.min()) < 0 or MIN_SAVING * len(first) > len(column):
        return list(column.tolist())
    ends = values[np.append(first[1:], len(values)) - 1].tolist()
    rows = zip(values[first].tolist(), counts[first].tolist(), ends, strict=True)
    return " ".join(f"{a}*{count}" if count > 1 else f"{a}..{end}" if end > a else str(a) for a, count, end in rows)


def packed_words(codes: Ints, words: Sequence[str]) -> list[str] | str:
    """Words for a file, as indices into `words` of shape (rows,): see `unpacked_words`."""
    values, counts = runs(codes)
    if len(codes) == 0 or MIN_SAVING * len(values) > len(codes):
        return [words[code] for code in codes.tolist()]
    rows = zip(values.tolist(), counts.tolist(), strict=True)
    return " ".join(f"{words[code]}*{count}" if count > 1 else words[code] for code, count in rows)


def runs(column: Ints) -> tuple[Ints, Ints]:
    """Values and run lengths; for a sorted column its distinct values and their counts (numpy's `unique` uses hashing, which
    takes ten times as long for whole numbers that lie close together)."""
    first = np.flatnonzero(np.diff(column, prepend=column[:1] - 1))
    return column[first], np.diff(np.append(first, len(column)))


def unpacked(text: str, what: str) -> Ints:
    """The whole numbers, shape (rows,), that the runs in `text` stand for. Raises BadInput naming `what`."""
    first, counts, steps = [], [], []
    for token in text.split():
        run = RUN.fullmatch(token)
        end = int(run[3]) if run and run[3] else None
        if run is None or (end is not None and end < int(run[1])):
            raise BadInput(f"{what}: '{token[:40]}' is no run such as 7, 5*32 or 0..31")
        first.append(int(run[1]))
        counts.append(int(run[2] or 1) if end is None else end - first[-1] + 1)
        steps.append(end is not None)
    repeats = _checked(counts, what)
    rising = np.array(steps, np.int64)
    column = np.repeat(np.array(first, np.int64) - rising * (np.cumsum(repeats) - repeats), repeats)
    if rising.any():
        column += np.repeat(rising, repeats) * np.arange(len(column))
    return column


def unpacked_words(text: str, code: Callable[[str], int], what: str) -> Ints:
    """`code` of each word, shape (rows,), that the runs in `text` stand for. Raises BadInput naming `what`."""
    codes, counts = [], []
    for token in text.split():
        run = WORD_RUN.fullmatch(token)
        if run is None:
            raise BadInput(f"{what}: '{token[:40]}' is no run such as F or F*32")
        codes.append(code(run[1]))
        counts.append(int(run[2] or 1))
    return np.repeat(np.array(codes, np.int64), _checked(counts, what))


def _checked(counts: list[int], what: str) -> Ints:
    """The run lengths. Raises BadInput if they make the column too long."""
    if sum(counts) > MAX_ROWS:
        raise BadInput(f"{what}: {sum(counts)} rows are more than a column has ({MAX_ROWS})")
    return np.array(counts, np.int64)


MANY_ROWS = 50_000  # beyond, loading numba and its compiled code is worth it


def looped(loop: Callable[..., Any], *columns: NDArray[np.int64]) -> Any:
    """`loop(*columns)`: on lists if these are short, else compiled. It must return the columns that it writes."""
    if max(map(len, columns)) < MANY_ROWS:
        return loop(*(column.tolist() for column in columns))
    return compiled(loop)(*(np.ascontiguousarray(column, np.int64) for column in columns))


@cache
def compiled(loop: Callable[..., Any]) -> Any:
    """The loop as a kernel, compiled on its first call: numba loads slowly, and short commands do not need it."""
    from .kernels import kernel

    return kernel(loop)


def quartiles(samples: ArrayLike) -> tuple[float, float]:
    """The lower and the upper quartile, interpolated between samples; over all elements of an array of any shape."""
    low, high = np.quantile(np.asarray(samples), (0.25, 0.75)).tolist()
    return low, high


def weighted_median(samples: ArrayLike, weights: ArrayLike) -> float:
    """The number u that minimises the sum of weight · |sample − u|, the middle one of several: with equal weights the
    median. Arrays of one shape, over all elements; weights above 0."""
    values, parts = np.ravel(np.asarray(samples, np.float64)), np.ravel(np.asarray(weights, np.float64))
    order = np.argsort(values, kind="stable")
    below = np.cumsum(parts[order])
    low, high = (int(np.searchsorted(below, below[-1] / 2, side)) for side in ("left", "right"))
    return float((values[order[low]] + values[order[high]]) / 2)


def median_error(samples: Sequence[float]) -> float:
    """Half the width of a 95 % interval around the median, relative to the median: 1.57 interquartile ranges over √n
    (McGill, Tukey and Larsen 1978, the notch of a box plot). 0 where the median is 0."""
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75)).tolist()
    return float(1.57 * (high - low) / len(samples) ** 0.5 / middle) if middle > 0 else 0.0
