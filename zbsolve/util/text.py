"""Numbers, rows and lines as text for people."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import groupby

from .errors import BadInput

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Rows of equally many cells as lines, two blanks between columns.

    left: the columns that stand to the left, the others stand to the right; -1 is the last one, behind which no blanks are
    left then.
    """
    count = len(rows[0])
    lefts = {i % count for i in left}
    widths = [max(len(row[i]) for row in rows) for i in range(count)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        line = "  ".join(cell.ljust(width) if i in lefts else cell.rjust(width) for i, (cell, width) in cells)
        lines.append(line.rstrip() if count - 1 in lefts else line)
    return lines


def counted(values: Sequence[object]) -> str:
    """`5 4×6 5`: values in a row, repeated ones counted."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    return " ".join(f"{value}×{times}" if times > 1 else str(value) for value, times in runs)


def printable(text: str) -> str:
    """`text` on one line without control characters: files are written by others, and terminals obey what they print."""
    return "".join(c if c.isprintable() else " " for c in text)


def format_time(us: float) -> str:
    """µs as a person reads them: `850 µs`, `12.40 ms`, `3.21 s`."""
    if abs(us) < 10_000:
        return f"{us:,.0f} µs"
    return f"{us / 1e3:,.2f} ms" if abs(us) < 1e7 else f"{us / 1e6:,.2f} s"


def format_bytes(size: float) -> str:
    """Bytes as a person reads them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            digits = 0 if unit == "B" or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def exact_bytes(size: float) -> str:
    """Whole bytes, and how a person reads them: `12091588608 bytes (11.3 GiB)`."""
    return f"{size:.0f} bytes" + (f" ({format_bytes(size)})" if size >= 1024 else "")


def parse_bytes(text: str | int) -> int:
    """Bytes from `40GiB`, `512MB` or a plain number. Raises BadInput."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in UNITS or match[1].count(".") > 1 or match[1] == "." or len(match[1]) > 30:
        raise BadInput(f"memory '{str(text)[:40]}': not a number of bytes such as 40GiB, 512MB or 1000000")
    return int(float(match[1]) * UNITS[match[2].upper()])


def format_gap(gap: float) -> str:
    """A certificate's gap as a share, or "optimal" where nothing is left: `1.24%`."""
    return f"{gap:.2%}" if gap > 0 else "optimal"
