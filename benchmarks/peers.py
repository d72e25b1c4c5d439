"""`python -m benchmarks.peers FILE`: solve against the best legal result that any peer's generator reached.

With `--left-by` only what an earlier result leaves open by more than 1 %: with more seconds it shows where the value and
the bound go (every change of either is kept).

The file lists problems (`name placement ranks microbatches stage_to_rank F B W comm held_until_B held_until_W capacity`,
times in µs, some of them half ones) with `best_peer` and `simple_bound` per objective. Half µs are doubled throughout.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbsolve import Problem, pipeline
from zbsolve.bench import timed_solve
from zbsolve.search.solver import compiled

from .harness import Benchmark, kept

OPEN = 0.01  # a gap above this is left open


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("problems", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each solve")
    parser.add_argument("--only", default="", help="part of a name or placement")
    parser.add_argument("--left-by", type=Path, metavar="RESULT", help="only what that result leaves over 1 %%")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print the table as it grows, then the summary; keep every row."""
    compiled()
    rows, left = [], None
    if options.left_by is not None:
        left = {(r["name"], r["placement"], r["objective"]) for r in kept(options.left_by)["rows"] if r["gap"] > OPEN}
    for row in json.loads(options.problems.read_text()):
        for objective in ("makespan", "span"):
            named = options.only in f"{row['name']} {row['placement']} {objective}"
            if named and (left is None or (row["name"], row["placement"], objective) in left):
                rows.append(solved(row, objective, options.seconds))
                print(line(rows[-1]), flush=True)
    print(summary(rows))
    return {"seconds": options.seconds, "summary": summary(rows), "rows": rows}


def problem_of(row: Mapping[str, Any], objective: str) -> tuple[Problem, int]:
    """The problem of one row, and how often its times were multiplied to be whole."""
    scale = 2 if any(t != int(t) for kind in "FBW" for t in row[kind]) else 1
    times = {kind: [int(t * scale) for t in row[kind]] for kind in "FBW"}
    sizes = {what: [int(x) for x in row[what]] for what in ("held_until_B", "held_until_W", "capacity")}
    shape = {"placement": tuple(row["stage_to_rank"]), "microbatches": row["microbatches"], "objective": objective}
    return pipeline(**times, comm=int(row["comm"] * scale), **shape, **sizes), scale


def solved(row: Mapping[str, Any], objective: str, seconds: float) -> dict[str, Any]:
    """One row of the table: value over the best peer's, proven gap, seconds."""
    problem, scale = problem_of(row, objective)
    found = timed_solve(problem, seconds=seconds)
    certificate = found.certificate
    peer = row.get("best_peer", {}).get(objective)
    return {
        "name": row["name"],
        "placement": row["placement"],
        "objective": objective,
        "value": certificate.value / scale,
        "bound": certificate.bound / scale,
        "gap": certificate.gap,
        "ratio": None if peer is None else certificate.value / scale / peer["value"],
        "bound_over_simple": certificate.bound / scale / row["simple_bound"][objective],
        "solver": certificate.solver,
        "proof": certificate.proof,
        "seconds": round(found.seconds, 2),
        "changes": [(round(one.seconds, 1), one.value / scale, one.bound / scale) for one in found.improvements],
    }


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    ratio = "     –" if row["ratio"] is None else f"{row['ratio']:.4f}"
    return (
        f"{row['name']:28} {row['placement']:6} {row['objective']:8} {ratio} gap {row['gap']:7.2%} "
        f"{row['seconds']:5.1f} s  {row['solver']}  | {row['proof'][:60]}"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """Counts against the targets."""
    ratios = [r["ratio"] for r in rows if r["ratio"] is not None]
    gaps = [r["gap"] for r in rows]
    return (
        f"{len(rows)} problems; {len(ratios)} with a peer: value ≤ peer's on {sum(r <= 1 + 1e-9 for r in ratios)}, "
        f"< 0.999 on {sum(r < 0.999 for r in ratios)}, worst {max(ratios, default=0):.4f}; "
        f"gap 0 on {sum(g <= 0 for g in gaps)}, ≤ 1 % on {sum(g <= OPEN for g in gaps)}, worst {max(gaps, default=0):.2%}"
    )


BENCHMARK = Benchmark("peers", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
