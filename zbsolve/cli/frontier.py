"""`zbsolve solve --frontier`: value and bound over memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..util.errors import BadInput
from .step_options import step_from
from .tools import print_json, profile_from, saving, search_limits, searching, workers_of

if TYPE_CHECKING:
    from ..profile.profile import Profile
    from ..search.memory_limits import Point
    from ..step import Step


POINTS = 12  # memory limits; the peaks of named schedules are added
NOT_HERE = ("memory", "hint")  # options of a search that a frontier has many of
CLOSED = ("placement", "partition", "gathers", "vocabulary")  # what is one for all points


def solve_frontier(options: argparse.Namespace) -> int:
    """Value and bound over memory, as a table, JSON, pictures, and schedules in a folder."""
    from ..show.frontier_report import check_frontier_path

    folders = [path for path in options.output if Path(path).is_dir() or path.endswith("/")]
    files = [path for path in options.output if path not in folders]
    for path in files:
        check_frontier_path(path)
    for name in NOT_HERE:
        if getattr(options, name) is not None:
            raise BadInput(f"--{name}: is not for a frontier, which searches at many limits of memory")
    if options.method != "auto":
        raise BadInput(f"--method {options.method}: a frontier is found by auto")
    profile, step = profile_from(options.profile, "solve"), step_from(options)
    for name in CLOSED:
        if getattr(step, name) == "auto":
            raise BadInput(f"--frontier: {name} 'auto' has no frontier: name one")
    limits = search_limits(options) | {"points": options.frontier}
    for folder in folders:
        _make_folder(folder)
    with workers_of(options, "solve", threads=2) as workers, searching("solve") as (search, pressed):
        limits |= {"progress": search.show, "stop": pressed, "workers": workers}
        found = _curves(profile, step, limits) if step.auto else _frontier(profile, step, limits)
    saves = [partial(found.save, path) for path in files]
    for folder in folders:
        saves += [partial(point.schedule.save, Path(folder) / f"schedule-{name}.json") for name, point in found.points]
    with saving(*saves):
        if options.json:
            print_json(found.body)
        elif "-" not in options.output:
            print(found.text, end="")
    return 0


class _Found(NamedTuple):
    """What came out: as text and as JSON, how a file of it is written, and points by the names of their schedules."""

    text: str
    body: dict[str, Any]
    save: Callable[[str], None]
    points: list[tuple[str, Point]]


def _frontier(profile: Profile, step: Step, limits: dict[str, Any]) -> _Found:
    """One frontier."""
    from ..search.pareto import frontier
    from ..show.frontier_report import frontier_as_text, save_frontier

    found = frontier(profile, step, **limits)
    points = [(f"{point.memory}", point) for point in found.points]
    return _Found(frontier_as_text(found), found.to_json(), partial(save_frontier, found), points)


def _curves(profile: Profile, step: Step, limits: dict[str, Any]) -> _Found:
    """One frontier for each way to keep activations."""
    from ..search.keeping import curves
    from ..show.curves_report import curves_as_text, save_curves

    found = curves(profile, step, **limits)
    points = [
        (f"{name.replace(' ', '-')}-{point.memory}", point) for name, one in found.frontiers.items() for point in one.points
    ]
    return _Found(curves_as_text(found), found.to_json(), partial(save_curves, found), points)


def _make_folder(name: str) -> None:
    """The folder for schedules, before any time is spent. Raises BadInput."""
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{name}: cannot make this folder: {error.strerror}") from None
