"""`make gpu`: everything that needs one GPU, in less than twelve minutes; each part is a process with a time limit.

The parts that solve nothing run first, while the kernels of the search compile. A part that fails does not stop the others:
its error is in the file, and the exit code is 1. Without a CUDA device nothing is written, and the exit code is 2.
docs/notes/gpu.md says which parts ended on which card. `--device cpu --tiny` shows that those parts work that need no GPU,
not how fast.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal
from xml.etree import ElementTree

import torch

from profiler.copies import measure_copies
from profiler.devices import cache_bytes, clock_of
from profiler.measurement import measure
from zbsolve.util.errors import BadInput
from zbsolve.util.machine import library_versions

from .harness import ROOT, STOPPED, Part, Results, failures, results_of, table, write

SECONDS = {  # less than twelve minutes together
    "device": 20.0,
    "copies": 15.0,
    "roofline": 25.0,
    "profile": 45.0,
    "split layers": 20.0,
    "split graph": 45.0,
    "split inductor": 70.0,
    "kernels": 170.0,
    "step": 130.0,
    "host": 40.0,
    "ranks": 120.0,
    "planted": 90.0,
    "failure": 60.0,
    "tests": 120.0,
    "offload": 45.0,
}
ALL_SECONDS = 700.0  # from here on parts are stopped; each takes up to 20 s to end
ENDING = 15.0  # seconds for tests to end, if they are stopped
BESIDE = {"planted", "failure", "tests"}  # they time nothing


def all_parts(device: str, tiny: bool) -> list[Part]:
    """All parts, in the order in which they run."""
    given = {"device": device, "tiny": tiny}
    found = []
    for name, seconds in SECONDS.items():
        head, _, split = name.partition(" ") if name.startswith("split") else (name, "", "")
        work = f"benchmarks.gpu:{head.replace(' ', '_')}"
        found.append(Part(name, work, seconds, given | ({"name": split} if split else {}), name in BESIDE))
    return found


def in_turn(chosen: list[Part]) -> tuple[list[Part], list[Part], list[Part]]:
    """Parts before the one that compiles kernels, which runs beside them as it needs no GPU; and parts after it."""
    at = next((i for i, part in enumerate(chosen) if part.name == "kernels"), 0)
    behind = at + any(part.name == "kernels" for part in chosen)
    return chosen[:at], chosen[at:behind], chosen[behind:]


@table(ending=lambda results: results["failed"])
def gpu(
    output: Path, device: Literal["cuda", "cpu"] = "cuda", tiny: bool = False, parts: tuple[str, ...] = tuple(SECONDS)
) -> Results:
    """Run the parts. The file has what is measured so far after each of them. tiny: the smallest sizes."""
    began, found = time.monotonic(), dict[str, Any]()
    unknown = set(parts) - SECONDS.keys()
    if unknown:
        raise SystemExit(f"make gpu: no part is called {', '.join(sorted(unknown))}: {', '.join(SECONDS)}")
    before, kernels, after = in_turn([part for part in all_parts(device, tiny) if part.name in parts])
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def kept(rows: Results, *failed: str) -> Results:
        found.update(rows)
        seconds = round(time.monotonic() - began, 1)
        return {"date": date, "seconds": seconds, "failed": [*failures(found), *failed], "parts": found}

    def keep(rows: Results) -> None:
        write("gpu", kept(rows, "it did not end"), output)

    try:
        with ThreadPoolExecutor(1) as thread:
            compiling = thread.submit(results_of, kernels, until=began + ALL_SECONDS)
            try:
                results_of(before, keep, began + ALL_SECONDS)
                wait([compiling])
            except KeyboardInterrupt:
                STOPPED.set()
                raise
            finally:
                kept(compiling.result())
        return kept(results_of(after, keep, began + ALL_SECONDS))
    except KeyboardInterrupt:
        return kept({}, "stopped before its end")


# --- The parts ---
#
# Each takes the device ("cuda" or "cpu") and whether to be tiny, and returns its numbers; what failed stands under `wrong`,
# a line each.

FREE_OF_OTHERS = 3 << 30  # bytes that a driver and this process may take
PROFILED, TINY_PROFILED = "gpt-1.5b@layers=2,batch=1,length=1024,dtype=bfloat16", "mlp-tiny"


def device(device: str, tiny: bool) -> dict[str, Any]:
    """What the device is, and with which versions it is used."""
    found: dict[str, Any] = {
        "name": "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **library_versions(("triton", "nvidia-ml-py")),
    }
    if device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        here = torch.device("cuda", 0)
        found |= {
            "name": facts.name,
            "memory_bytes": facts.total_memory,
            "free_bytes": (free := torch.cuda.mem_get_info(here)[0]),
            "multiprocessors": facts.multi_processor_count,
            "capability": [facts.major, facts.minor],
            "cache_bytes": cache_bytes(here),
            "clock_mhz": clock_of(here)(),
        }
        taken = facts.total_memory - free
        others = f"{taken / 1e9:.1f} GB of the GPU are taken before anything runs: another process uses it"
        found["wrong"] = [others] if taken > FREE_OF_OTHERS else []
        found["says"] = [f"{facts.name}, {facts.total_memory / 1e9:.0f} GB, torch {torch.__version__}"]
    return found


def kernels(device: str, tiny: bool) -> dict[str, Any]:
    """Compile the search's kernels if this checkout has none yet: all parts that solve wait for that."""
    from zbsolve.search.solver import compiled

    compiled()
    return {}


