"""Predictions compared with runs, on emulated devices (`run --emulate`) and on this machine's cores: plain steps, one long
sequence in slices, a sharded vocabulary, sharded parameters, and work in bubbles."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiler import estimate
from tests.support.exec_ranks import on_ranks
from tests.support.exec_tools import toy
from zbsolve import Layer, Link, Noise, Problem, Profile, Schedule, Step, Trace, pipeline, preset, solve, solve_auto
from zbsolve.build import Work, with_sharding
from zbsolve.exec import CrossEntropy, Pipeline
from zbsolve.exec.emulate import Times
from zbsolve.exec.run.launch import run_local
from zbsolve.models.presets import Block, Embed, Head
from zbsolve.schedule.timeline import Floats
from zbsolve.search.idle_room import place_work
from zbsolve.systems.torch_gathers import torch_window
from zbsolve.util.text import aligned, in_one_unit

from .harness import Results, rows_of, table


def _row(schedule: Schedule, trace: Trace, base: Results | None) -> Results:
    """The run's numbers and the predicted ones, µs and bytes; gains are relative to the first row."""
    times = {"predicted": float(schedule.timeline().makespan), "measured": float(trace.median().makespan)}
    return {
        **times,
        "error": times["measured"] / times["predicted"] - 1,
        **{f"gain_{what}": (base or times)[what] / us for what, us in times.items()},
        "bound": None if schedule.certificate is None else schedule.certificate.bound,
        "steps": [float(one.makespan) for one in trace.steps],
        "bubble": schedule.timeline().bubble_rate,
        "predicted_bytes": [int(one) for one in schedule.timeline().peak_bytes],
        "peaks": [int(one) for one in trace.peaks[0]],
        "gradients": trace.facts.get("check", {}).get("worst"),
        **{what: trace.facts.get("emulated", {}).get(what) for what in ("passes", "late", "worst_late_us", "waited")},
        "load": os.getloadavg()[0],
    }


# --- Plain steps ---

RANKS, MICROBATCHES, LAYERS = 8, 24, 16
MEMORY = 48_000_000  # bytes of activations that 1F1B needs
MODEL = f"mlp-{LAYERS}"


@table()
def emulate(steps: int = 9, seconds: float = 20.0) -> Results:
    """Do emulated devices keep to the prediction? 8 ranks and 24 microbatches on whatever cores are here: a model of 16
    layers, passes of 5 ms and more, a last layer that takes longer than the others. Each schedule is predicted, and run on 8
    processes that stretch their (tiny) real work to the profile's times. Steps and speed-ups over 1F1B are compared. The
    last row has devices fifty times as fast: this machine cannot keep up, and the measured step shows it."""
    usual, fast = _made_up(1.0), _made_up(1 / 50)
    schedules = {
        "1F1B": preset("1f1b", _step(usual, "single", fused=True)),
        "ZB-H1": preset("zb-h1", _step(usual, "single")),
        **{f"solved, {place}": solve(_step(usual, place), seconds=seconds) for place in ("single", "vee")},
    }
    hurried = {"1F1B, fifty times as fast": preset("1f1b", _step(fast, "single", fused=True))}

    def rows() -> Iterator[tuple[str, Results]]:
        for profile, several in ((usual, schedules), (fast, hurried)):
            with tempfile.TemporaryDirectory(prefix="zbsolve-emulate-") as folder:
                path, base = Path(folder) / "profile.json", None
                profile.save(path)
                for name, schedule in several.items():
                    trace = run_local(schedule, MODEL, steps=steps, emulate=str(path), check=True, timeout=300)
                    row = _row(schedule, trace, base)
                    base = base or row
                    yield name, row

    return {"ranks": RANKS, "microbatches": MICROBATCHES, "model": MODEL, "memory": MEMORY, "rows": rows_of(rows())}


