"""Every module, and every public class, function and method of the library and the profiler, says what it is; a method that
overrides one of ours says only what differs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from importlib import import_module

from ..support.house import MODULES

Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def silent(body: Sequence[ast.stmt], inside: str = "") -> Iterator[str]:
    """Names of the public definitions without a docstring, and of compiled ones whatever their name."""
    for node in body:
        if isinstance(node, Defined):
            compiled = any(ast.unparse(one) in ("kernel", "subkernel") for one in node.decorator_list)
            if (compiled or not node.name.startswith("_")) and not ast.get_docstring(node):
                yield inside + node.name
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from silent(node.body, f"{node.name}.")


def test_what_is_public_has_a_docstring() -> None:
    without = []
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # `forward` is torch's own method, whose meaning is the class's
        names = [one for one in silent(tree.body) if not one.endswith(".forward") and not inherits(module, one)]
        without += [f"{module}: {name}" for name in ([] if ast.get_docstring(tree) else ["the module"]) + names]
    assert without == []


def inherits(module: str, name: str) -> bool:
    """Has the method its words from a class of ours that its own derives from?"""
    kind, _, method = name.rpartition(".")
    above = getattr(import_module(module), kind).__mro__[1:] if kind else ()
    return any(
        one.__module__.startswith(("zbsolve", "profiler")) and vars(one)[method].__doc__
        for one in above
        if method in vars(one)
    )


def test_the_reader_sees_what_it_should() -> None:
    source = 'def f(): pass\n@subkernel\ndef _k(): pass\ndef _g(): pass\nclass A:\n "a"\n def m(self): pass'
    assert list(silent(ast.parse(source).body)) == ["f", "_k", "A.m"]
