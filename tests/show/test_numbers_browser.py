"""Every number of a page in a browser, against the schedule's, of models of real size by estimate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve import Profile, Schedule, Step, preset, solve
from zbsolve.cli import main
from zbsolve.planner.costs.rank_costs import least_bytes
from zbsolve.planner.plan_file import read_space
from zbsolve.schedule.trace import Trace
from zbsolve.show.plan_report import plan_as_page
from zbsolve.show.schedule_report import schedule_as_page
from zbsolve.util.text import format_bytes, format_time

from ..support.browser import opened
from ..support.runs import random_run, trace_of

pytestmark = pytest.mark.slow

# name: what `profile --estimate` takes, the step, a named order or none
REAL = {
    "8B on 8 ranks": ("llama3-8b", "h100", Step(8, 16, memory="80GiB"), ""),
    "8B, loop": ("llama3-8b", "h100", Step(8, 16, "loop", fused=True, memory=None), "interleaved"),
    "70B on 16 ranks": ("llama3-70b", "h100", Step(16, 32, memory=None), "1f1b"),
    "70B, offload": ("llama3-70b", "h100", Step(16, 16, "vee", offload="half", memory=None), ""),
}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Profile]:
    """Estimates by model."""
    folder, found = tmp_path_factory.mktemp("profiles"), {}
    for model in ("llama3-8b", "llama3-70b"):
        assert main(["profile", model, "--estimate", "h100", "-o", str(folder / f"{model}.json")]) == 0
        found[model] = Profile.load(folder / f"{model}.json")
    return found


def made(profiles: dict[str, Profile], name: str) -> Schedule:
    """A schedule of one of the steps."""
    model, _, step, order = REAL[name]
    profile = profiles[model] if step.memory is not None else replace(profiles[model], capacity=None)
    problem = step.problem(profile)
    return preset(order, problem) if order else solve(problem, effort=0.05)


def written(folder: Path, schedule: Schedule, trace: Trace | None = None) -> Path:
    """The schedule's page."""
    path = folder / "page.html"
    path.write_text(schedule_as_page(schedule, trace), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("run", [False, True])
def test_columns_and_curves_are_the_schedules(
    browser: Any, tmp_path: Path, profiles: dict[str, Profile], name: str, run: bool
) -> None:
    """What each pass takes and frees, when it runs, what each rank holds at each moment; of a run as it was measured, with
    bytes that were counted."""
    schedule = made(profiles, name)
    problem, p = schedule.problem, schedule.problem.passes
    trace = None
    if run:
        counted = np.arange(len(p), dtype=np.int64)[::-1] * 3 * (1 << 29)
        trace = replace(trace_of(schedule, random_run(schedule, 1)), held=counted)
    with opened(browser, written(tmp_path, schedule, trace)) as page:
        page.wait_for_selector("#chart[data-ready]")
        wanted = {what: getattr(p, what) for what in ("kind", "stage", "microbatch", "slice", "rank")}
        for what, ours in {**wanted, "taken": problem.taken, "freed": problem.freed}.items():
            assert (np.array(page.evaluate(f"[...C.{what}]")) == ours).all(), what
        timelines = [schedule.timeline(), *([trace.median()] if trace is not None else [])]
        for r, timeline in enumerate(timelines):
            origin, exact = timeline.start.min(), 1e-9 if r == 0 else 0.051
            for what, ours in (("startOf", timeline.start), ("endOf", timeline.end)):
                theirs = np.array(page.evaluate(f"[...C.kind.keys()].map(runs[{r}].{what})"))
                assert np.abs(theirs - (ours - origin)).max() <= 2 * exact
            assert page.evaluate(f"D.runs[{r}].peaks") == list(timeline.peak_bytes)
            for rank in range(problem.ranks):
                assert page.evaluate(f"Math.max(...curveOf(runs[{r}], {rank}).held)") == timeline.peak_bytes[rank]
                if r == 0:
                    times, ours = timeline.memory(rank)
                    last = np.flatnonzero(np.diff(times, append=np.inf) > 0)
                    theirs = page.evaluate(f"({(times[last] - origin).tolist()}).map((t) => heldAt(runs[0], {rank}, t))")
                    assert theirs == ours[last].tolist()


def test_tips_say_what_the_schedule_has(browser: Any, tmp_path: Path, profiles: dict[str, Profile]) -> None:
    """The words of every pass of two ranks, and of strips of memory, none above its capacity."""
    schedule = made(profiles, "8B on 8 ranks")
    problem, timeline = schedule.problem, schedule.timeline()
    with opened(browser, written(tmp_path, schedule)) as page:
        page.wait_for_selector("#chart[data-ready]")
        for i in np.flatnonzero(np.isin(problem.passes.rank, (0, 7))).tolist():
            name, _, rows = page.evaluate(f"describe({i}, rowOf({i}, 0))")
            found = dict(rows)
            start, end = timeline[problem.names[i]]
            assert (name, found["start"], found["end"]) == (problem.names[i], format_time(start), format_time(end))
            assert found["duration"] == format_time(end - start)
            taken, freed = (format_bytes(int(column[i])) for column in (problem.taken, problem.freed))
            assert found["memory"] == f"takes {taken}, frees {freed}"
        assert problem.capacity is not None
        for rank in range(problem.ranks):
            times, held = timeline.memory(rank)
            assert held.max() <= problem.capacity[rank]
            for t, size in zip(times[::7].tolist(), held[::7].tolist(), strict=True):
                rows = page.evaluate(f"describeStrip(strips.find((one) => one.rank === {rank}), {t})[2]")
                last = held[np.flatnonzero(times == t)[-1]]
                assert rows == [["holds", format_bytes(int(last))], ["capacity", format_bytes(problem.capacity[rank])]], size


def test_columns_of_a_plans_space_are_the_plans(browser: Any, tmp_path: Path) -> None:
    """Bounds, needs and sizes of each layout of an 8B on 16 devices, and the words of some."""
    command = ["plan", "llama3-8b", "--devices", "16", "--batch", "32", "--cluster", "h100", "--effort", "0.1"]
    assert main([*command, "-o", str(tmp_path / "plan.json")]) == 0
    space = read_space(tmp_path / "plan.json")
    (tmp_path / "space.html").write_text(plan_as_page(space), encoding="utf-8")
    bounds, layout = space.bounds, space.bounds.layout
    need = least_bytes(bounds.costs, layout)
    step = np.where(np.isfinite(bounds.step), np.floor(bounds.step), -1)
    assert need.max() > 2**32
    with opened(browser, tmp_path / "space.html", (1400, 1400)) as page:
        page.wait_for_selector("#chart[data-ready]")
        wanted = {"need": need, "bound": step, "rule": bounds.rule, "by": bounds.by, **layout._asdict()}
        for name, ours in wanted.items():
            assert (np.array(page.evaluate(f"[...C.{name}]")) == ours).all(), name
        for i in range(0, len(step), max(1, len(step) // 40)):
            said = dict(page.evaluate(f"describe({i})"))
            assert said["memory at least"] == f"{format_bytes(int(need[i]))} of {format_bytes(space.memory)}"


def test_words_of_numbers_are_those_of_python(browser: Any, tmp_path: Path, profiles: dict[str, Profile]) -> None:
    """Bytes, µs and plain numbers over all sizes, at the ends of units and at halves, which both round to even."""
    random, edges = np.random.default_rng(0), [10**k + d for k in range(1, 14) for d in (-5, -1, 0, 1, 5)]
    sizes = [
        0,
        *edges,
        *(round(share * 1024**k) for k in range(1, 5) for share in (0.99, 1.125, 1.375, 9.995, 10.05, 99.95, 1000.5)),
    ]
    sizes += [round(2 ** random.uniform(0, 46)) for _ in range(500)]
    times = [0, *edges, 12_345, 10_125, 10_135, 1_000_005] + [round(10 ** random.uniform(0, 12)) for _ in range(500)]
    with opened(browser, written(tmp_path, made(profiles, "8B on 8 ranks"))) as page:
        page.wait_for_selector("#chart[data-ready]")
        both = [*sizes, *(-size for size in sizes if size)]
        assert page.evaluate(f"({both}).map(bytes)") == [format_bytes(size) for size in both]
        assert page.evaluate(f"({times}).map(time)") == [format_time(us) for us in times]
        for digits in (0, 1, 2, 3):
            numbers = [x / 8 for x in range(5, 400)] + random.uniform(-1e7, 1e7, 200).tolist()
            assert page.evaluate(f"({numbers}).map((x) => number(x, {digits}))") == [f"{x:,.{digits}f}" for x in numbers]
