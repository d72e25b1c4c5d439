"""What the functions of a training loop need of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...util.errors import BadInput
from ..backward.stage import Stage
from ..base.part import Hooks, Part
from ..exchange.replicas import Replicas
from ..exchange.shared import Shared
from ..mesh.place import PipelineMesh
from ..slices.cutting import Counting, Cutting
from ..step_view import StepView
from ..transport.failure import LostRank
from ..transport.peers import Peers, together
from ..transport.wires import Wires, reason
from ..updates import WeightVersions
from ..vocabulary.whole import WholeVocabulary

SAID_BYTES = 512  # of what did not work on a rank


class OnRank(Protocol):
    """One rank's pipeline: see `Pipeline`. group: its process group, None for the default one. rounds: programs of forwards
    that were made so far. cutting: how sequences are cut into slices. counting: which labels count
    in the loss."""

    view: StepView
    group: Any
    mesh: PipelineMesh | None
    device: torch.device
    rank: int
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    cutting: Cutting
    counting: Counting
    wires: Wires
    peers: Peers
    hooks: Hooks
    module: nn.ModuleDict
    stages: Mapping[int, Stage]
    shared: Shared
    versions: Mapping[int, WeightVersions]
    vocabulary: WholeVocabulary | None
    replicas: Replicas | None
    place: int
    seed: int
    steps: int
    rounds: dict[Any, Any]

    @property
    def parts(self) -> Sequence[Part]:
        """What features have here."""

    def finish(self) -> None:
        """Wait until the optimizer's last step is final."""

    def wait_gradients(self) -> None:
        """Wait until `.grad` is the mean over all replicas."""


def beside(pipeline: OnRank, numbers: Sequence[float], what: str) -> Tensor:
    """The numbers of all ranks beside this one, shape (ranks, numbers), in one order on each; they call this together. One
    row without a mesh. Raises RunFailed naming `what`."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    group = None if pipeline.mesh is None else pipeline.mesh.beside
    return mine[None] if group is None else _gathered(pipeline, mine, group, what)


@contextmanager
def together_on_mesh(pipeline: OnRank, what: str) -> Iterator[None]:
    """Inside, each rank does what it does by itself; where one cannot, all ranks of the mesh raise. Raises RunFailed where
    one is lost."""
    said: BadInput | None = None
    try:
        with together(pipeline.peers, what):
            yield
    except BadInput as error:
        said = error
    group = None if pipeline.mesh is None else pipeline.mesh.beside
    if group is not None:
        text = str(said or "").encode()[:SAID_BYTES].ljust(SAID_BYTES)
        rows = _gathered(pipeline, torch.frombuffer(bytearray(text), dtype=torch.uint8), group, what)
        texts = [row.numpy().tobytes().decode(errors="replace").strip() for row in rows]
        if said is None and any(texts):
            raise BadInput(next(filter(None, texts)))
    if said is not None:
        raise said


def _gathered(pipeline: OnRank, mine: Tensor, group: Any, what: str) -> Tensor:
    mine = mine.to(pipeline.device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with pipeline.peers.telling(what):
        try:
            work: Any = dist.all_gather(rows, mine, group=group, async_op=True)
            work.wait(pipeline.peers.timeout)
        except RuntimeError as error:
            raise LostRank(f"waiting for the ranks beside: {reason(error)}") from None
    return torch.stack(rows).cpu()
