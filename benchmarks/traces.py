"""From a traced run to a better one: what real steps of other people could have been, and a round through torch's
runtime."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.exec_ranks import on_ranks
from tests.support.recorded import SAMPLES, a_schedule, primus_run, with_halved_backward, with_lengths
from zbsolve import Aim, Noise, Problem, Schedule, Timeline, Trace, pipeline, solve, under_noise
from zbsolve.build.restage import restaged, with_units_in_flight
from zbsolve.cli import main
from zbsolve.exec import split_stage
from zbsolve.exec.base.torch_private import load_order, pipeline_runtime
from zbsolve.interchange import export
from zbsolve.interchange.traces.reading import read_trace
from zbsolve.problem.placement import loop, vee
from zbsolve.profile.lengths import lengths_of, stalls_of
from zbsolve.search.solver import compiled
from zbsolve.search.today import UNITS, even_stages, today_of
from zbsolve.show.comparison import Parts, compare
from zbsolve.systems import preset
from zbsolve.util.text import aligned

from .harness import Results, listed, table

# --- Real steps ---

NAMES = {"primus-pp8": "primus-pp8", "bytedance-ST": "bytedance-ST.parquet"}  # sample → its file or folder
MESSAGES = ("beside compute", "hold their sender up")
OWN, OTHER, HALF = "replayed", "of the other steps", "measured, every other step"  # how steps were come to


@table()
def traced(effort: float = 4.0) -> Results:
    """What real steps, traced by other people, could have been. For each sample under tests/data/traces: the measured step,
    how close its order comes by the longest path (with messages beside compute and with messages that block their sender),
    where each rank's time went in its median step, and the best schedules found of the same passes in the same memory (the
    most microbatches in flight that any rank had), on today's placement, a vee and a loop (each stage cut into two equal
    ones), with the backward as traced and split (estimated: B and W half of it each), with the stages as they are and all
    equal. Values and bounds are µs."""
    compiled()
    found = {}
    for name, file in NAMES.items():
        found[name] = sample = _sample(read_trace(SAMPLES / file), effort)
        tables = (*replays_table(sample), *ranks_table(sample), *traced_table(sample))
        print(f"{name}\n" + "\n".join(tables), flush=True)
    return found


def _sample(trace: Trace, effort: float) -> Results:
    today = today_of(trace, seconds=0)
    problem = replace(with_units_in_flight(trace.problem, UNITS), capacity=today.room)
    ranks = problem.ranks
    rows = listed(
        {"backward": backward, "stages": stages, "placement": placement} | _best(moved, effort)
        for backward, step in (("as traced", problem), ("split", with_halved_backward(problem)))
        for stages, given in (("as they are", step), ("even", even_stages(step)))
        for placement, moved in (
            ("today's", given),
            ("vee", restaged(given, vee(ranks))),
            ("loop", restaged(given, loop(ranks))),
        )
    )
    return {
        "steps": len(trace.steps),
        "measured": today.measured,
        "bubble": today.bubble,
        "replayed": today.replayed,
        "replays": {MESSAGES[0]: _replays(_beside(trace)), MESSAGES[1]: _replays(trace)},
        "blocking": trace.facts.get("blocking"),
        "even_stages_save": today.replayed - today.even,
        "in_flight": max(today.room) / UNITS,
        "ranks": [_shares(one.measured) for one in compare(trace.planned(), trace).ranks],
        "stalls": [one.to_json() | {"step": trace.facts["steps"][one.step]} for one in stalls_of(trace)],
        "rows": rows,
    }


def _best(problem: Problem, effort: float) -> Results:
    found = solve(problem, prefer=None, effort=effort)
    in_flight = max(found.timeline().peak_bytes) / UNITS
    return {"in_flight": in_flight} | {
        what: getattr(found.certificate, what) for what in ("solver", "value", "bound", "gap")
    }


def _beside(trace: Trace) -> Trace:
    """The run with messages beside compute, whether or not they block in it."""
    problem, sent = trace.problem, trace.sent or (trace.problem.sending,) * len(trace.steps)
    edges = replace(problem.edges, lag=problem.edges.lag + problem.edges.sent, sent=0 * problem.edges.sent)
    passes = replace(problem.passes, duration=problem.passes.duration - problem.sending)
    problem = replace(problem, passes=passes, edges=edges)
    steps = (Timeline(problem, one.start, one.end - more) for one, more in zip(trace.steps, sent, strict=True))
    return replace(trace, problem=problem, steps=tuple(steps), sent=())


def _replays(trace: Trace) -> dict[str, float]:
    """How much longer than measured the order takes by the longest path, as a share: with each step's own times, the mean
    and the worst; with the medians of all steps, against the median step; and with each step's own factors a microbatch, the
    mean of absolute errors."""
    own = [trace.replayed(i).value / step.value - 1 for i, step in enumerate(trace.steps)]
    lengths, sent = lengths_of(trace), trace.problem.sending
    off = []
    for step, each in zip(trace.steps, lengths.each, strict=True):
        took = lengths.base * each[trace.problem.passes.microbatch]
        passes = replace(trace.problem.passes, duration=np.rint(took).astype(np.int64) + sent)
        replayed = Schedule(replace(trace.problem, passes=passes), trace.schedule).timeline().value
        off.append(abs(replayed / step.value - 1))
    medians = trace.planned().timeline().value / trace.median().value - 1
    return {"own": sum(own) / len(own), "worst": max(own, key=abs), "medians": medians, "factors": sum(off) / len(off)}


def _shares(parts: Parts) -> dict[str, int]:
    """Where a rank's time went, µs."""
    idle = {"waiting": parts.waiting, "launch": parts.launch, "before": parts.before, "after": parts.after}
    return {"busy": sum(parts.passes.values()), **idle}