def tests(device: str, tiny: bool) -> dict[str, Any]:
    """The tests marked `gpu`, each with its outcome and seconds. It is also wrong if none passes: without a device all are
    skipped, and say so."""
    files = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *map(str, files)]
        with subprocess.Popen(command, cwd=ROOT) as child:
            try:
                late, code = [], child.wait(SECONDS["tests"] - ENDING)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGINT)  # its report has the tests that ended
                late, code = ["stopped before its end"], child.wait()
        if not report.exists():
            return {"tests": [], "wrong": [f"pytest ended with {code}, without a report"]}
        rows = [_test_row(case) for case in ElementTree.parse(report).iter("testcase")]
    wrong = late + [f"{row['test']}: {row['why']}" for row in rows if row["outcome"] == "failed"]
    if not any(row["outcome"] == "passed" for row in rows):
        wrong.append("none passed" + (f" (the first: {rows[0]['why']})" if rows else ": there are none"))
    return {"tests": rows, "wrong": wrong}


def _test_row(case: ElementTree.Element) -> dict[str, Any]:
    """A test of the report. why: the first line of its message, if it did not pass."""
    ends = [(child.tag, child.get("message", "")) for child in case if child.tag in ("failure", "error", "skipped")]
    tag, message = ends[0] if ends else ("passed", "")
    outcome = tag if tag in ("passed", "skipped") else "failed"
    row = {"test": f"{case.get('classname')}.{case.get('name')}", "outcome": outcome}
    return row | {"seconds": float(case.get("time", 0)), "why": message.partition("\n")[0]}


def profile(device: str, tiny: bool) -> dict[str, Any]:
    """A profile of a small model: each layer's times and bytes, facts and samples, and when its phases began, s. Its
    warnings are kept as they are."""
    model, began, phases = TINY_PROFILED if tiny else PROFILED, time.monotonic(), dict[str, float]()

    def progress(text: str) -> None:
        phase = text.partition(", round ")[0]
        if phase not in phases:
            phases[phase] = round(time.monotonic() - began, 1)
            print(f"{phases[phase]:.1f} s: {phase}", flush=True)

    made = measure(model, seconds=0.5 if tiny else 4.0, device=device, progress=progress)
    progress("the end")
    names = ("name", "F", "B", "W", "BW", "X", "U", "parameter_bytes")
    layers = [{name: getattr(layer, name) for name in names} for layer in made.layers]
    facts = {name: value for name, value in made.facts.items() if name != "host"}  # nobody's business
    wrong = [f"layer {row['name']}: {kind} is {row[kind]} µs" for row in layers for kind in "FB" if not row[kind] > 0]
    found = {"model": model, "phases": phases, "layers": layers, "facts": facts, "samples": made.samples}
    return found | {"says": [f"{at:.1f} s: {phase}" for phase, at in phases.items()], "wrong": wrong}


