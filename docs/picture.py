"""Draws docs/picture.svg, the README's picture: `python docs/picture.py` writes it anew.

One training step of Llama 3 8B on eight ranks, estimated for an H100, twice on one time axis: in the order of 1F1B, with its
backward split too, and in the order that `solve` finds. Both are orders of the same passes. The search counts its work in
place of time, so the file is the same on every machine; a test holds that.
"""

from __future__ import annotations

from pathlib import Path

from zbsolve import Profile, Schedule, Step, preset, solve
from zbsolve.show import Style, comparison_drawing, to_svg

DOCS = Path(__file__).parent
PROFILE = DOCS.parent / "benchmarks" / "profiles" / "estimated-llama3-8b-h100.json"
WIDTH = 1000  # pixels; a page of GitHub shows about 850
TITLE = "One training step of Llama 3 8B, 8 ranks, 16 microbatches, in two orders of the same passes"


def schedules() -> tuple[Schedule, Schedule]:
    """1F1B's order with a split backward and the solved one, of one problem."""
    problem = Step(ranks=8, microbatches=16).problem(Profile.load(PROFILE))
    return preset("1f1b-split", problem), solve(problem, effort=0.3)


def picture() -> str:
    """Both schedules as one SVG document."""
    first, second = schedules()
    named = [("1F1B with a split backward", first), ("zbsolve", second)]
    return to_svg(comparison_drawing(named, Style(width=WIDTH, title=TITLE)))


if __name__ == "__main__":
    (DOCS / "picture.svg").write_text(picture(), encoding="utf-8")
