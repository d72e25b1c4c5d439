"""`zbsolve frontier`: value and bound over memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..util.errors import BadInput
from .picture_options import add_picture_options, style_from
from .step_options import OPTIONS, add_step_options, step_from
from .tools import add_search_limits, add_workers, print_json, profile_from, saving, search_limits, searching, workers_of

if TYPE_CHECKING:
    from ..profile.profile import Profile
    from ..search.memory_limits import Point
    from ..show.pictures.style import Style
    from ..step import Step


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    balanced = {"help": "as in solve, but one (default: balanced over F, B and W)"}
    add_step_options(parser, *(name for name in OPTIONS if name != "memory"), partition=balanced)
    parser.add_argument("--points", type=int, default=12, help="memory limits; the peaks of named schedules are added")
    add_search_limits(parser, 60.0, "seconds to search at most, for all points together", "points")
    add_workers(parser)
    parser.add_argument("--json", action="store_true", help="the frontier as JSON on standard output")
    files = "frontier.json, .html, .svg, .pdf or .png; may be given more than once"
    parser.add_argument("-o", "--output", action="append", default=[], help=files)
    add_picture_options(parser, axis_of_time=False)
    parser.add_argument("--schedules", metavar="FOLDER", help="also write the schedule of every point into this folder")


def command(options: argparse.Namespace) -> int:
    """Value and bound over memory, as a table, JSON and pictures."""
    from ..show.frontier_report import check_frontier_path

    for path in options.output:
        check_frontier_path(path)
    style = style_from(options, *options.output)
    profile, step = profile_from(options.profile, "frontier"), step_from(options)
    for name in ("placement", "partition", "gathers", "vocabulary"):
        if getattr(step, name) == "auto":
            raise BadInput(f"frontier: {name} 'auto' is for solve: name one")
    limits = search_limits(options) | {"points": options.points}
    if options.schedules:
        _make_folder(options.schedules)
    with workers_of(options, "frontier", threads=2) as workers, searching("frontier") as (search, pressed):
        limits |= {"progress": search.show, "stop": pressed, "workers": workers}
        found = _curves(profile, step, limits) if step.auto else _frontier(profile, step, limits)
    saves = [partial(found.save, path, style) for path in options.output]
    if options.schedules:
        names = [(point, Path(options.schedules) / f"schedule-{name}.json") for name, point in found.points]
        saves += [partial(point.schedule.save, name) for point, name in names]
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
    save: Callable[[str, Style], None]
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
