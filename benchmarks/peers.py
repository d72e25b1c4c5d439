"""solve against the best legal result that any peer's generator reached, on problems in the reference format.

    python -m benchmarks.peers peers.json [--seconds 10] [--only NAME] [--left-by RESULT] [-o benchmarks/results/peers.json]

With `--left-by` only what an earlier result leaves open by more than 1 %: with more seconds it shows where the value and
the bound go (every change of either is kept).

The file lists problems (`name placement ranks microbatches stage_to_rank F B W comm held_until_B held_until_W capacity`,
times in µs, some of them half ones) with `best_peer` and `simple_bound` per objective. Half µs are doubled throughout.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbsolve import Problem, __version__, pipeline, solve, verify
from zbsolve.search import compiled
from zbsolve.state import State


def problem_of(row: Mapping[str, Any], objective: str) -> tuple[Problem, int]:
    """The problem of one row, and how often its times were multiplied to be whole."""
    scale = 2 if any(t != int(t) for kind in "FBW" for t in row[kind]) else 1
    times = {kind: [int(t * scale) for t in row[kind]] for kind in "FBW"}
    problem = pipeline(
        **times,
        comm=int(row["comm"] * scale),
        placement=tuple(row["stage_to_rank"]),
        microbatches=row["microbatches"],
        held_until_B=[int(x) for x in row["held_until_B"]],
        held_until_W=[int(x) for x in row["held_until_W"]],
        capacity=[int(x) for x in row["capacity"]],
        objective=objective,
    )
    return problem, scale


def measure(row: Mapping[str, Any], objective: str, seconds: float) -> dict[str, Any]:
    """One row of the table: value over the best peer's, proven gap, seconds."""
    problem, scale = problem_of(row, objective)
    changes: list[tuple[float, float, float]] = []
    began = time.monotonic()

    def progress(state: State) -> None:
        if state.schedule is not None:
            changes.append((round(time.monotonic() - began, 1), state.value / scale, state.bound.value / scale))

    schedule = solve(problem, seconds=seconds, progress=progress)
    took = time.monotonic() - began
    assert verify(problem, schedule) == ()
    certificate = schedule.certificate
    assert certificate is not None
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
        "seconds": round(took, 2),
        "changes": changes,
    }


def main() -> None:
    """Print the table as it grows, then the summary; keep every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", default="", help="part of a name or placement")
    parser.add_argument("--left-by", type=Path, metavar="RESULT", help="only what that result leaves over 1 %%")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    compiled()
    rows, open_only = [], options.left_by is not None
    left = json.loads(options.left_by.read_text())["rows"] if open_only else []
    wanted = {(r["name"], r["placement"], r["objective"]) for r in left if r["gap"] > 0.01}
    for row in json.loads(options.problems.read_text()):
        for objective in ("makespan", "span"):
            named = options.only in f"{row['name']} {row['placement']} {objective}"
            if named and (not open_only or (row["name"], row["placement"], objective) in wanted):
                rows.append(measure(row, objective, options.seconds))
                r = rows[-1]
                ratio = "     –" if r["ratio"] is None else f"{r['ratio']:.4f}"
                print(
                    f"{r['name']:28} {r['placement']:6} {objective:8} {ratio} gap {r['gap']:7.2%} "
                    f"{r['seconds']:5.1f} s  {r['solver']}  | {r['proof'][:60]}",
                    flush=True,
                )
    print(summary(rows))
    if options.output:
        facts = {"zbsolve": __version__, "machine": platform.machine(), "python": platform.python_version()}
        head = json.dumps({"seconds": options.seconds, **facts, "summary": summary(rows)}, indent=1)
        body = ",\n".join(map(json.dumps, rows))
        options.output.write_text(f'{head[:-2]},\n "rows": [\n{body}\n]}}\n')


def summary(rows: list[dict[str, Any]]) -> str:
    """Counts against the targets."""
    ratios = [r["ratio"] for r in rows if r["ratio"] is not None]
    gaps = [r["gap"] for r in rows]
    return (
        f"{len(rows)} problems; {len(ratios)} with a peer: value ≤ peer's on {sum(r <= 1 + 1e-9 for r in ratios)}, "
        f"< 0.999 on {sum(r < 0.999 for r in ratios)}, worst {max(ratios, default=0):.4f}; "
        f"gap 0 on {sum(g <= 0 for g in gaps)}, ≤ 1 % on {sum(g <= 0.01 for g in gaps)}, worst {max(gaps, default=0):.2%}"
    )


if __name__ == "__main__":
    main()
