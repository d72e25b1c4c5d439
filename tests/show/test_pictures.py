"""Still pictures: their size, what stands where, words that keep apart, colours, and every form of file."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from zbsolve import BadInput, Schedule, pipeline, preset
from zbsolve.build.offload import with_offload
from zbsolve.cli import main
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.show.pictures.drawing import UNITS, Area, Box, Drawing, Line, Style, Words, text_width, to_svg, wrapped
from zbsolve.show.pictures.files import save_drawing
from zbsolve.show.pictures.schedule import comparison_drawing, schedule_drawing
from zbsolve.show.tracks import shades

from ..support.runs import one_f_one_b, random_run, trace_of

COLUMN, UNIT = 8.5 * UNITS["cm"], "cm"  # of a paper with two columns


def large(ranks: int = 64, microbatches: int = 128) -> Schedule:
    held = {"held_until_B": 6 << 20, "held_until_W": 4 << 20, "capacity": [12 << 28] * ranks}
    return preset("zb-h1", pipeline([300] * ranks, [320] * ranks, [210] * ranks, microbatches=microbatches, comm=8, **held))


def interleaved() -> Schedule:
    placement = tuple(range(4)) * 3
    problem = pipeline([10] * 12, [12] * 12, [8] * 12, placement=placement, microbatches=8, held_until_B=5)
    return preset("interleaved", problem)


def boxes_of(words: Sequence[Words]) -> list[tuple[Words, float, float, float, float]]:
    """Where each text stands: left, right, top, bottom."""
    found = []
    for one in words:
        wide = 0.95 * text_width(one.text, one.size, one.bold)  # the estimate is some 4 % more than what is drawn
        left = one.x - {"start": 0.0, "middle": wide / 2, "end": wide}[one.anchor]
        found.append((one, left, left + wide, one.y - 0.5 * one.size, one.y + 0.5 * one.size))
    return found


def check_words(drawing: Drawing) -> None:
    """No text leaves the page, none is too small to read, and none runs over another."""
    placed = boxes_of([mark for mark in drawing.marks if isinstance(mark, Words)])
    for words, left, right, top, bottom in placed:
        assert left >= -0.5, words
        assert right <= drawing.width + 0.5, words
        assert top >= -0.5, words
        assert bottom <= drawing.height + 0.5, words
        assert words.size >= 5.5, words
    for (a, *first), (b, *second) in combinations(placed, 2):
        apart = first[1] <= second[0] or second[1] <= first[0] or first[3] <= second[2] + 0.5 or second[3] <= first[2] + 0.5
        assert apart, (a, b)


@pytest.mark.parametrize("width", [COLUMN, 480.0, 1200.0])
@pytest.mark.parametrize("memory", [False, True])
def test_words_keep_apart(width: float, memory: bool) -> None:
    style = Style(width, memory=memory, title="A line that is long enough to be broken in a narrow picture, " * 3)
    small = one_f_one_b(4, 8, capacity=15)
    for drawing in (
        schedule_drawing(large(), None, style),
        schedule_drawing(interleaved(), None, style),
        schedule_drawing(small, trace_of(small, random_run(small, 1)), style),
        comparison_drawing([("1F1B", small), ("the same with a long name that says much", small)], style),
    ):
        check_words(drawing)


def test_a_step_on_64_ranks_fits_a_column() -> None:
    drawing = schedule_drawing(large(), None, Style(COLUMN, title="", notes=False))
    labels = [one.text for one in drawing.marks if isinstance(one, Words) and one.text.startswith("rank ")]
    assert labels[:2] == ["rank 0", "rank 2"]
    assert drawing.height < 1.4 * drawing.width
    rows = [one for one in drawing.marks if isinstance(one, Box) and one.fill == "#f1f2f4"]
    assert len(rows) == 64
    assert not any(one.text.isdigit() for one in drawing.marks if isinstance(one, Words))


@pytest.mark.parametrize("ranks", [4, 16, 24])
def test_streams_of_copies_have_their_labels(ranks: int) -> None:
    problem = pipeline([10] * ranks, [12] * ranks, [8] * ranks, microbatches=4, held_until_B=5)
    problem = with_offload(problem, 9, 9)
    schedule = list_schedule(problem, deepest_first(problem))
    drawing = schedule_drawing(schedule, None, Style(1200))
    labels = [one.text for one in drawing.marks if isinstance(one, Words) and one.anchor == "end"]
    assert labels == [text for rank in range(ranks) for text in (f"rank {rank}", "d2h", "h2d")]
    check_words(drawing)
    check_words(schedule_drawing(schedule, None, Style(COLUMN)))


def test_passes_stand_where_the_timeline_says() -> None:
    schedule = one_f_one_b(4, 8)
    timeline = schedule.timeline()
    drawing = schedule_drawing(schedule, None, Style(hover=True))
    passes = {one.said.split(":")[0]: one for one in drawing.marks if isinstance(one, Box) and one.said}
    assert set(passes) == set(schedule.problem.names)
    starts = np.array([timeline[name][0] for name in passes])
    places = np.array([box.x for box in passes.values()])
    slope, left = np.polyfit(starts, places, 1)
    assert np.abs(left + slope * starts - places).max() < 0.01
    ends = [box.x + box.width for box in passes.values()]
    assert max(ends) == pytest.approx(left + slope * timeline.makespan, abs=0.7)


def test_a_part_of_the_step() -> None:
    schedule = one_f_one_b(4, 8)
    drawing = schedule_drawing(schedule, None, Style(hover=True, window=(100, 200)))
    shown = {one.said.split(":")[0] for one in drawing.marks if isinstance(one, Box) and one.said}
    timeline = schedule.timeline()
    inside = {name for name, (start, end) in timeline.items() if start <= 200 and end >= 100}
    assert shown == inside
    with pytest.raises(BadInput, match="time range: the step ends at"):
        schedule_drawing(schedule, None, Style(window=(10_000, 20_000)))


def test_memory_is_as_high_as_it_is() -> None:
    schedule = one_f_one_b(4, 8, capacity=15)
    drawing = schedule_drawing(schedule, None, Style(memory=True))
    areas = [one for one in drawing.marks if isinstance(one, Area)]
    limits = [one for one in drawing.marks if isinstance(one, Line) and one.dashes]
    assert len(areas) == len(limits) == 4
    for area, limit, peak in zip(areas, limits, schedule.timeline().peak_bytes, strict=True):
        floor, top = area.points[0][1], min(y for _, y in area.points)
        assert (floor - top) / (floor - limit.points[0][1]) == pytest.approx(peak / 15)


def test_compared_schedules_have_one_scale() -> None:
    quick, slow = one_f_one_b(4, 8), one_f_one_b(4, 8, comm=20)
    drawing = comparison_drawing([("slow", slow), ("quick", quick)], Style(hover=True))
    first = [one for one in drawing.marks if isinstance(one, Box) and one.said.startswith("0F0:")]
    assert len(first) == 2
    assert (first[0].x, first[0].width) == (first[1].x, first[1].width)
    words = [one.text for one in drawing.marks if isinstance(one, Words)]
    less = slow.timeline().makespan - quick.timeline().makespan
    assert f"−{less:.0f} µs" in words
    share = 1 - quick.timeline().makespan / slow.timeline().makespan
    assert any(text.startswith("quick: ") and f"{share:.1%} less" in text for text in words)
    with pytest.raises(BadInput, match="no schedule"):
        comparison_drawing([])


def test_colours_tell_kinds_and_stages_apart() -> None:
    assert len({shades(kind, 1)[0] for kind in ("F", "B", "W", "BW", "X")}) == 5
    assert len(set(shades("F", 4))) == 4
    drawn = to_svg(schedule_drawing(interleaved(), None, Style()))
    assert all(shade in drawn for shade in shades("F", 3))


@pytest.mark.slow
def test_a_pdf_is_one_page_of_its_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install '.[pictures]'")
    drawing = schedule_drawing(one_f_one_b(4, 8), None, Style(COLUMN, unit=UNIT, title="$\\alpha$ {</b>"))
    save_drawing(drawing, tmp_path / "x.pdf")
    data = (tmp_path / "x.pdf").read_bytes()
    assert data.startswith(b"%PDF")
    assert data.count(b"/Type /Page ") == 1
    box = data.split(b"/MediaBox [")[1].split(b"]")[0].split()
    assert [float(one) for one in box] == pytest.approx([0, 0, drawing.width * 0.75, drawing.height * 0.75], abs=0.01)
    assert b"/Type3" not in data
    save_drawing(drawing, tmp_path / "again.pdf")
    assert (tmp_path / "again.pdf").read_bytes() == data


@pytest.mark.parametrize(("width", "unit", "dots"), [(600.0, "px", 600), (288.0, "in", 900)])
def test_a_png_has_the_colours_where_the_passes_are(tmp_path: Path, width: float, unit: str, dots: int) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install '.[pictures]'")
    from matplotlib.image import imread

    drawing = schedule_drawing(one_f_one_b(2, 3), None, Style(width, unit, hover=True))
    save_drawing(drawing, tmp_path / "x.png")
    data = (tmp_path / "x.png").read_bytes()
    assert struct.unpack(">I", data[16:20]) == (dots,)
    pixels, scale = imread(tmp_path / "x.png"), dots / width
    for box in (one for one in drawing.marks if isinstance(one, Box) and one.said):
        x, y = box.x + 2, box.y + 2  # beside its label
        seen = "#" + "".join(f"{round(level * 255):02x}" for level in pixels[int(y * scale), int(x * scale)][:3])
        assert seen == box.fill, box


def test_an_svg_says_its_size_in_its_unit() -> None:
    root = ElementTree.fromstring(to_svg(schedule_drawing(one_f_one_b(2, 3), None, Style(COLUMN, unit=UNIT))))
    assert root.attrib["width"] == "8.5cm"
    assert root.attrib["viewBox"].split()[2] == "321.26"


def test_without_the_library_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    one_f_one_b(2, 3).save(tmp_path / "s.json")
    assert main(["show", str(tmp_path / "s.json"), "-o", str(tmp_path / "x.png")]) == 2
    line = "PDF and PNG need matplotlib: pip install matplotlib (3.8 or newer); an SVG does not"
    assert capsys.readouterr().err == f"zbsolve show: {line}\n"
    assert not (tmp_path / "x.png").exists()


def test_commands_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, picture = str(tmp_path / "s.json"), tmp_path / "x.svg"
    one_f_one_b(4, 8, capacity=15).save(plan)
    assert main(["show", plan, "-o", str(picture), "--with-memory"]) == 0
    assert "capacity 15 B" in picture.read_text(encoding="utf-8")
    assert main(["compare", plan, plan, "-o", str(picture)]) == 0
    assert picture.read_text(encoding="utf-8").count("rank 3") == 2
    capsys.readouterr()
    assert main(["show", plan, "--size", "8cm"]) == 2
    line = "zbsolve show: --size is no option: pictures have one look; in Python zbsolve.show.Style changes it\n"
    assert capsys.readouterr().err == line


def test_lines_are_broken_between_words() -> None:
    assert wrapped("one two three", 10, text_width("one two", 10)) == ["one two", "three"]
    assert wrapped("", 10, 100) == []
