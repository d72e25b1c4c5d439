"""The planner: its cost model compared with measured steps, how far its plans are from the bound, and layouts that
offload."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator

import numpy as np

from zbsolve import plan as planned
from zbsolve.planner import Cluster, fit, predict, shape_by_name
from zbsolve.planner.bounds.space_bounds import cheap_bounds
from zbsolve.planner.candidate import Unsolved, unsolved
from zbsolve.planner.cluster import cluster_of
from zbsolve.planner.fitting import errors
from zbsolve.planner.space import layouts
from zbsolve.search.solver import compiled
from zbsolve.search.state import ALONE
from zbsolve.search.task import solve_task

from .harness import RESULTS, ROOT, Results, kept, listed, mean_of, rows_of, table

WORST_MEAN, WORST_RATIO = 0.07, 0.02  # of Table 5: mean error of its times, and of full over selective recompute


def rows_in(name: str) -> list[dict[str, str]]:
    """The measured steps of a file in `benchmarks/measured_steps/`, without the lines that name its source."""
    lines = (ROOT / "benchmarks" / "measured_steps" / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def korthikanti() -> list[dict[str, str]]:
    """Table 5 of 2205.05198, with the column step_ms."""
    return [{**row, "step_ms": str(1e3 * float(row["step_s"]))} for row in rows_in("korthikanti.csv")]


@table()
def plan() -> Results:
    """The error of the cost model on measured steps. Its constants are fitted only to the 41 steps of
    `measured_steps/vtrain-fit.csv`. The eight steps of Korthikanti et al. (2205.05198, Table 5) are from another cluster,
    framework and schedule, and not part of the fit."""
    rows = rows_in("vtrain-fit.csv")
    cluster = fit(rows)

    def far_off(some: list[dict[str, str]]) -> Results:
        found = errors(predict(some, cluster), some)
        return {"mean error": round(float(np.mean(np.abs(found))), 4), "errors": [round(one, 4) for one in found]}

    found = {"fitted": far_off(rows), "table 5": far_off(korthikanti())}
    found = rows_of(iter(found.items()))
    ratios = recompute_ratios(cluster)
    assert found["table 5"]["mean error"] <= WORST_MEAN
    assert max(abs(said / true - 1) for true, said in ratios.values()) <= WORST_RATIO
    return {"cluster": cluster.to_json(), **found, "full over selective": ratios}


def recompute_ratios(cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Model of Table 5 → the step's time with full recompute over that with selective recompute, measured and predicted."""
    rows = korthikanti()
    said, true = predict(rows, cluster), [float(row["step_ms"]) for row in rows]
    pairs = [(full, full + 1) for full, row in enumerate(rows) if row["recompute"] == "full"]
    assert all(rows[a]["model"] == rows[b]["model"] and rows[b]["recompute"] == "selective" for a, b in pairs)
    return {rows[a]["model"]: (round(true[a] / true[b], 4), round(said[a] / said[b], 4)) for a, b in pairs}


SPACES = (("gpt-18.4b", 64, 512), ("gpt-39.1b", 64, 512), ("gpt-175b", 512, 1536), ("gpt-1t", 4096, 4096))  # devices, batch


@table()
def plan_spaces(devices: int = 64, effort: float = 25.0) -> Results:
    """How far a plan can be from the best of its whole space (for spaces of at most so many devices). The cluster is the
    A100s whose constants `plan` fitted. A row has the number of layouts, the number that no bound excludes, step, bound and
    gap, and the seconds of the plan with all proofs, wall time and CPU time of one process."""
    compiled()
    cluster = Cluster.from_json(kept(RESULTS / "plan.json")["cluster"])
    spaces = [space for space in SPACES if space[1] <= devices]
    return {
        "effort": effort,
        "rows": rows_of((f"{space[0]} on {space[1]}", _space(*space, cluster, effort)) for space in spaces),
    }


def _space(name: str, devices: int, batch: int, cluster: Cluster, effort: float) -> Results:
    began, cpu = time.monotonic(), time.process_time()
    found = planned(shape_by_name(name), devices, batch, cluster, effort=effort)
    return {
        "layouts": len(found.bounds.rule),
        "solved": len(found.candidates),
        "open": found.open,
        "best": found.best.layout.title,
        "step": round(found.best.value),
        "bound": round(found.bound),
        "gap": round(found.gap, 4),
        "mfu": round(found.mfu(found.best), 4),
        "seconds": round(time.monotonic() - began, 1),
        "cpu seconds": round(time.process_time() - cpu, 1),
    }


# --- Layouts that offload ---

TIGHT = (("llama3-70b", "h100", 80), ("gpt-39.1b", "a100", 40), ("gpt-18.4b", "a100", 24))  # model, cluster, GiB
NEAR, MAX_PASSES = 1.6, 25_000  # times the least bound of a space; of a step
POOR = 1.15  # times its bound


@table()
def offload_layouts(count: int = 8, effort: float = 0.1, seed: int = 7) -> Results:
    """Layouts of a plan that offload, several stages a rank: schedules against bounds. A seed draws some of those of Llama 3
    70B on 64 H100s of 80 GiB, and of GPT 39.1B and 18.4B on 64 A100s of 40 and 24 GiB: there one microbatch often takes more
    than a device has. Layouts count only if their bound is at most 1.6 times the least of the space. Effort is counted, so
    all numbers but CPU seconds are deterministic."""
    compiled()
    rows = listed(_layout(one, effort) for one in drawn(count, seed))
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    return {
        "layouts": len(rows),
        "without_schedule": len(rows) - len(ratios),
        "mean": round(mean_of(ratios), 4),
        "poor": sum(one > POOR for one in ratios),
        "worst": max(ratios),
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows), 1),
        "rows": rows,
    }


def drawn(count: int, seed: int) -> Iterator[Unsolved]:
    """So many layouts of each space, the same for the same arguments, with split backwards."""
    random = np.random.default_rng(seed)
    for name, preset, memory in TIGHT:
        model, cluster = shape_by_name(name), cluster_of(preset)
        space = layouts(model, 64, 512, cluster)
        step = cheap_bounds(model, space, cluster, memory << 30).step
        right, left = (space.offload > 0) & (space.chunks > 1) & (step < NEAR * step.min()), count
        for row in random.permutation(np.flatnonzero(right)).tolist():
            for one in unsolved(model, space.row(row), cluster, memory << 30):
                if left and not one.step.fused and len(one.problem.passes) <= MAX_PASSES and len(one.problem.side_stream):
                    left -= 1
                    yield one
            if not left:
                break


def _layout(one: Unsolved, effort: float) -> Results:
    began = time.process_time()
    found = solve_task(one.task({"effort": effort, "seed": 0}), ALONE, {}).schedule
    certificate = None if found is None else found.certificate
    row: Results = {what: getattr(certificate, what, None) for what in ("value", "bound", "solver")}
    row["ratio"] = None if certificate is None else round(certificate.value / certificate.bound, 3)
    seconds = round(time.process_time() - began, 2)
    return {"layout": one.profile.model, "passes": len(one.problem.passes), **row, "cpu_seconds": seconds}
