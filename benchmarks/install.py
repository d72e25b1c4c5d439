"""`python -m benchmarks.install`: how long `pip install .` takes into a new environment, and the first solve after it, where
the wheel holds compiled kernels and where it does not.

pip takes packages from where it is told to; what it downloads is in the time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from zbsolve import Layer, Link, Profile

from .harness import Benchmark

ROOT = Path(__file__).parents[1]
SOLVE = ("--ranks", "8", "--microbatches", "24", "--seconds", "2")
WAYS = {"compiled kernels": (), "without": ("--config-settings", "kernels=none")}
LIMIT = 1200.0  # seconds for a command


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of wall time, of each way."""
    layer = Layer("block", 20_000, 22_000, 18_000, 40_000, 4096, 4096, 2048, 100)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "profile.json")
        Profile("estimated: made up", "toy", (layer,) * 16, Link(20, 1e4), 1, None, {}, {}).save(profile)
        source = Path(folder, "source")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True, timeout=LIMIT)
        for name, words in WAYS.items():
            home = Path(folder, name.split()[0])
            venv.create(home, with_pip=True)
            install = _seconds(home / "bin" / "python", "-m", "pip", "install", "--quiet", *words, str(source))
            solve = [_seconds(home / "bin" / "zbsolve", "solve", str(profile), *SOLVE) for _ in range(2)]
            results[name] = {"install": install, "first solve": solve[0], "second solve": solve[1]}
            print(f"{name}: {results[name]}", flush=True)
    return {"solve": " ".join(SOLVE), "seconds": results}


def _seconds(*words: object) -> float:
    command = [str(word) for word in words]
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    began = time.monotonic()
    subprocess.run(command, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL, stderr=sys.stderr, env=alone)
    return round(time.monotonic() - began, 2)


BENCHMARK = Benchmark("install", __doc__, measure)

if __name__ == "__main__":
    BENCHMARK.main()
