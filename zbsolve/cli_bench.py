"""The command `bench`: run a suite, or hold one report against another."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .cli_tools import print_json, searching
from .errors import BadInput

if TYPE_CHECKING:
    from .bench import Report


def bench_options(parser: argparse.ArgumentParser) -> None:
    """Options of `zbsolve bench`."""
    parser.add_argument("what", metavar="SUITE", help="small or full; or, with --against, an earlier result: now.json")
    parser.add_argument("--against", metavar="BASE", help="base.json: exit 1 where something is worse than there")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--seconds", type=float, default=10.0, help="seconds to search at most, a problem and repeat")
    limit.add_argument(
        "--effort",
        type=float,
        help="work, about seconds of one core, in place of --seconds: the same results on any machine",
    )
    parser.add_argument("--repeats", type=int, default=3, help="times each problem is solved; 3 or more let times be judged")
    parser.add_argument("--seed", type=int, default=0, help="of random choices")
    parser.add_argument("--method", default="auto", help="as in solve")
    parser.add_argument("--json", action="store_true", help="results (or what changed) as JSON on standard output")
    parser.add_argument("-o", "--output", help="now.json, or - for standard output")


def bench(options: argparse.Namespace) -> int:
    """Solve a suite and write every sample; with a base, print what changed and exit 1 where something is worse."""
    from .bench import Report
    from .bench_suites import SUITES

    base = None if options.against is None else Report.load(options.against)
    if options.what in SUITES:
        now = _run(options)
        if options.output:
            now.save(options.output)
    elif base is None:
        raise BadInput(f"'{options.what}' is no suite ({', '.join(SUITES)}); to compare a result add --against base.json")
    else:
        now = Report.load(options.what)
    if base is not None:
        return _compare(options, base, now)
    if options.json:
        print_json(now.to_json())
    elif options.output != "-":
        print(results_table(now))
    return 0


def _run(options: argparse.Namespace) -> Report:
    from .bench import Result, run

    if options.effort is not None and not 0 < options.effort < float("inf"):
        raise BadInput(f"effort: {options.effort} is not a positive number")
    with searching("bench") as (search, _):

        def done(result: Result) -> None:
            if search.came:
                raise KeyboardInterrupt(search.came[0])

        return run(
            options.what,
            seconds=options.seconds,
            effort=options.effort,
            seed=options.seed,
            repeats=options.repeats,
            method=options.method,
            progress=search.show,
            done=done,
        )


def _compare(options: argparse.Namespace, base: Report, now: Report) -> int:
    from .bench_compare import compare, markdown

    result = compare(base, now)
    if options.json:
        rows = [{"name": row.name, "worse": list(row.worse), "better": list(row.better)} for row in result.rows]
        print_json({"failed": result.failed, "noise": result.noise, "pace": result.pace, "rows": rows})
    elif options.output != "-":
        print(markdown(result, now.machine, f"zbsolve bench {now.suite}"), end="")
    return 1 if result.failed else 0


def results_table(report: Report) -> str:
    """Value, bound, gap and seconds of every problem, and in all."""
    from statistics import median

    width = max(len(one.name) for one in report.results)
    lines = [f"{'problem':{width}} {'value µs':>12} {'bound µs':>12} {'gap':>8} {'seconds':>8}  by"]
    for one in report.results:
        gap = "optimal" if one.bound >= one.value else f"{one.gap:.2%}"
        numbers = f"{one.value:>12} {one.bound:>12} {gap:>8} {median(one.seconds):>8.2f}"
        lines.append(f"{one.name:{width}} {numbers}  {one.solver}")
    closed = sum(one.bound >= one.value for one in report.results)
    mean = sum(one.gap for one in report.results) / len(report.results)
    total = sum(median(one.seconds) for one in report.results)
    lines.append(f"{len(report.results)} problems: {closed} optimal, mean gap {mean:.2%}, {total:.1f} s a round")
    return "\n".join(lines)
