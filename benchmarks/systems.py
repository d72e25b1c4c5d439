"""Named schedules compared with `solve`: those of the literature, on the published models, on models of several parts, and
for less memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from profiler import estimate
from zbsolve import Infeasible, Problem, Profile, Schedule, place_work, solve, verify
from zbsolve.build import Work
from zbsolve.problem.placement import parse_routes
from zbsolve.profile.step import Step
from zbsolve.search.auto import solve_auto
from zbsolve.search.least_peak import LeastPeak
from zbsolve.search.solver import compiled
from zbsolve.systems import System, preset
from zbsolve.systems.problems import problem_for
from zbsolve.systems.table import SYSTEMS
from zbsolve.util.errors import BadInput
from zbsolve.util.text import aligned

from . import profiles
from .harness import RESULTS, Results, kept, listed, rows_of, solved, table
from .profiles.public_models import T5_11B

Setting = tuple[int, int, tuple[int, int, int], int]
# ranks, microbatches, F, B, W of a rank's share of a microbatch (µs), communication (µs)
SETTINGS: tuple[Setting, ...] = (
    (4, 8, (1000, 1000, 1000), 0),
    (4, 8, (1000, 1000, 1000), 100),
    (4, 16, (1200, 1600, 800), 50),
    (4, 12, (1000, 1300, 1100), 300),
    (6, 12, (1000, 1000, 1000), 0),
    (6, 18, (1400, 1500, 600), 60),
    (8, 16, (1000, 1000, 1000), 0),
    (8, 24, (1200, 1600, 800), 0),
    (8, 24, (1200, 1600, 800), 120),
    (8, 32, (1000, 1200, 1600), 80),
    (8, 64, (1200, 1500, 900), 80),
    (16, 64, (1200, 1500, 900), 80),
)
NAMES = tuple(one.name for one in SYSTEMS)


@table()
def systems(seconds: float = 2.0, only: tuple[str, ...] = (), first: int = len(SETTINGS)) -> Results:
    """Each system of the literature, and what solve finds on its placement in its memory: every rank may hold the peak that
    it has in the system's own order. only: these are measured again, and the rows of the others are kept. first: so many
    settings."""
    compiled()
    rows = listed(
        _beside(one, setting, seconds) for setting in SETTINGS[:first] for one in SYSTEMS if not only or one.name in only
    )
    if only:

        def place(row: Results) -> tuple[int, int]:
            setting = (row["ranks"], row["microbatches"], tuple(row["times"]), row["comm"])
            return SETTINGS.index(setting), NAMES.index(row["system"])

        others = [row for row in kept(RESULTS / "systems.json")["rows"] if row["system"] not in only]
        rows = sorted([*others, *rows], key=place)
    for name in dict.fromkeys(row["system"] for row in rows):
        ratios = [row["solved"] / row["value"] for row in rows if row["system"] == name]
        print(f"{name:14} solve/system: median {median(ratios):.4f}, least {min(ratios):.4f}, most {max(ratios):.4f}")
    return {"seconds": seconds, "rows": rows}  # of rows that are kept from before each says its own time


def _beside(one: System, setting: Setting, seconds: float) -> Results | None:
    """The system's makespan and peak; solve's makespan and bound in the same memory. None if the system does not allow m."""
    ranks, microbatches, times, comm = setting
    chunks = len(parse_routes(one.placement, ranks)[0]) // ranks
    held = {"held_until_B": 40 // chunks, "held_until_W": 20 // chunks}
    try:
        problem = problem_for(one.name, ranks, microbatches, *(time // chunks for time in times), comm=comm, **held)
        timeline = preset(one.name, problem).timeline()
    except BadInput:
        return None
    peaks = tuple(int(peak) for peak in timeline.peak_bytes)
    found = solved(replace(problem, capacity=peaks), seconds=seconds)
    assert found["value"] <= timeline.makespan
    named = {"system": one.name, "ranks": ranks, "microbatches": microbatches, "times": list(times), "comm": comm}
    numbers = {"work": problem.work, "peak_microbatches": max(peaks) / 60, "value": int(timeline.makespan)}
    more = {what: found[what] for what in ("bound", "solver", "proof", "seconds")}
    return {**named, **numbers, "solved": found["value"], **more}


# --- Published models ---


def estimated(device: str) -> dict[str, Profile]:
    """The stored profiles for a device, by model."""
    ends = "estimated-", f"-{device}"
    names = [name for name in profiles.names() if name.startswith(ends[0]) and name.endswith(ends[1])]
    return {name.removeprefix(ends[0]).removesuffix(ends[1]): profiles.kept(name) for name in names}


@table()
def published(device: str = "h200", seconds: float = 5.0, models: tuple[str, ...] = ()) -> Results:
    """What a schedule gains on the published models (all, or these), each on as many ranks as 1F1B needs (if 8, 16 and 32
    are too few: as any schedule needs), with 4 microbatches a rank, in the device's memory. 1F1B with a fused backward, as
    is usual, has the equal split and the balanced one; `solve` has one stage a rank and the V shape, both split evenly by
    the ranks' work. All of it is estimated: rooflines, not measurements. A fused backward is assumed to take no longer than
    B and W: torch sums weight gradients in separate kernels, which training frameworks avoid."""
    compiled()
    chosen = {name: profile for name, profile in estimated(device).items() if not models or name in models}
    rows = rows_of((f"estimated-{name}-{device}", _fewest_ranks(profile, seconds)) for name, profile in chosen.items())
    return {"device": device, "seconds": seconds, "rows": rows}


def _fewest_ranks(profile: Profile, seconds: float) -> Results | None:
    """The row of the fewest ranks on which 1F1B fits, else of the fewest on which any schedule fits."""
    rest = None
    for ranks in (8, 16, 32):
        row = model_row(profile, ranks, seconds)
        if row is not None and row["equal"]["fits"]:
            return row
        rest = rest or row
    return rest


def model_row(profile: Profile, ranks: int, seconds: float) -> Results | None:
    """One model's row; None if not even one microbatch fits."""
    profile = replace(profile, layers=tuple(replace(one, BW=min(one.BW, one.B + one.W)) for one in profile.layers))
    step = Step(ranks, 4 * ranks)
    try:
        found = {
            "equal": preset("1f1b", replace(step, partition="equal", fused=True).problem(profile)),
            "balanced": preset("1f1b", replace(step, fused=True).problem(profile)),
            **{
                place: solve(replace(step, placement=place).problem(profile), seconds=seconds) for place in ("single", "vee")
            },
        }
    except Infeasible:
        return None
    named = {"model": profile.model, "source": profile.source, "ranks": ranks, "microbatches": step.microbatches}
    return named | {name: _numbers(schedule) for name, schedule in found.items()}


