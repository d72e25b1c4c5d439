"""The commands that search: `solve` and `frontier`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .cli_tools import counted, print_json, searching
from .errors import BadInput

if TYPE_CHECKING:
    from .auto import Tried
    from .profile import Profile
    from .schedule import Schedule


def _step_options(parser: argparse.ArgumentParser) -> None:
    """What makes a problem from a profile, and how long to search."""
    parser.add_argument("profile", help="profile.json, or - for standard input")
    parser.add_argument("--ranks", type=int, required=True, help="of the pipeline")
    parser.add_argument("--microbatches", type=int, required=True, help="of a step")
    parser.add_argument(
        "--objective",
        choices=("makespan", "span"),
        default="makespan",
        help="a step when ranks wait for each other at its end, or when they do not",
    )
    parser.add_argument("--fused", action="store_true", help="one backward pass in place of B and W, as 1F1B is run today")
    parser.add_argument(
        "--recompute", default="", metavar="STAGES", help="all, or 0,2: stages that drop activations after F, for a pass X"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random choices")


def solve_options(parser: argparse.ArgumentParser) -> None:
    """Options of `zbsolve solve`."""
    _step_options(parser)
    parser.add_argument(
        "--placement",
        default="single",
        help="single, loop (loop4: 4 stages a rank), vee, mirror, ranks such as 0,2,1,3, or auto: the best of single, loop, "
        "loop4, vee",
    )
    parser.add_argument(
        "--partition",
        default="balanced",
        help="equal, balanced, F+B, alpa, memory, layers a stage such as 5,5,6,4, a partition.json, or auto: the best of "
        "all named ones and of single layers moved from there",
    )
    parser.add_argument(
        "--memory", help="all that a rank has, such as 40GiB; default: the device's, as profiled (a CPU: no limit)"
    )
    parser.add_argument("--method", default="auto", help="auto, greedy, cp, milp, or a named schedule: see zbsolve systems")
    parser.add_argument("--solver", default="cbc", help="for --method milp: cbc, highs, gurobi, or another that PuLP knows")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--seconds", type=float, default=30.0, help="seconds to search at most")
    limit.add_argument(
        "--effort",
        type=float,
        help="work, about seconds of one core, in place of --seconds: the same schedule for one seed on any machine",
    )
    parser.add_argument("--hint", help="an earlier schedule.json to start from, also of slightly different times")
    parser.add_argument("--json", action="store_true", help="the certificate as JSON on standard output")
    parser.add_argument("-o", "--output", help="schedule.json, or - for standard output")


def solve(options: argparse.Namespace) -> int:
    """Find a schedule, write it, say how good it is."""
    from .profile import Profile

    profile = Profile.load(options.profile)
    tried: tuple[Tried, ...] = ()
    with searching("solve", options.method) as (search, pressed):
        if "auto" in (options.placement, options.partition):
            from .auto import PARTITIONS, solve_auto
            from .cli_partition import counts_in

            named = options.partition in ("auto", *PARTITIONS)
            schedule, tried = solve_auto(
                profile,
                options.ranks,
                options.microbatches,
                placement=options.placement,
                partition=options.partition if named else counts_in(options.partition),
                memory=options.memory,
                objective=options.objective,
                fused=options.fused,
                recompute=options.recompute,
                progress=search.show,
                stop=pressed,
                **_search_arguments(options),
            )
        else:
            from .cli_partition import chosen
            from .search import solve as solve_problem

            profile, counts = chosen(profile, options.partition, options)
            step = (options.ranks, options.microbatches, options.placement, options.memory, options.objective)
            problem = profile.problem(*step, counts, options.fused, options.recompute)
            arguments = _search_arguments(options)
            schedule = solve_problem(problem, progress=lambda state: search.show("", state), **arguments)
    if options.output:
        schedule.save(options.output)
    _print_solved(options, schedule, tried, _bounds_of_all(profile, options, tried) if options.partition == "auto" else {})
    return 0


def _bounds_of_all(profile: Profile, options: argparse.Namespace, tried: tuple[Tried, ...]) -> dict[str, int]:
    """Placement → µs that no schedule of any partition is below: other bounds hold for their own partition."""
    from .assign import least_step
    from .cli_partition import job_of

    found = {}
    for placement in dict.fromkeys(one.placement for one in tried if one.layers):
        job = job_of(profile, options.ranks, options.microbatches, placement, options.memory, options.fused)
        found[placement] = least_step(job, options.objective)
    return found


def _search_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What `solve` is told, from the command line."""
    arguments: dict[str, Any] = {"seed": options.seed, "method": options.method, "solver": options.solver}
    if options.effort is None:
        arguments["seconds"] = options.seconds
    elif 0 < options.effort < float("inf"):
        arguments["effort"] = options.effort
    else:
        raise BadInput(f"effort: {options.effort} is not a positive number")
    if options.hint:
        from .schedule import Schedule

        arguments["hint"] = Schedule.load(options.hint)
    return arguments


