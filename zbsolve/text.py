"""Tables, sizes and pages as text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


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


def html_page(title: str, style: str, body: str) -> str:
    """One HTML page that loads nothing and runs nothing; `style` is CSS beyond the common one, `body` HTML."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>"
        "body{margin:0;padding:22px 26px;background:#f7f8fa;color:#14171c;font:14px/1.45 system-ui,sans-serif}"
        "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
        "td,th{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid #dfe3e9;white-space:nowrap}"
        "th{color:#5a6270;font-weight:500}"
        f"{style}</style></head><body>{body}</body></html>\n"
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of cells as text; the first row is its head."""
    head, *body = rows
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>{lines}</table>"
