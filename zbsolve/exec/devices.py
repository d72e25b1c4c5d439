"""Which device a process computes on: the choice that `run` and `profile` share."""

from __future__ import annotations

import torch

from ..util.errors import BadInput

DEVICES = ("auto", "cuda", "cpu")


def choose(asked: str, local_ranks: int = 1, share: bool = False) -> str:
    """The kind of device, "cuda" or "cpu", that `asked` means for so many ranks of this machine. "auto" is cuda where each
    rank has a GPU of its own, or where ranks share those that are there. Raises BadInput where there are too few."""
    if asked not in DEVICES:
        raise BadInput(f"device '{asked}': one of {', '.join(DEVICES)}")
    gpus = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    enough = gpus >= (1 if share else local_ranks)
    if asked == "auto":
        return "cuda" if enough else "cpu"
    if asked == "cuda" and not gpus:
        raise BadInput("device 'cuda': torch sees no CUDA device here")
    if asked == "cuda" and not enough:
        have = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        raise BadInput(f"device 'cuda': {local_ranks} ranks of this machine have {have}: let them share with --share-gpus")
    return asked


def device_of(kind: str, local_rank: int = 0, share: bool = False) -> torch.device:
    """The device of one rank of this machine. share: ranks take the GPUs in turn."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, local_rank % torch.cuda.device_count() if share else local_rank)


def described(device: torch.device) -> str:
    """The device and its name, such as `cuda:0, NVIDIA H100 80GB HBM3`; `cpu`."""
    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
