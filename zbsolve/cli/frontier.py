"""`zbsolve frontier`: value and bound over memory."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ..util.errors import BadInput
from .picture_options import add_picture_options, style_from
from .step_options import OPTIONS, add_step_options, step_from
from .tools import add_search_limits, print_json, saving, search_limits, searching


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    balanced = {"help": "as in solve, but one (default: balanced over F, B and W)"}
    add_step_options(parser, *(name for name in OPTIONS if name != "memory"), partition=balanced)
    parser.add_argument("--points", type=int, default=12, help="memory limits; the peaks of named schedules are added")
    add_search_limits(parser, 60.0, "seconds to search at most, for all points together", "points")
    parser.add_argument("--json", action="store_true", help="the frontier as JSON on standard output")
    files = "frontier.json, .html, .svg, .pdf or .png; may be given more than once"
    parser.add_argument("-o", "--output", action="append", default=[], help=files)
    add_picture_options(parser, axis_of_time=False)
    parser.add_argument("--schedules", metavar="FOLDER", help="also write the schedule of every point into this folder")


def command(options: argparse.Namespace) -> int:
    """Value and bound over memory, as a table, JSON and pictures."""
    from ..profile.profile import Profile
    from ..search.pareto import frontier
    from ..show.frontier_report import check_frontier_path, frontier_as_text, save_frontier

    for path in options.output:
        check_frontier_path(path)
    style = style_from(options, *options.output)
    profile, step = Profile.load(options.profile), step_from(options)
    if step.auto:
        raise BadInput("frontier: placement 'auto' and partition 'auto' are for solve: name one of each")
    limits = search_limits(options)
    if options.schedules:
        _make_folder(options.schedules)
    with searching("frontier") as (search, pressed):
        found = frontier(profile, step, points=options.points, progress=search.show, stop=pressed, **limits)
    saves = [partial(save_frontier, found, path, style) for path in options.output]
    if options.schedules:
        names = [(point, Path(options.schedules) / f"schedule-{point.memory}.json") for point in found.points]
        saves += [partial(point.schedule.save, name) for point, name in names]
    with saving(*saves):
        if options.json:
            print_json(found.to_json())
        elif "-" not in options.output:
            print(frontier_as_text(found), end="")
    return 0


def _make_folder(name: str) -> None:
    """The folder for schedules, before any time is spent. Raises BadInput."""
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{name}: cannot make this folder: {error.strerror}") from None
