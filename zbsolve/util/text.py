"""Numbers, rows and lines formatted for people."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby, zip_longest

from .errors import BadInput

BYTES = {"": 1, "B": 1}
BYTES |= {f"{prefix}B": 1000**n for n, prefix in enumerate("KMGT", 1)}
BYTES |= {f"{prefix}IB": 1024**n for n, prefix in enumerate("KMGT", 1)}
TIMES = {"": 1.0, "ns": 1e-3, "us": 1.0, "µs": 1.0, "μs": 1.0, "ms": 1e3, "s": 1e6}  # µ: the micro sign and the Greek letter
BITS = {"bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
LARGEST = 2.0**62  # µs or bytes: beyond, sums do not fit
BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # as they are shown


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Rows of equally many cells as lines, two blanks between columns.

    left: the columns that are aligned to the left; all others are aligned to the right. -1 is the last one; lines then have
    no blanks at their end.
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


def did_you_mean(name: str, known: Iterable[str], at_most: int = 1) -> str:
    """`; did you mean a100?`: the end of a message, with the known names that are similar to `name`; empty if none is."""
    near = difflib.get_close_matches(name, known, n=at_most, cutoff=0.4)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def first_difference(row: Iterable[str], other: Iterable[str]) -> tuple[int, str, str] | None:
    """The first place, from 0, where two sequences differ, and the word of each ("nothing" after its end); None: equal."""
    pairs = enumerate(zip_longest(row, other, fillvalue="nothing"))
    return next(((place, a, b) for place, (a, b) in pairs if a != b), None)


def counted(values: Sequence[object]) -> str:
    """`5 4×6 5`: values in order, with repetitions counted."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    return " ".join(f"{value}×{times}" if times > 1 else str(value) for value, times in runs)


def plural(**counts: int) -> str:
    """`1 rank, 2 more stages, 3 passes` from `rank=1, more_stage=2, pass_=3`."""
    ends = {noun: "" if n == 1 else "es" if noun.endswith(("ch", "s_")) else "s" for noun, n in counts.items()}
    return ", ".join(f"{n:,} {noun.replace('_', ' ').strip()}{ends[noun]}" for noun, n in counts.items())


def printable(text: str) -> str:
    """`text` on one line without control characters: files come from others, and terminals obey what they print."""
    return "".join(c if c.isprintable() else " " for c in text)


def format_time(us: float) -> str:
    """µs in a readable unit: `850 µs`, `12.40 ms`, `3.21 s`."""
    return format_times(us)[0]


def format_times(*times: float) -> list[str]:
    """Times for one row, all in the unit of the largest: `8.17 ms`, `62.46 ms`."""
    largest = max(map(abs, times), default=0.0)
    if largest < 10_000:
        return [f"{us:,.0f} µs" for us in times]
    return [f"{us / 1e3:,.2f} ms" if largest < 1e7 else f"{us / 1e6:,.2f} s" for us in times]


def exact_time(us: float) -> str:
    """Whole µs, readable and without rounding: `850 µs`, `1,310.405 ms`."""
    return f"{us:,.0f} µs" if abs(us) < 10_000 else f"{us / 1e3:,.3f} ms"


def time_unit(largest: float, digits: int = 2) -> tuple[str, Callable[[float], str]]:
    """The unit for all times of a table whose largest is `largest` µs, and a function that formats one; digits: for ms."""
    if largest < 10_000:
        return "µs", lambda us: f"{us:,.0f}"
    return "ms", lambda us: f"{us / 1e3:,.{digits}f}"


def format_bytes(size: float) -> str:
    """Bytes in a readable unit, in powers of 1024."""
    unit = next((unit for unit, base in BINARY.items() if abs(size) < 1024 * base), "TiB")
    shown = size / BINARY[unit]
    digits = 2 if unit == "TiB" else 0 if unit == "B" or abs(shown) >= 100 else 1 if abs(shown) >= 10 else 2
    return f"{shown:.{digits}f} {unit}"


def in_one_unit(sizes: Sequence[int]) -> tuple[str, list[str]]:
    """`GiB` and `25.3`, `22.1`, `9.4`: the unit of the largest, and all bytes in it."""
    number, unit = format_bytes(max(sizes)).split()
    digits = len(number.partition(".")[2])
    return unit, [f"{size / BINARY[unit]:.{digits}f}" for size in sizes]


def exact_bytes(size: float) -> str:
    """Whole bytes, and a readable form: `12091588608 bytes (11.3 GiB)`."""
    return f"{size:.0f} bytes" + (f" ({format_bytes(size)})" if size >= 1024 else "")


