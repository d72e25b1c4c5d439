"""`python -m benchmarks.NAME --help` says what it measures, and measures nothing."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    sys.modules.pop(f"benchmarks.{name}", None)  # runpy warns of a module that tests imported
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
