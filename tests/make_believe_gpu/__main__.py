"""Builds the make-believe GPU and runs the checks: `python -m tests.make_believe_gpu [words of their names]`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils import cpp_extension

from zbsolve import Schedule, pipeline
from zbsolve.build import with_offload

from .planted import missed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILT = Path(os.environ.get("MAKE_BELIEVE_BUILT", ROOT / "build" / f"make_believe_gpu-{torch.__version__}"))
SECONDS = 300
PACKAGE = "tests.make_believe_gpu"
MODELS = str(HERE / "models.py") + ":"


def late_offload() -> Schedule:
    """On one rank a microbatch leaves when another is back, into the host buffer that the other was in."""
    plain = replace(pipeline([10], [10], [10], placement=(0,), microbatches=2, held_until_W=9), layers=(2,))
    order = {"compute:0": "0F0 0F1 0B0 0W0 0B1 0W1", "d2h:0": "0O0 0O1", "h2d:0": "0R0 0R1"}
    rows = {stream: tuple(names.split()) for stream, names in order.items()}
    return Schedule(with_offload(plain, 10, 10), rows, (("0B0", "0O1"),))


class Check(NamedTuple):
    """A step that ranks run with `--check`. solve, run: options. line: what the run says besides. order: makes the
    schedule, if it is not solved."""

    name: str
    model: str
    solve: str = ""
    run: str = ""
    line: str = ""
    order: Callable[[], Schedule] | None = None


CHECKS = [
    Check("plain", MODELS + "plain", "--placement vee"),
    Check("captured", MODELS + "plain", "--placement vee", "--capture", "captured: "),
    Check("graph", MODELS + "plain", "", "--capture --split graph", "captured: "),
    Check("dropout", MODELS + "dropout", "", "--capture", "captured: "),
    Check("recompute", MODELS + "dropout", "--recompute all", "--capture", "captured: "),
    Check("offload", MODELS + "plain", "--offload full --microbatches 8", "--capture", "captured: "),
    Check("late offload", MODELS + "short", order=late_offload),
    Check("vocabulary", "gpt-tiny", "--vocabulary sharded", "--capture", "captured: "),
    Check("smoothed labels", MODELS + "smoothed", "--vocabulary sharded", "--capture", "captured: "),
    Check("side inputs", MODELS + "sides", "", "--capture", "not captured: side inputs"),
    Check("slices", "gpt-tiny", "--slices 2", "--capture", "not captured: labels of slices"),
    Check("replicas", MODELS + "plain", "", "--mesh pp=2,dp=2"),
    Check("captured replicas", MODELS + "plain", "", "--mesh pp=2,dp=2 --capture", "captured: "),
    Check("memory limit", MODELS + "plain", "", "--memory-limit 1GiB"),
    Check("watched", MODELS + "plain", "", "--watch"),
]


def build() -> None:
    """Compile what changed, into a folder that git ignores."""
    BUILT.mkdir(parents=True, exist_ok=True)
    hooks, library = BUILT / "hooks.so", Path(torch.__file__).parent / "lib"
    if not hooks.exists() or hooks.stat().st_mtime < (HERE / "hooks.cpp").stat().st_mtime:
        where = [*(f"-I{path}" for path in cpp_extension.include_paths()), f"-L{library}", f"-Wl,-rpath,{library}"]
        flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-ltorch_cpu", "-lc10"]
        subprocess.run(["g++", str(HERE / "hooks.cpp"), "-o", str(hooks), *where, *flags], check=True, timeout=SECONDS)
    given = f"'make_believe_device', [{str(HERE / 'device.cpp')!r}], build_directory={str(BUILT)!r}, extra_cflags=['-O1']"
    code = f"from torch.utils.cpp_extension import load; load({given})"  # `load` also imports it, and this torch is a CPU's
    subprocess.run([sys.executable, "-c", code], check=True, timeout=3 * SECONDS)


def command(folder: Path, *words: str, gpus: int = 0, module: str = "zbsolve") -> tuple[int, str]:
    """Exit code and output of a module's run in `folder`, with make-believe GPUs or without."""
    path = [str(HERE / "site")] * bool(gpus) + [str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "MAKE_BELIEVE_BUILT": str(BUILT), "NO_COLOR": "1"}
    environment |= {"MAKE_BELIEVE_GPUS": str(gpus)} if gpus else {}
    line = [sys.executable, "-W", "ignore", "-m", module, *words]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout + done.stderr


