"""`make demo`: profile → solve (beside 1F1B) → run both → compare → pages, on this machine's CPU. Output under demo/."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from profiler.warn import DISTURBED
from zbsolve import Profile, Schedule, Trace
from zbsolve.show.comparison import Comparison, compare
from zbsolve.util.machine import cores
from zbsolve.util.text import aligned

MODEL = "gpt-tiny"
OUT = Path("demo")
STEPS = "12"
FAR_OFF = 0.2  # measured beside predicted: from here on the prediction is of another machine than the one that ran


def command(*arguments: str) -> None:
    """Run one zbsolve command as a person would, and show it; stop the demo where it fails."""
    print(f"\n$ zbsolve {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "zbsolve.cli", *arguments], timeout=600)
    if done.returncode:
        sys.exit(f"demo: zbsolve {arguments[0]} ended with exit code {done.returncode}")


def main() -> None:
    """The whole idea on one real model, in a few minutes."""
    began = time.monotonic()
    OUT.mkdir(exist_ok=True)
    ranks = min(4, max(2, cores()))
    profile = str(OUT / "profile.json")
    size = ["--ranks", str(ranks), "--microbatches", str(2 * ranks)]
    command("profile", MODEL, "--busy-processes", str(ranks - 1), "-o", profile)
    for name, options in (("1f1b", ["--method", "1f1b"]), ("solved", ["--seconds", "20"])):
        schedule, trace = str(OUT / f"{name}.json"), str(OUT / f"{name}-trace.json")
        command("solve", profile, *size, *options, "-o", schedule)
        command("check", schedule)
        command("run", schedule, "--model", MODEL, "--local", "--steps", STEPS, "--check", "-o", trace)
        command("show", schedule, "--trace", trace, "-o", str(OUT / f"{name}.html"))
    files = [str(OUT / f) for f in ("solved.json", "solved-trace.json", "1f1b.json", "1f1b-trace.json")]
    command("show", files[0])
    command("compare", files[0], files[1], "--baseline", *files[2:])
    solved, baseline = (Schedule.load(files[0]), Trace.load(files[1])), (Schedule.load(files[2]), Trace.load(files[3]))
    print(table(solved, baseline), flush=True)
    print(f"\nPages: {OUT}/1f1b.html {OUT}/solved.html    (demo took {time.monotonic() - began:.0f} s)")
    caution = cautions(Profile.load(profile), {"1F1B": compare(*baseline), "solved": compare(*solved)})
    print("".join(f"{line}\n" for line in caution), end="")


def cautions(profile: Profile, runs: dict[str, Comparison]) -> list[str]:
    """What makes the predicted speed-up meaningless, in lines; none where the profile was quiet and runs agree with it."""
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


def table(solved: tuple[Schedule, Trace], baseline: tuple[Schedule, Trace]) -> str:
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


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
