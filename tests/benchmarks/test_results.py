"""What is kept of benchmarks: every file says what it is of, where it was measured, and by which versions; one layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import RESULTS, Table, as_lines, kept, scripts, tables_of, timed
from benchmarks.kernels import CASES

GPU = {"gpu_ranks", "gpu_offload"}  # parts of `make gpu`, kept as they came from the card


def test_a_kept_result_says_where_it_was_measured() -> None:
    tables = GPU | {name for script in scripts() for name in tables_of(script)}
    for path in RESULTS.glob("*.json"):
        body = json.loads(path.read_text(encoding="utf-8"))
        assert path.name.startswith(body["benchmark"])
        assert body["benchmark"].partition("-")[0] in tables, path.name
        assert body.get("date") or body["machine"].get("date"), path.name
        assert body["machine"]["python"], path.name
        assert body["versions"]["zbsolve"], path.name
        assert kept(path), path.name


def test_the_harness_keeps_arguments_machine_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def toy(
        ranks: int = 4, shares: tuple[float, ...] = (1.0,), file: Path | None = None, tiny: bool = False
    ) -> dict[str, Any]:
        """Says what it measures."""
        return {"samples": timed(lambda: None, ranks)[0], "tiny": tiny}

    table = Table(toy, lambda ranks, **_: f"toy-p{ranks}")
    words = ["--ranks", "3", "--shares", "0.5", "2", "--tiny", "--file", "/somewhere/x.json"]
    results = table.main([*words, "-o", str(tmp_path / "new")])
    body = json.loads((tmp_path / "new" / "toy-p3.json").read_text())
    assert body["results"] == results
    assert (len(results["samples"]), results["tiny"]) == (3, True)
    assert body["arguments"] == {"ranks": 3, "shares": [0.5, 2.0], "file": "x.json", "tiny": True}
    assert {"cpu", "cores", "python"} <= set(body["machine"])
    assert {"date", "load", "seconds"} <= set(body)
    assert ("torch" in body["versions"]) == ("torch" in sys.modules)
    table.main(["-o", str(tmp_path / "named.json")])
    assert kept(tmp_path / "named.json")["samples"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        table.main(["--help"])
    assert "Says what it measures." in capsys.readouterr().out


def test_rows_and_samples_stand_in_one_line() -> None:
    body = {"name": "[a\n{", "samples": [1.5] * 999, "rows": [{"proof": "x ≤ y", "steps": [[1, 2], [3, 4]]}] * 99}
    text = as_lines(body)
    assert json.loads(text) == body
    assert len(text.splitlines()) == 2 + 1 + 1 + 2 + 99
    assert ' {"proof": "x ≤ y", "steps": [[1, 2], [3, 4]]},' in text


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_found_where_they_are(name: str) -> None:
    assert callable(CASES[name]())
