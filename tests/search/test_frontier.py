"""The frontier over memory: monotone, every point verified, pictures well-formed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zbsolve import BadInput, Layer, Link, NotFound, Profile, Schedule, pipeline, solve, verify
from zbsolve.build import Host, with_offload
from zbsolve.cli import main
from zbsolve.partition.layer import HostLink
from zbsolve.profile.step import Step
from zbsolve.search.keeping import curves
from zbsolve.search.memory_limits import Named
from zbsolve.search.pareto import Frontier, frontier
from zbsolve.show.frontier_report import frontier_as_page, frontier_as_text, report_of, save_frontier
from zbsolve.show.pictures.drawing import USUAL, Area, Line, Style, Words, text_width, to_svg
from zbsolve.show.pictures.frontier import BOUND_COLOUR, VALUE_COLOUR, frontier_drawing

from ..support.profiles import equal_layers


@pytest.fixture(scope="module")
def free() -> int:
    certificate = solve(equal_layers(4, 10).problem(4, 8), effort=0.5).certificate
    assert certificate is not None
    return certificate.value


@pytest.fixture(scope="module")
def found() -> Frontier:
    return frontier(equal_layers(4, 10), Step(4, 8), points=12, effort=0.5)


@pytest.mark.slow
def test_points_go_from_the_least_feasible_to_the_unlimited_optimum(found, free):
    assert len(found.points) >= 12
    first, last = found.points[0], found.points[-1]
    assert first.memory == 40 + 150
    with pytest.raises(Exception, match="rank 0 needs 150 bytes for one microbatch"):
        equal_layers(4, 10).problem(4, 8, memory=first.memory - 1)
    assert last.bound <= free
    assert last.value <= 1.02 * free


def test_values_and_bounds_fall_with_memory(found):
    for before, after in pairwise(found.points):
        assert before.memory < after.memory
        assert before.value >= after.value
        assert before.bound >= after.bound
    assert all(point.bound <= point.value and point.peak <= point.memory for point in found.points)


@pytest.mark.slow
def test_effort_gives_the_same_points_again():
    one, other = (frontier(equal_layers(3), Step(3, 6), points=4, effort=0.4) for _ in range(2))
    assert one.to_json() == other.to_json()
    assert [p.schedule.to_json() for p in one.points] == [p.schedule.to_json() for p in other.points]


def test_every_point_has_a_schedule_that_fits(found):
    for point in found.points:
        assert verify(point.schedule.problem, point.schedule) == ()
        assert point.schedule.problem == equal_layers(4, 10).problem(4, 8, memory=point.memory)
        assert point.schedule.timeline().value == point.value


def test_named_schedules_are_marked_and_never_better(found):
    named = {one.name: one for one in found.named}
    assert {"1f1b", "zb-h1", "zb-h2", "gpipe"} <= set(named)
    assert named["1f1b"].memory == 40 + 4 * 150
    for one in found.named:
        assert min(point.value for point in found.points if point.memory <= one.memory) <= one.value


def test_the_sentence_says_what_is_needed_and_not_the_limit(found):
    """Needed may be less than the limit of its point; a limit is too little where its bound says so."""
    last = found.points[-1]
    points = (*(replace(one, bound=2 * last.value, value=2 * last.value) for one in found.points[:1]), replace(last, peak=7))
    said = frontier_as_text(replace(found, points=points)).splitlines()[-1]
    assert f"; 7 B are enough for 1 % more than that, {points[0].memory} B are proven too little." in said
    assert "too little" not in frontier_as_text(replace(found, points=points[1:]))


def test_pictures_and_table(found):
    root = ElementTree.fromstring(to_svg(report_of(found).drawing(USUAL)))
    assert root.tag.endswith("svg")
    texts = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert any(text and text.startswith("1f1b") for text in texts)
    assert len([node for node in root.iter() if node.tag.endswith("circle")]) >= len(found.points)
    assert frontier_as_page(found).count("<script") == 1  # ours
    assert len(frontier_as_text(found).splitlines()) == 3 + len(found.points) + len(found.named)


@pytest.mark.parametrize("width", [420, 1200])
def test_no_name_stands_over_a_name_a_diamond_or_a_line(found, width):
    """Near the right edge, above each other, and beyond the edge."""
    least, most = found.points[0], found.points[-1]
    places = {
        "1f1b": (least.memory, 1.4),
        "1f1b-split": (least.memory, 1.2),
        "zb-h1": (least.memory, 1.19),
        "zb-h2": (most.memory, 1.0),
        "zb-2p": (2 * most.memory, 1.0),
        "gpipe": (3 * most.memory, 1.5),
    }
    named = tuple(Named(name, memory, int(most.value * times), found.work) for name, (memory, times) in places.items())
    drawing = frontier_drawing(replace(found, named=named), "", "", Style(width))
    names = [mark for mark in drawing.marks if isinstance(mark, Words) and mark.text.split(",")[0].split(" ")[0] in places]
    diamonds = [mark.points for mark in drawing.marks if isinstance(mark, Area) and mark.said]
    assert len(names) == len(diamonds) == len(places)
    half = names[0].size / 2
    boxes = [(one.x, one.x + text_width(one.text, one.size), one.y - half, one.y + half) for one in names]
    points = [(min(x for x, _ in p), max(x for x, _ in p), min(y for _, y in p), max(y for _, y in p)) for p in diamonds]
    curves = [
        mark.points for mark in drawing.marks if isinstance(mark, Line) and mark.colour in (VALUE_COLOUR, BOUND_COLOUR)
    ]
    pieces = [(a, c, min(b, d), max(b, d)) for curve in curves for (a, b), (c, d) in pairwise(curve)]
    for (a, b, low, high), (c, d, bottom, top) in (
        *combinations(boxes, 2),
        *product(boxes, points + pieces * (width > 1000)),
    ):
        assert b <= c or d <= a or high <= bottom + 1e-6 or top <= low + 1e-6
    heights = {mark.text.split(" ")[0]: mark.y for mark in names}
    assert heights["1f1b"] < heights["1f1b-split"] < heights["zb-h1"]


def test_hostile_model_names_stay_text():
    profile = equal_layers(2)
    hostile = Profile(profile.source, "<script>\x1b[2J", profile.layers, profile.link, 4.0, None, {}, {})
    drawn = frontier(hostile, Step(2, 2), points=2, seconds=0.3)
    assert frontier_as_page(drawn).count("<script") == 1  # ours
    ElementTree.fromstring(to_svg(report_of(drawn).drawing(USUAL)))


def test_one_point_where_memory_changes_nothing():
    only = frontier(equal_layers(2), Step(2, 1), points=12, seconds=0.5)
    assert {point.value for point in only.points} == {only.points[-1].value}
    ElementTree.fromstring(to_svg(report_of(only).drawing(USUAL)))


def test_on_the_command_line(tmp_path, capsys):
    profile, out = str(tmp_path / "profile.json"), tmp_path / "f.json"
    equal_layers(4, 10).save(profile)
    step = ["solve", profile, "--ranks", "2", "--microbatches", "3", "--placement", "vee", "--seconds", "1", "--frontier"]
    folder = ["-o", str(tmp_path)]
    assert main([*step, "-o", str(out), "-o", str(tmp_path / "f.svg"), "-o", str(tmp_path / "f.html"), *folder]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""  # no terminal, no progress
    assert "points are optimal" in shown.out
    points = json.loads(out.read_text())["points"]
    best = Schedule.load(tmp_path / f"schedule-{points[0]['memory']}.json")
    assert best.timeline().value == points[0]["value"]
    assert main([*step, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["placement"] == "vee"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-o", "x.gif"], "x.gif: unknown ending"),
        (["1"], "points: at least 2"),
        (["--seconds", "0"], "seconds: 0.0 is not"),
        (["--placement", "auto"], "placement 'auto'"),
        (["--memory", "1GB"], "--memory: is not for a frontier"),
        (["--method", "greedy"], "a frontier is found by auto"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, line):
    profile = str(tmp_path / "profile.json")
    equal_layers(4).save(profile)
    assert main(["solve", profile, "--ranks", "2", "--microbatches", "2", "--frontier", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_bad_calls():
    with pytest.raises(BadInput, match="points"):
        frontier(equal_layers(2), Step(2, 2), points=0)


class Counted:
    """A clock in whole seconds that a test puts forward; one for a whole frontier."""

    counted = False

    def __init__(self, seconds, effort=None):
        self.seconds, self.used = seconds, 0

    @property
    def left(self):
        return max(0, self.seconds - self.used)


@pytest.mark.parametrize("placement", ["single", "loop"])
def test_little_time_is_kept_to(placement, monkeypatch):
    """Every solve takes a second here, whatever it was granted, as for long steps; 4 s are for 12 points. All points have a
    schedule all the same: what fits the tightest fits everywhere."""
    clocks = []

    def clock(seconds, effort):
        clocks.append(Counted(seconds))
        return clocks[-1]

    def slow(problem, **options):
        clocks[-1].used += 1
        del options["seconds"]
        return solve(problem, effort=0.05, **options)

    monkeypatch.setattr("zbsolve.search.pareto.Clock", clock)
    monkeypatch.setattr("zbsolve.search.task.solve", slow)
    found = frontier(equal_layers(8, 10), Step(4, 8, placement), points=12, seconds=4)
    assert clocks[-1].used <= 6
    assert len(found.points) >= 12
    values, bounds = ([getattr(point, what) for point in found.points] for what in ("value", "bound"))
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds, reverse=True)
    for point in found.points:
        assert verify(point.schedule.problem, point.schedule) == ()


@pytest.mark.slow
def test_curves_of_what_stages_keep(tmp_path: Path) -> None:
    """Each is at least as low as those with less to choose from, all are above one bound, and every point holds."""
    layers = tuple(Layer(f"layer{i}", 20, 31, 23, 50, 30, 50, 10, 8) for i in range(3))
    profile = Profile("given", "toy", layers, Link(1, 100), 1, 400, {}, {}, host=HostLink(1, 4, 4, 3, 3))
    found = curves(profile, Step(3, 3, recompute="auto", offload="auto"), points=3, effort=2.0)
    assert list(found.frontiers) == ["keep only", "recompute", "offload", "both"]
    for one in found.frontiers.values():
        assert [point.value for point in one.points] == sorted((point.value for point in one.points), reverse=True)
        for point in one.points:
            assert verify(point.schedule.problem, point.schedule) == ()
            assert point.schedule.timeline().value == point.value >= found.bound
            assert point.peak <= point.memory
    for wide, narrow in (("recompute", "keep only"), ("offload", "keep only"), ("both", "recompute"), ("both", "offload")):
        for point in found.frontiers[narrow].points:
            assert min(one.value for one in found.frontiers[wide].points if one.memory <= point.memory) <= point.value
    assert found.frontiers["both"].points[0].memory <= found.frontiers["keep only"].points[0].memory
    text = frontier_as_text(found)
    assert "On the device's 400 B: keep only " in text
    small = replace(found, frontiers={name: replace(one, device=1) for name, one in found.frontiers.items()})
    assert "On the device's 1 B: none of them fits; the bound " in frontier_as_text(small)
    for ending in ("json", "svg", "html", "5b"):  # a number's dot begins no ending
        save_frontier(found, tmp_path / f"c.{ending}")
    assert (tmp_path / "c.5b").read_text() == (tmp_path / "c.json").read_text()
    with pytest.raises(BadInput, match=r"c.svg.gz: unknown ending"):
        save_frontier(found, tmp_path / "c.svg.gz")
    body = json.loads((tmp_path / "c.json").read_text())
    assert body["frontiers"]["both"]["points"][0]["memory"] == found.frontiers["both"].points[0].memory
    root = ElementTree.fromstring((tmp_path / "c.svg").read_text())
    assert {"keep only", "recompute", "offload", "both"} <= {node.text for node in root.iter() if node.tag.endswith("text")}
    assert (tmp_path / "c.html").read_text().count("<script") == 1  # ours


def test_where_more_memory_saves_time_every_point_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """No point of a curve only shows what a step with less to choose from takes in that memory."""
    raced = []

    def race(profile, step, **options):
        raced.append(step.memory)
        raise NotFound("nothing")

    monkeypatch.setattr("zbsolve.search.keeping.solve_auto", race)
    profile = replace(equal_layers(4), host=HostLink(1, 4, 4, 3, 3))
    points = curves(profile, Step(4, 8, offload="auto"), points=3, effort=0.4).frontiers["offload"].points
    falls = {one.memory for one, more in pairwise(points) if one.value > more.value}
    assert falls
    assert falls <= set(raced)
    assert len(raced) == len(set(raced))


def test_curves_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "p.json")
    equal_layers(2).save(path)
    step = ["solve", path, "--ranks", "2", "--microbatches", "2", "--frontier", "2", "--effort", "0.2"]
    assert main([*step, "--recompute", "auto", "-o", f"{tmp_path}/points/"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["memory", "keep", "only", "recompute", "chosen"]
    assert list(tmp_path.glob("points/schedule-recompute-*.json"))
    assert main([*step, "--offload", "auto"]) == 2
    assert "the profile knows no host link" in capsys.readouterr().err


def test_a_problem_has_a_frontier_of_activations() -> None:
    times = {"F": [10, 12], "B": [10, 15], "W": [8, 9], "held_until_B": 2, "held_until_W": 1}
    problem = pipeline(**times, microbatches=4, comm=1, capacity=[9, 9])
    found = frontier(problem, points=3, effort=0.5)
    assert (found.placement, found.fixed, found.device) == ("single", (0, 0), None)
    assert found.points[0].memory == 3  # one microbatch, of which a part stays until W
    for point in found.points:
        within = replace(problem, capacity=(point.memory,) * 2)
        assert verify(within, replace(point.schedule, problem=within)) == ()
        assert point.value == solve(within, effort=0.5).certificate.value  # type: ignore[union-attr]
    for arguments in ((problem, Step(2, 4)), (equal_layers(4),)):
        with pytest.raises(BadInput, match="a profile needs a step, and a problem is one"):
            frontier(*arguments)


def test_named_orders_that_host_memory_does_not_hold_are_no_points() -> None:
    """1F1B on a V holds 8 bytes of copies at once, where the host has room for 3."""
    step = pipeline([2] * 4, BW=[4] * 4, placement="vee", microbatches=2, held_until_B=2)
    found = frontier(with_offload(step, 3, 3, host=Host(capacity=3)), points=2, effort=0.2)
    assert found.named == ()
    assert all(verify(one.schedule.problem, one.schedule) == () for one in found.points)