def split(device: str, tiny: bool, name: str) -> dict[str, Any]:
    """The split `name` compared with eager mode: the difference of results, and µs of passes."""
    from .splits import LIMITS, SIZES, TINY, split_beside_eager

    rows = {dtype: split_beside_eager(device, name, dtype, TINY if tiny else SIZES) for dtype in LIMITS}
    wrong = [
        f"{dtype}: {what} is {far:.1e} of the largest value from eager mode's, more than {LIMITS[dtype]:.0e}"
        for dtype, row in rows.items()
        for what, far in row["differences"].items()
        if not far <= LIMITS[dtype]
    ]
    return {"split": name, "limits": LIMITS, "rows": rows, "wrong": wrong}


def ranks(device: str, tiny: bool) -> dict[str, Any]:
    """Gradients of two and four ranks on the device, by placement and split, plain and captured, and under delays for a
    hundred steps, each against the unsplit model's."""
    from .gpu_ranks import Case, all_cases, ranks_run

    if tiny:
        return _judged({"two": ranks_run([Case(steps=2, wide=16, dtype="float64", delays=True)], 2, device, seconds=60)})
    delayed = [Case("vee", delays=True, steps=100), Case("loop", delays=True, steps=100, capture=True)]
    delayed.append(Case("vee", kind="dropout", delays=True, steps=100))
    two = [Case(), Case("vee", capture=True), Case(delays=True, steps=100)]
    found = {"four": ranks_run([*delayed, *all_cases()], 4, device, seconds=72)}
    return _judged(found | {"two, in turns": ranks_run(two, 2, device, at_a_time=False, seconds=25)})


def _judged(found: dict[str, Any]) -> dict[str, Any]:
    from .gpu_ranks import wrong_of

    rows = [row for run in found.values() for one in run for row in one["rows"]]
    right = sum(row.get("right", False) for row in rows)
    says = [f"{right} cases right of {len(rows)}", "" if any(row["at_once"] for row in rows) else "without MPS: in turns"]
    wrong = [f"{name}: {line}" for name, run in found.items() for line in wrong_of(run)]
    return {"runs": found, "says": [line for line in says if line], "wrong": wrong}


def host(device: str, tiny: bool) -> dict[str, Any]:
    """The host's time for a pass on each of two ranks, here and in torch's own runtime."""
    from .gpu_ranks import Case, ranks_run

    run = ranks_run([Case(kind="host", steps=2 if tiny else 15)], 2, device, seconds=25)
    each = [f"{row['ours']:.0f} µs here, {row['torch']:.0f} in torch" for one in run for row in one["rows"] if "ours" in row]
    return _judged({"two": run}) | {"says": each}


def planted(device: str, tiny: bool) -> dict[str, Any]:
    """Waits that are left out, under delays: each must be detected."""
    from .gpu_ranks import PLANTED, PLANTED_TOKENS, Case, ranks_run, wrong_of

    case = Case(delays=True, steps=25, wide=1024, tokens=PLANTED_TOKENS)
    runs = {what: ranks_run([replace(case, planted=what)], 2, device, seconds=20) for what in PLANTED}
    rows = {what: [row for one in run for row in one["rows"]] for what, run in runs.items()}
    seen = {what: any(row.get("right") is False or "race: " in row.get("error", "") for row in rows[what]) for what in runs}
    missed = {what: "; ".join(wrong_of(run))[:500] for what, run in runs.items() if not seen[what]}
    return {"runs": runs, "wrong": [f"nobody saw that it {what}: {why or 'all was right'}" for what, why in missed.items()]}


