"""Suites of problems for `zbsolve bench`: data made by code, the same on every machine.

`small` is for every pull request, `full` for a nightly job: published profiles, every placement, tight and ample
memory, uneven stages and capacities, slow links, fewer microbatches than ranks, long, short and no W, both objectives.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..build.plain import pipeline
from ..problem import Problem
from ..problem.placement import parse
from ..profile.profile import Profile
from ..profile.step import Step
from ..util.errors import BadInput
from ..util.files import document_kind

SUITES = ("small", "full")

# arXiv 2401.10241, Table 9: profiled µs of F, B, W and one message; hidden size, heads. Sequence 1024.
TABLE9 = {
    "1.5B": (8, 24, 18522, 18086, 9337, 601, 2304, 24),
    "6.2B": (8, 32, 29802, 29428, 19530, 577, 4096, 32),
    "14.6B": (16, 48, 11347, 11248, 8132, 377, 5120, 40),
    "28.3B": (32, 96, 10419, 10207, 7715, 408, 6144, 48),
}
# The same paper's Table 8: µs of one of two chunks a rank, V shape.
TABLE8 = {"6.2B": (16, 48, 14407, 14380, 9676, 1610, 4096, 32), "14.6B": (24, 72, 6763, 6969, 5251, 755, 5120, 40)}

KINDS = ("profile", "problem", "schedule")  # documents from which a problem can be made
ENDINGS = ("*.json", "*.json.gz")


def suite(name: str) -> dict[str, Problem]:
    """The problems of a suite by name. Raises BadInput for an unknown suite."""
    if name not in SUITES:
        raise BadInput(f"suite '{name}': one of {', '.join(SUITES)}")
    problems = _small()
    if name == "full":
        known = {problem.digest for problem in problems.values()}
        problems |= {n: problem for n, problem in _full().items() if problem.digest not in known}
    return problems


def _step(
    placement: str,
    ranks: int,
    microbatches: int,
    times: tuple[Sequence[float] | float, ...],
    room: float | Sequence[float] | None = None,
    **options: Any,
) -> Problem:
    """A step in which the stages of a rank hold 57 bytes until B and 43 until W of a microbatch (about the shares of the
    papers' models). room: memory of a rank, in microbatches. times: F, B, W; or F and a fused backward."""
    spot = parse(placement, ranks)
    chunks = len(spot) // ranks
    names = ("F", "B", "W") if len(times) == 3 else ("F", "BW")
    columns = {n: list(t) if isinstance(t, Sequence) else [t] * len(spot) for n, t in zip(names, times, strict=True)}
    options = {"held_until_B": 5700 // chunks, "held_until_W": 4300 // chunks, **options}
    if room is not None:
        rooms = room if isinstance(room, Sequence) else [room] * ranks
        options["capacity"] = [round(10_000 * share) for share in rooms]
    return pipeline(**columns, placement=spot, microbatches=microbatches, **options)  # type: ignore[arg-type]


def _published(
    row: tuple[int, ...], placement: str, share: float, objective: str, chunks: int = 1, m: int | None = None
) -> Problem:
    """A published profile with memory for `share` · p microbatches; memory is in bytes of a token (appendix G of the paper).
    chunks > 1: each stage's times are divided among so many chunks."""
    ranks, microbatches, f, b, w, comm, hidden, heads = row
    stages = len(parse(placement, ranks)) // ranks
    all_of_it, weights = 34 * hidden + 5 * heads * 1024, 32 * hidden
    return _step(
        placement,
        ranks,
        m or microbatches,
        tuple(round(time / chunks) for time in (f, b, w)),
        comm=comm,
        objective=objective,
        held_until_B=(all_of_it - weights) // stages,
        held_until_W=weights // stages,
        capacity=int(share * ranks * all_of_it),
    )


def _uneven(seed: int, times: tuple[int, int, int], stages: int) -> tuple[list[int], ...]:
    """F, B and W, up to a fifth more or less on each stage."""
    columns = zip(times, map(random.Random, range(seed, seed + 3)), strict=True)
    return tuple([round(time * rng.uniform(0.8, 1.2)) for _ in range(stages)] for time, rng in columns)


def _vocabulary(times: tuple[int, int, int], stages: int) -> tuple[list[int], ...]:
    """A last stage three quarters longer: the vocabulary's projection."""
    return tuple([time] * (stages - 1) + [round(1.75 * time)] for time in times)


def _small() -> dict[str, Problem]:
    """At most 8 ranks and 24 microbatches; 15 problems."""
    unit, real = (1, 1, 1), (3, 4, 2)
    halves = {"held_until_B": 0, "held_until_W": 5000}  # known optima count chunks held from F's start to W's end
    times = (2200, 2300, 1500)
    return {
        "unit single p4 m8 1p span": _step("single", 4, 8, unit, 4, objective="span"),
        "unit single p4 m8 2p": _step("single", 4, 8, unit, 8),
        "unit vee p4 m8 6": _step("vee", 4, 8, unit, 3, **halves),
        "real vee p4 m8 6": _step("vee", 4, 8, real, 3, **halves),
        "unit loop p4 m8 6": _step("loop", 4, 8, unit, 3, **halves),
        "1.5B single p8 m24 1p": _published(TABLE9["1.5B"], "single", 1, "makespan"),
        "1.5B single p8 m24 2p span": _published(TABLE9["1.5B"], "single", 2, "span"),
        "1.5B vee p8 m16 0.5p": _published(TABLE9["1.5B"], "vee", 0.5, "makespan", chunks=2, m=16),
        "uneven single p4 m8": _step("single", 4, 8, _uneven(1, times, 4), 4, comm=60),
        "vocabulary single p4 m12": _step("single", 4, 12, _vocabulary(times, 4), 4, comm=60, objective="span"),
        "slow links p4 m8": _step("single", 4, 8, times, 4, comm=660),
        "fewer microbatches p8 m4": _step("single", 8, 4, times, 8, comm=60),
        "long W p4 m8": _step("single", 4, 8, (2200, 2300, 6000), 3, comm=60),
        "fused loop p4 m8": _step("loop", 4, 8, (1100, 1900), 6, comm=60),
        "tight single p6 m12": _step("single", 6, 12, times, 2, comm=60),
    }


def _full() -> dict[str, Problem]:
    problems: dict[str, Problem] = {}
    for objective in ("makespan", "span"):
        for model, row in TABLE9.items():
            for share in (0.5, 1, 1.5, 2):
                problems[f"{model} single {share}p {objective}"] = _published(row, "single", share, objective)
        for model, row in TABLE8.items():
            for share in (0.5, 1):
                problems[f"{model} vee {share}p {objective}"] = _published(row, "vee", share, objective)
        for model in ("1.5B", "6.2B"):
            for share in (0.75, 1.5):
                problems[f"{model} loop {share}p {objective}"] = _published(TABLE9[model], "loop", share, objective, 2)
        problems |= _odd(objective)
    return problems


def _odd(objective: str) -> dict[str, Problem]:
    """Problems that are difficult for heuristics made for equal stages."""
    times, chunk, common = (22000, 22400, 16200), (11000, 11200, 8100), {"comm": 400, "objective": objective}
    problems = {
        "uneven single p8 m24 1p": _step("single", 8, 24, _uneven(11, times, 8), 8, **common),
        "uneven single p8 m24 0.5p": _step("single", 8, 24, _uneven(21, times, 8), 4, **common),
        "uneven vee p8 m24 1p": _step("vee", 8, 24, _uneven(31, chunk, 16), 8, **common),
        "uneven loop p8 m24 1p": _step("loop", 8, 24, _uneven(41, chunk, 16), 8, **common),
        "vocabulary single p8 m32 1p": _step("single", 8, 32, _vocabulary(times, 8), 8, **common),
        "vocabulary vee p8 m32 0.75p": _step("vee", 8, 32, _vocabulary(chunk, 16), 6, **common),
        "rank 0 tight p8 m24": _step("single", 8, 24, times, [4] + [8] * 7, **common),
        "last rank tight p8 m24": _step("single", 8, 24, times, [16] * 7 + [1], **common),
        "slow links p8 m24": _step("single", 8, 24, times, 8, **{**common, "comm": 6600}),
        "slow links vee p8 m24": _step("vee", 8, 24, chunk, 8, **{**common, "comm": 3300}),
        "fewer microbatches p16 m8": _step("single", 16, 8, times, 16, **common),
        "fewer microbatches vee p16 m8": _step("vee", 16, 8, chunk, 8, **common),
        "long W p8 m24": _step("single", 8, 24, (22000, 22400, 60000), 8, **common),
        "short W p8 m24": _step("single", 8, 24, (22000, 22400, 3000), 8, **common),
        "no W p8 m24": _step("single", 8, 24, (22000, 38600), 8, **common),
        "one microbatch of room p8 m16": _step("single", 8, 16, times, 1, **common),
    }
    return {f"{name} {objective}": problem for name, problem in problems.items()}


def problems_of(what: Mapping[str, Mapping[str, Any]]) -> dict[str, Problem]:
    """Name → problem, of suites by name, of files and of all in folders: problems, schedules (their problem) and profiles.
    what: name or path → fields of the `Step` for profiles. Folders' other files are skipped. Raises BadInput, Infeasible."""
    problems: dict[str, Problem] = {}
    for source, step in what.items():
        if source in SUITES and not Path(source).exists():
            problems |= suite(source)
            continue
        for path in _files(source):
            name, problem = _problem(path, step)
            problems[str(path) if name in problems else name] = problem
    return problems


def _files(what: str) -> list[Path]:
    """The files that are meant. Raises BadInput for none."""
    path = Path(what)
    if not path.is_dir():
        if not path.exists():
            raise BadInput(f"'{what}' is no suite ({', '.join(SUITES)}), and no file or folder")
        return [path]
    inside = sorted(file for ending in ENDINGS for file in path.glob(ending))
    usable = [file for file in inside if document_kind(file) in KINDS]
    if not usable:
        raise BadInput(f"{what}: no {', '.join(KINDS[:-1])} or {KINDS[-1]} in this folder ({' '.join(ENDINGS)})")
    return usable


def _problem(path: Path, step: Mapping[str, Any]) -> tuple[str, Problem]:
    """(descriptive name, problem) of a file. Raises BadInput, Infeasible."""
    name, kind = path.name.split(".json")[0], document_kind(path)
    if kind not in KINDS:
        raise BadInput(f"{path}: holds {f'a {kind}' if kind else 'no zbsolve document'}, not a {' or a '.join(KINDS)}")
    if kind != "profile":
        return name, Problem.load(path)
    missing = next((need for need in ("ranks", "microbatches") if need not in step), None)
    if missing is not None:
        raise BadInput(f"{path}: holds a profile, and {missing} of its step are missing: {path}@ranks=4,microbatches=8")
    asked = Step(**step)
    if asked.auto:
        raise BadInput("placement and partition: bench solves one problem a profile: name them instead of auto")
    return f"{name} {asked.title} p{asked.ranks} m{asked.microbatches}", asked.problem(Profile.load(path))
