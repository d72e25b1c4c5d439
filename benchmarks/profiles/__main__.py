"""`python -m benchmarks.profiles [NAME …] [--measure]`: make the kept profiles anew.

Without --measure the estimates alone (a minute or two, nothing is run). With it also the measurements, on this machine's CPU
or on its GPU where there is one; a run that something disturbed is tried again, and not kept if that stays so.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from profiler import estimate, measure
from profiler.measurement import DISTURBED
from zbsolve import Profile
from zbsolve.models.published_models import PUBLISHED

from . import FOLDER

MODELS = tuple(name for name, one in PUBLISHED.items() if not one.source.startswith("none"))
DEVICES = ("a100", "h100", "h200")
ON_CPU = ("gpt-tiny", "gpt-tiny-tied", "moe-tiny")
ON_GPU = ("gpt-1.5b", "gpt-6.2b@layers=4", "llama3-8b@layers=4", "gemma2-9b@layers=4", "qwen2-7b@layers=4")
SECONDS, TRIES = 8.0, 8


def main() -> None:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; without, all")
    parser.add_argument("--measure", action="store_true", help="also what is measured on this machine")
    options = parser.parse_args()
    failed = False
    for name, make in sources(options.measure):
        if options.names and not any(part in name for part in options.names):
            continue
        profile = make()
        if profile is None:
            print(f"{name}: not kept: disturbed {TRIES} times")
            failed = True
            continue
        path = FOLDER / f"{name}.json"
        profile.save(path)
        print(f"{name}: {path.stat().st_size:,} bytes", flush=True)
    sys.exit(failed)


def sources(measuring: bool) -> Iterator[tuple[str, Callable[[], Profile | None]]]:
    """Every name and what makes its profile."""
    for model in MODELS:
        for device in DEVICES:
            yield f"estimated-{model}-{device}", lambda m=model, d=device: estimate(m, d)  # type: ignore[misc]
    if measuring:
        cuda = torch.cuda.is_available()
        for model in ON_GPU if cuda else ON_CPU:
            where = _slug(torch.cuda.get_device_name()) if cuda else "cpu"
            yield f"measured-{_slug(model)}-{where}", lambda m=model, c=cuda: quiet(m, "cuda" if c else "cpu")  # type: ignore[misc]


def quiet(model: str, device: str) -> Profile | None:
    """A measurement that nothing disturbed, without the machine's name."""
    for _ in range(TRIES):
        found = measure(model, seconds=SECONDS, device=device)
        if not any(line.startswith(DISTURBED) for line in found.facts["warnings"]):
            return replace(found, facts={key: value for key, value in found.facts.items() if key != "host"})
    return None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    main()
