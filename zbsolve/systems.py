"""The systems of the literature: what each is called, where it is defined, its formulas, and a problem to see it on.

p ranks, v chunks a rank, m microbatches; F, B, W pass times of a rank, B the input gradient alone; M what 1F1B's first rank
holds: p microbatches of one rank's activations. Bubble: time beyond a rank's work; of the makespan where nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import placement as placements
from .errors import BadInput
from .graphs import pipeline
from .problem import Problem
from .versions import updates

GROUPS = ("one direction", "two directions", "asynchronous")


@dataclass(frozen=True, slots=True)
class System:
    """`name`: of the preset that makes its order; `placement` as `placement.parse_routes` reads it; `fused`: its backward is
    one pass BW; `needs`: what a problem must fulfil, in words; bubble, memory, weights: formulas, in words."""

    name: str
    title: str
    group: str
    paper: str
    placement: str
    fused: bool
    bubble: str
    memory: str
    weights: str = "1×"
    needs: str = ""


def _one(
    name: str, title: str, paper: str, placement: str, fused: bool, bubble: str, memory: str, needs: str = ""
) -> System:
    return System(name, title, GROUPS[0], paper, placement, fused, bubble, memory, "1×", needs)


SYSTEMS: tuple[System, ...] = (
    _one("gpipe", "GPipe", "arXiv 1811.06965", "single", True, "(p−1)(F+B+W)", "m microbatches"),
    _one("1f1b", "1F1B (DAPPLE, PipeDream-Flush)", "arXiv 2007.01045", "single", True, "(p−1)(F+B+W)", "M: min(p−r, m)"),
    _one("interleaved", "Interleaved 1F1B", "arXiv 2104.04473", "loop", True, "(p−1)(F+B+W)/v", "M(1+(p−1)/(pv))"),
    _one("gis", "Grouped interleaving (GIS)", "arXiv 2503.01328", "loop", False, "(p−1)(F+B) of a chunk", "M"),
    _one(
        "interleaved-zb",
        "Interleaved zero bubble (torch.distributed.pipelining)",
        "arXiv 2401.10241",
        "loop",
        False,
        "(p−1)(F+B−W) of a chunk",
        "M",
    ),
    _one("gis-h", "GIS, half memory", "arXiv 2503.01328", "loop", False, "GIS + (v−1)(p/2)(F+B−W)", "(v+1)/(2v)·M"),
    _one("zb-h1", "ZB-H1", "arXiv 2401.10241", "single", False, "(p−1)(F+B−W)", "M"),
    _one("zb-h2", "ZB-H2", "arXiv 2401.10241", "single", False, "(p−1)(F+B−2W) of the span", "(2p−1)/p·M"),
    _one("zb-1p", "Automatic zero bubble, 1p", "arXiv 2401.10241", "single", False, "ZB-H1's or less", "M"),
    _one("zb-2p", "Automatic zero bubble, 2p", "arXiv 2401.10241", "single", False, "near 0 of the span", "2M"),
    _one("1f1b-v", "1F1B-V", "arXiv 2405.15362", "vee", True, "0 in the steady state at B+W=2F", "about 2/3 M"),
    _one("zb-v", "ZB-V", "arXiv 2401.10241", "vee", False, "0 of the span at F=B=W", "M"),
    _one("v-zb", "V-ZB", "arXiv 2405.15362", "vee", False, "0 of the span at F=B=W", "M"),
    _one("v-half", "V-Half", "arXiv 2405.15362", "vee", False, "about half of 1F1B's at F=B=W", "⌊(p+2)/2⌋ microbatches"),
    _one("v-min", "V-Min", "arXiv 2405.15362", "vee", False, "about 2/3 of 1F1B's at F=B=W", "⌊(p+4)/3⌋ microbatches"),
    _one(
        "dualpipe-v",
        "DualPipeV",
        "deepseek-ai/DualPipe",
        "vee",
        False,
        "(p−1)(F+B−W) of a chunk",
        "2p+1 chunks",
        "m ≥ 2p",
    ),
    System(
        "gems",
        "GEMS",
        GROUPS[1],
        "SC 2020",
        "mirror",
        True,
        "(p−1)/(p+1/2) of the time at B+W=2F",
        "1 microbatch",
        "2×",
        "p even",
    ),
    System(
        "chimera",
        "Chimera",
        GROUPS[1],
        "arXiv 2107.06925",
        "mirror",
        True,
        "(p−2f)/(2fm+p−2f) of the time at B+W=F",
        "p−p/2f+1 to p microbatches",
        "2f×",
        "p a multiple of 2f, m of 2f, for f pairs of pipelines",
    ),
    System(
        "dualpipe",
        "DualPipe",
        GROUPS[1],
        "arXiv 2412.19437",
        "mirror",
        False,
        "(p/2−1)(F+B−W); F&B as one block: (p/2−1)(F&B+B+W−3W)",
        "p+1 microbatches",
        "2×",
        "p even, m even and ≥ 2p",
    ),
    System(
        "pipedream",
        "PipeDream",
        GROUPS[2],
        "arXiv 1806.03377",
        "single",
        True,
        "0 in the steady state",
        "M",
        "p−r versions",
        "updates after every microbatch, p−s groups late",
    ),
    System(
        "pipedream-2bw",
        "PipeDream-2BW",
        GROUPS[2],
        "arXiv 2006.09503",
        "single",
        True,
        "0 in the steady state",
        "M",
        "2 versions",
        "at least p microbatches an update, two groups late",
    ),
)


def system(name: str) -> System:
    """The system called `name`. Raises BadInput."""
    for one in SYSTEMS:
        if one.name == name:
            return one
    raise BadInput(f"unknown system '{name}' (known: {', '.join(one.name for one in SYSTEMS)})")


def problem_for(
    name: str,
    ranks: int,
    microbatches: int,
    F: float | Sequence[float] = 1,
    B: float | Sequence[float] = 1,
    W: float | Sequence[float] = 1,
    *,
    update: int = 0,
    parameter_bytes: int = 0,
    **options: object,
) -> Problem:
    """A problem on which the system is defined: its placement, its kinds of passes, its updates; F, B, W in µs a stage.

    update, parameter_bytes: µs and bytes of a stage's update and weights, for the asynchronous systems. Further options go
    to `pipeline` (AF: the all-to-alls that DualPipe is about). Raises BadInput for an unknown system or numbers that it
    does not allow.
    """
    one = system(name)
    routes = placements.parse_routes(one.placement, ranks)
    times = {"BW": _sum(B, W)} if one.fused else {"B": B, "W": W}
    step = pipeline(F, placement=routes, microbatches=microbatches, **times, **options)  # type: ignore[arg-type]
    if name == "pipedream":
        delay = [ranks - stage for stage in range(ranks)]
        return updates(step, update, every=1, delay=delay, parameter_bytes=parameter_bytes)
    if name == "pipedream-2bw":
        return updates(step, update, every=_group(microbatches, ranks), delay=2, parameter_bytes=parameter_bytes)
    return step


def _group(microbatches: int, ranks: int) -> int:
    """Microbatches an update: as few as 2BW allows that make whole groups."""
    for every in range(ranks, microbatches + 1):
        if microbatches % every == 0:
            return every
    raise BadInput(f"pipedream-2bw: {microbatches} microbatches do not make groups of at least {ranks}, one a rank")


def _sum(B: float | Sequence[float], W: float | Sequence[float]) -> float | list[float]:
    if isinstance(B, Sequence) and isinstance(W, Sequence):
        return [b + w for b, w in zip(B, W, strict=True)]
    if isinstance(B, Sequence) or isinstance(W, Sequence):
        raise BadInput("B and W: give both as one number, or both as one a stage")
    return B + W