def parse_bytes(text: str | int, what: str = "memory") -> int:
    """Bytes from `40GiB`, `512MB` or a plain number. Raises BadInput naming `what`."""
    size = _amount(text, _bytes_in(text))
    if size is None and "," in str(text):
        raise BadInput(f"{what} '{str(text)[:40]}': one number for all is needed here, no list")
    if size is None:
        raise _wrong(text, what, "a number of bytes", "40GiB, 512MB or 1000000")
    if not size.is_integer() and not _unit(text).upper().strip("B"):
        raise BadInput(f"{what} '{str(text)[:40]}': a fraction of a byte: write a unit, such as {str(text).strip(' Bb')}GiB")
    return int(size)


def bytes_of_ranks(text: str | int, ranks: int) -> tuple[int, ...]:
    """Each rank's memory in bytes, from one number for all or one per rank: `16GB,16GB,8GB,8GB`. Raises BadInput."""
    parts = [part.strip() for part in str(text).split(",")]
    if len(parts) > 1 and "" in parts:
        raise BadInput(f"memory '{str(text)[:40]}': none for rank {parts.index('')}: give one number, or one a rank")
    sizes = tuple(map(parse_bytes, parts))
    if len(sizes) not in (1, ranks):
        raise BadInput(f"memory '{str(text)[:40]}': {len(sizes)} numbers for {ranks} ranks: give one, or one a rank")
    return sizes * (ranks // len(sizes))


def parse_time(text: str | float, what: str) -> float:
    """µs from `12.1ms`, `850us`, `3s`, `900ns` or a plain number of µs. Raises BadInput naming `what`."""
    us = _amount(text, TIMES)
    if us is None:
        raise _wrong(text, what, "a time", "12.1ms, 850us or 3s")
    return us


def _wrong(text: str | float, what: str, noun: str, such_as: str) -> BadInput:
    negative = re.match(r"\s*-\s*[\d.]", str(text))
    return BadInput(
        f"{what} '{str(text)[:40]}': " + (f"{noun} may not be negative" if negative else f"not {noun} such as {such_as}")
    )


def parse_share(text: str, what: str) -> float:
    """A share from `1%` or `0.01`; from 1 on it needs its %, since 1 may be meant as 1 %. Raises BadInput naming `what`."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise BadInput(f"{what} '{text}': a share such as 1% or 0.01 is needed")
    if share >= 1 and not percent:
        raise BadInput(f"{what} '{text}': write {text.strip()}% or {share:.0%}: without % a share is below 1")
    return share


def parse_rate(text: str | float, what: str) -> float:
    """Bytes a µs from `50GB/s`, `400Gbit/s` or a plain number of bytes a µs. Raises BadInput naming `what`."""
    amount, per, _ = str(text).strip().rpartition("/s")
    bits = {unit: size / 8 for unit, size in BITS.items()}
    byte = _bytes_in(amount) if amount.endswith("B") else {}  # Gb is a unit of bits
    rate = _amount(amount, {**bits, **byte}) if per else _amount(text, {"": 1e6})
    if rate is None:
        raise _wrong(text, what, "a bandwidth", "50GB/s, 400Gbit/s or 50000 (bytes a µs)")
    return rate / 1e6


def has_unit(text: str) -> bool:
    """Whether an amount states its unit."""
    return bool(_unit(text))


def _unit(text: str | float) -> str:
    return str(text).strip().lstrip("0123456789. ")


def _bytes_in(text: str | float) -> dict[str, float]:
    """The unit of bytes that `text` ends with, in any case, and its size."""
    unit = _unit(text)
    return {unit: BYTES[unit.upper()]} if unit.upper() in BYTES else {}


def _amount(text: str | float, units: Mapping[str, float]) -> float | None:
    """The number in `text` times its unit; None unless it is a number ≥ 0 with such a unit."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([^\d\s]*)\s*", str(text), re.ASCII)
    if match is None or match[2] not in units or len(match[1]) > 30:
        return None
    amount = float(match[1]) * units[match[2]]
    return amount if amount < LARGEST else None


def times_note(source: str) -> str:
    """A note on times from this source (a profile's, or a problem's): "" for measured ones, and for an unknown source."""
    return "" if re.match(r"measured(:| with split |$)", source) or not source else f"times are {source}, not measured"


def format_gap(gap: float) -> str:
    """A certificate's gap as a share, or "optimal" if it is zero: `1.24%`."""
    return f"{gap:.2%}" if gap > 0 else "optimal"


def numbers_in(text: str) -> Sequence[int]:
    """The whole numbers of "5" or "4-7", at most a million. Raises ValueError."""
    first, dash, last = text.strip().partition("-")
    if not dash or not first:
        return [int(text)]
    low, high = int(first), int(last)
    if not low <= high < low + 1_000_000:
        raise ValueError(text)
    return range(low, high + 1)


def rows_of_numbers(numbers: Sequence[int]) -> list[str]:
    """Ascending whole numbers as `numbers_in` reads them, with consecutive ones joined: "0", "4-7"."""
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    rows = [[number for _, number in group] for _, group in groups]
    return [f"{row[0]}" if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows]
