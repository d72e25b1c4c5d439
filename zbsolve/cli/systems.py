"""`zbsolve systems`: the named schedules of the literature, with a gallery."""

from __future__ import annotations

import argparse

from ..util.errors import BadInput
from .tools import print_json


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--ranks", type=int, default=4, help="of the step on which each is shown")
    parser.add_argument("--microbatches", type=int, default=8, help="of that step")
    parser.add_argument(
        "--all-to-all",
        type=int,
        default=0,
        metavar="US",
        help="µs of an all-to-all (expert parallelism) behind a rank's F and behind its backward; F, B and W take 600 each",
    )
    parser.add_argument("--json", action="store_true", help="the table as JSON on standard output")
    parser.add_argument("-o", "--output", help="gallery.html: every system's schedule on one page")


def command(options: argparse.Namespace) -> int:
    """The systems of the literature: formulas, and what each measures on one step."""
    from ..show.gallery import exhibits, gallery_as_page, gallery_as_text

    if options.output and options.output != "-" and not options.output.endswith(".html"):
        raise BadInput(f"{options.output}: a gallery is a page: name a file that ends in .html")
    shown, absent = exhibits(options.ranks, options.microbatches, options.all_to_all)
    if options.output:
        from ..util.files import write_text

        write_text(options.output, gallery_as_page(shown, absent))
    if options.json:
        print_json([one.to_json() for one in shown] + [one.to_json() for one in absent])
    elif options.output != "-":
        print(gallery_as_text(shown, absent), end="")
    return 0
