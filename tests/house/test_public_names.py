"""What a package hands on is there."""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib import import_module
from types import ModuleType

from ..support.house import MODULES

PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


def test_every_name_that_a_package_hands_on_loads() -> None:
    for package in PACKAGES:
        module = import_module(package)
        if hasattr(module, "__getattr__"):
            assert dir(module), package
            given = {name: getattr(module, name) for name in dir(module)}
            assert [name for name, value in given.items() if value is None] == [], package
            beside = {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == package}
            both = [name for name in given.keys() & beside if not isinstance(given[name], ModuleType)]
            assert both == [], f"{package}: a module has the name of what is handed on"


def test_no_module_has_the_name_of_a_function_beside_it() -> None:
    """Else the name means one thing before the module is loaded and another one afterwards."""
    modules, defined = defaultdict(set), defaultdict(set)
    for path in MODULES.values():
        home = path.parent.parent if path.name == "__init__.py" else path.parent
        modules[home].add(path.parent.name if path.name == "__init__.py" else path.stem)
        body = ast.parse(path.read_text(encoding="utf-8")).body
        defined[path.parent] |= {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {home: both for home in defined if (both := modules[home] & defined[home])} == {}
