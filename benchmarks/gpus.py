"""`make gpus`: the main job on this machine's GPUs, one rank each: profile, solve, run 1F1B and the order that is found.

It takes some ten minutes on eight GPUs. The last line says all that matters: send it back with the file. Each step is a
command of zbsolve, printed before it runs, so that it can be run by hand too. `--device cpu --tiny` shows that it works.
Not run on several GPUs yet.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from zbsolve.schedule import Schedule
from zbsolve.trace import Trace
from zbsolve.util.machine import child_environment

from .harness import RESULTS, Benchmark

MODEL, TINY = "llama3-8b@batch=1,length=4096,dtype=bfloat16", "mlp-tiny"
STEPS, WARMUP = 10, 3
LIMIT = 900.0  # seconds of a command


class Job(NamedTuple):
    """What is measured. capture: passes and steps as CUDA graphs."""

    model: str
    ranks: int
    microbatches: int
    device: str
    capture: bool
    seconds: float

    def commands(self, folder: Path) -> dict[str, list[str]]:
        """Each step's command, by name."""
        profile, on = str(folder / "profile.json"), ["--device", self.device, *["--capture"] * self.capture]
        step = ["--ranks", str(self.ranks), "--microbatches", str(self.microbatches)]
        found = {"profile": ["profile", self.model, *on, "--seconds", str(self.seconds), "-o", profile]}
        for name, how in (("1f1b", ["--method", "1f1b", "--fused"]), ("solved", ["--seconds", str(self.seconds)])):
            found[f"solve {name}"] = ["solve", profile, *step, *how, "-o", str(folder / f"{name}.json")]
        for name in ("1f1b", "solved"):
            job = [str(folder / f"{name}.json"), "--model", self.model, "--local", *on, "--steps", str(STEPS)]
            found[f"run {name}"] = ["run", *job, "--warmup", str(WARMUP), "-o", str(folder / f"{name}.trace.json")]
        return found


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model: shows that it works")
    parser.add_argument("--model", default=MODEL, help="as zbsolve profile takes it")
    parser.add_argument("--ranks", type=int, help="one a GPU of this machine, if not said")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the commands; predicted and measured steps. Raises SystemExit where there are no GPUs, and where one fails."""
    cuda = options.device == "cuda"
    gpus = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
    ranks = options.ranks or (gpus if cuda else 2)
    if cuda and not 2 <= ranks <= gpus:
        print(f"make gpus: {gpus} GPUs here, and ranks are {ranks}: it needs two GPUs or more, one a rank", file=sys.stderr)
        raise SystemExit(2)
    if not cuda and options.output.parent.resolve() == RESULTS.resolve():
        print("make gpus: with --device cpu, name another place for the file: --output", file=sys.stderr)
        raise SystemExit(2)
    model = TINY if options.tiny else options.model
    job = Job(model, ranks, 4 * ranks, options.device, cuda and not options.eager, 1.0 if options.tiny else 30.0)
    folder = options.output.parent / "gpus"
    folder.mkdir(exist_ok=True)
    for name, command in job.commands(folder).items():
        print(f"{name}: zbsolve {shlex.join(command)}", flush=True)
        code = subprocess.run(
            [sys.executable, "-m", "zbsolve.cli", *command], env=child_environment(), timeout=LIMIT, check=False
        )
        if code.returncode:
            raise SystemExit(f"make gpus: {name} ended with {code.returncode}")
    rows = {name: _row(folder / f"{name}.json", folder / f"{name}.trace.json") for name in ("1f1b", "solved")}
    ratios = {way: rows["1f1b"][way] / rows["solved"][way] for way in ("predicted_ms", "measured_ms")}
    found = {
        "job": job._asdict(),
        "rows": rows,
        "speed_up": dict(zip(("predicted", "measured"), ratios.values(), strict=True)),
    }
    print(line_of(found))
    return found


def _row(schedule: Path, trace: Path) -> dict[str, Any]:
    planned, ran = Schedule.load(schedule), Trace.load(trace)
    facts = {
        name: ran.facts.get(name) for name in ("on", "captured", "communicators", "launching_us", "device_peaks", "torch")
    }
    steps = [step.makespan / 1e3 for step in ran.steps]
    return {"predicted_ms": planned.timeline().makespan / 1e3, "measured_ms": median(steps), "steps_ms": steps, **facts}


def line_of(found: dict[str, Any]) -> str:
    """All that matters, in a line."""
    job, rows, gain = found["job"], found["rows"], found["speed_up"]
    each = [f"{name} {row['predicted_ms']:.1f} predicted {row['measured_ms']:.1f} ms measured" for name, row in rows.items()]
    steps = ", ".join(each)
    where = f"{job['ranks']} × {rows['solved']['on']}, torch {rows['solved']['torch']}"
    on = f"{where}, {job['model']}, {job['microbatches']} microbatches"
    return f"{on}: {steps}; speed-up predicted {gain['predicted']:.3f}, measured {gain['measured']:.3f}"


BENCHMARK = Benchmark("gpus", __doc__, measure, arguments)

if __name__ == "__main__":
    print(json.dumps(BENCHMARK.main()["speed_up"]))
