"""`zbsolve numbers`: make a profile from given times and bytes, without a measurement."""

from __future__ import annotations

import argparse
import sys

from ..profile.doubtful import rounding_note
from ..profile.given import NUMBERS, RANK, given_profile, unit_note, words_of

SHOWN = ("F", "B", "W", "BW", "X", "comm", "activation", "parameters")  # numbers of a stage that are options
SHOWN_OF_RANK = ("ranks", "chunks", "memory", "states")


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    more = [name for name in (*NUMBERS, *RANK) if name not in (*SHOWN, *SHOWN_OF_RANK)]
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TABLE|NAME=VALUE",
        help="a CSV file with a row a stage and a column a number, a JSON object of numbers, or a number by its name: that "
        "of an option, or one of those at the end",
    )
    parser.epilog = "; ".join(f"{name}: {RANK[name] if name in RANK else NUMBERS[name].help}" for name in more)
    for name in SHOWN_OF_RANK:
        parser.add_argument(f"--{name}", help=RANK[name])
    stage = parser.add_argument_group(
        "numbers of one stage, for one microbatch",
        "Each is one value for all stages, values with commas between them (one a stage), or @FILE.csv (its column of that "
        "name). Units: ns us ms s; B KB MB GB KiB MiB GiB. Without a unit: µs, bytes.",
    )
    for name in SHOWN:
        stage.add_argument(f"--{name}", help=NUMBERS[name].help)
    parser.add_argument("-o", "--output", required=True, help="profile.json, or - for standard output")


def command(options: argparse.Namespace) -> int:
    """Write the profile that the numbers make."""
    from ..show.profile_meaning import rank_work_lines
    from ..show.profile_report import profile_as_text

    values = {name: value for name in (*SHOWN_OF_RANK, *SHOWN) if (value := getattr(options, name)) is not None}
    words = words_of(options.words, values)
    profile = given_profile(words)
    profile.save(options.output)
    if options.output != "-":
        print(profile_as_text(profile), end="")
        print("\n".join(rank_work_lines(profile, profile.facts["ranks"])))
    for note in filter(None, [unit_note(words), rounding_note(profile, [1] * len(profile.layers))]):
        print(f"zbsolve numbers: {note}", file=sys.stderr)
    return 0