def replays_table(sample: Results) -> list[str]:
    """How close the order comes to the measurement, with each kind of messages."""
    rows = [("messages", "own times", "worst step", "medians", "with factors")]
    for name, one in sample["replays"].items():
        rows.append((name, f"{one['own']:+.2%}", f"{one['worst']:+.2%}", f"{one['medians']:+.2%}", f"{one['factors']:.2%}"))
    return aligned(rows)


def ranks_table(sample: Results) -> list[str]:
    """Where each rank's time went in the median step, ms."""
    rows = [("rank", *sample["ranks"][0])]
    rows += [(str(rank), *(f"{us / 1e3:,.1f}" for us in one.values())) for rank, one in enumerate(sample["ranks"])]
    return aligned(rows)


def traced_table(sample: Results) -> list[str]:
    """The best schedules found, ms; gaps are to proven bounds; changes are against today's order by the medians."""
    rows = [("backward", "stages", "placement", "step, ms", "gap", "change")]
    for one in sample["rows"]:
        change = one["value"] / sample["replayed"] - 1
        shown = (f"{one['value'] / 1e3:,.1f}", f"{one['gap']:.2%}", f"{change:+.1%}")
        rows.append((one["backward"], one["stages"], one["placement"], *shown))
    return aligned(rows, (0, 1, 2))


KEPT = ("given", "mean", "p50", "p95", "p99", "bound")
DRAWS, SEARCHES = (1, 2), (1, 2)  # seeds of further draws, and of further searches, for what is said of p95


