"""Compiled functions and what an older version left of them on disk."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import zbsolve
from zbsolve.util.kernels import inner_kernel, kernel, subkernel


def printed(folder: Path, *words: str) -> str:
    """What Python prints; without its own cache, to which files of one second and one length are one file."""
    command = [sys.executable, "-B", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=True).stdout.strip()


SOURCE = """
from typing import NamedTuple
from zbsolve.util.kernels import kernel

class {name}(NamedTuple):
    one: int
    two: int

@kernel
def total(pair):
    return pair.one + pair.two

if __name__ == "__main__":
    import old_cache
    print(old_cache.total(old_cache.{name}(3, 4)), len(old_cache.total.stats.cache_hits))
"""


@pytest.mark.slow
def test_an_index_that_names_a_class_of_another_version_is_made_anew(tmp_path: Path) -> None:
    path, said = tmp_path / "old_cache.py", []
    for name in ("Old", "Old", "New", "New"):
        path.write_text(SOURCE.format(name=name))
        said.append(printed(tmp_path, str(path)))
    assert said == ["7 0", "7 1", "7 0", "7 1"]  # compiled, read, compiled anew, read


CALLED = """
from zbsolve.util.kernels import kernel
STEP = {step}

@kernel
def further(value):
    return value {sign} STEP
"""
CALLER = """
from zbsolve.util.kernels import kernel
from pair.called import STEP, further

@kernel
def both(value):
    return further(value) + STEP

if __name__ == "__main__":
    from pair import caller
    print(caller.both(10), len(caller.both.stats.cache_hits))
"""


@pytest.mark.slow
def test_a_change_of_what_a_kernel_calls_or_reads_compiles_it_anew(tmp_path: Path) -> None:
    folder, said = tmp_path / "pair", []
    folder.mkdir()
    (folder / "caller.py").write_text(CALLER)
    for step, sign in ((1, "+"), (1, "+"), (1, "-"), (2, "-"), (2, "-")):
        (folder / "called.py").write_text(CALLED.format(step=step, sign=sign))
        said.append(printed(tmp_path, "-m", "pair.caller"))
    assert said == ["12 0", "12 1", "10 0", "10 0", "10 1"]


TOLD = """
from zbsolve.util.kernels import before_compiling, kernel

@kernel
def inner(value):
    return value + 1

@kernel
def outer(value):
    return inner(value) + 1

if __name__ == "__main__":
    import told
    said = []
    with before_compiling(lambda: said.append("compiles")), before_compiling(lambda: said.append("too")):
        told.outer(1), told.outer(1.5)
    print(said)
"""


@pytest.mark.slow
def test_whoever_asks_is_told_once_before_kernels_are_compiled(tmp_path: Path) -> None:
    path, said = tmp_path / "told.py", []
    path.write_text(TOLD)
    for _ in range(2):
        said.append(printed(tmp_path, str(path)))
    assert said == ["['too', 'compiles']", "[]"]


def test_an_inner_kernel_that_would_make_an_array_is_refused() -> None:
    """It could not be given back: nobody counts who uses it."""

    @inner_kernel
    def wrong(count):  # type: ignore[no-untyped-def]
        return np.zeros(count).sum()

    with pytest.raises(Exception, match="Only accept returning of array passed"):
        kernel(lambda count: wrong(count))(3)


def test_what_only_kernels_call_has_no_code_for_python() -> None:
    @subkernel
    def twice(values):  # type: ignore[no-untyped-def]
        return np.append(values, values)

    @kernel
    def summed(values):  # type: ignore[no-untyped-def]
        return twice(values).sum()

    with pytest.raises(TypeError, match="only kernels can call"):
        twice(np.ones(3))
    assert summed(np.ones(3)) == 6
    with pytest.raises(TypeError, match="only kernels"):
        twice(np.ones(3))


def test_every_kernel_runs_without_the_lock_of_the_interpreter() -> None:
    """Finders, provers and kernels of other searches run beside each other in threads. Nobody else compiles anything."""
    home = Path(zbsolve.__file__).parent
    files = {path: path.read_text(encoding="utf-8") for path in sorted(home.rglob("*.py"))}
    assert [path.name for path, text in files.items() if re.search(r"(?<!torch\.)\b(njit|jit|vectorize)\b", text)] == [
        "kernels.py"
    ]
    seen = 0
    for path in (path for path, text in files.items() if re.search(r"^@(inner_|sub)?kernel$", text, re.MULTILINE)):
        module = importlib.import_module(".".join(("zbsolve", *path.relative_to(home).with_suffix("").parts)))
        made = [getattr(one, "made", one) for one in vars(module).values()]
        own = [one for one in made if isinstance(one, Dispatcher) and one.__module__ == module.__name__]
        assert len(own) == len(re.findall(r"^@(?:inner_|sub)?kernel$", files[path], re.MULTILINE)), path.name
        assert all(one.targetoptions["nogil"] for one in own), path.name
        seen += len(own)
    assert seen > 60