def solved(folder: Path, model: str, options: str = "") -> None:
    """A schedule of two ranks, `s.json`. Raises RuntimeError."""
    given = ["profile.json", *["--ranks", "2", "--microbatches", "4", "--effort", "0.05", "-o", "s.json"], *options.split()]
    for words in (["profile", model, "--estimate", "h100", "-o", "profile.json"], ["solve", *given]):
        code, said = command(folder, *words)
        if code:
            raise RuntimeError(said)


def wrong_of(check: Check, folder: Path) -> str:
    """What is wrong of a check; "": nothing."""
    if check.order is None:
        solved(folder, check.model, check.solve)
    else:
        check.order().save(folder / "s.json")
    words = [
        *["run", "s.json", "--local", "--device", "cuda", "--check", "--steps", "3", "--model"],
        check.model,
        *check.run.split(),
    ]
    code, said = command(folder, *words, gpus=4)
    missing = [line for line in ("check: right", "make-believe GPU", check.line) if line not in said]
    return said if code or "race: " in said else f"it does not say '{missing[0]}'" if missing else ""


def wrong_of_loop(folder: Path) -> str:
    """The same of a training loop of one's own."""
    solved(folder, MODELS + "plain")
    words = ["--standalone", "--nproc-per-node", "2", "-m", f"{PACKAGE}.loop", "s.json", str(folder)]
    code, said = command(folder, *words, gpus=2, module="torch.distributed.run")
    return said if code or "race: " in said or said.count("loop: right") != 2 else ""


def wrong_of_ranks(folder: Path) -> str:
    """The same of four ranks, which a process with a GPU starts."""
    code, said = command(ROOT, "ranks only", gpus=1, module=PACKAGE)
    return said if code or "race: " in said else ""


def ranks() -> list[str]:
    """What is wrong of `make gpu`'s steps of four ranks, small ones in float64, each against the unsplit model's."""
    from benchmarks.gpu_ranks import all_cases, ranks_run
    from benchmarks.gpu_ranks import wrong_of as wrong_of_runs

    cases = [replace(one, wide=16, tokens=4, dtype="float64", timeout=120.0) for one in all_cases()]
    return wrong_of_runs(ranks_run(cases, 4, "cuda", seconds=SECONDS))


def main(words: list[str]) -> int:
    """Run the checks whose names have one of the words, or what `planted` errors need."""
    if "MAKE_BELIEVE_BUILT" not in os.environ:
        build()
    if words[:1] == ["planted"]:
        found = missed(words[1:], BUILT)
        print(*found, sep="\n")
        return int(bool(found))
    wrong: dict[str, Callable[[Path], str]] = {check.name: partial(wrong_of, check) for check in CHECKS}
    wrong |= {"loop": wrong_of_loop, "four ranks": wrong_of_ranks}
    failed = False
    exactly = words[1:] if words[:1] == ["exactly"] else []
    for name in exactly or [one for one in wrong if not words or any(word in one for word in words)]:
        with tempfile.TemporaryDirectory() as folder:
            found = wrong[name](Path(folder)).strip()
        print(f"{name}: {found or 'right'}", flush=True)
        failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:] == ["ranks only"]:
        found = ranks()
        print(*found, sep="\n")
        sys.exit(bool(found))
    sys.exit(main(sys.argv[1:]))
