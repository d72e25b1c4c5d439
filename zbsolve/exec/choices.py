"""What a user of `run` and `profile` can choose, readable without torch: the device of a process, and how the backward is
split (see `graphs.auto`). Also tables and text of how splits were decided."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..schedule.trace import SLACK
from ..util.errors import BadInput
from ..util.text import format_bytes, plural

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cuda", "cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # of process groups


def choose(asked: str, local_ranks: int = 1, share: bool = False) -> str:
    """The kind of device, "cuda" or "cpu", for this machine's ranks. `asked` "auto": cuda if each rank has a GPU of
    its own, or if ranks share those that there are. Raises BadInput where there are too few GPUs."""
    if asked not in DEVICES:
        raise BadInput(f"device '{asked}': one of {', '.join(DEVICES)}")
    gpus = 0
    if asked != "cpu":
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= (1 if share else local_ranks)
    if asked == "auto":
        return "cuda" if enough else "cpu"
    if asked == "cuda" and not gpus:
        raise BadInput("device 'cuda': torch sees no CUDA device here")
    if asked == "cuda" and not enough:
        few = f"{local_ranks} ranks of this machine have {plural(GPU=gpus)}"
        raise BadInput(f"device 'cuda': {few}: let them share with --share-gpus")
    return asked


def device_of(kind: str, local_rank: int = 0, share: bool = False) -> torch.device:
    """The device of one rank of this machine. share: several ranks may get the same GPU."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, local_rank % torch.cuda.device_count() if share else local_rank)


def local_place() -> tuple[int, int]:
    """This process's number among those that torchrun started on this machine, and their count; (0, 1) without torchrun."""
    return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def described(device: torch.device) -> str:
    """The device and its name, such as `cuda:0, NVIDIA H100 80GB HBM3`; `cpu`."""
    import torch

    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def group_device(mesh: Any, group: Any) -> torch.device:
    """The device of a pipeline that was given none: a GPU, if the group (None: the default one) or the mesh carries CUDA
    tensors. It is the GPU that the group is bound to; else the current one, if that is not the first; else the one of
    LOCAL_RANK."""
    import torch
    import torch.distributed as dist

    from .base.torch_private import backend_name, default_group

    if not torch.cuda.is_available() or not dist.is_initialized() or (mesh is not None and mesh.device_type != "cuda"):
        return torch.device("cpu")
    group = default_group() if group is None else group
    if mesh is None and backend_name(group, torch.device("cuda")) != "nccl":
        return torch.device("cpu")
    bound = getattr(group, "bound_device_id", None) or getattr(default_group(), "bound_device_id", None)
    if bound is not None:
        return with_number(bound)
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    return torch.device("cuda", current or local_place()[0] % torch.cuda.device_count())


def with_number(device: torch.device) -> torch.device:
    """The device with its number: without one, "cuda" is the current GPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


SPLITS = ("layers", "graph", "graph:least", "inductor", "inductor:least", "auto", "auto:inductor")
RUN_SPLITS = (*SPLITS, f"layers{SLACK}", f"graph{SLACK}")  # all values of run's --split
# What a block costs for one microbatch with one split: µs of F, B and W; bytes held after F and after B.
COSTS = ("F", "B", "W", "after_F", "after_B")
Row = dict[str, Any]


def merged(tables: Iterable[Sequence[Row]]) -> list[Row]:
    """Rows of several ranks as one table (see `Pipeline.splits`): rows with the same decision become one, with the costs of
    the first."""
    alike: dict[tuple[str, str, str], Row] = {}
    for row in (row for table in tables for row in table):
        first = alike.setdefault((row["block"], row["split"], row["why"]), row | {"layers": []})
        first["layers"] = sorted({*first["layers"], *row["layers"]})
    return sorted(alike.values(), key=lambda row: row["layers"])


def as_line(row: Row) -> str:
    """A row in words: "layers 1–4 (Block): graph, 310 µs a microbatch (layers 330 µs)"."""
    numbers, costs = row["layers"], row["costs"]
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    ranges = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))
    head = f"layer{'s' * (len(numbers) > 1)} {ranges} ({row['block']}): {row['split']}"
    if not costs:
        return f"{head}: {row['why']}"
    texts = {
        name: f"{cost['F'] + cost['B'] + cost['W']:.0f} µs and {format_bytes(max(cost['after_F'], cost['after_B']))}"
        for name, cost in costs.items()
    }
    others = ", ".join(f"{name} {text}" for name, text in texts.items() if name != row["split"])
    line = f"{head}, {texts[row['split']]} a microbatch" + (f" ({others})" if others else "")
    return f"{line}; {row['why']}" if row["why"] else line
