"""Simulator, verifier and solvers know no kinds of passes: they read edges, lanes, streams and bytes.

A new kind is a builder, a handler and a colour. So these modules neither import the table of kinds nor hold a string that is
a kind or a pass's name, but in docstrings.
"""

from __future__ import annotations

import ast
import re

import pytest

from zbsolve.kinds import KINDS

from ..support.house import MODULES

BLIND = ("zbsolve.schedule.timeline", "zbsolve.verifier", "zbsolve.greedy", "zbsolve.ilp", "zbsolve.search")
# A string that is a kind's by chance (a unit, a numpy code) is named here: "module: string" → what it means there.
EXCEPTIONS: dict[str, str] = {}

NAME = re.compile(rf"\d*(?:{'|'.join(KINDS)})\d*(?:\.\d+)?")


def below(module: str, packages: tuple[str, ...]) -> bool:
    """Whether the module is one of the packages or in one."""
    return any(module == one or module.startswith(f"{one}.") for one in packages)


READ = sorted(module for module in MODULES if below(module, BLIND))


def docstrings(tree: ast.AST) -> set[int]:
    """The nodes that are docstrings, by id."""
    homes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, homes)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


def kinds_in(source: str) -> list[str]:
    """The kinds and names of passes that a source holds as strings, and its uses of the table of kinds."""
    tree = ast.parse(source)
    prose = docstrings(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if NAME.fullmatch(node.value):
                found.append(node.value)
        elif isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names if alias.name == "KINDS"]
        elif isinstance(node, ast.Attribute) and node.attr == "KINDS":
            found.append("KINDS")
    return found


def test_no_kind_is_named() -> None:
    named = [f"{module}: {one}" for module in READ for one in kinds_in(MODULES[module].read_text(encoding="utf-8"))]
    assert [one for one in named if one not in EXCEPTIONS] == []


def test_all_of_them_are_read() -> None:
    assert {one for one in BLIND if any(below(module, (one,)) for module in READ)} == set(BLIND)
    assert len(EXCEPTIONS) <= 2


def test_exceptions_are_needed() -> None:
    for one in EXCEPTIONS:
        module, _, string = one.partition(": ")
        assert string in kinds_in(MODULES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('x = p.kind == "BW"', ["BW"]),
        ('x = f"{stage}W{microbatch}"', ["W"]),
        ('x = "0F0", "3B12.1"', ["0F0", "3B12.1"]),
        ("from ..problem import KINDS, Ints", ["KINDS"]),
        ("x = problem.KINDS", ["KINDS"]),
        ('def f():\n    "W"\n    return "Wait", "w", "µs", ""', []),
    ],
)
def test_the_reader_sees_what_it_should(source: str, found: list[str]) -> None:
    assert kinds_in(source) == found