def _numbers(schedule: Schedule) -> Results:
    """Of one schedule: µs, the bound (of a search), bytes of activations of the fullest rank, whether they fit."""
    timeline, capacity = schedule.timeline(), schedule.problem.capacity
    assert capacity is not None
    fits = all(peak <= room for peak, room in zip(timeline.peak_bytes, capacity, strict=True))
    bound = schedule.certificate.bound if schedule.certificate is not None else None
    return {"us": int(timeline.makespan), "bound_us": bound, "bytes": max(timeline.peak_bytes), "fits": fits}


# --- Models of several parts ---

GIVEN = "benchmarks.profiles.public_models:"
# Of each model: its name for `estimate`; that of the same model trained whole; layers of its tower, and what goes into the
# language model behind them; whether the tower needs no gradients.
PARTED: dict[str, tuple[str, str, int, bool]] = {
    "Qwen2-VL 7B": (f"{GIVEN}qwen2_vl", "", 35, False),
    "Qwen2-VL 7B, frozen tower": (f"{GIVEN}qwen2_vl_tuned", f"{GIVEN}qwen2_vl", 35, True),
    "InternVL2 26B": (f"{GIVEN}internvl2", "", 48, False),
    "Llama 3.2 11B Vision": (f"{GIVEN}llama32_vision", f"{GIVEN}llama32_vision_whole", 42, False),
    "T5 11B": (f"{T5_11B},dtype=bfloat16", "", 0, False),
    "Llama 3 8B, LoRA": (f"{GIVEN}llama3_lora", "llama3-8b", 0, False),
}
ROOM = 2**50  # bytes, where a way is looked at whether it fits or not


