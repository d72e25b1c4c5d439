"""Long rows of words as short text: what repeats is written once, `0F*16 (0F 0B 0W)*128 0B*16`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from ..problem import Ints
from ..util.errors import BadInput

MAX_WIDTH = 96  # words of a part that repeats at most
TOKEN = re.compile(r"\s*(?:\(([^()*]*)\)\*(\d{1,9})|([^\s()*]+)(?:\*(\d{1,9}))?)\s*")


def as_text(row: Ints, words: Sequence[str]) -> str:
    """Indices into `words`, shape (n,), as a text that `from_text` reads again."""
    parts, at, repeats = list[str](), 0, _repeats(row)
    while at < len(row):
        width = max(repeats, key=lambda one: _saved(int(repeats[one][at]), one), default=0)
        more = int(repeats[width][at]) // width if width else 0
        if more == 0:
            parts.append(words[row[at]])
            at += 1
            continue
        part = " ".join(words[one] for one in row[at : at + width].tolist())
        parts.append(f"({part})*{more + 1}" if width > 1 else f"{part}*{more + 1}")
        at += width * (more + 1)
    return " ".join(parts)


def _saved(same: int, width: int) -> int:
    """Words that need not be written where the next `width` ones come again for so many words."""
    return same // width * width - 1


def _repeats(row: Ints) -> dict[int, Ints]:
    """For each width and place how many of the following words are the ones `width` later; shape (n,) each."""
    found = {}
    for width in range(1, min(MAX_WIDTH, len(row) // 2) + 1):
        same = np.zeros(len(row), bool)
        same[:-width] = row[width:] == row[:-width]
        ends = np.flatnonzero(~same)
        found[width] = ends[np.searchsorted(ends, np.arange(len(row)))] - np.arange(len(row))
    return found


def from_text(text: str, index: Mapping[str, int], most: int, where: str) -> Ints:
    """The indices, shape (n,), that a text stands for. Raises BadInput for an unknown word, or more than `most` words."""
    parts, at, total = [], 0, 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise BadInput(f"{where}: '{text[at : at + 20]}' is no pass such as 0F, and no part such as (0F 0B)*12")
        names = found[1].split() if found[1] is not None else [found[3]]
        unknown = [name for name in names if name not in index]
        if unknown:
            raise BadInput(f"{where}: the step has no passes {unknown[0][:20]}")
        times = int(found[2] or found[4] or 1)
        total += times * len(names)
        if total > most:
            raise BadInput(f"{where}: more than {most} passes")
        parts.append(np.tile(np.array([index[name] for name in names], np.int64), times))
        at = found.end()
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
