"""The page of a plan's space: every layout is in it with its bound and what pruned it, by the command and of the file."""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve.cli import main
from zbsolve.planner.bounds.space_bounds import RULES
from zbsolve.planner.layout import PLACEMENTS
from zbsolve.planner.plan_file import read_space
from zbsolve.planner.solved_space import SolvedSpace
from zbsolve.show.plan_report import plan_as_page
from zbsolve.util.text import format_time

from ..support.browser import PHONE, WIDE, opened

COMMAND = ["plan", "gpt-3.6b@layers=4", "--devices", "4", "--batch", "8", "--cluster", "a100", "--effort", "0.2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan and its page."""
    folder = tmp_path_factory.mktemp("plan")
    assert main([*COMMAND, "-o", str(folder / "plan.json"), "-o", str(folder / "space.html")]) == 0
    return folder


@pytest.fixture(scope="module")
def space(files: Path) -> SolvedSpace:
    return read_space(files / "plan.json")


def test_the_file_gives_the_same_page(files: Path, tmp_path: Path) -> None:
    made = (files / "space.html").read_text(encoding="utf-8")
    assert main(["show", str(files / "plan.json"), "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == made


def test_words_and_tables_say_it_without_the_chart(space: SolvedSpace) -> None:
    page = plan_as_page(space)
    for words in (
        "proven bound over the space",
        "are open",
        "estimated: data sheet",
        space.bounds.layout.row(space.best).title,
    ):
        assert words in page
    for number, rule in enumerate(RULES):
        count = int((space.bounds.rule == number).sum())
        assert (f"<td>{escape(rule, quote=False)}</td><td>{count:,}</td>" in page.replace("&#39;", "'")) == (count > 0)
    assert "gpt-3.6b@layers=4 on 4 devices" in page
    assert "<script>alert" not in plan_as_page(replace(space, shape=replace(space.shape, name="<script>alert(1)")))


def shown(page: Any, row: int) -> dict[str, str]:
    """What the tip says when a layout is pointed at."""
    script = """(i) => {
        const cell = cells.get(i), box = over.getBoundingClientRect();
        return [box.x + cell.x + cell.w / 2, box.y + cell.y + cell.h / 2];
    }"""
    page.evaluate("scrollTo(0, 0)")
    page.mouse.move(*page.evaluate(script, row))
    rows = page.eval_on_selector_all("#tip tr", "rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent))")
    return {"name": page.text_content("#tip b"), "verdict": page.text_content("#tip span"), **dict(rows)}


@pytest.mark.slow
def test_every_layout_is_in_the_chart_and_says_what_it_is(browser: Any, files: Path, space: SolvedSpace) -> None:
    bounds, layout = space.bounds, space.bounds.layout
    with opened(browser, files / "space.html", (1400, 1400)) as page:
        page.wait_for_selector("#chart[data-ready]")
        assert page.evaluate("cells.size") == len(bounds.rule)
        for choice in page.query_selector_all("#rows button, #ranges button"):
            choice.click()
            assert page.evaluate("cells.size") == len(bounds.rule)
        finite = np.isfinite(bounds.step)
        rows = [space.best, int(np.argmax(np.where(finite, bounds.step, 0))), int(np.flatnonzero(bounds.by >= 0)[0])]
        for row in rows:
            said, one = shown(page, row), layout.row(row)
            name = PLACEMENTS[one.placement] + (str(one.chunks) if PLACEMENTS[one.placement] == "loop" else "")
            assert said["name"] == f"dp {one.dp} tp {one.tp} pp {one.pp} {name}, {one.count} × {one.size}"
            assert said["because of"] == RULES[bounds.rule[row]]
            if finite[row]:
                assert said["step at least"].startswith(format_time(int(bounds.step[row])))
        assert "pruned: dominated" in said["verdict"]
        assert shown(page, space.best)["verdict"] == "the plan"
        open_ones = page.evaluate("[...C.open].reduce((a, b) => a + b)")
        assert open_ones == space.open


@pytest.mark.slow
def test_keys_go_through_the_layouts_by_bound(browser: Any, files: Path, space: SolvedSpace) -> None:
    order = np.argsort(np.floor(np.where(np.isfinite(space.bounds.step), space.bounds.step, np.inf)), kind="stable").tolist()
    with opened(browser, files / "space.html", WIDE, color_scheme="dark") as page:
        page.wait_for_selector("#chart[data-ready]")
        page.focus("#chart")
        for key, at in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("PageDown", 100), ("Home", 0)):
            page.keyboard.press(key)
            assert page.evaluate("hover") == order[at]
        page.keyboard.press("Escape")
        assert page.evaluate("tip.style.visibility") == "hidden"


def test_a_phone_shows_it_without_scrolling_sideways(browser: Any, files: Path) -> None:
    with opened(browser, files / "space.html", PHONE, has_touch=True) as page:
        page.wait_for_selector("#chart[data-ready]")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        assert page.evaluate("plotEnd() - LEFT") > 100
        page.evaluate("over.scrollIntoView()")
        row = page.evaluate("byBound.at(-1)")
        at = "(i) => ((c, b) => [b.x + c.x + c.w / 2, b.y + c.y + c.h / 2])(cells.get(i), over.getBoundingClientRect())"
        page.touchscreen.tap(*page.evaluate(at, row))
        assert page.evaluate("hover") == row
        assert page.evaluate("tip.style.visibility") == "visible"


def test_thousands_of_layouts_are_few_bytes(files: Path) -> None:
    page = (files / "space.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert len(data["packed"]["text"]) < 100_000
    assert len(page) < 200_000