def failure(device: str, tiny: bool) -> dict[str, Any]:
    """A rank that is killed, raises, lacks memory or hangs in the middle of a step: what the other rank says, and when. A
    killed or hanging rank says nothing itself."""
    from .gpu_ranks import FAILURES, Case, ranks_run

    silent, soon, seconds = (10.0, 300.0, 300.0) if tiny else (5.0, 15.0, 25.0)

    def run_of(what: str) -> list[Any]:
        return ranks_run([Case(failing=what, timeout=silent, steps=6)], 2, device, at_a_time=False, seconds=seconds)

    wrong = list[str]()
    with ThreadPoolExecutor(2 if tiny else len(FAILURES)) as threads:
        found = dict(zip(FAILURES, threads.map(run_of, FAILURES), strict=True))
    for what, run in found.items():
        row = run[0]["rows"][-1] if run[0]["rows"] else {}
        if "LostRank" not in row.get("error", "") or "\n" in row["error"] or row["seconds"] > soon:
            wrong.append(f"{what}: the other rank says {row.get('error', 'nothing')!r} after {row.get('seconds')} s")
    return {"runs": found, "wrong": wrong}


def step(device: str, tiny: bool) -> dict[str, Any]:
    """The main job on ranks that share the device: steps predicted and measured. Raises BadInput without a GPU."""
    from .gpu_step import gpu_step

    if device != "cuda":
        raise BadInput("ranks that share a device need a GPU")
    return gpu_step()


def roofline(device: str, tiny: bool) -> dict[str, Any]:
    """A roofline's estimates compared with measured passes."""
    from .gpu_roofline import gpu_roofline

    return gpu_roofline(device, tiny)


def offload(device: str, tiny: bool) -> dict[str, Any]:
    """A stage's step with activations that go to host memory and back during computing, and without: times, peaks, bytes
    saved."""
    from .gpu_offload import SIZES, TINY, with_and_without
    from .splits import LIMITS

    dtype = "float32" if tiny else "bfloat16"
    found = with_and_without(device, TINY if tiny else SIZES, getattr(torch, dtype))
    kept, moved = (found["rows"][name] for name in ("kept", "offloaded"))
    found["saved_bytes"] = kept["peak_bytes"] - moved["peak_bytes"]
    found["step_over_kept"] = median(moved["samples_us"]) / median(kept["samples_us"])
    wrong = (
        [f"gradients differ by {found['differs']:.1e} of their largest value"] if found["differs"] > LIMITS[dtype] else []
    )
    wrong += [] if found["saved_bytes"] > 0 else ["offload saves no bytes"]
    orders = found["orders"].items()
    says = [f"{name}: {order['over_longer']:.2f} of the longer of computing and copying" for name, order in orders]
    return found | {"says": says, "wrong": wrong}


def copies(device: str, tiny: bool) -> dict[str, Any]:
    """Copies between host and device, also both ways at once: samples, and GB/s by their medians. Raises BadInput without a
    GPU."""
    if device != "cuda":
        raise BadInput("copies between host and device need a GPU")
    samples = measure_copies()
    speeds = {name: round(int(size) / median(row) / 1e3, 3) for name, size, row in _sized(samples)}
    says = [f"{name.replace('/', ', bytes ')}: {speed:.1f} GB/s" for name, speed in speeds.items() if name.endswith("both")]
    return {"gigabytes_per_s": speeds, "samples_us": samples, "says": says[-2:]}


def _sized(samples: dict[str, list[float]]) -> list[tuple[str, str, list[float]]]:
    """(name, bytes, µs) of the samples that are copies: "h2d/1024 beside"."""
    return [(name, name.partition("/")[2].split()[0], row) for name, row in samples.items() if "/" in name]
