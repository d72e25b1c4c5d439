"""Functions stay small: under 60 lines, at most seven parameters. Compiled kernels may be longer, not wider."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from ..support.house import ROOT

FOLDERS = ("zbsolve", "profiler", "benchmarks")
MAX_LINES, MAX_PARAMETERS = 59, 7
# What people call: all that a step, a profile's problem, a pipeline and a search may be given.
INTERFACES = (
    "zbsolve/build/plain.py: pipeline",
    "zbsolve/exec/pipeline.py: Pipeline.__init__",
    "zbsolve/search/solver.py: solve",
    "zbsolve/planner/planning.py: plan",
    "profiler/measurement.py: measure",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, Function]]:
    """All functions below a node, by qualified name."""
    for child in ast.iter_child_nodes(node):
        name = f"{inside}.{child.name}" if inside and hasattr(child, "name") else getattr(child, "name", inside)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        yield from functions(child, name)


@cache
def named() -> dict[str, Function]:
    """`path: qualified name` → function, of the whole project."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for name, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
            found[f"{path.relative_to(ROOT).as_posix()}: {name}"] = function
    return found


def compiled(function: Function) -> bool:
    """Whether numba compiles it (see `util.kernels`)."""
    calls = [one.func if isinstance(one, ast.Call) else one for one in function.decorator_list]
    return any(ast.unparse(one) in ("kernel", "subkernel") for one in calls)


def parameters(function: Function) -> int:
    """How many parameters it has, but for self and cls."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def lines(function: Function) -> int:
    """From `def` to the last line, docstring and all."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_functions_are_short() -> None:
    long = {
        name: lines(function)
        for name, function in named().items()
        if lines(function) > MAX_LINES and not compiled(function) and name not in INTERFACES
    }
    assert long == {}


def test_functions_take_few_parameters() -> None:
    wide = {
        name: parameters(function)
        for name, function in named().items()
        if parameters(function) > MAX_PARAMETERS and name not in INTERFACES
    }
    assert wide == {}


@pytest.mark.parametrize("name", INTERFACES)
def test_exceptions_are_needed(name: str) -> None:
    assert name in named(), f"{name} is not there any more: take it out of the list"
    function = named()[name]
    assert parameters(function) > MAX_PARAMETERS or lines(function) > MAX_LINES


def test_the_reader_sees_what_it_should() -> None:
    """Of a known source: nested functions, methods, compiled ones, keyword-only parameters."""
    tree = ast.parse("class A:\n @classmethod\n def f(cls, a, /, b, *, c): \n  def g(): pass\n@subkernel\ndef k(x): pass")
    found = {name: (parameters(one), compiled(one), lines(one)) for name, one in functions(tree)}
    assert found == {"A.f": (3, False, 2), "A.f.g": (0, False, 1), "k": (1, True, 1)}