@table()
def noise(effort: float = 6.0) -> Results:
    """Whether the best order for medians stays the best if times vary as they did. For each sample: the mean, p50 and p95 of
    measured steps; and those of the same steps in today's order (1F1B), in named orders, in the best order of the same
    passes, of a loop (also in interleaved's memory) and of a vee (each stage cut into two equal ones) in today's memory, and
    in the best for p95; with the backward as traced and split (estimated: B and W half of it each). less: the share by which
    p95 is below that of the best order for medians, in draws (microbatches in another order) and for searches with other
    seeds. µs, shares, microbatches in flight."""
    compiled()
    found = {}
    for name, file in NAMES.items():
        trace = read_trace(SAMPLES / file)
        noise, problem = Noise.of(trace), with_units_in_flight(trace.problem, UNITS)
        schedules, less = _orders(problem, today_of(trace, seconds=0).room, Aim("p95", noise), effort)
        drawn = under_noise({"1F1B, today's": trace.planned()} | schedules, noise)
        values = [one.value for one in trace.steps]
        measured = [float(np.mean(values)), *(float(np.quantile(values, share)) for share in (0.5, 0.95))]
        first, rows = drawn.spreads["1F1B, today's"], dict[str, Any]()
        for what, one in drawn.spreads.items():
            row, held = one.to_json(), max(schedules.get(what, Schedule(problem, trace.schedule)).timeline().peak_bytes)
            rows[what] = {key: row[key] for key in KEPT} | {"shorter": one.shorter(first), "in_flight": held / UNITS}
        found[name] = {"noise": str(noise), "steps": len(values), "measured": measured, "rows": rows, "less": less}
        print(f"{name}: {noise}\n" + "\n".join([*noise_table(found[name]), *less_table(found[name])]), flush=True)
    return found


def _orders(problem: Problem, room: tuple[int, ...], aim: Aim, effort: float) -> tuple[dict[str, Schedule], Results]:
    """Named and solved orders; and by how much p95 is below that of the best for medians, with new draws and searches."""
    ranks, split = problem.ranks, with_halved_backward(problem)
    looped, folded, fine = restaged(problem, loop(ranks)), restaged(problem, vee(ranks)), restaged(split, vee(ranks))
    found = {"interleaved": preset("interleaved", looped)}
    found |= {f"{title}, split": preset(name, fine) for title, name in (("ZB-V", "zb-v"), ("V-Half", "v-half"))}
    less = {}
    more = (max(found["interleaved"].timeline().peak_bytes),) * ranks
    steps = (("same passes", problem, room), ("loop", looped, room), ("loop, interleaved's memory", looped, more))
    for what, step, limit in (*steps, ("vee", folded, room), ("vee, split", fine, room)):
        one = replace(step, capacity=limit)
        found[what] = best = solve(one, effort=effort, prefer=None)
        better = [solve(one, effort=effort, prefer=aim, seed=seed) for seed in (0, *SEARCHES)]
        found[f"{what}, for p95"] = better[0]
        draws = [_less(better[0], best, aim, seed) for seed in DRAWS]
        less[what] = {"draws": draws, "searches": [_less(order, best, aim, 0) for order in better[1:]]}
    return found, less


def _less(order: Schedule, other: Schedule, aim: Aim, seed: int) -> tuple[float, float, float]:
    noise = replace(aim.noise, shuffled=True)
    spreads = under_noise({"order": order, "other": other}, noise, seed=seed).spreads
    return spreads["order"].less(spreads["other"], aim)


def noise_table(sample: Results) -> list[str]:
    """Measured and drawn steps, ms; the mean and p95 with their 95 % intervals."""
    rows = [
        ("steps", "as given", "mean", "±", "p50", "p95", "from", "to", "p99", "no mean below", "shorter in", "in flight")
    ]
    mean, middle, high = (f"{us / 1e3:,.1f}" for us in sample["measured"])
    rows.append((f"measured ({sample['steps']})", "", mean, "", middle, high, *[""] * 6))
    for what, row in sample["rows"].items():
        times = (row["given"], *row["mean"], row["p50"][0], *row["p95"], row["p99"][0], row["bound"][0])
        rows.append((what, *(f"{us / 1e3:,.1f}" for us in times), f"{row['shorter']:.1%}", f"{row['in_flight']:g}"))
    return aligned(rows)


def less_table(sample: Results) -> list[str]:
    """By how much p95 is below that of the best order for medians (95 %): in other draws, and for other searches."""
    rows = [("p95 less by", *(f"draws {seed}" for seed in DRAWS), *(f"search {seed}" for seed in SEARCHES))]
    for what, found in sample["less"].items():
        each = (f"{least:.2%} ({low:.2%} to {high:.2%})" for least, low, high in (*found["draws"], *found["searches"]))
        rows.append((what, *each))
    return aligned(rows)


