"""docs/python.md lists every public name with its parameters and purpose, and a docstring explains each parameter."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import zbsolve
import zbsolve.build
import zbsolve.systems
from zbsolve.features.table import FIELDS

from ..support.docs import text_of
from ..support.house import ROOT

pytest.importorskip("torch")

PAGE, MARKS = "docs/python.md", re.compile(r"(<!-- names -->\n).*(<!-- /names -->)", re.S)
LISTED = (zbsolve, zbsolve.build)
OF_FEATURES = {field.name for field in FIELDS}  # docs/features.md lists them
MADE_BY_HAND = ("Pipeline", "PostValidated", "CrossEntropy", "Cluster", "Layout", "Shape")


def further(package: str) -> list[Any]:
    """Functions of a package, and the classes that a person makes by hand."""
    module = import_module(f"zbsolve.{package}")
    things = [getattr(module, name) for name in dir(module) if not name.startswith("_")]
    return [thing for thing in things if inspect.isfunction(thing) or getattr(thing, "__name__", "") in MADE_BY_HAND]


def is_error(thing: Any) -> bool:
    """Whether it is a class of errors."""
    return isinstance(thing, type) and issubclass(thing, Exception)


NAMES = [(module, name) for module in (*LISTED, zbsolve.systems) for name in dir(module) if not name.startswith("_")]
THINGS = [thing for module, name in NAMES if callable(thing := getattr(module, name))]
THINGS += [thing for package in ("planner", "interchange", "exec") for thing in further(package)]
EXPLAINED = {thing.__qualname__: thing for thing in THINGS if not is_error(thing)}


def parameters(of: Callable[..., Any]) -> list[str]:
    """Names of the parameters, the further ones as `**options`."""
    return [str(one.replace(annotation=one.empty, default=one.empty)) for one in inspect.signature(of).parameters.values()]


def row(name: str, thing: Any) -> str:
    """A line of the page's tables: parameters, and the first sentence of the docstring."""
    plain = isinstance(thing, ModuleType) or is_error(thing)
    purpose = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".")
    names = [] if plain else [name for name in parameters(thing) if thing is not zbsolve.Step or name not in OF_FEATURES]
    given = "" if plain else f"({', '.join([*names, *['…'] * (thing is zbsolve.Step)])})"
    return f"| `{name}{given}` | {purpose} |"


def tables() -> str:
    """What the page has between its marks."""
    parts = []
    for module in LISTED:
        rows = [row(name, getattr(module, name)) for of, name in NAMES if of is module]
        head = f"| of `{module.__name__}` | what it is |\n|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


def test_every_public_name_is_listed() -> None:
    """After a change of names or docstrings: `python -m tests.docs.test_python` writes the tables anew."""
    assert tables() in text_of(PAGE)
    assert set(zbsolve.__all__) <= set(re.findall(r"^\| `(\w+)", text_of(PAGE), re.M))


def test_a_docstring_explains_every_parameter() -> None:
    for name, thing in EXPLAINED.items():
        text = inspect.getdoc(thing) or ""
        lines = {one for line in re.findall(r"^ *([\w, ]+): ", text, re.M) for one in line.split(", ")}
        told = lines | set(re.findall(r"`(\w+)", text.split("\n\n")[0]))  # in its first sentence
        assert {one.lstrip("*") for one in parameters(thing)} - told <= {"problem"}, name


if __name__ == "__main__":
    (ROOT / PAGE).write_text(MARKS.sub(lambda found: found[1] + tables() + found[2], text_of(PAGE)), encoding="utf-8")
