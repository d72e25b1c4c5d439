"""The README's picture is what the script draws, and its caption says what is in it."""

from __future__ import annotations

import runpy
from xml.etree import ElementTree

import pytest

from zbsolve.show.pictures.drawing import short_time

from ..support.docs import text_of
from ..support.house import ROOT


@pytest.mark.parametrize(("script", "picture"), [("offload_memory", "offload_memory"), ("contexts_picture", "contexts")])
def test_pictures_of_benchmarks_show_the_kept_results(script: str, picture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a new measurement: `python docs/SCRIPT.py` writes it anew."""
    monkeypatch.syspath_prepend(ROOT / "docs")  # as for a script that is run
    drawn = runpy.run_path(str(ROOT / "docs" / f"{script}.py"))["picture"]()
    assert drawn == (ROOT / "docs" / f"{picture}.svg").read_text(encoding="utf-8")


def test_the_committed_picture_is_what_the_script_draws() -> None:
    """After a change of the pictures or the search: `python docs/picture.py` writes it anew."""
    script = runpy.run_path(str(ROOT / "docs" / "picture.py"))
    drawn = script["picture"]()
    assert drawn == (ROOT / "docs" / "picture.svg").read_text(encoding="utf-8")
    words = " ".join(one for one in ElementTree.fromstring(drawn).itertext() if one.strip())
    first, second = script["schedules"]()
    assert first.problem == second.problem
    assert second.certificate.status == "optimal"
    readme = text_of("README.md")
    for schedule in (first, second):
        assert f"{short_time(schedule.timeline().makespan)} a step" in words
        assert f"takes {schedule.timeline().makespan / 1e3:,.0f} ms" in readme
    less = 1 - second.timeline().makespan / first.timeline().makespan
    assert f"takes {100 * less:.0f} % less time" in readme
    assert max(second.timeline().peak_bytes) > max(first.timeline().peak_bytes)
