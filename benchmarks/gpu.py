"""`make gpu`: all that needs one GPU, in less than twelve minutes; each part is a process with its own time.

The parts that solve nothing run first, while the kernels of the search compile. A part that fails does not stop the others:
its error is in the file, and the exit code is 1. Without a CUDA device nothing is written, and the exit code is 2.
docs/notes/gpu.md says which parts ended on which card. `--device cpu --tiny` shows that the parts work, where they can
without one, not how fast.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .harness import RESULTS, Benchmark
from .parts import Part, failures, results_of

SECONDS = {  # less than twelve minutes together
    "device": 10.0,
    "copies": 15.0,
    "roofline": 25.0,
    "profile": 45.0,
    "split layers": 20.0,
    "split graph": 45.0,
    "split inductor": 70.0,
    "kernels": 170.0,
    "step": 130.0,
    "host": 30.0,
    "ranks": 120.0,
    "planted": 60.0,
    "failure": 60.0,
    "tests": 120.0,
    "offload": 45.0,
}
BESIDE = {"planted", "failure", "tests"}  # they time nothing


def parts(device: str, tiny: bool) -> list[Part]:
    """All parts, in the order in which they run."""
    given = {"device": device, "tiny": tiny}
    found = []
    for name, seconds in SECONDS.items():
        head, _, split = name.partition(" ") if name.startswith("split") else (name, "", "")
        work = f"benchmarks.gpu_parts:{head.replace(' ', '_')}"
        found.append(Part(name, work, seconds, given | ({"name": split} if split else {}), name in BESIDE))
    return found


def in_turn(chosen: list[Part]) -> tuple[list[Part], list[Part], list[Part]]:
    """Parts before the one that compiles kernels, which needs a core and no GPU, so that it runs beside them; and behind."""
    at = next((i for i, part in enumerate(chosen) if part.name == "kernels"), 0)
    behind = at + any(part.name == "kernels" for part in chosen)
    return chosen[:at], chosen[at:behind], chosen[behind:]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: shows that it works, not how fast")
    parser.add_argument("--parts", nargs="+", choices=tuple(SECONDS), default=list(SECONDS), help="only these")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts. Raises SystemExit where there is no device, or where numbers of a CPU would be kept as a GPU's."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"make gpu: torch {torch.__version__} sees no CUDA device here: nothing was run", file=sys.stderr)
        raise SystemExit(2)
    if options.device == "cpu" and options.output.parent.resolve() == RESULTS.resolve():
        print("make gpu: with --device cpu, name another place for the file: --output", file=sys.stderr)
        raise SystemExit(2)
    began = time.monotonic()
    before, kernels, after = in_turn([part for part in parts(options.device, options.tiny) if part.name in options.parts])
    with ThreadPoolExecutor(1) as thread:
        compiling = thread.submit(results_of, kernels)
        found = results_of(before) | compiling.result()
    found |= results_of(after)
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"date": date, "seconds": round(time.monotonic() - began, 1), "failed": failures(found), "parts": found}


BENCHMARK = Benchmark("gpu", __doc__, measure, arguments)

if __name__ == "__main__":
    raise SystemExit(1 if BENCHMARK.main()["failed"] else 0)
