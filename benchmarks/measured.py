"""The measured steps that are kept in `benchmarks/measured_steps/`, as `csv.DictReader` gives them."""

from __future__ import annotations

import csv
from pathlib import Path

FOLDER = Path(__file__).parent / "measured_steps"


def rows_of(name: str) -> list[dict[str, str]]:
    """Rows of a file there, without the lines that say where it comes from."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def korthikanti() -> list[dict[str, str]]:
    """Table 5 of 2205.05198, with the column step_ms."""
    return [{**row, "step_ms": str(1e3 * float(row["step_s"]))} for row in rows_of("korthikanti.csv")]
