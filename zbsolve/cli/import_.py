"""`zbsolve import`: other people's schedules, on the times of a profile."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ..show.sentences import certificate_lines, headline, value_line
from .step_options import add_step_options
from .tools import first_lines, print_json, profile_from

if TYPE_CHECKING:
    from ..interchange.importing import Imported

STEP = ("partition", "memory", "replicas")  # options of a step; its other fields follow from the file
PLACED = {"help": "of node lists that say chunks and no stages: single, loop, loop4, vee (default: as messages say)"}


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "file",
        help="a grid of pass names, a row a rank; torch's CSV; node lists of Primus or ColossalAI in JSON; - for a pipe",
    )
    parser.add_argument("--profile", required=True, help="profile.json: the times and the memory of the schedule's passes")
    add_step_options(parser, *STEP, "placement", placement=PLACED)
    parser.add_argument("--json", action="store_true", help="the certificate, or what does not hold, as JSON")
    parser.add_argument("-o", "--output", help="schedule.json, or - for standard output; without: drawn in the terminal")


def command(options: argparse.Namespace) -> int:
    """Read an order, verify it on the profile's times, write it as a schedule with a certificate."""
    from ..interchange.importing import import_schedule, read_order
    from ..search.certify import certified
    from .step_options import step_words

    order, profile = read_order(options.file, options.placement), profile_from(options.profile, "import")
    imported = import_schedule(order, profile, **{"partition": "balanced", **step_words(options, *STEP)})
    for note in order.notes:
        print(f"zbsolve import: {note}", file=sys.stderr)
    if imported.violations:
        return _refused(options, imported)
    schedule = certified(imported.schedule, imported.solver)
    if options.output:
        schedule.save(options.output)
    if options.json:
        assert schedule.certificate is not None
        print_json(schedule.certificate.to_json() | {"source": schedule.problem.source})
    elif options.output is None:
        from .show import draw

        draw(schedule)
    elif options.output != "-":
        print("\n".join((headline(schedule), value_line(schedule), *certificate_lines(schedule))))
    return 0


def _refused(options: argparse.Namespace, imported: Imported) -> int:
    """Print the violations, and how much memory the schedule would need. No file is written."""
    if options.json:
        rows = [{"rule": v.rule, "passes": list(v.passes), "text": v.text} for v in imported.violations]
        print_json([{**row, "places": {n: imported.order.places.get(n, []) for n in row["passes"]}} for row in rows])
        return 1
    print("\n".join(first_lines(imported.told())))
    if imported.needs is not None:
        print(f"{options.file}: with --memory {imported.needs} it holds")
    if options.output:
        print(f"zbsolve import: {options.output} was not written: the schedule does not hold", file=sys.stderr)
    return 1
