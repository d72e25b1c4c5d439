"""`zbsolve export`: schedules for other engines."""

from __future__ import annotations

import argparse
import sys

from .tools import print_json


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("schedule", help="schedule.json, or - for standard input")
    parser.add_argument("--to", required=True, choices=("torch-csv",), help="torch-csv: torch.distributed.pipelining")
    parser.add_argument(
        "--defer-recv", action="store_true", help="for a runtime made with defer_pp_recv=True: refuse what it would mix up"
    )
    parser.add_argument("--json", action="store_true", help="what to know about the file as JSON on standard output")
    parser.add_argument("-o", "--output", help="file.csv; standard output without")


def command(options: argparse.Namespace) -> int:
    """Write the file; what to know about it goes to standard error, or with --json to standard output."""
    from ..interchange.torch_csv import torch_order
    from ..placement import describe
    from ..schedule import Schedule
    from ..util.files import write_text

    order = torch_order(Schedule.load(options.schedule), defer_recv=options.defer_recv)
    path = options.output or "-"
    if options.output or not options.json:
        write_text(path, order.csv)
    name = "FILE" if path == "-" else path
    if options.json:
        body = {
            "to": options.to,
            "output": options.output,
            "ranks": len(order.rows),
            "placement": list(order.placement),
            "placement_name": describe(order.placement),
            "microbatches": list(order.microbatches),
            "relabelled": order.relabelled,
            "overtaken": list(order.overtaken),
            "torchtitan": order.torchtitan(name),
            "notes": list(order.notes(name)),
        }
        print_json(body if options.output else {**body, "rows": [list(row) for row in order.rows]})
        return 0
    for note in order.notes(name):
        print(f"zbsolve export: {note}", file=sys.stderr)
    return 0
