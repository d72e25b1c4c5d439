"""`python -m benchmarks.torch_round`: from a run in torch's own runtime to a better one, and its step beside the prediction.

Today's run is 1F1B with a split backward, one stage a rank, in torch.distributed.pipelining with our split of the backward.
It is traced by torch's profiler, and then by the command line: a profile of the trace, a schedule of the profile, torch's
CSV of the schedule. That order runs in the same runtime again, and by `zbsolve run --emulate`. Steps are wall time, ms,
without a profiler.

Each pass sleeps for its stage's time behind a small model's work, as a host does that waits for its device. So cores that
others use count little, and ranks may be more than cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from zbsolve import Schedule, Trace, pipeline
from zbsolve.cli import main
from zbsolve.exec import split_stage
from zbsolve.exec.base.torch_private import load_order, pipeline_runtime
from zbsolve.interchange import export
from zbsolve.systems import preset
from zbsolve.util.text import aligned

from .children import found_by
from .harness import Benchmark

F, B, W = [20, 24, 22, 18], [24, 26, 22, 28], [18, 20, 20, 24]  # ms a stage
PASSES = {"forward_one_chunk": F, "backward_one_chunk": B, "backward_weight_one_chunk": W}
RANKS, MICROBATCHES, WIDTH, ROWS, WARM = len(F), 8, 32, 16, 2


def run(rank: int, csv: str, steps: int, traces: str) -> list[float]:
    """Wall times of steps on this rank, ms. traces: a folder for torch profiler's traces of some more ("": none)."""
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

    for _ in range(WARM):
        step()
    found = [step() for _ in range(steps)]
    if traces:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
            for _ in range(steps):
                step()
        seen.export_chrome_trace(str(Path(traces) / f"rank{rank}_trace.json"))
    return found


def _sleeping(action: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Behind its work: what comes before an action's first operation is waiting, in a trace."""

    def slept(*args: Any, **kwargs: Any) -> Any:
        result = action(*args, **kwargs)
        time.sleep(seconds)
        return result

    return slept


def said_by(*words: str) -> str:
    """What a command writes to standard output. Raises SystemExit where it fails."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main(list(words))
    if code:
        raise SystemExit(f"zbsolve {words[0]} ended with {code}")
    return text.getvalue()


def model() -> tuple[list[nn.Module], Tensor]:
    """The same for `zbsolve run`."""
    return [nn.Linear(WIDTH, WIDTH) for _ in range(RANKS)], torch.ones(ROWS, WIDTH)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The table, and every sample: of a step, its longest rank."""
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as name:
        rows = _measure(Path(name), options.steps, options.seconds)
    cells = [("run", "predicted ms", "measured ms", "difference")]
    for row in rows:
        off = f"{100 * (row['measured_ms'] / row['predicted_ms'] - 1):+.1f}%"
        cells.append((row["run"], f"{row['predicted_ms']:.1f}", f"{row['measured_ms']:.1f}", off))
    print("\n".join(aligned(cells, left=(0,))))
    return {"ranks": RANKS, "microbatches": MICROBATCHES, "pass_ms": {"F": F, "B": B, "W": W}, "rows": rows}


def _measure(folder: Path, steps: int, seconds: float) -> list[dict[str, Any]]:
    traces, profile, plan, order, ran = (
        folder / n for n in ("traces", "profile.json", "plan.json", "order.csv", "run.json")
    )
    traces.mkdir()
    given = {kind: [1000 * t for t in times] for kind, times in (("B", B), ("W", W))}
    nominal = pipeline([1000 * t for t in F], **given, microbatches=MICROBATCHES)
    order.write_text(export(preset("1f1b-split", nominal), "torch-csv").text, encoding="utf-8")
    today = found_by(run, RANKS, 300, csv=str(order), steps=steps, traces=str(traces))
    print(said_by("profile", "--from-trace", str(traces), "--seconds", "0", "-o", str(profile)), end="")
    size = ["--ranks", str(RANKS), "--microbatches", str(MICROBATCHES)]
    print(said_by("solve", str(profile), *size, "--seconds", str(seconds), "-o", str(plan)), end="")
    said_by("export", str(plan), "--to", "torch-csv", "-o", str(order))
    best = found_by(run, RANKS, 300, csv=str(order), steps=steps, traces="")
    how = ["--model", "benchmarks.torch_round:model", "--emulate", "schedule", "--local", "--steps", str(steps)]
    said_by("run", str(plan), *how, "-o", str(ran))
    schedule = Schedule.load(str(plan))
    emulated = [one.value / 1000 for one in Trace.load(str(ran)).steps]
    before = preset("1f1b-split", schedule.problem)
    return [
        _row("today, torch's runtime", before, [max(row) for row in zip(*today, strict=True)]),
        _row("best, torch's runtime", schedule, [max(row) for row in zip(*best, strict=True)]),
        _row("best, zbsolve run --emulate", schedule, emulated),
    ]


def _row(name: str, schedule: Schedule, samples: list[float]) -> dict[str, Any]:
    predicted = schedule.timeline().makespan / 1000
    return {"run": name, "predicted_ms": predicted, "measured_ms": median(samples), "samples_ms": samples}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--steps", type=int, default=10, help="timed, of each run (10)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the search (10)")


BENCHMARK = Benchmark("torch_round", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
