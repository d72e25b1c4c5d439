"""What is kept of benchmarks: every file says what it is of, where it was measured, and by which versions; one layout."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import RESULTS, Benchmark, as_lines, kept, timed

FILES = sorted(path.name for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", FILES)
def test_a_kept_result_says_where_it_was_measured(name: str) -> None:
    body = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    assert name.startswith(body["benchmark"])
    assert (RESULTS.parent / f"{body['benchmark'].partition('-')[0]}.py").exists()
    assert body["machine"]["python"]
    assert body["versions"]["zbsolve"]
    assert kept(RESULTS / name)


def test_the_harness_keeps_arguments_machine_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", type=int, default=4)
        parser.add_argument("--file", type=Path)

    def measure(options: argparse.Namespace) -> dict[str, Any]:
        return {"samples": timed(lambda: None, options.ranks)[0]}

    one = Benchmark("toy", "Says what it measures.", measure, arguments, lambda options: f"toy-p{options.ranks}")
    results = one.main(["--ranks", "3", "--file", "/somewhere/x.json", "-o", str(tmp_path / "new")])
    body = json.loads((tmp_path / "new" / "toy-p3.json").read_text())
    assert body["results"] == results
    assert len(results["samples"]) == 3
    assert body["arguments"] == {"ranks": 3, "file": "x.json"}
    assert {"cpu", "cores", "python"} <= set(body["machine"])
    assert ("torch" in body["versions"]) == ("torch" in sys.modules)
    one.main(["-o", str(tmp_path / "named.json")])
    assert kept(tmp_path / "named.json")["samples"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        one.main(["--help"])
    assert "Says what it measures." in capsys.readouterr().out


def test_rows_and_samples_stand_in_one_line() -> None:
    body = {"name": "[a\n{", "samples": [1.5] * 999, "rows": [{"proof": "x ≤ y", "steps": [[1, 2], [3, 4]]}] * 99}
    text = as_lines(body)
    assert json.loads(text) == body
    assert len(text.splitlines()) == 2 + 1 + 1 + 2 + 99
    assert ' {"proof": "x ≤ y", "steps": [[1, 2], [3, 4]]},' in text
