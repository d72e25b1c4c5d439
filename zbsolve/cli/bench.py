"""`zbsolve bench`: solve a suite of problems or your own ones, or compare two reports."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..util.errors import BadInput
from ..util.files import document_kind
from .step_options import OPTIONS, add_step_options, step_words
from .tools import add_search_limits, add_workers, search_limits, searching, tell, workers_of

if TYPE_CHECKING:
    from ..bench.runs import Report


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "what",
        nargs="+",
        metavar="SUITE",
        help="small, full, or your own: files and folders of problems, schedules and profiles, these with the step as in "
        "solve's options, such as profile.json@ranks=4,microbatches=8,placement=vee; or, with --against, an earlier "
        "result: now.json",
    )
    parser.add_argument("--against", metavar="BASE", help="base.json: exit 1 if something is worse than there")
    add_search_limits(parser, 10.0, "seconds to search at most, a problem and repeat", "results")
    add_workers(parser)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each problem; from 3 on, their times are compared")
    parser.add_argument("--method", default="auto", help="as in solve")
    parser.add_argument("--json", action="store_true", help="results (or what changed) as JSON on standard output")
    parser.add_argument("-o", "--output", help="now.json, or - for standard output")


def command(options: argparse.Namespace) -> int:
    """Solve a suite and write all samples; with --against, print what changed and return 1 if something got worse."""
    from ..bench.runs import Report, report_as_text

    base = None if options.against is None else Report.load(options.against)
    if options.what == ["-"] or (len(options.what) == 1 and document_kind(options.what[0]) == "bench"):
        if base is None:
            raise BadInput(f"{options.what[0]}: holds a result: to compare it add --against base.json")
        now = Report.load(options.what[0])
    else:
        now = _run(options)
        if options.output:
            now.save(options.output)
    if base is not None:
        return _compare(options, base, now)
    tell(options, now.to_json, lambda: report_as_text(now))
    return 0


def _with_step(what: str) -> tuple[str, dict[str, Any]]:
    """A file or folder, and the step given after `@`, such as `profile.json@ranks=4,microbatches=8`. Raises BadInput."""
    path, _, step = what.partition("@")
    if not step or Path(what).exists():
        return what, {}
    words = argparse.ArgumentParser(prog=f"zbsolve bench {what}", add_help=False, allow_abbrev=False, exit_on_error=False)
    add_step_options(words, *OPTIONS)
    pairs = [pair.partition("=") for pair in re.split(r",(?=[a-z_-]+=)", step)]
    try:
        parsed, more = words.parse_known_args([f"--{name}={value}" for name, _, value in pairs])
    except argparse.ArgumentError as error:
        raise BadInput(f"{what}: {error}") from None
    if more:
        raise BadInput(f"{what}: '{more[0].lstrip('-')}' is no word of a step such as ranks=4")
    return path, step_words(parsed, *OPTIONS)


def _run(options: argparse.Namespace) -> Report:
    from ..bench.runs import Result, Settings, run_suite
    from ..bench.suites import problems_of

    options.on = options.on or "1"  # parallel searches are slower, so they need to be asked for
    settings = Settings(**search_limits(options), repeats=options.repeats, method=options.method)
    problems = problems_of(dict(map(_with_step, options.what)))
    name = " ".join(Path(path).name for path in options.what)
    with workers_of(options, "bench") as workers, searching("bench") as (search, _):

        def done(result: Result) -> None:
            if search.came:
                raise KeyboardInterrupt(search.came[0])

        return run_suite(name, settings, progress=search.show, done=done, problems=problems, workers=workers)


def _compare(options: argparse.Namespace, base: Report, now: Report) -> int:
    from ..bench.regressions import compare_reports, regressions_as_markdown

    result = compare_reports(base, now)
    rows = [{"name": row.name, "worse": list(row.worse), "better": list(row.better)} for row in result.rows]
    body = {"failed": result.failed, "noise": result.noise, "pace": result.pace, "rows": rows}
    tell(options, lambda: body, lambda: regressions_as_markdown(result, now.machine, f"zbsolve bench {now.suite}"))
    return 1 if result.failed else 0
