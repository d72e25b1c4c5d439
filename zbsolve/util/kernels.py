"""Functions compiled by numba, cached on disk and run without the global interpreter lock."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn, TypeVar

import numba
import numpy as np

Kernel = TypeVar("Kernel", bound=Callable[..., Any])  # a kernel has the type of the function that it compiles

_notices: list[Callable[[], object]] = []
_WITHOUT_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@contextmanager
def before_compiling(notice: Callable[[], object]) -> Iterator[None]:
    """Call `notice` once, before the first kernel inside the block that is not on disk and must be compiled."""
    _notices.append(notice)
    try:
        yield
    finally:
        if notice in _notices:
            _notices.remove(notice)


def kernel(function: Kernel) -> Kernel:
    """`numba.njit`, whose compiled code stays on disk for the next process as long as its source, the source of the kernels
    that it calls, and the constants that it reads stay the same. (numba itself checks only the function's own file: after a
    change elsewhere it would use the old code.)

    numba's index on disk names the tuple classes that a function was compiled for. Reading an index of another version of
    zbsolve fails if it names classes that no longer exist (numba checks the source's age only afterwards): then the
    function is compiled again, as after any change of its source.
    """
    return _compiled(function)


def subkernel(function: Kernel) -> Kernel:
    """A `kernel` that only kernels call, compiled without what Python would need to call it. From Python it raises
    TypeError; `py_func` is the function itself."""
    return _Subkernel(_compiled(function, **_WITHOUT_WRAPPERS))  # type: ignore[return-value]


def inner_kernel(function: Kernel) -> Kernel:
    """A `subkernel`, inlined by the compiler. It creates no array and returns only numbers, so numba can skip reference
    counting for its arrays: in a short function with many of them, counting and passing them takes longer than everything
    else."""
    return _Subkernel(_compiled(function, _nrt=False, forceinline=True, **_WITHOUT_WRAPPERS))  # type: ignore[return-value]


class _Subkernel:
    def __init__(self, made: Any) -> None:
        self.py_func, self.made = made.py_func, made  # numba's types hold what they stand for weakly
        self._numba_type_ = made._numba_type_  # its compiler reads this

    def __call__(self, *_: object) -> NoReturn:
        raise TypeError(f"only kernels can call {self.py_func.__qualname__}")  # its entry point has no code


def _compiled(function: Any, **options: Any) -> Any:
    made: Any = numba.njit(cache=True, nogil=True, **options)(function)
    on_disk = made._cache
    load = on_disk.load_overload

    def load_overload(signature: Any, context: Any) -> Any:
        on_disk._cache_file._source_stamp = rests_on(function)  # not earlier: now the module is complete
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
    """A digest of everything that a kernel's compiled code depends on, the same in every process: its own source file and
    those of all kernels that it calls, and the constants that they read, also from other modules."""
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
    """What a function reads from its module, from modules of this project, and from enclosing functions, by name."""
    names = list(_names(function.__code__))
    known = {name: function.__globals__[name] for name in names if name in function.__globals__}
    own = function.__module__.partition(".")[0]
    for module in [item for item in known.values() if isinstance(item, ModuleType) and item.__name__.startswith(f"{own}.")]:
        known |= {f"{module.__name__}.{name}": getattr(module, name) for name in names if hasattr(module, name)}
    return {**known, **inspect.getclosurevars(function).nonlocals}


def _plain(values: tuple[Any, ...]) -> bool:
    return all(isinstance(v, bool | int | float | str) or (isinstance(v, tuple) and _plain(v)) for v in values)


def _names(code: CodeType) -> set[str]:
    """The names that code, including nested code, reads."""
    inside = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inside)


@cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
