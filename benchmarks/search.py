"""How good the search is: values and proven bounds on steps that nobody picked, against other generators, at scale, without
each of its sources, and against exact models. Every row has each better value or bound with its time."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from zbsolve import BadInput, Layer, Link, Problem, Profile, Schedule, Step, pipeline, solve, solve_auto, verify
from zbsolve.bench.suites import suite
from zbsolve.greedy.lists.list_scheduler import list_schedule
from zbsolve.greedy.lists.policy_annealing import starting_policies
from zbsolve.ilp.bounds.closed_forms import all_closed_forms
from zbsolve.ilp.cp import solve_cp
from zbsolve.ilp.milp import solve_milp
from zbsolve.problem.placement import parse
from zbsolve.search.certify import work_bound
from zbsolve.search.finder import find, quick, search_of
from zbsolve.search.solver import compiled, ready, search
from zbsolve.search.sources import AHEAD, ANEW, FIRST, LAST, TURNS
from zbsolve.search.state import State
from zbsolve.systems import preset
from zbsolve.util.clock import Clock

from . import profiles
from .harness import Results, kept, listed, mean_of, rows_of, solved, table, write

CLOSE = 0.01  # a gap of that much is near enough
HELD = {"held_until_B": 6, "held_until_W": 4}
TIMES = ((1000, 1000, 900), (1000, 1200, 800), (1000, 1100, 600), (1200, 1000, 1000))  # µs of F, B and W of a rank's layers
ROOM = (0.5, 0.75, 1.0, 1.5, 2.0)  # times the memory of 1F1B


def _counts(rows: list[Results]) -> str:
    gaps = [row["gap"] for row in rows]
    proven, near = (sum(gap <= most for gap in gaps) for most in (0, CLOSE))
    return f"{len(gaps)} steps, {proven} proven, {near} within 1 %, worst {max(gaps):.2%}"


@table()
def plain(
    ranks: tuple[int, ...] = (4, 8, 16), seconds: float = 10.0, count: int = 104, only: str = "", seeds: int = 1
) -> Results:
    """Plain steps that nobody picked: equal stages, usual times, 3p microbatches, both objectives, on ranks and memory drawn
    by a seed, one stage a rank or a V shape. only: a part of a row's placement, room and objective."""
    compiled()
    random = np.random.default_rng(2026)

    def rows() -> Iterator[Results]:
        for i in range(count):
            named = {
                "ranks": int(random.choice(ranks)),
                "times": i // 4 % len(TIMES),
                "placement": ("single", "vee")[i % 2],
                "room": float(random.choice(ROOM)),
                "objective": ("makespan", "span")[i // 2 % 2],
            }
            if only in f"{named['placement']:6} {named['room']:4} {named['objective']:8}":
                yield named | solved(plain_step(**named), seeds=seeds, seconds=seconds)

    found = listed(rows())
    groups = {"all": found} | {
        f"{place} {room}": [row for row in found if (row["placement"], row["room"]) == (place, room)]
        for place in ("single", "vee")
        for room in ROOM
    }
    summary = [f"{name}: {_counts(rows)}" for name, rows in groups.items() if rows]
    print("\n".join(summary))
    return {"seconds": seconds, "summary": summary, "rows": found}


def plain_step(ranks: int, times: int, placement: str, room: float, objective: str) -> Problem:
    """The step; a V's stages have half the layers."""
    where = parse(placement, ranks)
    share = len(where) // ranks
    F, B, W = (t // share for t in TIMES[times])
    how = {"placement": where, "microbatches": 3 * ranks, "objective": objective, **HELD}
    return pipeline(F, B, W, comm=round(F * 0.005), capacity=int(10 * len(where) * room), **how)


@table()
def partitions(seconds: float = 30.0, every: int = 7, first: int = 0) -> Results:
    """Split and order together, on SlackPipe's grid: 2, 4 and 8 ranks, one, two and four stages a rank, half as many
    microbatches as stages, as many, twice as many; 8 equal layers a stage, F = 1, BW = 2; messages 0, 2, 8; without a memory
    limit, and in the memory that each rank takes for the uniform split in breadth-first order. Results are compared with the
    bound over every split, and with the uniform split: in breadth-first and interleaved 1F1B order, and solved for a third
    of the time. every, first: take problems first, first + every, … of the 162."""
    compiled()
    ready()
    grid = [
        (ranks, chunks, chunks * ranks * half // 2, message, limited)
        for limited in (False, True)
        for ranks in (2, 4, 8)
        for chunks in (1, 2, 4)
        for half in (1, 2, 4)
        for message in (0, 2, 8)
    ]
    found = listed(_partitioned(*one, seconds) for one in grid[first::every])
    ratio = mean_of(row["breadth_first"] / row["value"] for row in found)
    longer = sum(row["value"] > min(row[name] for name in BESIDE if row[name]) for row in found)
    said = (
        f"{_counts(found)}, mean gap {sum(row['gap'] for row in found) / len(found):.2%}; longer than one beside: {longer}"
    )
    summary = f"{said}; {ratio:.3f} times as fast as breadth-first"
    print(summary)
    return {"seconds": seconds, "summary": summary, "rows": found}


BESIDE = ("breadth_first", "interleaved", "uniform")
COLUMNS = (
    "ranks",
    "stages",
    "microbatches",
    "message",
    "memory",
    "breadth-first",
    "interleaved",
    "uniform",
    "solved",
    "bound",
    "gap",
)


def partitions_table(results: Results) -> list[list[str]]:
    """The rows as pages show them."""
    rows = [
        [
            *(str(row[name]) for name in ("ranks", "stages", "microbatches", "message")),
            "limit" if row["limited"] else "–",
            *(str(row[name] or "–") for name in (*BESIDE, "value", "bound")),
            f"{row['gap']:.2%}",
        ]
        for row in results["rows"]
    ]
    return [list(COLUMNS), *rows]


def _partitioned(ranks: int, chunks: int, microbatches: int, message: int, limited: bool, seconds: float) -> Results:
    stages = ranks * chunks
    each = Layer("layer", 1.0, 0.0, 0.0, 2.0, 1, 0, 0, 0)
    profile = Profile("given", "equal", (each,) * (8 * stages), Link(float(message), 1e12), 0.0, None, {}, {})
    memory = ",".join([f"{8 * chunks * microbatches}B"] * ranks) if limited else None
    step = Step(ranks, microbatches, "single" if chunks == 1 else f"loop{chunks}", (8,) * stages, memory=memory, fused=True)
    uniform = step.problem(profile)
    beside: Results = dict.fromkeys(BESIDE)
    for name, single, loop in (("breadth_first", "gpipe", "breadth-first"), ("interleaved", "1f1b", "interleaved")):
        with suppress(BadInput):
            order = preset(single if chunks == 1 else loop, uniform)
            beside[name] = None if verify(uniform, order) else int(order.timeline().value)
    beside["uniform"] = solve(uniform, seconds=seconds / 3).certificate.value
    began = time.monotonic()
    schedule, _ = solve_auto(profile, replace(step, partition="auto"), seconds=seconds)
    assert verify(schedule.problem, schedule) == ()
    value, bound = schedule.certificate.value, schedule.every_split.bound
    named = {"ranks": ranks, "stages": stages, "microbatches": microbatches, "message": message, "limited": limited}
    found = {"value": value, "bound": bound, "gap": 1 - bound / value, "seconds": round(time.monotonic() - began, 1)}
    return named | found | beside | {"layers": schedule.problem.layers}


@table()
def peers(problems: Path, seconds: float = 10.0, only: str = "", left_by: Path | None = None, seeds: int = 1) -> Results:
    """`solve` against the best legal result that any peer's generator reached. The file of problems lists `name placement
    ranks microbatches stage_to_rank F B W comm held_until_B held_until_W capacity` (µs; a problem with half µs is doubled)
    with `best_peer` and `simple_bound` by objective. only: part of a name, placement or objective. left-by: a result; only
    its problems with a gap of more than 1 %."""
    compiled()
    left = [] if left_by is None else [row for row in kept(left_by)["rows"] if row["gap"] > CLOSE]
    open_ones = {(row["name"], row["placement"], row["objective"]) for row in left}

    def rows() -> Iterator[Results]:
        for row in json.loads(problems.read_text()):
            for objective in ("makespan", "span"):
                key = row["name"], row["placement"], objective
                if only in " ".join(key) and (left_by is None or key in open_ones):
                    found = _beside_peers(row, objective, seeds=seeds, seconds=seconds)
                    yield dict(zip(("name", "placement", "objective"), key, strict=True)) | found

    found = listed(rows())
    ratios = [row["ratio"] for row in found if row["ratio"] is not None]
    shorter = f"shorter on {sum(r < 0.999 for r in ratios)}, at most {max(ratios, default=0):.4f}"
    summary = f"{_counts(found)}; {len(ratios)} with a peer: no longer on {sum(r <= 1 + 1e-9 for r in ratios)}, {shorter}"
    print(summary)
    return {"seconds": seconds, "summary": summary, "rows": found}


def _beside_peers(row: Results, objective: str, **how: Any) -> Results:
    """The value over the best peer's, and the proven gap."""
    scale = 2 if any(t != int(t) for kind in "FBW" for t in row[kind]) else 1
    given = {kind: [int(t * scale) for t in row[kind]] for kind in "FBW"}
    given |= {what: [int(x) for x in row[what]] for what in ("held_until_B", "held_until_W", "capacity")}
    shape = {"placement": tuple(row["stage_to_rank"]), "microbatches": row["microbatches"], "objective": objective}
    found = solved(pipeline(**given, comm=int(row["comm"] * scale), **shape), scale, **how)
    peer = row.get("best_peer", {}).get(objective)
    ratio = None if peer is None else found["value"] / peer["value"]
    return found | {"ratio": ratio, "bound_over_simple": found["bound"] / row["simple_bound"][objective]}


@table(lambda ranks, microbatches, **_: f"scale-p{ranks}-m{microbatches}")
def scale(
    seconds: float = 30.0,
    ranks: int = 64,
    microbatches: int = 256,
    placements: tuple[str, ...] = ("single", "vee", "loop"),
    rooms: tuple[float, ...] = (0.25, 0.5, 1.0),
    seeds: int = 1,
) -> Results:
    """Large uniform steps: F, B, W 300, 320, 210 µs, messages 8 µs. A room is the capacity in microbatches over the number
    of ranks (1: 1F1B's memory). The file also has the machine's load: on a busy machine, less is done in the seconds."""
    compiled()

    def rows() -> Iterator[tuple[str, Results]]:
        for placement in placements:
            for room in rooms:
                spot = parse(placement, ranks)
                how = {"microbatches": microbatches, "comm": 8, "capacity": int(10 * len(spot) * room), **HELD}
                problem = pipeline(300, 320, 210, placement=spot, **how)
                row = {"passes": len(problem.passes), **solved(problem, seeds=seeds, seconds=seconds)}
                row |= {"load": os.getloadavg()[0]}
                row |= {"first_seconds": row["changes"][0][0], "value_over_work": row["value"] / problem.work}
                most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                yield f"{placement} {room:g}p", row | {"most_memory_mib": most}

    return rows_of(rows())


# --- What each source brings ---

NAMES = tuple(dict.fromkeys(source.name for group in (FIRST, AHEAD, TURNS, ANEW, LAST) for source in group))
LESS = 1e-6  # of a value: no difference
STEPS = {  # of Llama 3 8B, beside a suite's problems
    "offload single": Step(4, 12, offload="half"),
    "offload loop, tight": Step(4, 12, "loop", memory="50GiB", offload="half"),
    "shards loop": Step(4, 12, "loop", shards=4),
    "shards vee, tight": Step(4, 12, "vee", memory="30GiB", shards=4),
}
TIGHT = {  # the same, where pools are tight
    f"{place} {memory} {next(iter(how.values()))}": Step(4, 12, place, memory=memory, **how)
    for place in ("single", "loop", "vee")
    for memory, how in (
        *((memory, {"offload": what}) for memory in ("42GiB", "50GiB") for what in ("half", "full")),
        *(("28GiB", {"gathers": gathers, "shards": 4}) for gathers in (1, 2)),
    )
}


@table()
def sources(
    problems: str = "full", most: int = 600, effort: float = 0.3, seeds: int = 5, without: tuple[str, ...] = NAMES
) -> Results:
    """The problems of a suite (of so many passes at most), and steps with copies and gathers (problems "tight": in little
    memory, and these alone), are searched with all sources and without one at a time, for counted effort, with several
    seeds. Rows say how much longer values are without it, in the mean and at worst over problems (medians of seeds), and for
    how many problems they are longer or shorter."""
    ready()
    profile = profiles.kept("estimated-llama3-8b-h100")
    if problems == "tight":
        chosen = {name: step.problem(profile) for name, step in TIGHT.items()}
    else:
        chosen = {name: problem for name, problem in suite(problems).items() if len(problem.passes) <= most}
        for objective in ("makespan", "span"):
            chosen |= {
                f"{name} {objective}": replace(one, objective=objective).problem(profile) for name, one in STEPS.items()
            }

    def values(source: str) -> dict[str, list[int]]:
        return {name: [_value(problem, source, effort, seed) for seed in range(seeds)] for name, problem in chosen.items()}

    base = values("")
    rows = rows_of((source, _without(base, values(source))) for source in without)
    bounds = {name: _bounds(problem) for name, problem in chosen.items()}
    passes = {name: len(problem.passes) for name, problem in chosen.items()}
    return {"problems": passes, "bounds": bounds, "all": base, "without": rows}


def _bounds(problem: Problem) -> list[int]:
    """The highest closed form that counts whole microbatches (0: none says more than work), and of the others, µs."""
    forms = [("whole microbatches" in form.proof, form.value) for form in all_closed_forms(problem)]
    return [max((value for whole, value in forms if whole == asked), default=0) for asked in (True, False)]


def _value(problem: Problem, without: str, effort: float, seed: int) -> int:
    """The value found, µs; −1: none."""
    state = State(problem, Clock(1e9, effort), work_bound(problem), without=frozenset((without,)))
    search(state, "auto", seed)
    return state.value


def _without(base: dict[str, list[int]], values: dict[str, list[int]]) -> Results:
    both = [name for name in values if min(*values[name], *base[name]) >= 0]
    ratios = {name: median(values[name]) / median(base[name]) for name in both}
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "longer_mean": round(mean_of(ratios.values()) - 1, 6),
        "longer_worst": round(ratios[worst] - 1, 6),
        "worst": worst,
        "longer": sum(one > 1 + LESS for one in ratios.values()),
        "shorter": sum(one < 1 - LESS for one in ratios.values()),
        "none_found": sorted(name for name in values if min(values[name]) < 0 <= min(base[name])),
    }


# --- Luck ---


def _step(place: str, ranks: int, microbatches: int, room: float, spread: float = 0.0, **how: Any) -> Problem:
    """A step whose stages' times vary by `spread`. room: times the memory of 1F1B. how: times of a rank's stages, µs, as
    `times`; others as of `pipeline`."""
    where, random = parse(place, ranks), Random(1)
    times = [time * ranks / len(where) for time in how.pop("times", (1000, 1100, 900))]
    columns = [[round(time * random.uniform(1 - spread, 1 + spread)) for _ in where] for time in times]
    how = {"placement": where, "capacity": int(10 * len(where) * room), "comm": 10, **HELD, **how}
    return pipeline(*columns, microbatches=microbatches, **how)


LUCK = {  # steps of 1,000 to 6,000 passes
    "single, half the memory": partial(_step, "single", 16, 48, 0.5),
    "single, uneven": partial(_step, "single", 8, 48, 0.75, 0.2),
    "single, span": partial(_step, "single", 16, 48, 1.0, times=(1000, 1000, 900), comm=50, objective="span"),
    "V, half the memory": partial(_step, "vee", 8, 24, 0.5, times=(1000, 1200, 800)),
    "V, uneven": partial(_step, "vee", 8, 32, 1.0, 0.2),
    "V, uneven, half the memory": partial(_step, "vee", 16, 48, 0.5, 0.2),
    "V, slow messages": partial(_step, "vee", 8, 32, 1.0, comm=200),
    "loop, half the memory": partial(_step, "loop", 8, 32, 0.5),
    "loop, uneven": partial(_step, "loop", 16, 32, 1.0, 0.2),
    "loop4, uneven": partial(_step, "loop4", 8, 24, 0.75, 0.2),
    "single, copies": Step(8, 32, memory="42GiB", offload="half"),
    "loop, copies": Step(8, 32, "loop", memory="50GiB", offload="half"),
    "single, vocabulary": Step(8, 32, memory="42GiB", vocabulary="sharded"),
    "loop, gathers": Step(8, 32, "loop", memory="50GiB", shards=4),
    "V, gathers": Step(8, 24, "vee", memory="30GiB", shards=4, gathers=1),
}


@table()
def luck(output: Path, effort: float = 5.0, seeds: int = 5, only: str = "") -> Results:
    """How much values depend on the seed: the finder alone, without the prover, with counted effort. Steps with copies,
    gathers or a sharded vocabulary are of Llama 3 8B. A row has the value of each seed, the worst over the best, the highest
    bound by closed forms, and for each seed what found the value and with how much effort. The file is written after each
    row; rows that it has for the same effort and seeds stay. only: a part of a row's name."""
    ready()
    profile = profiles.kept("estimated-llama3-8b-h100")
    asked = {"effort": effort, "seeds": seeds}
    before = kept(output) if output.exists() else {}
    rows: Results = before["rows"] if before.get("asked") == asked else {}
    for name, how in LUCK.items():
        if only in name and name not in rows:
            problem = how.problem(profile) if isinstance(how, Step) else how()
            rows |= rows_of([(name, _luck(problem, effort, seeds))])
            write("luck", {"asked": asked, "rows": rows}, output)
    return {"asked": asked, "rows": {name: rows[name] for name in LUCK if name in rows}}


def _luck(problem: Problem, effort: float, seeds: int) -> Results:
    found = [_found(problem, effort, seed) for seed in range(seeds)]
    values, bound = [value for value, *_ in found], max(bound for _, bound, *_ in found)
    ratios = {"median_over_best": median(values) / min(values) - 1, "worst_over_best": max(values) / min(values) - 1}
    by = {"by": [solver for *_, solver, _ in found], "when": [when for *_, when in found]}
    return {"passes": len(problem.passes), "values": values, "bound": bound, **ratios, **by}


def _found(problem: Problem, effort: float, seed: int) -> tuple[int, int, str, float]:
    """Value and bound, µs, what found the value, and by what effort."""
    last: list[float] = [-1, 0.0]

    def note(state: State) -> None:
        if state.value > 0 and state.value != last[0]:
            last[:] = state.value, state.clock.used

    state = State(problem, Clock(1e9, effort), work_bound(problem), progress=note)
    state.raise_closed_forms()
    ours = search_of(state, seed)
    for _ in chain(quick(ours), find(ours)):
        if state.done:
            break
    return state.value, state.bound.value, state.solver, round(last[1], 2)


def luck_table(results: Results, before: Results) -> list[list[str]]:
    """The rows as pages show them: how much longer than the best value of all seeds the others are. before: rows of the same
    steps, measured before; their values are compared with the best one of now, too."""
    head = ["step", "passes", "bound", "best", "median", "worst", "was best", "was median", "was worst"]
    return [head, *(_luck_row(name, row, before["rows"].get(name)) for name, row in results["rows"].items())]


def _luck_row(name: str, row: Results, before: Results | None) -> list[str]:
    best = min(row["values"])
    now = [f"{which(row['values']) / best - 1:+.2%}" for which in (median, max)]
    then = ["–"] * 3 if before is None else [f"{which(before['values']) / best - 1:+.2%}" for which in (min, median, max)]
    return [*name.split(), f"{row['passes']:,}", f"{row['bound']:,}", f"{best:,}", *now, *then]


# --- Exact models ---

SIZES = ((2, 2), (2, 4), (3, 3), (3, 5), (4, 4), (4, 6), (4, 8))  # ranks, microbatches


@table()
def milp(seconds: float = 30.0) -> Results:
    """The size up to which exact models solve a problem: CP-SAT, and the MILP with CBC and HiGHS. Each runs alone, and
    starts from the greedy schedule as incumbent and from the busiest rank's work as bound: relaxations prove nothing
    here."""

    def rows() -> Iterator[Results]:
        for ranks, microbatches in SIZES:
            F, B, W = ([base + (7 * s) % 5 for s in range(ranks)] for base in (30, 33, 20))
            how: dict[str, Any] = {"held_until_B": 2, "held_until_W": 1, "capacity": 3 * ranks}
            problem = pipeline(F, B, W, microbatches=microbatches, comm=3, **how)
            first = list_schedule(problem, starting_policies(problem)[0])
            yield from (_exact(problem, first, solver, seconds) for solver in ("cp-sat", "cbc", "highs"))

    return {"seconds": seconds, "rows": listed(rows())}


def _exact(problem: Problem, first: Schedule, solver: str, seconds: float) -> Results:
    began = time.perf_counter()
    cp = solver == "cp-sat"
    how: dict[str, Any] = {} if cp else {"solver": solver}
    found = (solve_cp if cp else solve_milp)(problem, first, problem.work, seconds, **how)
    took = time.perf_counter() - began
    value = int((found.schedule or first).timeline().value)
    row = {"ranks": problem.ranks, "passes": len(problem.passes), "solver": solver, "value": value, "bound": found.bound}
    return row | {"optimal": found.bound >= value, "seconds": round(took, 2)}
