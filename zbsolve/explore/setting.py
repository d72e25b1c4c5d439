"""From a state to what the rest of zbsolve takes: a profile, a step, and the command lines that give the same."""

from __future__ import annotations

import shlex
from dataclasses import replace

from ..layer import Layer, Link
from ..placement import parse_routes
from ..profile.profile import Profile
from ..step import Step
from ..systems.table import system
from ..util.errors import BadInput
from .state import BEST, State

MS, GIB = 1e3, 2**30  # in µs, in bytes
NUMBERS_FILE = "numbers.json"  # of the command line


def in_its_placement(state: State) -> State:
    """The state with what its named system prescribes: its backward, and its placement where the state's is of another
    shape."""
    if state.system == BEST:
        return state
    one = system(state.system)
    shape = state.placement.rstrip("0123456789")
    placement = state.placement if shape == one.placement else one.placement
    return replace(state, placement=placement, backward="fused" if one.fused else "split")


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
        "" if state.recompute == "none" else state.recompute,
    )


def profile_of(state: State) -> Profile:
    """The model of a state without a profile: a layer a stage of its placement, whatever that is of equal parts of the
    model. Raises BadInput."""
    stages = len(parse_routes(state.placement, state.ranks)[0])
    share = state.ranks / stages
    held = [round(share * size * GIB) for size in (state.until_B, state.until_W)]
    layers = []
    for stage in range(stages):
        part = stage * state.ranks // stages + 1
        longer = share * (state.slow_factor if part == state.slow_part else 1.0)
        more = state.output if stage == stages - 1 else 0.0
        F, B, W = (time * MS * (longer + more) for time in (state.F, state.B, state.W))
        layers.append(Layer(f"stage{stage}", F, B, W, B + W, held[0], held[1], 0, 0))
    if not any(layer.F + layer.BW for layer in layers):
        raise BadInput("F: forward and backward take no time: give at least one of F, B, W")
    return Profile("given", f"{state.ranks} equal parts", tuple(layers), Link(state.comm * MS, 1.0), 0.0, None, {}, {})


def commands(state: State, path: str, options: str) -> tuple[str, ...]:
    """The command lines that make the same schedule: of `zbsolve numbers` where there is no profile at `path`, then of
    `zbsolve solve` with these further options."""
    first = () if path else (_numbers(state),)
    words = [
        "zbsolve",
        "solve",
        path or NUMBERS_FILE,
        "--ranks",
        str(state.ranks),
        "--microbatches",
        str(state.microbatches),
    ]
    words += ["--placement", state.placement]
    words += ["--partition", state.partition] if path else []
    words += ["--memory", f"{_plain(state.memory)}GiB"] if state.memory else []
    words += ["--fused"] if state.system == BEST and state.backward == "fused" else []  # named ones have their own
    words += ["--recompute", state.recompute] if state.recompute != "none" else []
    words += ["--objective", state.objective] if state.objective != "makespan" else []
    return (*first, f"{shlex.join(words)} {options} -o schedule.json")


def _numbers(state: State) -> str:
    """`zbsolve numbers` with the stages of `profile_of`."""
    profile = profile_of(state)
    words = ["zbsolve", "numbers", "--ranks", str(state.ranks)]
    chunks = len(profile.layers) // state.ranks
    words += ["--chunks", str(chunks)] if chunks > 1 else []
    for kind in ("F", "B", "W"):
        words += [f"--{kind}", ",".join(_unlike([f"{_plain(getattr(one, kind) / MS)}ms" for one in profile.layers]))]
    words += ["--comm", f"{_plain(state.comm)}ms"] if state.comm else []
    held = profile.layers[0]
    words += ["--activation", f"{held.held_until_B}/{held.held_until_W}"]
    return shlex.join([*words, "-o", NUMBERS_FILE])


def _unlike(values: list[str]) -> list[str]:
    """One value where all are alike."""
    return values if len(set(values)) > 1 else values[:1]


def _plain(value: float) -> str:
    """A number without an exponent."""
    return f"{value:.6f}".rstrip("0").rstrip(".")
