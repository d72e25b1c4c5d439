"""A schedule's page in a browser: what it says is the schedule's, and mouse, keys and fingers do what the hint says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve import Edge, Pass, Problem, Schedule, Trace
from zbsolve.kinds import KINDS
from zbsolve.show.schedule_report import schedule_as_page
from zbsolve.util.text import format_time

from ..support.browser import PHONE, WIDE, opened
from ..support.runs import one_f_one_b, random_run, trace_of


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return one_f_one_b(4, 8, capacity=15)


@contextmanager
def shown(browser: Any, folder: Path, schedule: Schedule, trace: Trace | None = None, **more: Any) -> Iterator[Any]:
    """The page of a schedule, drawn."""
    path = folder / "page.html"
    path.write_text(schedule_as_page(schedule, trace), encoding="utf-8")
    with opened(browser, path, **more) as page:
        page.wait_for_selector("#chart[data-ready]")
        yield page


def over(page: Any, name: str, run: int = 0) -> dict[str, float]:
    """Where a pass is on the screen."""
    script = """([name, run]) => {
        const i = [...C.kind.keys()].find((i) => nameOf(i) === name), row = rowOf(i, run);
        const box = over.getBoundingClientRect();
        const t = (runs[run].startOf(i) + runs[run].endOf(i)) / 2;
        return { x: box.x + toX(t), y: box.y + row.y + row.h / 2 };
    }"""
    place: dict[str, float] = page.evaluate(script, [name, run])
    return place


def point(page: Any, name: str, run: int = 0) -> None:
    page.mouse.move(*over(page, name, run).values())


def tip(page: Any) -> dict[str, str]:
    """What the tip says: its heading, then its table; nothing where it is hidden."""
    if page.evaluate("tip.style.visibility") != "visible":
        return {}
    rows = page.eval_on_selector_all("#tip tr", "rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent))")
    return {"name": page.text_content("#tip b"), **dict(rows)}


def length_of_view(page: Any) -> float:
    page.evaluate("new Promise(requestAnimationFrame)")
    return float(page.evaluate("view[1] - view[0]"))


@pytest.mark.slow
def test_hover_says_what_the_schedule_has(browser: Any, tmp_path: Path, schedule: Schedule) -> None:
    timeline = schedule.timeline()
    with shown(browser, tmp_path, schedule) as page:
        for name in ("0F0", "2B5", "3W7"):
            point(page, name)
            start, end = timeline[name]
            found = tip(page)
            assert (found["name"], found["start"], found["end"]) == (name, format_time(start), format_time(end))
            assert found["rank, stage"] == f"{name[0]}, {name[0]}"
        assert page.evaluate("hover.i") == schedule.problem.index["3W7"]
        page.mouse.move(2, 2)
        assert tip(page) == {}


@pytest.mark.slow
def test_memory_in_the_page_is_the_timelines(browser: Any, tmp_path: Path) -> None:
    """Curves are made in the page: held against ours at every moment, passes without length and side streams too."""
    copy = {"O": ("d2h:0",), "R": ("h2d:0",)}
    lengths = {"F": 10, "O": 0, "R": 0, "BW": 10, "U": 0}
    passes = [Pass(kind, 0, i, 0, lengths[kind], streams=copy.get(kind, ("compute:0",))) for i in (0, 1) for kind in lengths]
    names = [one.name for one in passes]
    edges = [Edge(a, b, bytes=1 << 33) for a, b in zip(names, names[1:], strict=False)]
    order = {stream: [n.name for n in passes if stream in n.streams] for stream in ("compute:0", "d2h:0", "h2d:0")}
    odd = Schedule(Problem.of(passes, edges), {stream: tuple(names) for stream, names in order.items()})
    for one in (odd, one_f_one_b(3, 7)):
        with shown(browser, tmp_path, one) as page:
            timeline = one.timeline()
            assert page.evaluate("D.runs[0].peaks") == list(timeline.peak_bytes)
            for rank in range(one.problem.ranks):
                curve = page.evaluate(f"(({{time, held}}) => [[...time], [...held]])(curveOf(runs[0], {rank}))")
                times, held = timeline.memory(rank)
                for t in np.unique(times).tolist():
                    at = np.searchsorted(curve[0], t, side="right") - 1
                    assert curve[1][at] == held[np.flatnonzero(times == t)[-1]]
                assert max(curve[1]) == max(held.tolist())


@pytest.mark.slow
def test_memory_of_a_run_is_what_was_counted(browser: Any, tmp_path: Path, schedule: Schedule) -> None:
    held = np.arange(len(schedule.problem.passes))
    trace = replace(trace_of(schedule, random_run(schedule, 1)), held=held)
    with shown(browser, tmp_path, schedule, trace) as page:
        for rank in range(schedule.problem.ranks):
            times, counted = trace.median().memory(rank)
            assert page.evaluate(f"[...curveOf(runs[1], {rank}).held]") == counted.tolist()
            assert page.evaluate(f"curveOf(runs[1], {rank}).time.length") == len(times)


@pytest.mark.slow
def test_wheel_drag_and_double_click(browser: Any, tmp_path: Path, schedule: Schedule) -> None:
    with shown(browser, tmp_path, schedule) as page:
        whole = length_of_view(page)
        point(page, "1F3")
        under = page.evaluate("toT(pointer.x)")
        page.mouse.wheel(0, -500)
        page.wait_for_function(f"view[1] - view[0] < {whole / 2}")
        assert page.evaluate("toT(pointer.x)") == pytest.approx(under)
        point(page, "1F3")
        assert tip(page)["name"] == "1F3"
        before = page.evaluate("view[0]")
        page.mouse.down()
        page.mouse.move(over(page, "1F3")["x"] + 150, 300, steps=4)
        page.mouse.up()
        assert page.evaluate("view[0]") < before
        page.mouse.dblclick(600, 300)
        assert length_of_view(page) == whole


@pytest.mark.slow
def test_a_range_is_zoomed_to(browser: Any, tmp_path: Path, schedule: Schedule) -> None:
    with shown(browser, tmp_path, schedule) as page:
        a, b = over(page, "0F1"), over(page, "0F3")
        times = [page.evaluate(f"toT({x} - over.getBoundingClientRect().x)") for x in (a["x"], b["x"])]
        page.mouse.move(a["x"], a["y"])
        page.keyboard.down("Shift")
        page.mouse.down()
        page.mouse.move(b["x"], b["y"], steps=5)
        page.mouse.up()
        page.keyboard.up("Shift")
        assert page.evaluate("view") == pytest.approx(times, abs=1)


@pytest.mark.slow
def test_keys(browser: Any, tmp_path: Path, schedule: Schedule) -> None:
    with shown(browser, tmp_path, schedule) as page:
        whole = length_of_view(page)
        page.focus("#chart")
        page.keyboard.press("+")
        assert length_of_view(page) == pytest.approx(0.7 * whole)
        before = page.evaluate("view[0]")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("view[0]") == pytest.approx(before + 0.2 * 0.7 * whole)
        page.keyboard.press("0")
        assert length_of_view(page) == whole
        page.keyboard.press("Shift+ArrowRight")
        first = tip(page)["name"]
        order = schedule.order["compute:0"]
        page.keyboard.press("Shift+ArrowRight")
        assert tip(page)["name"] == order[order.index(first) + 1]
        page.keyboard.press("Shift+ArrowDown")
        assert tip(page)["rank, stage"] == "1, 1"
        page.keyboard.press("Escape")
        assert tip(page) == {}


@pytest.mark.slow
def test_two_fingers_pinch_and_a_tap_tells(browser: Any, tmp_path: Path, schedule: Schedule) -> None:
    with shown(browser, tmp_path, schedule, size=PHONE, has_touch=True, is_mobile=True) as page:
        assert "pinch" in page.text_content("#hint")
        place = over(page, "1B4")
        page.touchscreen.tap(place["x"], place["y"])
        assert tip(page)["name"] == "1B4"
        whole = length_of_view(page)
        touch = page.context.new_cdp_session(page)

        def fingers(kind: str, *xs: float) -> None:
            points = [{"x": x, "y": place["y"], "id": i} for i, x in enumerate(xs)]
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        under = page.evaluate("[160, 240].map((x) => toT(x - over.getBoundingClientRect().x))")
        fingers("touchStart", 160)
        fingers("touchStart", 160, 240)
        for by in (10, 25, 40):
            fingers("touchMove", 160 - by, 240 + by)
        fingers("touchEnd")
        assert length_of_view(page) == pytest.approx(whole / 2, rel=0.01)
        assert page.evaluate("[120, 280].map((x) => toT(x - over.getBoundingClientRect().x))") == pytest.approx(under)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]


@pytest.mark.slow
def test_a_run_stands_under_its_prediction(browser: Any, tmp_path: Path, schedule: Schedule) -> None:
    trace = trace_of(schedule, random_run(schedule, 1))
    step = trace.steps[0]
    with shown(browser, tmp_path, schedule, trace) as page:
        point(page, "2B5", run=1)
        start, end = (t - step.start.min() for t in step["2B5"])
        found = tip(page)
        assert (found["start"], found["end"]) == (format_time(start), format_time(end))
        assert "predicted" in found["duration"]
        page.click("button")
        assert page.evaluate("rows.map((row) => row.run).slice(0, 4)") == [0, 1, 0, 1]


@pytest.mark.slow
def test_light_dark_and_paper(browser: Any, tmp_path: Path, schedule: Schedule) -> None:
    """Dark on a dark screen, light on paper all the same, and on one page of it."""
    later = one_f_one_b(16, 32, capacity=60)
    with shown(browser, tmp_path, later, color_scheme="dark") as page:
        assert page.evaluate("css.ink") == "#e9ecf1"
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate("css.ink") == "#14171c"
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("css.ink") == "#e9ecf1"
        assert page.pdf(prefer_css_page_size=True).count(b"/Type /Page\n") == 1


@pytest.mark.slow
def test_names_of_files_stay_text(browser: Any, tmp_path: Path, schedule: Schedule) -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    with shown(browser, tmp_path, Schedule(replace(schedule.problem, source=hostile), schedule.order)) as page:
        assert hostile in page.text_content("h1")
        assert page.query_selector("img") is None


@pytest.mark.slow
def test_a_hundred_thousand_passes(browser: Any, tmp_path: Path) -> None:
    large = one_f_one_b(32, 1042)
    assert len(large.problem.passes) > 100_000
    timeline = large.timeline()
    with shown(browser, tmp_path, large, size=WIDE) as page:
        assert page.evaluate("COUNT") == len(large.problem.passes)
        seen = page.evaluate("[...base.getContext('2d').getImageData(LEFT + plot() / 2, rows[3].y + 1, 1, 1).data]")
        track = timeline.problem.members["compute:3"]
        t = page.evaluate("toT(LEFT + Math.floor(plot() / 2))")
        near = np.flatnonzero((timeline.start[track] < t + 40) & (timeline.end[track] > t - 40))
        kinds = {KINDS[k] for k in timeline.problem.passes.kind[track[near]]}
        assert seen[:3] in page.evaluate(
            "kinds => kinds.map((kind) => looks[D.kinds.indexOf(kind)][0].pixel.slice(0, 3))", sorted(kinds)
        )
        start, end = timeline["17B500"]
        page.evaluate(f"show({start - 50}, {end + 50})")
        page.evaluate("new Promise(requestAnimationFrame)")
        point(page, "17B500")
        assert (tip(page)["name"], tip(page)["start"]) == ("17B500", format_time(start))
