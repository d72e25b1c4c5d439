"""The main job by commands, as a person would run them: profile → solve (beside 1F1B) → run both → compare, on this
machine's CPU (`make demo`) and on its GPUs (`make gpus`)."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from profiler.measurement import DISTURBED
from zbsolve import Profile, Schedule, Trace
from zbsolve.show.comparison import Comparison, compare
from zbsolve.util.machine import child_environment, cores
from zbsolve.util.text import aligned

from .harness import Results, table

MODEL = "gpt-tiny"
FAR_OFF = 0.2  # measured beside predicted: from here on the prediction is of another machine than the one that ran


def command(*words: str, limit: float = 600.0) -> None:
    """Run one zbsolve command, and show it. Raises SystemExit if it fails."""
    print(f"\n$ zbsolve {shlex.join(words)}", flush=True)
    whole = [sys.executable, "-m", "zbsolve", *words]
    try:
        code = subprocess.run(whole, env=child_environment(), timeout=limit, check=False).returncode
    except subprocess.TimeoutExpired:
        raise SystemExit(f"zbsolve {words[0]} is not done after {limit:g} s") from None
    if code:
        raise SystemExit(f"zbsolve {words[0]} ended with exit code {code}")


# --- On this machine's CPU ---


@table(folder=Path("demo"))
def demo(output: Path) -> Results:
    """The whole idea on one real model, in a few minutes: files, pages and numbers under demo/."""
    began, out = time.monotonic(), output.parent
    ranks = min(4, max(2, cores()))
    profile = str(out / "profile.json")
    size = ["--ranks", str(ranks), "--microbatches", str(2 * ranks)]
    command("profile", MODEL, "--beside", str(ranks - 1), "-o", profile)
    runs: dict[str, tuple[str, str]] = {}
    for name, options in (("1f1b", ["--method", "1f1b"]), ("solved", ["--seconds", "20"])):
        schedule, trace = runs[name] = str(out / f"{name}.json"), str(out / f"{name}-trace.json")
        command("solve", profile, *size, *options, "-o", schedule)
        command("check", schedule)
        command("run", schedule, "--model", MODEL, "--local", "--steps", "12", "--check", "-o", trace)
        command("show", schedule, "--trace", trace, "-o", str(out / f"{name}.html"))
    command("show", runs["solved"][0])
    command("compare", *runs["solved"], "--baseline", *runs["1f1b"])
    solved, baseline = ((Schedule.load(runs[name][0]), Trace.load(runs[name][1])) for name in ("solved", "1f1b"))
    print(demo_table(solved, baseline), flush=True)
    print(f"\nPages: {out}/1f1b.html {out}/solved.html    (demo took {time.monotonic() - began:.0f} s)")
    both = {"1F1B": compare(*baseline), "solved": compare(*solved)}
    caution = cautions(Profile.load(profile), both)
    print("".join(f"{line}\n" for line in caution), end="")
    rows = {name: {"predicted": one.predicted, "measured": one.measured} for name, one in both.items()}
    return {"rows": rows, "cautions": caution}


def cautions(profile: Profile, runs: dict[str, Comparison]) -> list[str]:
    """What makes the predicted speed-up meaningless, in lines; none if the profile had little noise and runs agree with
    it."""
    found = [f"WARNING: the profile was {text}" for text in profile.facts.get("warnings", []) if text.startswith(DISTURBED)]
    for name, one in runs.items():
        off = one.difference / max(1, one.predicted)
        if abs(off) > FAR_OFF:
            found.append(f"WARNING: {name} took {off:+.0%} against predicted: passes took other times than in the profile")
    if found:
        found.append(
            "So the predicted speed-up means nothing here: run the demo again while nothing else runs on this machine."
        )
    return found


def demo_table(solved: tuple[Schedule, Trace], baseline: tuple[Schedule, Trace]) -> str:
    """Bubble, step time predicted and measured, peak memory, gradient check, certificate; 1F1B beside solved."""
    rows = [("", "bubble", "predicted", "measured", "peak MB", "gradients", "certificate")]
    for name, (schedule, trace) in (("1F1B", baseline), ("solved", solved)):
        result = compare(schedule, trace)
        certificate = schedule.certificate
        assert certificate is not None
        times = (f"{us / 1000:.1f} ms" for us in (result.predicted, result.measured))
        peak = max(max(peaks) for peaks in trace.peaks) / 1e6
        verdict = f"{certificate.status}, gap {certificate.gap:.2%}"
        numbers = (f"{schedule.timeline().bubble_rate:.1%}", *times, f"{peak:.1f}", f"{trace.facts['check']['worst']:.1e}")
        rows.append((name, *numbers, verdict))
    speedup = compare(*solved, baseline=baseline).speedup
    assert speedup is not None
    said = f"speed-up  predicted {speedup.predicted:.3f}×, measured {speedup.measured:.3f}×"
    return "\n".join(["", *aligned(rows, left=(0, -1)), said])


# --- On its GPUs ---

LARGE, TINY = "llama3-8b@batch=1,length=4096,dtype=bfloat16", "mlp-tiny"
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


def line_of(found: Results) -> str:
    """The main numbers in one line."""
    job, rows, gain = found["job"], found["rows"], found["speed_up"]
    each = [f"{name} {row['predicted_ms']:.1f} predicted {row['measured_ms']:.1f} ms measured" for name, row in rows.items()]
    steps = ", ".join(each)
    where = f"{job['ranks']} × {rows['solved']['on']}, torch {rows['solved']['torch']}"
    on = f"{where}, {job['model']}, {job['microbatches']} microbatches"
    return f"{on}: {steps}; speed-up predicted {gain['predicted']:.3f}, measured {gain['measured']:.3f}"


@table(ending=lambda found: print(line_of(found)))
def gpus(
    output: Path,
    device: Literal["cuda", "cpu"] = "cuda",
    tiny: bool = False,
    model: str = LARGE,
    ranks: int | None = None,
    eager: bool = False,
) -> Results:
    """The main job on this machine's GPUs, one rank each: profile, solve, run 1F1B and the order that is found.

    It takes some ten minutes on eight GPUs. Send back the last line, with the main numbers, and the file. Each step is a
    command of zbsolve, printed before it runs. Not run on several GPUs yet. tiny: a small model: shows that it works, with
    --device cpu. model: as zbsolve profile takes it. ranks: by default one for each GPU of this machine. eager: without CUDA
    graphs. Raises SystemExit if there is no GPU or a command fails."""
    import torch

    cuda = device == "cuda"
    there = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
    ranks = ranks or (there if cuda else 2)
    if cuda and not 2 <= ranks <= there:
        print(f"make gpus: {there} GPUs here, and ranks are {ranks}: it needs two GPUs or more, one a rank", file=sys.stderr)
        raise SystemExit(2)
    model = TINY if tiny else model
    job = Job(model, ranks, 4 * ranks, device, cuda and not eager, 1.0 if tiny else 30.0)
    folder = output.parent / "gpus"
    folder.mkdir(exist_ok=True)
    for words in job.commands(folder).values():
        command(*words, limit=LIMIT)
    rows = {name: _row(folder / f"{name}.json", folder / f"{name}.trace.json") for name in ("1f1b", "solved")}
    speed_up = {way: rows["1f1b"][f"{way}_ms"] / rows["solved"][f"{way}_ms"] for way in ("predicted", "measured")}
    return {"job": job._asdict(), "rows": rows, "speed_up": speed_up}


def _row(schedule: Path, trace: Path) -> Results:
    planned, ran = Schedule.load(schedule), Trace.load(trace)
    names = ("on", "captured", "communicators", "launching_us", "device_peaks", "torch")
    steps = [step.makespan / 1e3 for step in ran.steps]
    row = {"predicted_ms": planned.timeline().makespan / 1e3, "measured_ms": median(steps), "steps_ms": steps}
    return row | {name: ran.facts.get(name) for name in names}
