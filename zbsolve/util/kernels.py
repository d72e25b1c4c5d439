"""Compiled functions, cached on disk and run without the interpreter's lock."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import numba
import numpy as np

Kernel = TypeVar("Kernel", bound=Callable[..., Any])  # seen from outside, a kernel is the function that it compiles

_notices: list[Callable[[], object]] = []


@contextmanager
def before_compiling(notice: Callable[[], object]) -> Iterator[None]:
    """`notice` is called once, before the first kernel that is compiled inside since it is not on disk."""
    _notices.append(notice)
    try:
        yield
    finally:
        if notice in _notices:
            _notices.remove(notice)


def kernel(function: Kernel) -> Kernel:
    """`numba.njit` with compiled code cached on disk. The cache is used while the function's source, that of the kernels
    that it calls, and the constants that it reads are unchanged. (Numba itself only checks the function's own file, and
    would use old code after a change elsewhere.)

    Numba's index on disk names the tuple classes that a function was compiled for. If another version of zbsolve wrote an
    index with classes that this one lacks, reading it fails; then the function is compiled again.
    """
    return _compiled(function)


def inner_kernel(function: Kernel) -> Kernel:
    """A `kernel` that only kernels call; it is inlined into each of them. It makes no array and returns only numbers, so
    numba need not count references to arrays: in a short function with many arrays that takes most of the time."""
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: Any, **options: Any) -> Any:
    made: Any = numba.njit(cache=True, nogil=True, **options)(function)
    on_disk = made._cache
    load = on_disk.load_overload

    def load_overload(signature: Any, context: Any) -> Any:
        on_disk._cache_file._source_stamp = rests_on(function)  # only now: the module's later functions are there
        loaded = None
        try:
            loaded = load(signature, context)
        except (AttributeError, ImportError):  # a class or a module that this version does not have
            on_disk.flush()
        while loaded is None and _notices:
            _notices.pop()()
        return loaded

    on_disk.load_overload = load_overload
    return made


@cache
def rests_on(function: FunctionType) -> str:
    """A digest of everything that a kernel's compiled code depends on, the same in every process: its file, the files of all
    kernels that it calls, and the constants that they read, also of other modules."""
    digests: dict[str, str] = {}
    seen: set[FunctionType] = set()
    waiting = [function]
    while waiting:
        func = waiting.pop()
        if func in seen:
            continue
        seen.add(func)
        digests[f"{func.__module__}.{func.__qualname__}"] = _digest(inspect.getfile(func))
        for name, value in _read(func).items():
            called = getattr(value, "py_func", value)
            if isinstance(called, FunctionType):
                waiting += [called] if called.__module__.partition(".")[0] == func.__module__.partition(".")[0] else []
            elif isinstance(value, np.ndarray):
                digests[f"{func.__module__}.{name}"] = hashlib.sha256(value.tobytes()).hexdigest()
            elif isinstance(value, bool | int | float | str) or (isinstance(value, tuple) and _plain(value)):
                digests[f"{func.__module__}.{name}"] = repr(value)
            elif isinstance(value, type) and issubclass(value, tuple):
                digests[f"{func.__module__}.{name}"] = repr(getattr(value, "_fields", ()))
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def _read(function: FunctionType) -> dict[str, Any]:
    """Name → value of what a function reads from its module, other modules of this project, and enclosing functions."""
    names = list(_names(function.__code__))
    known = {name: function.__globals__[name] for name in names if name in function.__globals__}
    own = function.__module__.partition(".")[0]
    for module in [it for it in known.values() if isinstance(it, ModuleType) and it.__name__.startswith(f"{own}.")]:
        known |= {f"{module.__name__}.{name}": getattr(module, name) for name in names if hasattr(module, name)}
    return {**known, **inspect.getclosurevars(function).nonlocals}


def _plain(values: tuple[Any, ...]) -> bool:
    return all(isinstance(v, bool | int | float | str) or (isinstance(v, tuple) and _plain(v)) for v in values)


def _names(code: CodeType) -> set[str]:
    """The names that code, and code in it, reads."""
    inside = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inside)


@cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
