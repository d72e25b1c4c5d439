"""From a state to what the rest of zbsolve takes: a profile, a step, and the command lines that give the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from ..placement import parse_routes
from ..profile.given import given_profile
from ..profile.profile import Profile
from ..step import Step
from ..systems.table import system
from ..util.errors import BadInput
from .state import BEST, State

GIB = 2**30  # bytes
NUMBERS_FILE = "numbers.json"  # of the command line


def in_its_placement(state: State) -> State:
    """The state with what its named system prescribes: its backward, and its placement where the state's is of another
    shape."""
    if state.system == BEST:
        return state
    backward = "fused" if system(state.system).fused else "split"
    return replace(state, placement=own_placement(state), backward=backward)


def own_placement(state: State) -> str:
    """The placement in which the state's system runs, also where that cannot be: the state's, or what a named system
    prescribes where that has another shape."""
    if state.system == BEST:
        return state.placement
    own = system(state.system).placement
    return state.placement if state.placement.rstrip("0123456789") == own else own


def step_of(state: State) -> Step:
    """The step that the state says. Raises BadInput."""
    named = state.partition if not state.partition[0].isdigit() else tuple(map(int, state.partition.split(",")))
    return Step(
        state.ranks,
        state.microbatches,
        state.placement,
        named,
        f"{_plain(state.memory)}GiB" if state.memory else None,
        state.objective,
        state.backward == "fused",
        recompute="" if state.recompute == "none" else state.recompute,
    )


def profile_of(state: State) -> Profile:
    """The model of a state without a profile: a layer a stage of its placement. Raises BadInput."""
    if not state.F + state.B + state.W:
        raise BadInput("F: forward and backward take no time: give at least one of F, B, W")
    return given_profile({"ranks": str(_stages(state)), **_numbers(state)})


def _stages(state: State) -> int:
    return len(parse_routes(state.placement, state.ranks)[0])


def _numbers(state: State) -> dict[str, str]:
    """What `zbsolve numbers` is told: option → one value, or one a stage. A stage is a piece of the model, which has as many
    equal parts as there are ranks."""
    stages = _stages(state)
    share = state.ranks / stages
    times = [state.slow_factor if stage * state.ranks // stages + 1 == state.slow_part else 1.0 for stage in range(stages)]
    times = [share * time for time in times]
    times[-1] += state.output
    said = {kind: [f"{_plain(getattr(state, kind) * time)}ms" for time in times] for kind in ("F", "B", "W")}
    said["comm"] = [f"{_plain(state.comm)}ms"]
    said["activation"] = ["/".join(f"{_plain(share * size)}GiB" for size in (state.until_B, state.until_W))]
    return {option: ",".join(values if len(set(values)) > 1 else values[:1]) for option, values in said.items()}


def commands(state: State, path: str, options: str) -> tuple[str, ...]:
    """The command lines that make the same schedule: of `zbsolve numbers` where there is no profile at `path`, then of
    `zbsolve solve` with these further options."""
    step = {
        "ranks": str(state.ranks),
        "microbatches": str(state.microbatches),
        "placement": state.placement,
        "partition": state.partition if path and state.partition != "balanced" else "",
        "memory": f"{_plain(state.memory)}GiB" if state.memory else "",
        "recompute": "" if state.recompute == "none" else state.recompute,
        "objective": "" if state.objective == "makespan" else state.objective,
    }
    fused = " --fused" if state.system == BEST and state.backward == "fused" else ""  # a named one has its own
    solve = f"zbsolve solve {shlex.quote(path or NUMBERS_FILE)}{_options(step)}{fused} {options} -o schedule.json"
    return (solve,) if path else (_numbers_command(state), solve)


def _numbers_command(state: State) -> str:
    chunks, rest = divmod(_stages(state), state.ranks)
    whose = {"ranks": str(_stages(state))}
    if chunks > 1 and not rest:
        whose = {"ranks": str(state.ranks), "chunks": str(chunks)}
    return f"zbsolve numbers{_options({**whose, **_numbers(state)})} -o {NUMBERS_FILE}"


def _options(said: Mapping[str, str]) -> str:
    return "".join(f" --{option} {shlex.quote(value)}" for option, value in said.items() if value)


def _plain(value: float) -> str:
    """A number without an exponent."""
    return f"{value:.6f}".rstrip("0").rstrip(".")
