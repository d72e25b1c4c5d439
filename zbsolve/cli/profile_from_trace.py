"""`zbsolve profile [BASE] --from-trace TRACE`: a profile from a run, without measuring."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from ..util.errors import BadInput
from ..util.files import check_writable
from .tools import print_json, saving, searching

if TYPE_CHECKING:
    from ..profile.profile import Profile


def from_trace(options: argparse.Namespace) -> int:
    """Write the profile that a run amounts to, and say what its step could be."""
    from ..interchange.traces.reading import read_trace
    from ..profile.lengths import stalls_of
    from ..profile.measured_run import FROM_STEPS, LINKS
    from ..profile.measured_run import from_trace as profile_of
    from ..profile.profile import Profile
    from ..search.today import today_of
    from ..show.run_text import run_in_words, stage_times
    from ..show.today_text import today_as_text, today_line

    if options.seconds < 0:
        raise BadInput(f"--seconds {options.seconds:g}: from 0 up; 0: no search")
    base = None if options.model is None else Profile.load(options.model)
    trace = read_trace(options.from_trace)
    found, stalls = profile_of(trace, base), stalls_of(trace)
    if options.output is not None and options.output != "-":
        check_writable(options.output)
    with searching("profile", "auto" if options.seconds else "none") as (search, pressed):
        today = today_of(trace, seconds=options.seconds, seed=options.seed, progress=search.show, stop=pressed)
    with saving(*[partial(found.save, options.output)] * bool(options.output)):
        if options.json:
            told = {"model": found.model, "source": found.source, "rank_factors": found.rank_factors, **found.facts}
            told |= {"blocking": trace.facts.get("blocking"), "microbatch_factors": found.microbatch_factors}
            told |= {"stages": stage_times(trace), "stalls": [one.to_json() for one in stalls]}
            print_json(told | {"today": today.to_json() | {"line": today_line(today)}})
        elif options.output != "-":
            print(run_in_words(trace, stalls), end="")
            print(_ranks_in_words(found, told=base is not None or trace.facts.get(LINKS) != FROM_STEPS))
            print(today_as_text(today), end="")
    return 0


def _ranks_in_words(found: Profile, told: bool) -> str:
    """Where the profile is from, and which ranks are slow. told: whether that is known: of a run alone, a stage may be."""
    steps = f"{found.source}: {len(found.layers)} layers from {found.facts['steps']} steps"
    if not told:
        return (
            f"{steps}; only a base profile tells whether a rank is slow or its stages are long (profile BASE --from-trace)"
        )
    ratios = " ".join(f"{one:.3f}" for one in found.facts["rank_ratios"])
    slow = [f"rank {rank} takes {one:.2f} times as long" for rank, one in enumerate(found.rank_factors) if one != 1]
    return f"{steps}; ranks {ratios}\n{'; '.join(slow) if slow else 'all ranks are alike'}"
