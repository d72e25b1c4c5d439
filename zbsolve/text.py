"""Tables and sizes as text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """First column to the left, the others to the right, two blanks between."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


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
