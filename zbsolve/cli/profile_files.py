"""`zbsolve profile --diff` and `--from-trace`: profiles from profiles and runs, without measuring."""

from __future__ import annotations

import argparse

from ..util.errors import BadInput
from .tools import print_json


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Options that stand in for a model."""
    parser.add_argument(
        "--diff", nargs=2, metavar=("OLD", "NEW"), help="in place of MODEL: what changed between two profiles"
    )
    parser.add_argument("--from-trace", metavar="TRACE", help="in place of MODEL: a profile from a run, slow ranks included")
    parser.add_argument("--profile", metavar="BASE", help="for --from-trace: shares times out over layers; bytes are its")


def diff(options: argparse.Namespace) -> int:
    """Print what changed from one profile to another."""
    from ..profile.changes import drift
    from ..profile.profile import Profile
    from ..show.drift_text import drift_as_text

    if options.output is not None:
        raise BadInput("--diff writes no profile: leave out -o")
    found = drift(*(Profile.load(path) for path in options.diff))
    if options.json:
        print_json(found.to_json())
    else:
        print(drift_as_text(found), end="")
    return 0


def from_trace(options: argparse.Namespace) -> int:
    """Write the profile that a run amounts to."""
    from ..profile.measured_run import from_trace as profile_of
    from ..profile.profile import Profile
    from ..trace import Trace

    base = None if options.profile is None else Profile.load(options.profile)
    found = profile_of(Trace.load(options.from_trace), base)
    found.save(options.output)
    if options.json:
        print_json({"model": found.model, "source": found.source, "rank_factors": found.rank_factors, **found.facts})
    elif options.output != "-":
        ratios = " ".join(f"{one:.3f}" for one in found.facts["rank_ratios"])
        slow = [f"rank {rank} takes {one:.2f} times as long" for rank, one in enumerate(found.rank_factors) if one != 1]
        print(f"{found.source}: {len(found.layers)} layers from {found.facts['steps']} steps; ranks {ratios}")
        print("; ".join(slow) if slow else "all ranks are alike")
    return 0
