"""Compiled functions, cached on disk and run without the interpreter's lock."""

from __future__ import annotations

from typing import Any

import numba


def kernel(function: Any) -> Any:
    """`numba.njit`, whose compiled code stays on disk for the next process.

    Numba's index on disk names the tuple classes that a function was compiled for. Where another version of zbsolve left an
    index that names classes of its own, reading it fails (numba looks at the age of the source only afterwards): then the
    function is compiled anew, as for any change of its source.
    """
    return _compiled(function)


def inner_kernel(function: Any) -> Any:
    """A `kernel` that only kernels call, compiled into each of them. It makes no array and returns nothing but numbers, so
    numba need not count who uses its arrays: in a short function with many of them, counting and handing them over takes
    longer than all else."""
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: Any, **options: Any) -> Any:
    made: Any = numba.njit(cache=True, nogil=True, **options)(function)
    cache = made._cache
    load = cache.load_overload

    def load_overload(signature: Any, context: Any) -> Any:
        try:
            return load(signature, context)
        except (AttributeError, ImportError):  # a class or a module that this version does not have
            cache.flush()
            return None

    cache.load_overload = load_overload
    return made
