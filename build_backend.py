"""The build backend: setuptools', with compiled kernels in wheels, so that the first solve after `pip install` need not wait
for them. They are for this Python, numba and kind of processor; elsewhere numba compiles them anew, once.

`--config-settings kernels=none` leaves them out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the other hooks of PEP 517 and PEP 660)

Settings = Mapping[str, Any] | None
# What compiling imports. numba has to be the version that runs later, as the newest one is as a rule.
NEEDED = ["numba>=0.60", "numpy>=1.26", "ortools>=9.10", "msgspec>=0.19"]
COMPILE = "import zbsolve.search.solver as s, zbsolve.planner.planning as p; s.compiled(); p.compiled()"
SECONDS = 900.0  # that compiling may take


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """The packages that building a wheel needs besides setuptools."""
    found: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    return found if _without_kernels(config_settings) else found + NEEDED


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Build a wheel into this folder. Its name."""
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    if _without_kernels(config_settings):
        return name
    with tempfile.TemporaryDirectory() as folder:
        _wheel("unpack", str(Path(wheel_directory, name)), "--dest", folder)
        (inside,) = Path(folder).iterdir()
        if not _compiled(inside):
            return name
        Path(wheel_directory, name).unlink()
        _wheel("pack", str(inside), "--dest-dir", wheel_directory)
    return _tagged(Path(wheel_directory, name))


def _without_kernels(settings: Settings) -> bool:
    return (settings or {}).get("kernels") == "none"


def _compiled(inside: Path) -> bool:
    """Compile the kernels of the package in this folder, beside its modules. Whether that went well: an install need not
    fail for it."""
    known = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    try:
        subprocess.run([sys.executable, "-B", "-c", COMPILE], cwd=inside, env=known, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"zbsolve: the wheel has no compiled kernels: {error}\n")
        return False
    return True


def _tagged(path: Path) -> str:
    """Name a wheel as one for this Python and platform alone."""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tags = ["--python-tag", version, "--abi-tag", version, "--platform-tag", platform]
    return _wheel("tags", "--remove", *tags, str(path)).split()[-1]


def _wheel(*words: str) -> str:
    command = [sys.executable, "-m", "wheel", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout
