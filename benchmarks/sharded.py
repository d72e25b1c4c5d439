"""Vocabularies and parameters that are sharded over ranks: what they gain and how close the search comes, on the stored
estimated profiles; nothing was measured on the devices. Effort is counted, so all numbers but seconds are deterministic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zbsolve import Infeasible, Problem, Profile, Schedule, Step, preset, solve, verify
from zbsolve.features.vocabulary import VOCABULARIES
from zbsolve.partition.layer import Link
from zbsolve.profile.named_steps import usual_schedule
from zbsolve.schedule import relative_gap
from zbsolve.search.solver import compiled
from zbsolve.systems.torch_gathers import torch_window
from zbsolve.util.errors import NotFound

from . import profiles
from .harness import Results, rows_of, solved, table

MODELS = {  # name → as one writes it
    "gemma2-9b": "Gemma 2 9B",
    "gemma2-27b": "Gemma 2 27B",
    "qwen2-7b": "Qwen 2 7B",
    "qwen2-72b": "Qwen 2 72B",
    "deepseek-v3": "DeepSeek v3",
    "llama3-8b": "Llama 3 8B",
    "llama3-70b": "Llama 3 70B",
    "llama3-405b": "Llama 3 405B",
    "mixtral-8x7b": "Mixtral 8x7B",
    "mixtral-8x22b": "Mixtral 8x22B",
}


def unlimited(model: str, device: str) -> Profile:
    """A model's estimated profile, without a limit of memory."""
    return replace(profiles.kept(f"estimated-{model}-{device}"), capacity=None)


@table()
def vocabulary(
    models: tuple[str, ...] = tuple(MODELS),
    device: str = "h100",
    ranks: tuple[int, ...] = (8, 16),
    rounds: int = 4,
    effort: float = 3.0,
) -> Results:
    """Steps of models with large vocabularies, with the output layer on the last stage, with layers redistributed, and with
    vocabulary parallelism (arXiv 2411.05288), each with its proven bound. Each rank has as much memory as 1F1B with layers
    redistributed needs on its fullest rank: parameters, optimizer states and activations. rounds: microbatches, as a
    multiple of the ranks. saves: the share that the best sharded schedule saves against the best unsharded one found;
    saves_proven: against any schedule with these layers a stage."""
    compiled()
    pairs = [(name, count) for name in models for count in ranks]
    rows = rows_of(
        (f"{name} p{count}", _choices(unlimited(name, device), Step(count, rounds * count), effort)) for name, count in pairs
    )
    return {"source": f"estimated for {device}, not measured", "steps": rows}


def _choices(profile: Profile, step: Step, effort: float) -> Results:
    """The results of each choice: value and bound, µs, the gap, bytes of the fullest rank, layers of each stage."""
    usual = usual_schedule(profile, step, ())
    assert usual is not None
    today = replace(step, fused=True, partition=usual.problem.layers)
    step = replace(step, memory=max(today.needs(profile, usual)))
    row: Results = {"ranks": step.ranks, "microbatches": step.microbatches, "layers": len(profile.layers)}
    row |= {"memory": step.memory, "1f1b": int(usual.timeline().value)}
    for choice in VOCABULARIES:
        chosen = replace(step, vocabulary=choice)
        schedule = solve(chosen.problem(profile), effort=effort, prefer=None)
        assert not verify(schedule.problem, schedule)
        value, bound = schedule.certificate.value, schedule.certificate.bound
        row[choice] = {"value": value, "bound": bound, "gap": round(relative_gap(value, bound), 5)}
        row[choice] |= {"fullest_rank": max(chosen.needs(profile, schedule)), "layers": list(schedule.problem.layers)}
    shortest = min(row[choice]["value"] for choice in VOCABULARIES[2:])
    least = {what: min(row[choice][what] for choice in VOCABULARIES[:2]) for what in ("value", "bound")}
    best = min(VOCABULARIES, key=lambda choice: row[choice]["value"])
    saves = {name: round(1 - shortest / least[what], 4) for name, what in (("saves", "value"), ("saves_proven", "bound"))}
    return {**row, "best": best, **saves}


def vocabulary_table(steps: Results) -> str:
    """The rows as docs/vocabulary.md shows them, ms."""
    lines = []
    for name, row in steps.items():
        both = [f"{row[one]['value'] / 1e3:,.0f} ({row[one]['bound'] / 1e3:,.0f})" for one in VOCABULARIES]
        gain = f"{abs(row['saves']):.1%} {'shorter' if row['saves'] > 0 else 'longer'}"
        cells = [MODELS[name.partition(" ")[0]], str(row["ranks"]), f"{row['1f1b'] / 1e3:,.0f}", *both, gain]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@table()
