"""What a package hands on is there."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest

from ..support.house import MODULES

PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_that_a_package_hands_on_loads(package: str) -> None:
    module = import_module(package)
    if not hasattr(module, "__getattr__"):
        return
    assert dir(module)
    for name in dir(module):
        assert getattr(module, name) is not None


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_has_the_name_of_a_function_beside_it(package: str) -> None:
    """Else the name means one thing before the module is loaded and another one afterwards."""
    folder = MODULES[package].parent
    beside = [path for name, path in MODULES.items() if path.parent == folder]
    inside = {path.parent.name for path in MODULES.values() if path.name == "__init__.py" and path.parent.parent == folder}
    modules = {path.stem for path in beside} | inside
    defined = {
        node.name
        for path in beside
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert modules & defined == set()
