"""What people install: wheel and sdist are built, and a clean environment solves with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from ..support.house import ROOT

BUILD = "import sys, build_backend as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2], {'kernels': 'none'}))"
KERNEL = """
import numpy as np
from zbsolve.ilp.bounds.closed_form_kernels import one_machine
zero = np.zeros(1, np.int64)
assert one_machine(zero, zero + 5, zero) == 5
"""
SEEN = "import json; print(json.dumps([sum(one.values()) for one in one_machine.stats[1:]]))"
WITH_KERNEL = "import sys, build_backend as b; b.COMPILE = sys.argv[2]; print(b.build_wheel(sys.argv[1]))"
TOP = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "build_backend.py")
SCRIPT = """
import zbsolve, pathlib, sys
assert "site-packages" in zbsolve.__file__, zbsolve.__file__
layers = (zbsolve.Layer("a", 3, 3, 2, 5, 1, 1, 1, 1),) * 4
profile = zbsolve.Profile("measured", "toy", layers, zbsolve.Link(0, 1), 1, None, {}, {})
profile.save("profile.json")
schedule = zbsolve.solve(profile.problem(2, 4), effort=0.01, method="greedy")
assert zbsolve.verify(schedule.problem, schedule) == ()
"""


def built(folder: Path, what: str, source: Path) -> Path:
    """A wheel, without kernels, or sdist of the project in `source`."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(folder)], cwd=source, capture_output=True, text=True, timeout=300, check=True
    )
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, made from what git knows: so a file that is in neither is missed here."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if names.returncode:
        pytest.skip("not a git checkout")
    for name in names.stdout.decode().split("\0"):
        if name.startswith(("zbsolve/", "profiler/")) or name in TOP:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    sdist = built(folder, "sdist", source)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (inside,) = (folder / "unpacked").iterdir()
    return inside


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    return built(unpacked.parent, "wheel", unpacked)


def with_compiled_kernels(site: Path) -> None:
    """What this checkout has compiled lies beside the same sources there. numba takes it where these are the same."""
    for path in (ROOT / "zbsolve").rglob("*"):
        copy = site / path.relative_to(ROOT)
        if path.suffix in (".nbi", ".nbc") and copy.parents[1].is_dir():  # not of a folder that is there no more
            copy.parent.mkdir(exist_ok=True)
            shutil.copy2(path, copy)
        elif path.suffix == ".py":
            shutil.copystat(path, copy)


@pytest.mark.slow
def test_the_wheel_has_every_module_and_template(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for top in ("zbsolve", "profiler")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".html", ".css", ".js", ".typed") and "__pycache__" not in path.parts
    }
    assert wanted - packed == set()
    assert not any(name.startswith(("tests", "benchmarks")) for name in packed)


@pytest.mark.slow
def test_a_clean_environment_solves(wheel: Path, tmp_path: Path) -> None:
    """The libraries are this environment's; zbsolve is the wheel's alone."""
    home = tmp_path / "clean"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    with_compiled_kernels(site)
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(python), *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        return done.stdout

    run("-c", SCRIPT)
    solve = ["-m", "zbsolve", "solve", "profile.json", "--ranks", "2", "--microbatches", "3", "--method", "1f1b"]
    run(*solve, "-o", "s.json")
    assert "holds" in run("-m", "zbsolve", "check", "s.json")
    run("-m", "zbsolve", "show", "s.json", "-o", "s.html")
    assert (tmp_path / "s.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_a_wheel_holds_compiled_kernels(unpacked: Path, tmp_path: Path) -> None:
    """One kernel here: all of them take a minute."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_KERNEL, str(tmp_path), KERNEL],
        cwd=unpacked,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    path = tmp_path / done.stdout.split()[-1]
    assert f"-cp{sys.version_info.major}{sys.version_info.minor}-" in path.name
    assert list(tmp_path.glob("*.whl")) == [path]
    site = tmp_path / "site"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
    environment = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "PYTHONPATH")}
    code = f"{KERNEL}\n{SEEN}"
    seen = subprocess.run(
        [sys.executable, "-c", code], cwd=site, env=environment, capture_output=True, timeout=300, check=True
    )
    assert json.loads(seen.stdout) == [1, 0]  # it was loaded, not compiled
