"""`zbsolve explore`: a local page to play with."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from typing import TYPE_CHECKING

from ..util.errors import BadInput
from .step_options import OPTIONS, add_step_options
from .tools import compiling

if TYPE_CHECKING:
    from ..explore.state import State

NOT_ON_PAGE = ("blocking", "shards", "gathers", "replicas", "offload", "vocabulary")


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    file = {"nargs": "?", "help": "profile.json, or - for standard input; without one the page sets the model's times too"}
    add_step_options(
        parser,
        *(name for name in OPTIONS if name not in NOT_ON_PAGE),
        file=file,
        partition={"help": "equal, balanced, F+B, alpa, memory, or layers a stage such as 5,5,6,4 (default: balanced)"},
        memory={"help": "all that a rank has, such as 40GiB (default: the device's, as profiled; a CPU: no limit)"},
        recompute={
            "metavar": None,
            "choices": ("none", "all"),
            "help": "all: activations are dropped after F, for a pass X",
        },
        fused={"help": "one backward pass in place of B and W, or both (default: both)"},
    )
    parser.add_argument("--state", default="", help="what another page showed: its address, or what stands there behind ?")
    parser.add_argument("--port", type=int, default=0, help="to serve on; 0: any that is free")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--seconds", type=float, help="end after so long (default: at Ctrl-C)")


def command(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    try:
        from ..explore.server import serve
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{error.name} is missing, and explore serves its page with it: pip install 'zbsolve[explore]'"
        ) from None
    from ..explore.playground import Playground
    from ..profile.profile import Profile
    from ..search.solver import ready

    state = _state(options)
    playground = Playground(Profile.load(options.profile) if options.profile else None, options.profile or "")
    with compiling("explore"):
        ready()

    def started(address: str) -> None:
        print(f"{address}\nOnly this machine reaches the page, and only under this address. Ctrl-C ends it.", flush=True)
        if options.open and not webbrowser.open(address):
            print("zbsolve explore: no browser was found: open the address yourself", file=sys.stderr)

    try:
        serve(playground, state, options.port, options.seconds, started)
    except KeyboardInterrupt as pressed:
        if pressed.args:  # SIGTERM
            raise
    return 0


def _state(options: argparse.Namespace) -> State:
    """What the page begins with: `--state`, changed by the step's options. Raises BadInput."""
    from dataclasses import replace

    from ..explore.setting import GIB
    from ..explore.state import State
    from ..util.text import parse_bytes

    names = ("ranks", "microbatches", "placement", "partition", "objective", "recompute")
    said = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.memory is not None:
        said["memory"] = parse_bytes(options.memory) / GIB
    if options.fused is not None:
        said["backward"] = "fused" if options.fused else "split"
    return replace(State.parse(options.state), **said)