def _made_up(scale: float) -> Profile:
    """The emulated model; µs and bytes are made up."""
    times = {"F": 5_000 * scale, "B": 6_000 * scale, "W": 5_000 * scale, "BW": 11_000 * scale}
    plain = Layer("", **times, held_until_B=2_000_000, held_until_W=1_000_000, parameter_bytes=0, output_bytes=1_000_000)
    layers = [replace(plain, name=f"layer{i}") for i in range(LAYERS)]
    layers[-1] = replace(layers[-1], **{kind: 1.3 * us for kind, us in times.items()})
    return Profile("estimated: made up", MODEL, tuple(layers), Link(100 * scale, 10_000 / scale), 4.0, None, {}, {})


def _step(costs: Profile, placement: str, fused: bool = False) -> Problem:
    return replace(costs.problem(RANKS, MICROBATCHES, placement, fused=fused), capacity=(MEMORY,) * RANKS)


# --- Slack ---

NOISES = ("stall=1%x8", "rank=1%,microbatch=25%,pass=3%")
VEE = (0, 1, 2, 3, 3, 2, 1, 0)
STATS = (("median", np.median), ("worst", np.max))


@table()
def slack(seeds: int = 3, steps: int = 10, draws: int = 200) -> Results:
    """Ranks that run later W's while they wait (`run --split layers:slack`) compared with the given order, with the same
    random times: ZB-H1 and ZB-V on four ranks with 12 microbatches, passes of 18 to 48 ms. Steps run on emulated devices
    with each seed, without those in which a device waited for this machine. The longest path also simulates the same rule
    with many draws. Changes are step by step."""

    def rows() -> Iterator[tuple[str, Results]]:
        single = pipeline([40_000] * 4, B=[48_000] * 4, W=[36_000] * 4, microbatches=12, comm=2000, layers=[1] * 4)
        halves = {kind: [us // 2] * 8 for kind, us in (("B", 48_000), ("W", 36_000))}
        vee = pipeline([20_000] * 8, **halves, placement=VEE, microbatches=12, comm=2000, layers=[1] * 8)
        for name, problem in (("zb-h1", single), ("zb-v", vee)):
            schedule = preset(name, problem)
            with tempfile.TemporaryDirectory(prefix="zbsolve-slack-") as folder:
                path = str(Path(folder) / "schedule.json")
                schedule.save(path)
                for noise in NOISES:
                    ran = on_ranks(4, "benchmarks.emulation:under_noise", (path, noise, seeds, steps), timeout=900)[0]
                    given, early, waited = (np.array(ran[key]) for key in ("layers", "layers:slack", "waited"))
                    took = np.concatenate(list(Noise.read(noise).steps(problem, draws, seeds)))
                    drawn = np.array([[longest(schedule, row, slack) for slack in (False, True)] for row in took]).T
                    yield f"{name}, {noise}", {"ran": _beside(given, early, waited), "drawn": _beside(*drawn)}

    return {"rows": rows_of(rows()), "load": os.getloadavg()[0]}


def under_noise(rank: int, argument: tuple[str, str, int, int]) -> dict[str, list[float]]:
    """On a rank: steps of a schedule's file on emulated devices whose times are drawn anew for each, `steps` of each of
    `seeds`: µs as given and with slack, and how often a device had to wait for this machine."""
    path, noise, seeds, steps = argument
    schedule = Schedule.load(path)
    names, x = schedule.problem.names, torch.linspace(-1, 1, 8 * schedule.problem.microbatches).reshape(-1, 4)
    runners = {}
    for split in ("layers", "layers:slack"):
        times = Times.of(schedule, "schedule")
        runners[split] = Pipeline(toy, schedule, loss=nn.functional.mse_loss, split=split, emulate=times)
        runners[split].step(x, x.flip(0))
    found: dict[str, list[float]] = {"layers": [], "layers:slack": [], "waited": []}
    for seed in range(seeds):
        for took in (row for some in Noise.read(noise).steps(schedule.problem, steps, seed) for row in some.round()):
            waited = 0
            for split, runner in runners.items():
                device = runner.hooks.emulated
                device.length = {name: 1000 * us for name, us in zip(names, took.astype(int).tolist(), strict=True)}
                dist.barrier()
                before = int(device.board.waited.sum())
                found[split].append(float(runner.step(x, x.flip(0)).timeline.makespan))
                dist.barrier()
                waited += int(device.board.waited.sum()) - before
            found["waited"].append(waited)
    grads = [[p.grad for p in runner.parameters()] for runner in runners.values()]
    assert all(bool((a == b).all()) for a, b in zip(*grads, strict=True))
    return found


def slack_table(rows: Results) -> str:
    """A line each schedule and noise, run and drawn: steps; their median and the longest, ms, as given and with slack; the
    change of a step: mean, worst, best."""
    lines = [("schedule and noise", "", "steps", "median", "slack", "longest", "slack", "mean", "worst", "best")]
    for name, both in rows.items():
        for how, one in both.items():
            times = (f"{one[f'{what}_{which}'] / 1e3:,.1f}" for what, _ in STATS for which in ("given", "slack"))
            changes = (f"{one[f'change_{what}']:+.2%}" for what in ("mean", "worst", "best"))
            lines.append((name, how, f"{one['steps']}", *times, *changes))
    return "\n".join(aligned(lines, left=(0, 1))) + "\n"


def _beside(given: Floats, early: Floats, waited: Floats | None = None) -> Results:
    """Median and worst steps, µs; changes step by step."""
    kept = np.ones(len(given), bool) if waited is None else waited == 0
    given, early = given[kept], early[kept]
    change = early / given - 1
    return {
        "steps": int(kept.sum()),
        "of": len(kept),
        **{f"{what}_{name}": float(how(one)) for name, one in (("given", given), ("slack", early)) for what, how in STATS},
        **{f"change_{what}": float(how(change)) for what, how in (*STATS, ("mean", np.mean), ("best", np.min))},
    }


def longest(schedule: Schedule, took: Floats, slack: bool) -> float:
    """µs of a step with these times of passes, with the rule of `zbsolve.exec.slack` or without."""
    problem, e = schedule.problem, schedule.problem.edges
    kinds, rank, usual = problem.passes.kind_names, problem.passes.rank.tolist(), problem.passes.duration.tolist()
    inputs: list[list[tuple[int, int]]] = [[] for _ in kinds]
    for a, b, lag in zip(e.before.tolist(), e.after.tolist(), e.lag.tolist(), strict=True):
        inputs[b].append((a, lag if rank[a] != rank[b] else 0))
    orders = [rows.tolist() for rows in schedule.sequences.values()]
    place = {row: i for order in orders for i, row in enumerate(order)}
    end, at, waiting, turns = dict[int, float](), [0] * len(orders), set[int](), [(0.0, r) for r in range(len(orders))]

    def left(row: int) -> float:
        sure = [0.0]
        for a, lag in inputs[row]:
            if rank[a] != rank[row] and a not in end:
                rest = orders[rank[a]][at[rank[a]] : place[a] + 1]
                sure.append(lag + sum(usual[one] for one in rest if kinds[one] != "W"))
        return max(sure)

    while turns:
        now, r = heappop(turns)
        order = orders[r]
        while at[r] < len(order) and order[at[r]] in end:
            at[r] += 1
        if at[r] == len(order):
            continue
        row = order[at[r]]
        known = all(a in end for a, _ in inputs[row])
        ready = max((end[a] + lag for a, lag in inputs[row]), default=0.0) if known else 0.0
        runs = row if known and ready <= now else None
        if runs is None and slack:
            later = next((one for one in order[at[r] :] if kinds[one] == "W" and one not in end), row)
            fits = all(end.get(a, now + 1) <= now for a, _ in inputs[later])
            runs = later if fits and later != row and left(row) >= usual[later] else None
        if runs is not None:
            end[runs] = now + float(took[runs])
            at[r] += runs == row
            heappush(turns, (end[runs], r))
        elif known:
            heappush(turns, (ready, r))
        else:
            waiting.add(r)
        for other in [one for one in waiting if all(a in end for a, _ in inputs[orders[one][at[one]]])]:
            waiting.remove(other)
            heappush(turns, (max(now, *(end[a] + lag for a, lag in inputs[orders[other][at[other]]])), other))
    return max(end.values())


# --- Slices and vocabularies ---

Given = tuple[list[nn.Module], Any, CrossEntropy]  # layers, a sample, its loss
TOKENS, SLICES, SLICED, BLOCKS = 131_072, 16, 4, 32  # SLICED: ranks; BLOCKS of Llama 3 8B
SCHEDULES = ("1f1b", "slimpipe", "even-work", "exchange", "search")


def _model(words: int, width: int, blocks: list[nn.Module], batch: int, length: int) -> Given:
    tokens = torch.randint(0, words, (batch, length))
    return [Embed(length, width, words), *blocks, Head(width, words)], (tokens, tokens.roll(1, 1)), CrossEntropy()


def sliced_model() -> Given:
    """As many layers as Llama 3 8B has, and little work: four tokens a slice, and attention in one layer of a stage."""
    torch.manual_seed(0)
    blocks = [nn.Linear(8, 8) if i % (BLOCKS // SLICED) else Block(8, 2) for i in range(BLOCKS)]
    return _model(24, 8, blocks, 1, 64)


def wordy_model() -> Given:
    """A GPT over 32k words."""
    torch.manual_seed(0)
    return _model(32_768, 128, [Block(128, 4) for _ in range(8)], 8, 64)


def wordy_stand_in() -> Given:
    """As many layers, and little work."""
    torch.manual_seed(0)
    return _model(24, 12, [Block(12, 4) for _ in range(8)], 8, 8)


@table()
def slices_run(steps: int = 3, seconds: float = 10.0, schedules: tuple[str, ...] = SCHEDULES) -> Results:
    """One long sequence on four ranks, whole and in 16 slices, predicted and run. The step is Llama 3 8B's with 128k tokens
    as estimated for an H100, one microbatch. Four emulated devices take its times, with a small model of as many layers
    instead of the real one: the executor runs, message by message and slice by slice. Only one layer of each stage has
    attention: if ranks exchange it, each such layer waits for an answer, and all waits of a pass should be shorter than the
    pass, on a busy machine too.

    1f1b: the whole sequence. slimpipe: even slices in SlimPipe's order (arXiv 2504.14519). even-work: the same order with
    slices of equal times (Seq1F1B, arXiv 2406.03488). exchange: slimpipe, and waiting ranks compute attention for late
    slices. search: what solve finds for even slices with a split backward, if every rank may hold what slimpipe's fullest
    rank holds; the others have a fused backward."""
    profile = replace(estimate(f"llama3-8b@length={TOKENS}", "h100"), capacity=None)
    rows: Results = {}
    for name in schedules:
        schedule = _sliced(profile, name, seconds)
        model = "benchmarks.emulation:sliced_model"
        trace = run_local(schedule, model, steps=steps, warmup=1, emulate="schedule", timeout=120)
        rows |= rows_of([(name, _row(schedule, trace, next(iter(rows.values()), None)))])
    print(slices_run_table(rows))
    return {"model": "llama3-8b", "tokens": TOKENS, "ranks": SLICED, "slices": SLICES, "rows": rows}


def _sliced(profile: Profile, name: str, seconds: float) -> Schedule:
    """The schedule of this name: each stage has equally many blocks, the first also the embedding, the last also the
    output."""
    each = (len(profile.layers) - 2) // SLICED
    counts = (each + 1, *(each,) * (SLICED - 2), each + 1)
    slices: Any = {"1f1b": 1, "even-work": f"{SLICES}:even-work"}.get(name, SLICES)
    exchange = {"attention_exchange": name == "exchange"}
    found = preset(
        "1f1b" if name == "1f1b" else "slimpipe",
        profile.problem(SLICED, 1, layers=counts, fused=True, slices=slices, **exchange),
    )
    if name != "search":
        return found
    room = (max(found.timeline().peak_bytes),) * SLICED
    return solve(replace(profile.problem(SLICED, 1, layers=counts, slices=slices), capacity=room), seconds=seconds)


def slices_run_table(rows: Results) -> str:
    """A line for each schedule: its step, predicted and measured, their difference, the gain over the whole sequence, the
    bubble, and bytes of activations on the fullest rank."""
    unit, sizes = in_one_unit([max(one["predicted_bytes"]) for one in rows.values()])
    lines = [("schedule", "predicted s", "measured s", "apart", "gain", "bubble", unit)]
    for (name, one), size in zip(rows.items(), sizes, strict=True):
        times = (f"{one[what] / 1e6:.3f}" for what in ("predicted", "measured"))
        apart = f"{one['measured'] / one['predicted'] - 1:+.2%}"
        lines.append((name, *times, apart, f"{one['gain_measured']:.2f}", f"{one['bubble']:.0%}", size))
    return "\n".join(aligned(lines, left=(0,))) + "\n"


@table()
def vocabulary_run(steps: int = 5, seconds: float = 5.0) -> Results:
    """What a sharded vocabulary gains, predicted and measured, with 32k words and a tiny model, which is profiled first. The
    same step is solved with output layer and loss on the last stage (layers redistributed as evenly as possible), and with
    both sharded over all ranks. Two ranks run both with real passes and check gradients. Four emulated devices take the
    profile's times, with a small model of as many layers instead of the real one."""
    model = "benchmarks.emulation:wordy_model"
    with tempfile.TemporaryDirectory(prefix="zbsolve-vocabulary-") as folder:
        path = str(Path(folder) / "profile.json")
        subprocess.run([sys.executable, "-m", "zbsolve", "profile", model, "-o", path], check=True)
        costs = Profile.load(path)
    ways = (
        (2, "their passes", {"check": True}, model),
        (4, "emulated", {"emulate": "schedule"}, f"{__name__}:wordy_stand_in"),
    )

    def rows() -> Iterator[tuple[str, Results]]:
        for ranks, what, how, spec in ways:
            base = None
            for where in ("redistribute", "sharded", "two-barriers"):
                schedule = solve(costs.problem(ranks, 8, "single", vocabulary=where), seconds=seconds)
                trace = run_local(schedule, spec, steps=steps, timeout=120, **how)
                row = _row(schedule, trace, base)
                base = base or row
                row |= {
                    "peaks": [int(one) for one in trace.peaks[0]],
                    "gradients": trace.facts.get("check", {}).get("worst"),
                }
                yield f"{ranks} ranks, {what}: {where}", row

    return {"words": 32_768, "width": 128, "blocks": 8, "microbatches": 8, "rows": rows_of(rows())}


# --- Sharded parameters ---

PLACEMENT, PASS_TIME, LINK_TIME, COLLECTIVE_TIME = (0, 1, 0, 1), 8_000, 100, 24_000  # µs


@table()
def fsdp(steps: int = 8, rounds: int = 2, seconds: float = 10.0) -> Results:
    """Sharded parameters with gathers and reductions in the schedule, compared with torch's rule. There are two pipelines of
    two ranks, two stages a rank, each stage sharded over two ranks (FSDP2), and 8 microbatches. Torch's runtime gathers in
    the order of use, up to three stages ahead, and reduces after a stage's last backward: so do the rows of its schedules.
    The search places both itself. Emulated devices have passes of 8 ms, gathers and reductions of 24 ms. The real run has
    four processes on this machine's cores, without emulated times: gloo's collectives take these cores too."""
    schedules = {
        "interleaved 1F1B, torch's rule": torch_window(preset("interleaved", _sharded(fused=True))),
        "interleaved zero bubble, torch's rule": torch_window(preset("interleaved-zb", _sharded(fused=False))),
        "solved": solve(_sharded(fused=False), seconds=seconds),
    }
    forms = {name: one.to_json() for name, one in schedules.items()}
    work, given = "benchmarks.emulation:sharded_steps", {"forms": forms, "steps": steps, "rounds": rounds}
    runs = {kind: on_ranks(4, work, given | {"emulate": kind == "emulated"}, 600)[0] for kind in ("emulated", "real")}

    def row(name: str, schedule: Schedule) -> Results:
        bound = None if schedule.certificate is None else schedule.certificate.bound
        found: Results = {"predicted_us": int(schedule.timeline().makespan), "bound_us": bound}
        for kind, samples in runs.items():
            found |= {f"{kind}_us": median(samples[name]), f"{kind}_samples_us": [round(us) for us in samples[name]]}
        return found

    return {"load": os.getloadavg()[0], **rows_of((name, row(name, one)) for name, one in schedules.items())}


def _sharded(fused: bool) -> Problem:
    """The step with gathers and reductions."""
    times = [PASS_TIME] * len(PLACEMENT)
    backward: dict[str, Any] = {"BW": [2 * PASS_TIME] * len(PLACEMENT)} if fused else {"B": times, "W": times}
    options = {"placement": PLACEMENT, "microbatches": 8, "comm": LINK_TIME, "layers": [1] * len(PLACEMENT)}
    return with_sharding(pipeline(times, **backward, **options), COLLECTIVE_TIME, COLLECTIVE_TIME)


class TwoMatrices(nn.Module):
    """A stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Rows → rows of the same width."""
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def sharded_steps(rank: int, given: Results) -> dict[str, list[float]]:
    """What every rank runs: each schedule in turn, round by round; µs of every step, to the end of its optimizer."""
    from torch.distributed.fsdp import fully_shard

    forms, emulate, warmup = given["forms"], given["emulate"], 2
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    width, found = 8 if emulate else 512, {name: list[float]() for name in forms}

    def build(numbers: list[int]) -> list[nn.Module]:
        return [fully_shard(TwoMatrices(width), mesh=mesh["dp"]) for _ in numbers]

    for name, form in [*forms.items()] * given["rounds"]:
        schedule = Schedule.from_json(form)
        how = {"timeout": 60, "emulate": Times.of(schedule, "schedule") if emulate else None}
        runner = Pipeline(build, schedule, loss=nn.functional.mse_loss, group=mesh.get_group("pp"), **how)
        optimizer = torch.optim.SGD(runner.parameters(), lr=1e-4)
        x = torch.randn(16 * 8, width)
        for step in range(warmup + given["steps"]):
            dist.barrier()
            began = time.monotonic()
            result = runner.step(x, x)
            optimizer.step()
            optimizer.zero_grad()
            took = result.timeline.makespan if emulate else 1e6 * (time.monotonic() - began)
            if step >= warmup:
                found[name].append(float(took))
    return found


# --- A tower's work in bubbles ---

DECODER, TOWER_RANKS, IMAGES = 16, 4, 8  # layers; one image a microbatch
TOWER_F, NOTHING = 20_000, {"held_until_B": 0, "held_until_W": 0, "output_bytes": 0}  # µs


@table()
def tower_run(steps: int = 6, seconds: float = 20.0, tower: int = 4) -> Results:
    """A frozen vision tower before a decoder, on four emulated devices. Once it is the first layers of the pipeline, in the
    best split that the search finds for the true times of passes. Once it is work beside the step: ranks that would wait run
    forwards of the next batch (Optimus, ATC'25), and send results to rank 0, which uses them in the next step. All train the
    same decoder on the same batches: `losses` has the largest difference of their losses."""
    layer = Layer("", TOWER_F, 24_000, 20_000, 44_000, parameter_bytes=256, **NOTHING)
    frozen = Layer("", TOWER_F, 0, 0, 0, parameter_bytes=256, frozen_bytes=256, **NOTHING)
    decoder = [replace(layer, name=f"decoder{i}") for i in range(DECODER)]
    front = [replace(frozen, name=f"tower{i}") for i in range(tower)]
    alone, whole = (
        Profile("given: made up", "tower", tuple(one), Link(100, 1e6), 4.0, None, {}, {})
        for one in (decoder, [*front, *decoder])
    )
    works = Work(None, IMAGES * tower * TOWER_F, IMAGES), Work(0, 100 * IMAGES, IMAGES, takes=0, comm=100)
    placed = place_work(alone.problem(TOWER_RANKS, IMAGES), *works, seconds=seconds)
    schedules = {
        "tower first, 1F1B": preset("1f1b", whole.problem(TOWER_RANKS, IMAGES, fused=True)),
        **{
            f"tower first, solved, {place}": solve_auto(whole, Step(TOWER_RANKS, IMAGES, place, "auto"), seconds=seconds)[0]
            for place in ("single", "loop")
        },
        "tower in bubbles, solved, single": placed.schedule,
    }
    given = {"forms": {name: one.to_json() for name, one in schedules.items()}, "steps": steps, "tower": tower}
    found = on_ranks(TOWER_RANKS, "benchmarks.emulation:tower_steps", given, 600)[0]

    def row(name: str, schedule: Schedule) -> Results:
        certificate, (us, losses) = schedule.certificate, found[name]
        first = found["tower first, 1F1B"]
        return {
            "predicted_us": int(schedule.timeline().makespan),
            "bound_us": None if certificate is None else certificate.bound,
            "emulated_us": median(us),
            "gain": median(first[0]) / median(us),
            "losses": max(abs(a / b - 1) for a, b in zip(losses, first[1], strict=True)),
            "layers": list(schedule.problem.layers),
            "bubble": float(1 - schedule.problem.passes.duration.sum() / (TOWER_RANKS * schedule.timeline().makespan)),
            "samples_us": [round(one) for one in us],
        }

    rows = rows_of((name, row(name, one)) for name, one in schedules.items())
    return {"load": os.getloadavg()[0], "bound_of_every_choice_us": placed.bound, **rows}


def tower_steps(rank: int, given: Results) -> dict[str, list[list[float]]]:
    """What every rank runs: each schedule in turn; µs of every step but the first, and the loss of each."""
    return {
        name: _tower_trained(Schedule.from_json(form), given["tower"], given["steps"], "bubbles" in name)
        for name, form in given["forms"].items()
    }


def _tower_trained(schedule: Schedule, tower: int, steps: int, beside: bool) -> list[list[float]]:
    torch.manual_seed(0)
    front, decoder = ([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(n)] for n in (tower, DECODER))
    frozen, now, arrived = nn.Sequential(*front).requires_grad_(False), 0, dict[int, Tensor]()
    batches = [torch.randn(IMAGES, 4, 8) for _ in range(steps + 2)]

    def work(rank: int, piece: int, pieces: int, features: Tensor | None = None) -> Tensor | None:
        """Run images of the next batch through the tower; or, on rank 0, collect the results."""
        if features is None:
            return frozen(batches[now + 1][piece])  # type: ignore[no-any-return]
        arrived[piece - IMAGES] = features
        return None

    layers, how = decoder if beside else [*front, *decoder], {"emulate": Times.of(schedule, "schedule"), "work": work}
    runner = Pipeline(layers, schedule, loss=nn.functional.mse_loss, timeout=60, **how)  # type: ignore[arg-type]
    optimizer, took, losses = torch.optim.SGD(runner.parameters(), lr=0.1), list[float](), list[float]()
    features = frozen(batches[0])
    for now in range(steps + 1):
        inputs = (features if beside else batches[now]).flatten(0, 1)
        result = runner.step(inputs, torch.zeros_like(inputs))
        optimizer.step()
        optimizer.zero_grad()
        took.append(float(result.timeline.makespan))
        losses.append(result.loss)
        if arrived:
            features = torch.stack([arrived[i] for i in range(IMAGES)])
    return [took[1:], losses]
