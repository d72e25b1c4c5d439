"""Long rows of words as short text: what repeats is written once, `0F*16 (0F 0B 0W)*128 0B*16`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from ..problem import Ints
from ..util.errors import BadInput
from ..util.kernels import kernel

MAX_WIDTH = 96  # words of a part that repeats at most
TOKEN = re.compile(r"\s*(?:\(([^()*]*)\)\*(\d{1,9})|([^\s()*]+)(?:\*(\d{1,9}))?)\s*")


def as_text(row: Ints, words: Sequence[str]) -> str:
    """Indices into `words`, shape (n,), as a text that `from_text` reads again."""
    parts = []
    for at, width, times in _parts(np.ascontiguousarray(row, np.int64), MAX_WIDTH).tolist():
        part = " ".join(words[word] for word in row[at : at + width].tolist())
        parts.append(part if times == 1 else f"({part})*{times}" if width > 1 else f"{part}*{times}")
    return " ".join(parts)


@kernel
def _parts(row: Ints, widest: int) -> Ints:
    """Where each part of a row begins, how wide it is and how often it comes, shape (parts, 3): at each place the width, up
    to `widest`, that saves most words."""
    parts, count, at = np.empty((len(row), 3), np.int64), 0, 0
    while at < len(row):
        width, times, saved = 1, 1, -1
        for wide in range(1, min(widest, (len(row) - at) // 2) + 1):
            end = at + wide
            while end < len(row) and row[end] == row[end - wide]:
                end += 1
            more = (end - at) // wide - 1
            if more > 0 and more * wide - 1 > saved:
                width, times, saved = wide, more + 1, more * wide - 1
        parts[count, 0], parts[count, 1], parts[count, 2] = at, width, times
        count += 1
        at += width * times
    return parts[:count]


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
