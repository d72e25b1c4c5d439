"""Damaged files: whatever stands in a field, a file is read, or refused in one line; never a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, Problem, Profile, Schedule, Trace, pipeline, solve
from zbsolve.cli import main
from zbsolve.profile.changes import drift
from zbsolve.show.run_text import drift_as_text
from zbsolve.verifier import verify

from ..support.profiles import toy_profile

WRONG = [
    *(None, True, "x", "", -1, 0, 1.5, float("nan"), float("inf"), 10**40, 10**15, [], {}, [None], [[]], [[], 1], {"a": 1}),
    *("0F0", ["x"], [1e308], {"0F0": 1}),
]
Document = dict[str, Any]
Path = tuple[Any, ...]


def paths(part: Any, above: Path = ()) -> Iterator[Path]:
    """Every field, and the first and last item of every list."""
    if above:
        yield above
    if isinstance(part, dict):
        for name in part:
            yield from paths(part[name], (*above, name))
    elif isinstance(part, list):
        for i in {0, len(part) - 1} if part else ():
            yield from paths(part[i], (*above, i))


def damaged(document: Document) -> Iterator[tuple[str, Document]]:
    """What was done, and the document with one place replaced or taken away, or an item twice in its list."""
    for path in paths(document):
        for wrong in (*WRONG, "gone", "twice"):
            changed = copy.deepcopy(document)
            part: Any = changed
            for step in path[:-1]:
                part = part[step]
            if wrong == "gone":
                del part[path[-1]]
            elif wrong != "twice":
                part[path[-1]] = wrong
            elif isinstance(part, list):
                part.insert(path[-1], part[path[-1]])
            yield f"{path} {wrong!r}", changed


def read_or_refused(document: Document, read: Callable[[Document], object]) -> tuple[int, int]:
    """How many changes were read, and how many refused; anything but BadInput in one line fails."""
    good, lines = 0, list[str]()
    for what, changed in damaged(document):
        try:
            read(changed)
        except BadInput as error:
            lines.append(str(error))
        except Exception as error:  # names the case, which the traceback does not
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        else:
            good += 1
    assert all(line.strip() and "\n" not in line for line in lines)
    return good, len(lines)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    problem = pipeline([3, 4], [3, 4], [2, 2], microbatches=2, held_until_B=[2, 2], held_until_W=[1, 1], capacity=9)
    return solve(problem, method="greedy")


def test_schedules(schedule: Schedule) -> None:
    def read(body: Document) -> None:
        found = Schedule.from_json(body, "file")
        verify(found.problem, found)

    good, bad = read_or_refused(schedule.to_json(), read)
    assert min(good, bad) > 20


def test_schedules_whose_digest_was_made_to_fit(schedule: Schedule) -> None:
    """The digest stops most of what is wrong with a problem; here what is read is all that stops it."""

    def read(body: Document) -> None:
        Problem.from_json(body, "file").index  # noqa: B018
        found = Schedule(Problem.from_json(body), schedule.order)
        verify(found.problem, found)

    good, bad = read_or_refused(schedule.problem.to_json(), read)
    assert min(good, bad) > 20


@pytest.mark.slow
def test_traces(schedule: Schedule) -> None:
    zeros = np.zeros(len(schedule.problem.passes))
    timeline = schedule.timeline()
    trace = Trace(
        *(schedule.problem, dict(schedule.order), (timeline, timeline), (zeros, zeros), (1.0, 0.5), ((3, 3), (3, 3))),
        *({"host": "here"}, (zeros, zeros), zeros),
    )
    good, bad = read_or_refused(trace.to_json(), lambda body: Trace.from_json(body, "file").waits(0))
    assert min(good, bad) > 20


@pytest.mark.slow
def test_profiles(tmp_path: Any) -> None:
    path = tmp_path / "profile.json"
    toy_profile().save(path)
    body = json.loads(path.read_text())
    name = body["layers"][0]["name"]
    body["samples"] = {f"{name}/F": [10.0, 11.0, 12.0], "link/4096": [3.0, 4.0]}
    path.write_text(json.dumps(body))
    whole = Profile.load(path)

    def read(changed: Document) -> None:  # as from a file, but quicker
        found = {name: value for name, value in changed.items() if name not in ("zbsolve", "version")}
        assert drift_as_text(drift(whole, Profile.from_json(found, "file")))

    good, bad = read_or_refused(body, read)
    assert min(good, bad) > 20


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda body: body.update(certificate=[[]]), "field 'certificate' has a wrong type (array, not object | null)"),
        (
            lambda body: body["problem"]["passes"].update(kind=[["F"]]),
            "problem.passes: field 'kind'[0] has a wrong type (array, not str)",
        ),
        (
            lambda body: body["problem"]["passes"].update(slice=[[0]]),
            "problem.passes: field 'slice'[0] has a wrong type (array, not int)",
        ),
        (
            lambda body: body["problem"]["passes"]["stream_sets"].__setitem__(0, 7),
            "problem.passes: field 'stream_sets'[0] has a wrong type (int, not array)",
        ),
        (lambda body: body["problem"]["passes"].update(streams="0*11"), "column 'streams' has 11 rows, not 12"),
        (
            lambda body: body["problem"]["passes"].update(rank="0*6 x"),
            "field 'rank': 'x' is no run such as",
        ),
        (lambda body: body["problem"]["passes"].update(rank="5..0"), "field 'rank': '5..0' is no run"),
        (
            lambda body: body["problem"]["passes"].update(rank="0*999999999999"),
            "999999999999 rows are more than",
        ),
        (lambda body: body["problem"]["passes"].update(kind="F*2 Z*10"), "field 'kind' has an unknown kind 'Z'"),
        (lambda body: body.update(certficate=None), "field 'certficate' is unknown (one of digest, order,"),
        (lambda body: body.update(later=1), "; a newer zbsolve may have written it"),
        (lambda body: body["problem"].update(pool=[]), "problem: field 'pool' is unknown (one of objective,"),
        (lambda body: body.update(version="1"), "format version '1' is not a whole number from 1 on (field 'version')"),
        (lambda body: body.update(version=3), "version 3 of a schedule needs a newer zbsolve: this one reads up to 2"),
    ],
)
def test_a_schedule_names_the_field(schedule: Schedule, change, line, tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "schedule.json"
    schedule.save(path)
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))
    for command in (["check"], ["show"], ["export", "--to", "torch-csv"]):
        assert main([command[0], str(path), *command[1:]]) == 2
        said = capsys.readouterr().err
        assert line in said
        assert said.count("\n") == 1
