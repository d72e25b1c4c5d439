"""The command line. Each command is a module: `options` declares its options, `command` runs it. Only one is loaded.

Every command reads files, calls one function and prints. Slow imports are inside functions. For commands and options that
were removed, or that other words name, an error says what to write."""

from __future__ import annotations

import argparse
import csv
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module, resources
from keyword import iskeyword
from typing import Any, NoReturn

from .. import __version__
from ..util.errors import BadInput, ZbsolveError, interruption
from .tools import PICTURES, ends_on_sigterm, outputs_of, progress_line, under_torchrun

STEP = "options of a step"  # all of them


@cache
def moved() -> list[list[str]]:
    """The rows of `moved.csv`: commands; options of these, or "" if a command is gone itself; what to write now."""
    text = (resources.files(__package__) / "moved.csv").read_text(encoding="utf-8")
    return list(csv.reader(text.splitlines()[1:]))


def removed(options: str) -> list[str]:
    """The options in a row of `moved`."""
    if options != STEP:
        return options.split()
    from ..profile.step import STEP_FIELDS

    return [*(field.option for field in STEP_FIELDS), "--no-fused", "--no-blocking"]


def what_instead(command: str, words: Sequence[str]) -> str:
    """What to write in place of a command, or of the first option, that is done by another; "" if there is none."""
    for name in (word.partition("=")[0] for word in words):
        for commands, options, instead in moved():
            if command in commands.split() and not options:
                return f"is no command: {instead}"
            if command in commands.split() and name in removed(options):
                return f"{name} is no option: {instead}"
    return ""


def entry_point() -> NoReturn:
    """Run the command of this process and exit. Ranks of torchrun skip Python's cleanup: during it, gloo's threads may
    notice that other ranks have exited, and abort a process that has finished its work."""
    code = main()
    if not under_torchrun():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has closed the pipe
            stream.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fine, 1 a check failed or no schedule exists, 2 bad use or bad input,
    128 + n ended by signal n."""
    words, began = sys.argv[1:] if arguments is None else list(arguments), time.monotonic()
    debug, words = DEBUG in words, [word for word in words if word != DEBUG]
    wanted = next((word for word in words if not word.startswith("-")), "")
    if wanted not in MODELS:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    root = parser(wanted)
    if instead := what_instead(wanted, words):
        print(f"zbsolve {wanted}: {instead}", file=sys.stderr)
        return 2
    options = _parsed(root, words)
    options.began = began
    try:
        with ends_on_sigterm():
            _check_outputs(options)
            code: int = options.command(options)
            return code
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            sys.stderr.close()
            return 0
        if debug:
            traceback.print_exception(error)
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"zbsolve {options.name}: {where}cannot write: {error.strerror}", file=sys.stderr)
        return 2
    except ZbsolveError as error:
        if debug:
            traceback.print_exception(error)
            print(end=f"\nthe traceback of that rank:\n{error.details}\n" if error.details else "", file=sys.stderr)
        for failure in (error, *error.others):
            said = re.sub(rf"^{options.name}(: | (?=--))", "", str(failure))  # its Python function may name itself
            print(f"zbsolve {options.name}: {said}{_kept_elsewhere(failure)}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, SystemError) as error:
        pressed = interruption(error)
        if pressed is None:
            raise
        progress_line("")
        print(f"zbsolve {options.name}: interrupted", file=sys.stderr)
        return 128 + (pressed.args[0] if pressed.args else signal.SIGINT)


def _parsed(root: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """The parsed options. Positional arguments may be between options, if the command takes any number of them."""
    options, more = root.parse_known_args(words)
    if more and ("words" not in options or any(word.startswith("-") for word in more)):
        _Parser(prog=f"zbsolve {options.name}").error(f"unrecognized: {' '.join(more)}")
    if more:
        options.words += more
    return options


def _kept_elsewhere(error: ZbsolveError) -> str:
    """Save a result that could not be written, as it may have taken hours, and say where; "" for other errors."""
    from ..util.files import CannotWrite, write_elsewhere

    if not isinstance(error, CannotWrite):
        return ""
    kept = write_elsewhere(error)
    return "; nor can the folder for temporary files or the home folder" if kept is None else f"; it is kept in {kept}"


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise BadInput for outputs that cannot be written, before the work begins."""
    from ..util.files import check_writable, ending_of

    outputs, endings = outputs_of(options), WRITES.get(options.name, (JSON,))
    for path in outputs:
        if getattr(options, "frontier", None) is not None and (path.endswith("/") or os.path.isdir(path)):
            continue
        check_writable(path)
        if endings and ending_of(path) and not path.endswith((*endings, f"{JSON}.gz")):
            hint = "; 'show' draws what is in a file" if path.endswith(PICTURES) else ""
            raise BadInput(f"{path}: unknown ending; '{options.name}' writes {' '.join(endings)}{hint}")
    if "-" in outputs and getattr(options, "json", False):
        raise BadInput("--json and -o - both want standard output: choose one")


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage of all options. `-3ms` is a value, which its option refuses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class Help(argparse.HelpFormatter):
    """Shows the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default is None or action.default is False or action.default in ("", [], argparse.SUPPRESS)
        return action.help if plain or not action.help else f"{action.help} (default: %(default)s)"


def parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands with their options. wanted: add only this command's options, which is faster."""
    root = _Parser(prog="zbsolve", description="Pipeline-parallel training schedules: found, proven, run.")
    root.add_argument("--version", action="version", version=f"zbsolve {__version__}")
    root.add_argument(DEBUG, action="store_true", help="show the traceback of an error; anywhere on the line")
    commands = root.add_subparsers(dest="name", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text, formatter_class=Help)
        if wanted in (name, None):
            module = import_module(f".{name}{'_' if iskeyword(name) else ''}", __package__)
            module.options(sub)
            sub.set_defaults(command=module.command)
    return root


# Commands that run a model. The others multiply no matrices with numpy, so they do not start OpenBLAS's threads: that would
# take half of the CPU time of a short command.
MODELS = ("profile", "run")
DEBUG = "--debug"
JSON = ".json"
# Endings of what a command writes (others: JSON), where the command does not check them itself.
WRITES = {"solve": (JSON, *PICTURES), "plan": (JSON, ".html"), "show": (), "compare": (), "export": ()}
COMMANDS = {
    "profile": "measure a model: F, B, W, memory, links",
    "numbers": "a profile from numbers that you give, in place of a measurement",
    "plan": "how to split a model over devices, with a bound over all ways",
    "solve": "find a schedule and prove how good it is; a race of methods; value and bound over memory",
    "check": "verify a schedule from its file alone; prove its bound again, look at its steady state",
    "show": "draw a schedule, a run, a plan, a profile or the literature's schedules",
    "run": "run a schedule on torch.distributed ranks and measure it",
    "compare": "schedules side by side; measured against predicted; two profiles",
    "import": "another engine's or a hand-made schedule, verified on a profile's times",
    "export": "write a schedule for another engine",
    "explore": "a local page to play with: a step by sliders, its schedule and bound at once",
    "bench": "solve a suite of problems; compare results with earlier ones",
}
