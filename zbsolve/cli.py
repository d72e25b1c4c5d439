"""The command line: thin. Every command reads files, calls one function and prints; imports stay inside commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .errors import BadInput, ZbsolveError

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit 0 fine, 1 a check failed or no schedule exists, 2 bad use or bad input."""
    options = _parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except ZbsolveError as error:
        print(f"zbsolve {options.name}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print(f"zbsolve {options.name}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zbsolve", description="Pipeline-parallel training schedules: found, proven, run.")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    for name, (add, command, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        add(sub)
        sub.set_defaults(command=command)
    return parser


def print_json(body: Any) -> None:
    """Machine-readable results on standard output."""
    print(json.dumps(body, indent=1))


def _solve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", help="profile.json, or - for standard input")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--placement", default="single", help="single, loop, vee, or ranks such as 0,2,1,3")
    parser.add_argument("--memory", help="bytes a rank, such as 40GiB; default: the device's, as profiled")
    parser.add_argument("--objective", choices=("makespan", "span"), default="makespan")
    parser.add_argument("--method", default="auto", help="auto, greedy, cp, milp, or a named schedule")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the certificate as JSON on standard output")
    parser.add_argument("-o", "--output", help="schedule.json, or - for standard output")


def _solve(options: argparse.Namespace) -> int:
    from .profile import Profile
    from .search import solve

    profile = Profile.load(options.profile)
    problem = profile.problem(options.ranks, options.microbatches, options.placement, options.memory, options.objective)
    schedule = solve(problem, seconds=options.seconds, seed=options.seed, method=options.method)
    if options.output:
        schedule.save(options.output)
    certificate, timeline = schedule.certificate, schedule.timeline()
    assert certificate is not None
    if options.json:
        print_json(certificate.to_json())
    elif options.output != "-":
        print(
            f"{certificate.objective} {certificate.value} µs, bound {certificate.bound} µs, gap {certificate.gap:.2%} "
            f"({certificate.status}), bubble {timeline.bubble_rate:.2%}, by {certificate.solver} "
            f"in {certificate.seconds:.1f} s\nbound: {certificate.proof}"
        )
    return 0


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", help="schedule.json, or - for standard input")
    parser.add_argument("--json", action="store_true", help="the violations as JSON on standard output")


def _check(options: argparse.Namespace) -> int:
    from .schedule import Schedule
    from .verifier import verify

    schedule = Schedule.load(options.schedule)
    violations = verify(schedule.problem, schedule)
    if options.json:
        print_json([{"rule": v.rule, "passes": list(v.passes), "text": v.text} for v in violations])
    else:
        for violation in violations:
            print(f"{options.schedule}: {violation}")
        if not violations:
            print(f"{options.schedule}: holds ({len(schedule.problem.passes)} passes)")
    return 1 if violations else 0


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", help="schedule.json, or - for standard input")
    parser.add_argument("--trace", help="trace.json of a run of it: predicted and measured on one time axis")
    parser.add_argument("--width", type=int, help="columns in the terminal; default: as wide as it is")
    parser.add_argument("-o", "--output", help="x.html, x.svg, x.png or x.trace.json; in the terminal without")


def _show(options: argparse.Namespace) -> int:
    import os
    import shutil

    from .schedule import Schedule
    from .trace import Trace

    schedule = Schedule.load(options.schedule)
    trace = Trace.load(options.trace) if options.trace else None
    if options.output:
        from .show import save

        save(schedule, options.output, trace)
        return 0
    from .show_terminal import terminal

    width = options.width or shutil.get_terminal_size((100, 24)).columns
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(terminal(schedule, trace, width, colour), end="")
    return 0


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", help="schedule.json")
    parser.add_argument("trace", help="trace.json of a run of it")
    parser.add_argument("--baseline", nargs=2, metavar=("SCHEDULE", "TRACE"), help="a baseline's schedule and run (1F1B)")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON on standard output")
    parser.add_argument("-o", "--output", help="x.html: predicted and measured as a page (or another ending of show)")


def _compare(options: argparse.Namespace) -> int:
    from .compare import compare, table
    from .schedule import Schedule
    from .trace import Trace

    schedule, trace = Schedule.load(options.schedule), Trace.load(options.trace)
    baseline = None
    if options.baseline:
        baseline = (Schedule.load(options.baseline[0]), Trace.load(options.baseline[1]))
    result = compare(schedule, trace, baseline)
    if options.output:
        from .show import save

        save(schedule, options.output, trace)
    if options.json:
        print_json(result.to_json())
    else:
        print(table(result), end="")
    return 0


def _profile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a preset (gpt-tiny) or module:function")
    parser.add_argument("-o", "--output", required=True, help="profile.json, or - for standard output")


def _profile(options: argparse.Namespace) -> int:
    raise BadInput("profile: not built yet")


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", help="schedule.json")
    parser.add_argument("--model", required=True, help="a preset (gpt-tiny) or module:function")
    parser.add_argument("-o", "--output", help="trace.json")


def _run(options: argparse.Namespace) -> int:
    raise BadInput("run: not built yet")


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Command, str]] = {
    "profile": (_profile_options, _profile, "measure a model: F, B, W, memory, links"),
    "solve": (_solve_options, _solve, "find a schedule and prove how good it is"),
    "check": (_check_options, _check, "verify a schedule from its file alone"),
    "show": (_show_options, _show, "draw a schedule in the terminal or as a page"),
    "run": (_run_options, _run, "run a schedule on torch.distributed ranks and measure it"),
    "compare": (_compare_options, _compare, "measured against predicted, and against a baseline"),
}


if __name__ == "__main__":
    sys.exit(main())
