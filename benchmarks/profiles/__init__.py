"""Profiles that are kept: real models' layers, for benchmarks, emulation and documentation.

`estimated-<model>-<device>.json`: rooflines of published models, without samples. `measured-<model>-<device>.json`: measured
where the file says, every sample kept. `python -m benchmarks.profiles` makes them anew.
"""

from __future__ import annotations

from pathlib import Path

from zbsolve import Profile

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Of all profiles that are kept, such as `estimated-llama3-8b-h200`."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def kept(name: str) -> Profile:
    """The profile of this name. Raises BadInput."""
    return Profile.load(FOLDER / f"{name}.json")
