"""`zbsolve explore`: a local page on which to try steps and schedules."""

from __future__ import annotations

import argparse

from ..profile.profile import Profile
from ..util.errors import BadInput
from .tools import compiling


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "profile", nargs="?", help="profile.json, or - for standard input; without one the page sets the model's times too"
    )
    parser.add_argument(
        "--state",
        default="",
        help="the page's first state, such as 'ranks=8&microbatches=24&placement=vee': the text after ? in its address, or "
        "another page's whole address",
    )
    parser.add_argument("--port", type=int, default=0, help="to serve on; 0: any free one")
    parser.add_argument("--seconds", type=float, help="end after serving for this time (default: at Ctrl-C)")


def command(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    try:
        from ..explore.server import serve
    except ModuleNotFoundError as error:
        raise BadInput(f"{error.name} is missing, which serves explore's page: pip install 'zbsolve[explore]'") from None
    from ..explore.playground import Playground
    from ..explore.state import State
    from ..search.solver import ready

    state = State.parse(options.state)
    playground = Playground(Profile.load(options.profile) if options.profile else None, options.profile or "")
    with compiling("explore"):
        ready()

    def started(address: str) -> None:
        print(f"{address}\nOnly this machine reaches the page, and only under this address. Ctrl-C ends it.", flush=True)

    try:
        serve(playground, state, options.port, options.seconds, started)
    except KeyboardInterrupt as pressed:
        if pressed.args:  # SIGTERM
            raise
    return 0
