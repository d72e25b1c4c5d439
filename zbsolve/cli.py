"""The command line: thin. Every command reads files, calls one function and prints; imports stay inside commands."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from . import __version__, cli_bench, cli_export, cli_partition, cli_period, cli_profile, cli_run, cli_search
from .cli_tools import ends_on_sigterm, print_json, progress_line
from .errors import BadInput, ZbsolveError, interruption
from .files import check_writable

if TYPE_CHECKING:
    from .schedule import Schedule
    from .verifier import Violation

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit 0 fine, 1 a check failed or no schedule exists, 2 bad use or bad input, 128 + n
    ended by signal n."""
    options = parser().parse_args(arguments)
    command: Command = options.command
    try:
        with ends_on_sigterm():
            _check_outputs(options)
            return command(options)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            sys.stderr.close()
            return 0
        print(f"zbsolve {options.name}: cannot write: {error.strerror}", file=sys.stderr)
        return 2
    except ZbsolveError as error:
        print(f"zbsolve {options.name}: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, SystemError) as error:
        pressed = interruption(error)
        if pressed is None:
            raise
        progress_line()("")
        print(f"zbsolve {options.name}: interrupted", file=sys.stderr)
        return 128 + (pressed.args[0] if pressed.args else signal.SIGINT)


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse what cannot be written before the work begins."""
    output = getattr(options, "output", None)
    outputs = [output] if isinstance(output, str) else list(output or ())
    for path in outputs:
        check_writable(path)
    if "-" in outputs and getattr(options, "json", False):
        raise BadInput("--json and -o - both want standard output: choose one")


class Help(argparse.HelpFormatter):
    """Says each option's default where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default is None or action.default is False or action.default in ("", [], argparse.SUPPRESS)
        return action.help if plain or not action.help else f"{action.help} (default: %(default)s)"


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(prog="zbsolve", description="Pipeline-parallel training schedules: found, proven, run.")
    root.add_argument("--version", action="version", version=f"zbsolve {__version__}")
    commands = root.add_subparsers(dest="name", metavar="COMMAND", required=True)
    for name, (add, command, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text, formatter_class=Help)
        add(sub)
        sub.set_defaults(command=command)
    return root


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", help="schedule.json, or - for standard input")
    parser.add_argument("--bound", action="store_true", help="also prove the certificate's bound again, from the file alone")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to prove the bound at most")
    parser.add_argument("--json", action="store_true", help="the violations as JSON on standard output")


def _check(options: argparse.Namespace) -> int:
    from .schedule import Schedule
    from .verifier import verify

    schedule = Schedule.load(options.schedule)
    violations = verify(schedule.problem, schedule)
    proven = ""
    if options.bound and not violations:
        proven, *failed = _prove_again(schedule, options.seconds)
        violations = tuple(failed)
    if options.json:
        print_json([{"rule": v.rule, "passes": list(v.passes), "text": v.text} for v in violations])
    else:
        for violation in violations:
            print(f"{options.schedule}: {violation}")
        if not violations:
            print(f"{options.schedule}: holds ({len(schedule.problem.passes)} passes){proven}")
    return 1 if violations else 0


def _prove_again(schedule: Schedule, seconds: float) -> tuple[str] | tuple[str, Violation]:
    """The words for a bound that was proven again; with a violation where it was not."""
    from .ilp.bounds import Bound, recheck
    from .verifier import Violation

    if not seconds > 0:
        raise BadInput(f"seconds: {seconds} is not a positive time")
    stated = schedule.certificate
    if stated is None:
        return "", Violation("bound", (), "there is no certificate, so no bound is stated")
    if not all(0 <= rank < schedule.problem.ranks for rank in stated.ranks):
        return "", Violation("bound", (), f"the certificate names ranks {list(stated.ranks)} of {schedule.problem.ranks}")
    found = recheck(schedule.problem, Bound(stated.bound, stated.proof, stated.relaxation, stated.ranks), seconds)
    if found.value < stated.bound:
        text = f"bound {stated.bound} µs is not proven again; {found.value} µs is ({found.proof})"
        return "", Violation("bound", (), text)
    return (f"; bound {stated.bound} µs proven again: {found.proof}",)


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "schedule", help="schedule.json, or trace.json of a run (it holds its schedule); - for standard input"
    )
    parser.add_argument("--trace", help="trace.json of a run of it: predicted and measured on one time axis")
    parser.add_argument("--width", type=int, help="columns in the terminal; default: as wide as it is")
    parser.add_argument("-o", "--output", help="x.html, x.svg or x.trace.json; in the terminal without")


def _show(options: argparse.Namespace) -> int:
    import os
    import shutil

    from .files import read_one_of
    from .schedule import Schedule
    from .trace import Trace

    kind, body = read_one_of(options.schedule, ("schedule", "trace"))
    trace = Trace.load(options.trace) if options.trace else None
    if kind == "trace":
        if trace is not None:
            raise BadInput(f"{options.schedule}: holds a trace, and --trace names another: give the schedule in its place")
        trace = Trace.from_json(body, options.schedule)
    schedule = Schedule.from_json(body, options.schedule) if kind == "schedule" or trace is None else trace.planned()
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


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Command, str]] = {
    "profile": (cli_profile.profile_options, cli_profile.profile, "measure a model: F, B, W, memory, links"),
    "partition": (cli_partition.partition_options, cli_partition.partition, "which layers go to which stage"),
    "solve": (cli_search.solve_options, cli_search.solve, "find a schedule and prove how good it is"),
    "check": (_check_options, _check, "verify a schedule from its file alone"),
    "frontier": (cli_search.frontier_options, cli_search.frontier, "value and bound over memory"),
    "systems": (cli_search.systems_options, cli_search.systems, "the named schedules of the literature, with a gallery"),
    "period": (cli_period.period_options, cli_period.period, "the steady state of training without an end, and its bound"),
    "bench": (cli_bench.bench_options, cli_bench.bench, "solve a suite of problems; hold results against earlier ones"),
    "show": (_show_options, _show, "draw a schedule in the terminal or as a page"),
    "export": (cli_export.export_options, cli_export.export, "write a schedule for torch's own pipeline runtime"),
    "run": (cli_run.run_options, cli_run.run, "run a schedule on torch.distributed ranks and measure it"),
    "compare": (_compare_options, _compare, "measured against predicted, and against a baseline"),
}


if __name__ == "__main__":
    sys.exit(main())