def _print_solved(options: argparse.Namespace, schedule: Schedule, tried: tuple[Tried, ...], every: dict[str, int]) -> None:
    """What was found; `every`: bounds that hold for every partition, by placement."""
    certificate, timeline = schedule.certificate, schedule.timeline()
    assert certificate is not None
    if options.json:
        print_json(
            certificate.to_json()
            | {"source": schedule.problem.source}
            | ({"tried": [one.to_json() for one in tried]} if tried else {})
            | ({"bound_of_every_partition": every} if every else {})
        )
        return
    if options.output == "-":
        return
    if tried:
        print(tried_table(tried, certificate.objective))
    if schedule.problem.source.startswith("estimated"):
        print(f"times are {schedule.problem.source}, not measured")
    took = f" in {certificate.seconds:.1f} s" if options.effort is None else ""  # work is counted then, not time
    print(
        f"{certificate.objective} {certificate.value} µs, bound {certificate.bound} µs, gap {certificate.gap:.2%} "
        f"({certificate.status}), bubble {timeline.bubble_rate:.2%}, by {certificate.solver}{took}\n"
        f"bound: {certificate.proof}"
    )
    if every:
        least = ", ".join(f"{placement} {bound} µs" for placement, bound in every.items())
        print(f"each bound is for its own partition; for every partition: at least {least}")


def tried_table(tried: tuple[Tried, ...], objective: str) -> str:
    """What each placement and partition reached and why it lost."""
    split = len({one.partition for one in tried}) > 1
    names = [f"{one.placement} {one.partition}" if split else one.placement for one in tried]
    width = max(10, *map(len, names))
    head = "placement" if not split else "placement, partition"
    lines = [f"{head:{width}} {objective + ' µs':>14} {'bound µs':>14} {'gap':>8} {'seconds':>8}"]
    for name, one in zip(names, tried, strict=True):
        if one.value is None or one.bound is None:
            numbers = f"{'–':>14} {'–':>14} {'–':>8}"
        else:
            numbers = f"{one.value:>14} {one.bound:>14} {(one.value - one.bound) / max(1, one.value):>8.2%}"
        layers = f"  {counted(one.layers)}" if split and one.layers else ""
        lines.append(
            f"{name:{width}} {numbers} {f'{one.seconds:.1f}' if one.seconds else '–':>8}  {one.why or 'best'}{layers}"
        )
    return "\n".join(lines)


def frontier_options(parser: argparse.ArgumentParser) -> None:
    """Options of `zbsolve frontier`."""
    _step_options(parser)
    parser.add_argument("--placement", default="single", help="single, loop, vee, mirror, or ranks such as 0,2,1,3")
    parser.add_argument("--points", type=int, default=12, help="memory limits; the peaks of named schedules are added")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--seconds", type=float, default=60.0, help="seconds to search at most, for all points together")
    limit.add_argument(
        "--effort",
        type=float,
        help="work, about seconds of one core, in place of --seconds: the same points for one seed on any machine",
    )
    parser.add_argument("--json", action="store_true", help="the frontier as JSON on standard output")
    parser.add_argument(
        "-o", "--output", action="append", default=[], help="frontier.json, .svg or .html; may be given more than once"
    )
    parser.add_argument("--schedules", metavar="FOLDER", help="also write the schedule of every point into this folder")


def frontier(options: argparse.Namespace) -> int:
    """Value and bound over memory, as a table, JSON and pictures."""
    from .frontier import frontier as walk
    from .frontier_svg import check_ending, save, table
    from .profile import Profile

    for path in options.output:
        check_ending(path)
    profile = Profile.load(options.profile)
    with searching("frontier") as (search, pressed):
        found = walk(
            profile,
            options.ranks,
            options.microbatches,
            options.placement,
            options.objective,
            fused=options.fused,
            recompute=options.recompute,
            points=options.points,
            seconds=options.seconds,
            effort=options.effort,
            seed=options.seed,
            progress=search.show,
            stop=pressed,
        )
    for path in options.output:
        save(found, path)
    if options.schedules:
        from pathlib import Path

        Path(options.schedules).mkdir(parents=True, exist_ok=True)
        for point in found.points:
            point.schedule.save(Path(options.schedules) / f"schedule-{point.memory}.json")
    if options.json:
        print_json(found.to_json())
    elif "-" not in options.output:
        print(table(found), end="")
    return 0


def systems_options(parser: argparse.ArgumentParser) -> None:
    """Options of `zbsolve systems`."""
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


def systems(options: argparse.Namespace) -> int:
    """The systems of the literature: formulas, and what each measures on one step."""
    from .show_gallery import exhibits, page, table

    if options.output and options.output != "-" and not options.output.endswith(".html"):
        raise BadInput(f"{options.output}: a gallery is a page: name a file that ends in .html")
    shown, absent = exhibits(options.ranks, options.microbatches, options.all_to_all)
    if options.output:
        from .files import write_text

        write_text(options.output, page(shown, absent))
    if options.json:
        print_json([one.to_json() for one in shown] + [one.to_json() for one in absent])
    elif options.output != "-":
        print(table(shown, absent), end="")
    return 0