def vocabulary_search(
    models: tuple[str, ...] = ("gemma2-9b", "llama3-8b", "qwen2-7b"),
    device: str = "h100",
    ranks: tuple[int, ...] = (4, 8, 16),
    rounds: tuple[int, ...] = (2, 3),
    effort: float = 1.0,
) -> Results:
    """Results of the search with little effort on steps with a sharded vocabulary. Each rank has unlimited memory, or as
    much as the order 1f1b-vocab (arXiv 2411.05288) needs on its fullest rank, parameters and optimizer states included."""
    compiled()

    def rows() -> Iterator[tuple[str, Results]]:
        for name, p, n in ((name, p, n) for name in models for p in ranks for n in rounds):
            profile, plain = unlimited(name, device), Step(p, n * p, vocabulary="sharded")
            fused = replace(plain, fused=True)
            paper = max(fused.needs(profile, preset("1f1b-vocab", fused.problem(profile))))
            for placement in ("single", "vee", "loop"):
                for memory, room in (("ample", None), ("1f1b-vocab's", paper)):
                    step = replace(plain, placement=placement, memory=room)
                    if not step.too_few_layers(profile):
                        row = solved(step.problem(profile), effort=effort)
                        kept = {what: row[what] for what in ("value", "bound", "gap", "solver", "seconds")}
                        yield f"{name} p{p} m{n * p} {placement} {memory}", kept | {"gap": round(row["gap"], 4)}

    found = rows_of(rows())
    gaps = sorted(row["gap"] for row in found.values())
    summary = {
        "steps": len(gaps),
        "mean": round(sum(gaps) / len(gaps), 4),
        "median": gaps[len(gaps) // 2],
        "worst": gaps[-1],
    }
    summary |= {f"beyond {limit:.0%}": sum(gap > limit for gap in gaps) for limit in (0.01, 0.03, 0.1)}
    seconds = round(sum(row["seconds"] for row in found.values()), 1)
    return {"source": f"estimated for {device}, not measured", **summary, "seconds": seconds, "rows": found}


# --- Parameters ---

LINK, SHARDS = Link(20.0, 40_000.0), 8  # 20 µs and 40 GB/s a rank: assumed, not measured
CASES = (
    ("llama3-8b", 4, "loop"),
    ("llama3-8b", 4, "loop4"),
    ("llama3-8b", 8, "loop"),
    ("llama3-8b", 8, "loop4"),
    ("llama3-70b", 8, "loop4"),
)
SHARES = (1.0, 0.85, 0.7)  # of the peak of torch's rule
GATHERS = (1, 2, 4)


@table()
def sharded(effort: float = 0.6, device: str = "h100", first: int = len(CASES)) -> Results:
    """Parameters over 8 ranks of a data-parallel group: torch's window of three stages against the search, on simulated
    times.

    Torch's rule runs interleaved 1F1B (fused backward) and gathers the next three stages that a rank computes; it has no
    memory limit, so its peak is the memory that it needs. The search has the same passes, fused too, in a share of that
    peak: with torch's own gathers as passes that may move (beginning from torch's schedule if that fits), and with
    parameters gathered 1, 2 or 4 times a step; the best of all counts. Bytes are activations, gathered parameters and
    gradients of the fullest rank. first: so many cases."""
    compiled()

    def rows() -> Iterator[tuple[str, Results]]:
        for model, ranks, place in CASES[:first]:
            profile = replace(unlimited(model, device), shard_link=LINK)
            step = Step(ranks, 2 * ranks, place, fused=True, shards=SHARDS)
            steps = {str(g): replace(step, gathers=g).problem(profile) for g in GATHERS}
            theirs = torch_window(preset("interleaved", steps["1"]))
            assert not verify(theirs.problem, theirs)
            for share in SHARES:
                row = _beside_torch({**steps, "torch's": theirs.problem}, theirs, share, effort)
                yield f"{model} p{ranks} m{2 * ranks} {place} {share:g}", row

    return {"link": [LINK.latency, LINK.bytes_per_us], "shards": SHARDS, "rows": rows_of(rows())}


def _beside_torch(steps: dict[str, Problem], theirs: Schedule, share: float, effort: float) -> Results:
    value, peak = int(theirs.timeline().value), max(theirs.timeline().peak_bytes)
    room, found = int(share * peak), dict[str, Schedule]()
    for name, problem in steps.items():
        limited = replace(problem, capacity=(room,) * problem.ranks)
        begin = {"hint": theirs} if name == "torch's" and share >= 1 else {}
        try:
            found[name] = solve(limited, effort=effort, prefer=None, **begin)
        except (Infeasible, NotFound):
            continue
        assert not verify(limited, found[name])
    gathers = len(theirs.problem.rows("AG"))
    row: Results = {"torch_step": value, "torch_peak": peak, "torch_gathers": gathers, "room": room}
    if not found:
        return {**row, "step": None}
    best = min(found, key=lambda name: float(found[name].timeline().value))
    ours = found[best].timeline()
    row |= {"step": int(ours.value), "bound": found[best].certificate.bound, "peak": max(ours.peak_bytes)}
    return row | {"gathers": best, "step_against_torch": round(float(ours.value) / value - 1, 4)}