@table()
def parted(device: str = "h200", ranks: int = 8, seconds: float = 40.0, models: tuple[str, ...] = ()) -> Results:
    """Public models of several parts on 8 ranks, 4 microbatches a rank, by estimates. The ways, left out if they are the
    same: layers in equal stages and all values passed from stage to stage, 1F1B (torch.distributed.pipelining); the same
    with side inputs; the whole tower on the first rank and equally many layers of the language model on the others, 1F1B
    (Megatron); the same model with all parts trained, solved: the cost of ignoring that parts are frozen; side inputs and
    each layer's true costs, solved over placements and splits; and the frozen tower's forwards of the next batch in the
    bubbles of any ranks. Bytes: the total of the fullest rank."""
    compiled()
    found = {}
    for model, (spec, whole, tower, frozen) in PARTED.items():
        if not models or model in models:
            found[model] = rows_of(
                (f"{model}: {way}", _on_device(*one))
                for way, one in _ways(spec, whole, tower, frozen, device, ranks, seconds)
            )
    return {"ranks": ranks, "microbatches": 4 * ranks, "rows": found}


def _ways(
    spec: str, whole: str, tower: int, frozen: bool, device: str, ranks: int, seconds: float
) -> Iterator[tuple[str, tuple[Profile, Schedule, int]]]:
    """The name of a way, and its profile and schedule; bytes of weights that all ranks also have."""
    profile, step = _estimated(spec, device), Step(ranks, 4 * ranks)
    along = _along(replace(profile, capacity=ROOM))
    count, equal = len(profile.layers), replace(step, partition="equal", fused=True)
    yield "equal, passed along, 1F1B", (profile, preset("1f1b", equal.problem(along)), 0)
    if any(one.gives for one in profile.layers):
        roomy = replace(profile, capacity=ROOM)
        yield "equal, side inputs, 1F1B", (profile, preset("1f1b", equal.problem(roomy)), 0)
    if tower:
        behind = [(count - tower) // (ranks - 1) + (i < (count - tower) % (ranks - 1)) for i in range(ranks - 1)]
        first = replace(step, partition=(tower, *behind), fused=True).problem(along)
        yield "tower on the first rank, 1F1B", (profile, preset("1f1b", first), 0)
    if whole:
        other = replace(_estimated(whole, device), capacity=ROOM)
        yield "as if all were trained, solved", (profile, solve(step.problem(other), seconds=seconds), 0)
    open_step = replace(step, placement="auto", partition="auto")
    yield "solved", (profile, solve_auto(profile, open_step, seconds=seconds)[0], 0)
    if frozen:
        yield "tower in bubbles, solved", _in_bubbles(profile, tower - 2, step, seconds)


def _estimated(spec: str, device: str) -> Profile:
    """The profile with fused backwards no longer than B and W (see `published`)."""
    profile = estimate(spec, device, shards=False)
    return replace(profile, layers=tuple(replace(one, BW=min(one.BW, one.B + one.W)) for one in profile.layers))


def _along(profile: Profile) -> Profile:
    """Side inputs as part of the values that pass from layer to layer: each stage between gets and keeps them."""
    layers = list(profile.layers)
    for i, layer in enumerate(profile.layers):
        for given in layer.gives:
            last = max(j for j, one in enumerate(profile.layers) if given.name in one.takes)
            layers[i] = replace(layers[i], held_until_B=layers[i].held_until_B + given.bytes)
            for j in range(i, last):
                after = layers[j + 1]
                layers[j] = replace(layers[j], output_bytes=layers[j].output_bytes + given.bytes)
                layers[j + 1] = replace(after, input_unneeded=after.input_unneeded + given.bytes)
    return replace(profile, layers=tuple(replace(one, gives=(), takes=()) for one in layers))


def _in_bubbles(profile: Profile, count: int, step: Step, seconds: float) -> tuple[Profile, Schedule, int]:
    """The first `count` layers are work of any rank, whose output goes to rank 0 for the next step."""
    front, rest = profile.layers[:count], profile.layers[count:]
    names = {given.name for one in front for given in one.gives}
    rest = tuple(replace(one, takes=tuple(name for name in one.takes if name not in names)) for one in rest)
    step = replace(step, partition="auto")
    best = solve_auto(replace(profile, layers=rest, tied=()), step, seconds=seconds / 2)[0]
    comm = round(profile.link.latency + front[-1].output_bytes / profile.link.bytes_per_us)
    m, size = step.microbatches, front[-1].output_bytes
    works = (
        Work(None, m * round(sum(one.F for one in front)), m),
        Work(0, m * comm, m, takes=0, comm=comm, held=m * size),
    )
    placed = place_work(best.problem, *works, seconds=seconds / 2, alone=best)
    return profile, placed.schedule, sum(one.parameter_bytes for one in front)


def _on_device(profile: Profile, schedule: Schedule, more: int) -> Results:
    """µs, the bound, layers of each stage; bytes of the fullest rank, weights and all, and whether they fit."""
    timeline, certificate, problem = schedule.timeline(), schedule.certificate, schedule.problem
    assert profile.capacity is not None
    assert problem.capacity is not None
    device = ROOM if max(problem.capacity) > profile.capacity else profile.capacity
    used = max(device - room + peak for room, peak in zip(problem.capacity, timeline.peak_bytes, strict=True)) + more
    return {
        "us": int(timeline.makespan),
        "bound_us": None if certificate is None else certificate.bound,
        "bubble": float(1 - problem.passes.duration.sum() / (problem.ranks * timeline.makespan)),
        "bytes": used,
        "fits": used <= profile.capacity,
        "stages": problem.stages,
        "layers": list(problem.layers),
    }


# --- Models of unlike layers ---

MIXED = {"Nemotron-H 8B": (f"{GIVEN}nemotron_h", 8), "DeepSeek-V3, two tokens": (f"{GIVEN}deepseek_v3", 16)}  # and ranks
# torch's runtime schedules, and what the zero-bubble fork has besides.
RUNTIME = ("1f1b", "interleaved", "interleaved-zb", "zb-v", "dualpipe-v", "zb-h1", "zb-2p", "v-half", "v-min")


@table()
def mixed(device: str = "h200", seconds: float = 40.0, models: tuple[str, ...] = ()) -> Results:
    """Public models of unlike layers, by estimates; 4 microbatches a rank. torch's schedules and the zero-bubble fork's have
    layers in equal stages, or in those of `balance`; `solve` searches over placements and splits in 1F1B's activation memory
    with equal stages, and in twice as much. Weights do not count: experts are on other ranks, too."""
    compiled()
    found = {}
    for model, (spec, ranks) in MIXED.items():
        if not models or model in models:
            profile = _activations_alone(_estimated(spec, device))
            found[model] = rows_of(_orders(profile, ranks, seconds))
    return {"seconds": seconds, "rows": found}


def _activations_alone(profile: Profile) -> Profile:
    nothing = dict.fromkeys(("parameter_bytes", "frozen_bytes", "buffer_bytes"), 0)
    return replace(profile, layers=tuple(replace(one, **nothing) for one in profile.layers), tied=(), capacity=ROOM)


def _orders(profile: Profile, ranks: int, seconds: float) -> Iterator[tuple[str, Results]]:
    """The name of a way, and its numbers by split."""
    placements, peak = {system.name: system.placement for system in SYSTEMS}, 0
    for name in RUNTIME:
        step = Step(ranks, 4 * ranks, placements[name], fused=name in ("1f1b", "interleaved"))
        equal, other = (preset(name, one.problem(profile)) for one in (replace(step, partition="equal"), step))
        peak = peak or max(map(int, equal.timeline().peak_bytes))
        yield name, {"equal": _of_step(equal), "balanced": _of_step(other)}
    step = Step(ranks, 4 * ranks, "auto", partition="auto")
    for what, room in (("in 1F1B's memory", peak), ("in twice as much", 2 * peak)):
        found = solve_auto(replace(profile, capacity=room), step, seconds=seconds)[0]
        yield f"solved {what}", {"solved": _of_step(found)}


def _of_step(schedule: Schedule) -> Results:
    """µs, the bound of a search, bytes of activations of the fullest rank, layers of each stage."""
    timeline, certificate = schedule.timeline(), schedule.certificate
    return {
        "us": int(timeline.makespan),
        "bound_us": None if certificate is None else certificate.bound,
        "bytes": max(map(int, timeline.peak_bytes)),
        "layers": list(schedule.problem.layers),
    }


def mixed_table(rows: Results) -> str:
    """A line for each way: the step in equal stages and in a balanced or searched split, the bound of a search, and the
    memory relative to 1F1B's."""

    def shown(us: float | None) -> str:
        return "" if us is None else f"{us / 1e3:,.0f} ms"

    lines = [("", "equal stages", "balanced", "proven", "memory")]
    for model, ways in rows.items():
        lines.append((model, "", "", "", ""))
        for way, of in ways.items():
            *equal, last = of.values()
            cells = shown(equal[0]["us"] if equal else None), shown(last["us"]), shown(last["bound_us"])
            lines.append((f"  {way}", *cells, f"{last['bytes'] / ways['1f1b']['equal']['bytes']:.2f}"))
    return "\n".join(line.rstrip() for line in aligned(lines)) + "\n"


# --- Less memory ---

CHANGES = ("peak_with_time_preferred", "peak_with_memory_preferred", "value_with_memory_preferred")


@table()
def least_peak(
    effort: float = 2.0, ranks: tuple[int, ...] = (4, 8), device: str = "h100", models: tuple[str, ...] = ()
) -> Results:
    """The memory that the search for less memory saves, and its time: stored profiles (of all models, or these), without a
    memory limit, with one stage a rank and on the V shape. Each problem is solved three times with the same effort: for the
    value alone (the first schedule of the least value), with time preferred, and with memory preferred. Values and bounds of
    the first two are the same, or this fails. Peaks are bytes of activations of the fullest rank. Changes are medians: with
    time preferred only over problems whose value is proven optimal, since only there the search has time left."""
    compiled()

    def rows() -> Iterator[tuple[str, Results | None]]:
        for name, profile in estimated(device).items():
            for count in ranks if not models or name in models else ():
                for place in ("single", "vee"):
                    step, label = Step(count, 4 * count, place), f"{name}-{device} p{count} m{4 * count} {place}"
                    if not step.too_few_layers(profile):
                        yield label, _leaner(step.problem(replace(profile, capacity=None)), effort)

    found = rows_of(rows())
    closed = [row for row in found.values() if row["status"] == "optimal"]
    medians = {
        what: median(_change(row, what) for row in (closed if what == CHANGES[0] else found.values())) for what in CHANGES
    }
    proven = sum(row["proven"] for row in closed)
    return {"rows": found, "problems": len(found), "optimal": len(closed), "proven_least": proven, "median_changes": medians}


def _change(row: Results, what: str) -> float:
    """The change of the value or the peak against the search for the value alone."""
    return float(row[what] / row[what.split("_", 1)[0]] - 1)


def _leaner(problem: Problem, effort: float) -> Results:
    seen: dict[str | None, list[LeastPeak]] = {None: [], "time": [], "memory": []}
    found: dict[Any, Schedule] = {}
    seconds = []
    for prefer, peaks in seen.items():
        began = time.perf_counter()
        found[prefer] = solve(problem, effort=effort, prefer=prefer, peaks=peaks.append)
        seconds.append(round(time.perf_counter() - began, 3))
        assert not verify(problem, found[prefer])
    first, lean = found[None].certificate, found["time"].certificate
    assert first is not None
    assert lean is not None
    assert (first.value, first.bound) == (lean.value, lean.bound)
    peaks = {prefer: max(schedule.timeline().peak_bytes) for prefer, schedule in found.items()}
    return {
        "passes": len(problem.passes),
        "status": first.status,
        "value": first.value,
        "value_with_memory_preferred": int(found["memory"].timeline().value),
        "peak": peaks[None],
        "peak_with_time_preferred": peaks["time"],
        "peak_with_memory_preferred": peaks["memory"],
        "proven": any(one.proven for one in seen["time"][-1:]),
        "seconds": seconds,
    }
