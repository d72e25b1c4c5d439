"""`zbsolve export`: schedules for other engines."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ..planner.engines import TARGETS, target
from ..schedule import Schedule
from ..util.errors import BadInput
from ..util.files import document_kind, write_parts, write_text
from ..util.text import aligned
from .tools import print_json

if TYPE_CHECKING:
    from ..interchange.exports import Export, Options
    from ..planner.candidate import Choice


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("schedule", nargs="?", help="schedule.json or plan.json, or - for standard input")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", choices=[engine.name for engine in TARGETS], help="which engine's file; see --list")
    what.add_argument("--list", action="store_true", help="say what each engine can express, and write nothing")
    parser.add_argument("--or-best", action="store_true", help="if the engine cannot express the schedule: its best order")
    parser.add_argument(
        "--defer-recv",
        action="store_true",
        help="torch-csv and torchtitan, for a runtime made with defer_pp_recv=True: refuse what it would mix up",
    )
    parser.add_argument(
        "--layers",
        help="megatron and torchtitan: what each layer is, E embedding, t transformer, m prediction, L loss, "
        "- none: E,t*30,L",
    )
    parser.add_argument("--json", action="store_true", help="notes about the file as JSON on standard output")
    parser.add_argument("-o", "--output", help="the file, as --list says which; standard output without")


def command(options: argparse.Namespace) -> int:
    """Write the engine's file. Notes about it go to standard error, or with --json to standard output."""
    if options.list:
        rows = [engine.words for engine in TARGETS]
        table = aligned([list(rows[0]), *(list(row.values()) for row in rows)], left=range(-1, 5))
        print_json(rows) if options.json else print("\n".join(table))
        return 0
    from ..interchange.exports import Options, export

    if options.schedule is None:
        raise BadInput("export: name the schedule's file, or - for standard input")
    for option, value, names in (
        ("--layers", options.layers, ("megatron", "torchtitan")),
        ("--defer-recv", options.defer_recv, ("torch-csv", "torchtitan")),
    ):
        if value and options.to not in names:
            raise BadInput(f"{option}: for --to {' or '.join(names)} only")
    path = options.output or "-"
    target(options.to).check_ending(path)
    asked = Options("FILE" if path == "-" else path, options.or_best, options.defer_recv, options.layers)
    if (made := _by_rank(options, asked, path)) is None:
        schedule, plan = _schedule_and_plan(options.schedule)
        made = export(schedule, options.to, replace(asked, plan=plan))
        if options.output or not options.json:
            write_text(path, made.text)
    if options.json:
        print_json(_body(options, made))
        return 0
    for note in made.notes:
        print(f"zbsolve export: {note}", file=sys.stderr)
    return 0


def _by_rank(options: argparse.Namespace, asked: Options, path: str) -> Export | None:
    """Export repeated rounds rank by rank, to save memory. None for other files, and if the engine needs all passes."""
    from ..interchange.exports import export_long
    from ..interchange.order import Refused
    from ..long_steps.files import KIND, MAX_UNROLLED, load

    if options.schedule == "-" or document_kind(options.schedule) != KIND:
        return None
    long = load(options.schedule)
    try:
        long_export = export_long(long, options.to, asked)
    except Refused:
        if long.passes > MAX_UNROLLED:
            raise
        return None  # `export` gets all passes, and may find an order that the engine accepts
    if long_export is None:
        return None
    if not options.output and options.json:
        return replace(long_export.made, rows=[line.rstrip().split(",") for line in long_export.lines])
    write_parts(path, long_export.lines)
    return long_export.made


def _schedule_and_plan(path: str) -> tuple[Schedule, Choice | None]:
    """The schedule in a file, and the plan if the file holds one. Raises BadInput."""
    from ..long_steps.files import load_unrolled
    from ..planner.plan_file import KIND, read_choice

    if document_kind(path) != KIND:
        return load_unrolled(path), None
    plan = read_choice(path)
    return plan.best.schedule, plan


def _body(options: argparse.Namespace, made: Export) -> dict[str, object]:
    body = {"to": options.to, "output": options.output, **made.facts, "notes": list(made.notes)}
    return body if options.output else {**body, "rows": made.rows}
