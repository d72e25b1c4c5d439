"""Names that a package hands on and loads when they are first used, so that importing the package stays quick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def handing_on(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`. homes: module below the package ("search.solver") → the names that it
    gives, blanks between; `old=new` where the package calls it otherwise; no name: the module itself."""
    found = {}
    for module, names in homes.items():
        for name in names.split() or [f"={module.rpartition('.')[2]}"]:
            there, _, here = name.partition("=")
            found[here or there] = (module, there)

    def load(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module, there = found[name]
        loaded = import_module(f".{module}", package)
        return getattr(loaded, there) if there else loaded

    return load, lambda: sorted(found)