@table()
def truth() -> Results:
    """How close drawn steps come to measured ones, for the order that ran. For each sample, and for a made run whose
    microbatches differ in length (none of the samples has such): mean, p50 and p95 of measured steps; of the same steps
    replayed with their own times, as `--noise` takes them; of 10,000 with microbatches in another order, as `--prefer` takes
    them; of as many with factors of the measured deviations, as in words; and of one half of the steps by the other half.
    µs."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as folder:
        runs = {name: read_trace(SAMPLES / file) for name, file in NAMES.items()}
        for name, trace in (runs | {"made": _made(Path(folder) / "run")}).items():
            found[name] = sample = _truth(trace)
            print(f"{name}\n" + "\n".join(truth_table(sample)), flush=True)
    return found


def _made(folder: Path) -> Trace:
    """64 steps of eight microbatches, whose lengths are log-normal (30 %); passes also vary by 2 %."""
    schedule = a_schedule("single", split=False, times=100, comm=700)
    lengths = np.exp(0.3 * np.random.default_rng(0).standard_normal((64, schedule.problem.microbatches)))
    return read_trace(primus_run(folder, with_lengths(schedule, lengths.tolist(), 0.02)))


def _truth(trace: Trace) -> Results:
    noise, own = Noise.of(trace), trace.planned()
    names = [str(name).partition(",")[0] for name in trace.facts["steps"]]
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}  # pipelines of one step stay together
    rows_of_half = [[i for i, name in enumerate(names) if number[name] % 2 == half] for half in (0, 1)]
    halves = [
        replace(trace, steps=tuple(trace.steps[i] for i in some), sent=tuple(trace.sent[i] for i in some if trace.sent))
        for some in rows_of_half
    ]
    ways = {OWN: noise, "in another order": replace(noise, shuffled=True), "as deviations": replace(noise, measured=None)}
    spreads = {how: under_noise({"": own}, one).spreads[""] for how, one in ways.items()}
    other = under_noise({"": own}, replace(Noise.of(halves[1]), shuffled=True)).spreads[""]
    rows = {"measured": trace.steps, HALF: halves[0].steps}
    found = {how: _quantiles(np.array([step.value for step in steps])) for how, steps in rows.items()}
    found |= {how: _quantiles(one.values) for how, one in spreads.items()} | {OTHER: _quantiles(other.values)}
    return {"noise": str(noise), "steps": len(trace.steps), "rows": found, "p95": spreads[OWN].at(0.95)[1:]}


def _quantiles(values: Any) -> list[float]:
    return [float(values.mean()), *np.quantile(values, (0.5, 0.95)).tolist()]


def truth_table(sample: Results) -> list[str]:
    """Measured steps, ms, and the differences of drawn ones."""
    rows, found = [(f"{sample['steps']} steps", "mean", "p50", "p95")], sample["rows"]
    for how, row in found.items():
        if how.startswith("measured"):
            rows.append((how, *(f"{us / 1e3:,.1f}" for us in row)))
        else:
            real = found[HALF if how == OTHER else "measured"]
            rows.append((how, *(f"{us / was - 1:+.2%}" for us, was in zip(row, real, strict=True))))
    return aligned(rows)


# --- Through torch's runtime ---

F, B, W = [20, 24, 22, 18], [24, 26, 22, 28], [18, 20, 20, 24]  # ms a stage
PASSES = {"forward_one_chunk": F, "backward_one_chunk": B, "backward_weight_one_chunk": W}
RANKS, MICROBATCHES, WIDTH, ROWS, WARM = len(F), 8, 32, 16, 2


@table()
def torch_round(steps: int = 10, seconds: float = 10.0) -> Results:
    """From a run in torch's own runtime to a better one, and its step compared with the prediction.

    Today's run is 1F1B with a split backward, one stage a rank, in torch.distributed.pipelining with our split of the
    backward. It is traced by torch's profiler, and then by the command line: a profile of the trace, a schedule of the
    profile, torch's CSV of the schedule. That order runs in the same runtime again, and by `zbsolve run --emulate`. Steps
    are wall time of the longest rank, ms, without a profiler.

    Each pass sleeps for its stage's time after a small model's work, like a host that waits for its device. So other load on
    the cores matters little, and there may be more ranks than cores."""
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as folder:
        rows = listed(_there_and_back(Path(folder), steps, seconds))
    return {"ranks": RANKS, "microbatches": MICROBATCHES, "pass_ms": {"F": F, "B": B, "W": W}, "rows": rows}


def _there_and_back(folder: Path, steps: int, seconds: float) -> list[Results]:
    traces, *files = (str(folder / name) for name in ("traces", "profile.json", "plan.json", "order.csv", "run.json"))
    profile, plan, order, ran = files
    Path(traces).mkdir()
    given = {kind: [1000 * t for t in times] for kind, times in (("B", B), ("W", W))}
    nominal = pipeline([1000 * t for t in F], **given, microbatches=MICROBATCHES)
    Path(order).write_text(export(preset("1f1b-split", nominal), "torch-csv").text, encoding="utf-8")

    def in_torch(traced_to: str) -> list[float]:
        found = on_ranks(RANKS, "benchmarks.traces:torch_run", [order, steps, traced_to], 300)
        return [max(row) for row in zip(*found, strict=True)]

    today = in_torch(traces)
    print(_said_by("profile", "--from-trace", traces, "--seconds", "0", "-o", profile), end="")
    size = ["--ranks", str(RANKS), "--microbatches", str(MICROBATCHES)]
    print(_said_by("solve", profile, *size, "--seconds", str(seconds), "-o", plan), end="")
    _said_by("export", plan, "--to", "torch-csv", "-o", order)
    best = in_torch("")
    how = ["--model", "benchmarks.traces:torch_model", "--emulate", "schedule", "--local", "--steps", str(steps)]
    _said_by("run", plan, *how, "-o", ran)
    schedule = Schedule.load(plan)
    emulated = [one.value / 1000 for one in Trace.load(ran).steps]
    rows = (
        ("today, torch's runtime", preset("1f1b-split", schedule.problem), today),
        ("best, torch's runtime", schedule, best),
        ("best, zbsolve run --emulate", schedule, emulated),
    )
    return [
        {
            "run": name,
            "predicted_ms": one.timeline().makespan / 1000,
            "measured_ms": median(samples),
            "samples_ms": samples,
        }
        for name, one, samples in rows
    ]


def torch_run(rank: int, given: tuple[str, int, str]) -> list[float]:
    """Wall times of steps on this rank, ms, by an order in a CSV file. A folder gets torch profiler's traces of some more
    steps ("": none)."""
    from torch.distributed.pipelining import PipelineStage

    csv, steps, traces = given
    stage = split_stage(PipelineStage(nn.Linear(WIDTH, WIDTH), rank, RANKS, torch.device("cpu")))
    for name, times in PASSES.items():
        setattr(stage, name, _sleeping(getattr(stage, name), times[rank] / 1000))
    runtime = pipeline_runtime([stage], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    load_order(runtime, csv)
    x = torch.ones(MICROBATCHES * ROWS, WIDTH)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        runtime.step(*([x] if rank == 0 else []), target=x if rank == RANKS - 1 else None)
        return 1000 * (time.perf_counter() - start)

    found = [step() for _ in range(WARM + steps)][WARM:]
    if traces:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
            for _ in range(steps):
                step()
        seen.export_chrome_trace(str(Path(traces) / f"rank{rank}_trace.json"))
    return found


def _sleeping(action: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Sleep after the work: a trace shows time before an action's first operation as waiting."""

    def slept(*args: Any, **kwargs: Any) -> Any:
        result = action(*args, **kwargs)
        time.sleep(seconds)
        return result

    return slept


def torch_model() -> tuple[list[nn.Module], Tensor]:
    """The same for `zbsolve run`."""
    return [nn.Linear(WIDTH, WIDTH) for _ in range(RANKS)], torch.ones(ROWS, WIDTH)


def _said_by(*words: str) -> str:
    """What a command writes to standard output. Raises SystemExit if it fails."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main(list(words))
    if code:
        raise SystemExit(f"zbsolve {words[0]} ended with {code}")
    return text.getvalue()
