"""On PYTHONPATH, with MAKE_BELIEVE_GPUS=4 and MAKE_BELIEVE_BUILT, a process begins with four make-believe GPUs."""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

if os.environ.get("MAKE_BELIEVE_GPUS"):
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    for name in ("libgomp.so.1", "libc10.so", "libtorch_cpu.so"):  # what torch asks about its devices comes before torch
        library = Path(found.origin).parent / "lib" / name
        if library.exists():
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.environ["MAKE_BELIEVE_BUILT"] + "/hooks.so", ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch_cuda  # noqa: F401

    sys.path.pop(0)
