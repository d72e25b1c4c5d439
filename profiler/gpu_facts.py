"""What a GPU says of itself: the size of its cache and the clock of its multiprocessors."""

from __future__ import annotations

import torch

from .timing import Clock


def cache_bytes(device: torch.device) -> int:
    """Bytes of a GPU's second-level cache; 0 on a CPU, whose passes are timed as a process there finds its caches."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def clock_of(device: torch.device) -> Clock:
    """Reads the clock of a GPU's multiprocessors, MHz, as found: nothing here sets it. It says None on a CPU, and where
    NVIDIA's management library is missing (nvidia-ml-py, in zbsolve[cuda])."""

    def read() -> int | None:
        try:
            return torch.cuda.clock_rate(device)
        except Exception:  # each way of not knowing has an error of its own
            return None

    return read if device.type == "cuda" else lambda: None
