"""Other engines' own files, from their packages, without their dependencies: downloaded and run with stand-ins for what they
import, or installed in a folder of a test."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import types
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .exports import modules

SECONDS = 60


def installed(requirements: Sequence[str], folder: Path) -> Path:
    """`folder` with these packages in it, installed without what they depend on. Skips the test, with the reason, where that
    is not done within a minute."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    _done([*command, "--target", str(folder), *requirements], requirements[0])
    return folder


def _done(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what}: not there within {SECONDS} s")
    if done.returncode:
        pytest.skip(f"{what}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")


class Package:
    """The files of one package as they are in its archive."""

    def __init__(self, requirement: str, folder: Path) -> None:
        """Skips the test, with the reason, where the package is not to be had within a minute."""
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
        _done(command, requirement)
        (self.archive,) = folder.iterdir()
        self.texts: dict[str, str] = {}

    def text(self, path: str) -> str:
        """One file's text; `path` from the package on."""
        if path not in self.texts:
            self.texts[path] = self._read(path).decode()
        return self.texts[path]

    def _read(self, path: str) -> bytes:
        if self.archive.suffix == ".whl":
            with zipfile.ZipFile(self.archive) as wheel:
                return wheel.read(path)
        with tarfile.open(self.archive) as source:
            member = next(one for one in source if one.name.partition("/")[2] == path)
            file = source.extractfile(member)
            assert file is not None
            return file.read()

    def functions(self, path: str, names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """Some functions of a file (methods too, as functions), without running the rest of it."""
        found = {
            node.name: node
            for node in ast.walk(ast.parse(self.text(path)))
            if isinstance(node, ast.FunctionDef) and node.name in names
        }
        assert set(found) == set(names)
        for node in found.values():
            node.decorator_list = []
        code = ast.Module([found[name] for name in names], type_ignores=[])
        made: dict[str, Any] = dict(given)
        exec(compile(code, path, "exec", flags=_annotations()), made)
        return made

    @contextmanager
    def loaded(self, names: Mapping[str, str], stand_ins: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Modules (name → file) run one after the other, with these stand-ins, as long as the block lasts."""
        with modules({**stand_ins, **{name: {} for name in names}}):
            for name, path in names.items():
                module: types.ModuleType = sys.modules[name]
                module.__package__ = name.rpartition(".")[0]
                exec(compile(self.text(path), path, "exec"), vars(module))
            yield {name: sys.modules[name] for name in names}


def _annotations() -> int:
    """The flag of `from __future__ import annotations`: types of functions are not looked up."""
    import __future__

    return __future__.annotations.compiler_flag
