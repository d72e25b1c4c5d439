"""Tensor and sequence parallelism inside stages: both splits give eager's gradients, and W has all matrices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from zbsolve import Schedule, pipeline, preset
from zbsolve.exec import Pipeline
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.check import difference
from zbsolve.exec.graphs.auto import parts_by_name
from zbsolve.exec.graphs.graph_split import graphs_of
from zbsolve.exec.graphs.sharing import SharedGraphs
from zbsolve.exec.offload.keeper import Keeper, room_for

from ..support.exec_ranks import on_ranks
from ..support.tensor_parallel import WIDTH, WORDS, Block, loss, model, parallel, placements, whole

pytestmark = pytest.mark.slow


BLOCKS, MICROBATCHES = 2, 2


def batch(microbatch: int) -> tuple[Tensor, Tensor]:
    """Two rows of words, and what comes after each."""
    words = torch.randint(WORDS, (2, 9), generator=torch.Generator().manual_seed(microbatch))
    return words[:, :-1], words[:, 1:]


def trained(layers: Sequence[nn.Module]) -> nn.Sequential:
    """The layers with the gradients of a step of plain autograd."""
    found = nn.Sequential(*layers)
    for m in range(MICROBATCHES):
        x, targets = batch(m)
        (loss(found(x), targets) / MICROBATCHES).backward()
    return found


def compared(layers: nn.Module, eager: nn.Module, plain: nn.Module) -> dict[str, Any]:
    """The largest differences to eager tensor parallelism and to one process; gradients that lie otherwise than eager's."""
    rows = [
        (name, p.grad, eager.get_parameter(name).grad, plain.get_parameter(name).grad)
        for name, p in layers.named_parameters()
    ]
    return {
        "eager": max(difference(whole(mine), whole(theirs)) for _, mine, theirs, _ in rows),
        "plain": max(difference(whole(mine), right) for _, mine, _, right in rows),
        "elsewhere": [name for name, mine, theirs, _ in rows if placements(mine) != placements(theirs)],
        "partial": sum("Partial" in placements(mine) for _, mine, _, _ in rows),
    }


def without_pipeline(rank: int, jobs: list[tuple[str, str, bool]]) -> list[dict[str, Any]]:
    """(plan, split, biases) → gradients of one stage against eager's; what W has to do; how many pieces of memory one of the
    microbatches had elsewhere between F and B."""
    from torch.distributed.tensor.debug import CommDebugMode  # it imports torch._dynamo, which takes a second

    warnings.simplefilter("ignore")
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    for how, split, bias in jobs:
        layers = parallel(model(BLOCKS, bias), mesh, how)
        stage = Stage(layers, 0, loss, 1 / MICROBATCHES, parts=parts_by_name(split)(layers, 0, loss))
        keeper = Keeper(torch.device("cpu"), batch(1))
        for m in range(MICROBATCHES):
            stage.forward(m, *batch(m), split=True, keeper=keeper if m == 1 else None)
        moved = away_and_back(keeper, 0.7)
        for m in range(MICROBATCHES):
            stage.backward(m, None)
        before = [p.grad is None for layer in layers[1:-1] for p in layer.parameters() if p.dim() > 1]
        with CommDebugMode() as collectives:
            for m in range(MICROBATCHES):
                stage.weights(m)
        eager, plain = trained(parallel(model(BLOCKS, bias), mesh, how)), trained(model(BLOCKS, bias))
        found.append(
            compared(nn.Sequential(*layers), eager, plain)
            | {"moved": moved, "left": sum(before), "matrices": len(before), "collectives": collectives.get_total_counts()}
        )
    return found


def away_and_back(keeper: Keeper, share: float) -> int:
    """What a microbatch keeps leaves the device and comes back. How many pieces of memory moved."""
    pieces = keeper.chosen(share)
    buffer = torch.empty(room_for(pieces), dtype=torch.uint8)
    for one in pieces:
        buffer[one.place : one.place + one.moved].copy_(one.bytes_on_device()[: one.moved])
        one.leave()
    for one in pieces:
        one.come_back().copy_(buffer[one.place : one.place + one.moved])
    return len(pieces)


def graphs(rank: int, _: None) -> dict[str, Any]:
    """What the graphs of tensor-parallel blocks are like, and who shares them."""
    warnings.simplefilter("ignore")
    mesh, shared = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), SharedGraphs(graphs_of)
    x = torch.zeros(2, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    first, second = (parallel(model(2), mesh, "sequence")[i] for i in (1, 2))
    other = parallel([Block().double()], mesh, "tensor")[0]
    found = shared.split(first, 1, x, 0).graphs
    pieces = {"F": found.cut.forward, "B": found.cut.backward, "W": found.cut.weights}
    targets = {
        name: [str(n.target) for n in piece.graph.graph.nodes if n.op == "call_function"] for name, piece in pieces.items()
    }
    return {
        "same": shared.split(second, 2, x, 0).graphs is found,
        "other": shared.split(other, 1, x, 0).graphs is found,
        "collectives": {name: sum("_c10d_functional" in one for one in names) for name, names in targets.items()},
        "products": sum(".mm." in one for one in targets["W"]),
    }


class Twice(nn.Module):
    """Takes a DTensor and a plain tensor; gives one that it was given, another DTensor, and one without a gradient."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        for name, parameter in list(self.layer.named_parameters()):
            setattr(self.layer, name, nn.Parameter(DTensor.from_local(parameter.detach(), mesh, [Replicate()])))

    def forward(self, given: Any) -> Any:
        x, mask, skip = given
        return self.layer(x).tanh() * 2, mask, skip


def handed_on(rank: int, split: str) -> dict[str, Any]:
    """Layers that hand on several tensors, DTensors among them, one of which nobody uses."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(2)
    layers = [Twice(mesh) for _ in range(3)]
    other = [Twice(mesh) for _ in range(3)]
    nn.Sequential(*other).load_state_dict(nn.Sequential(*layers).state_dict())

    def made(seed: int) -> Any:
        numbers = torch.Generator().manual_seed(seed)
        parts = [torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=numbers) for _ in range(2)]
        x, skip = (DTensor.from_local(part, mesh, [Shard(0)]).requires_grad_() for part in parts)
        return x, torch.ones(3), skip

    def total(given: Any, _: Any) -> Tensor:
        y, _, skip = given
        return y.square().mean().full_tensor() + skip.sum().full_tensor() * 0.1

    stage = Stage(layers, 1, total, 1.0, parts=parts_by_name(split)(layers, 1, total))
    inputs = made(7)
    stage.forward(0, inputs, None, split=True)
    gradients = stage.backward(0, None)
    stage.weights(0)
    again = made(7)
    total(nn.Sequential(*other)(again), None).backward()
    rights = [again[0].grad, again[2].grad]
    return {
        "inputs": max(difference(whole(a), whole(b)) for a, b in zip(gradients, rights, strict=True)),
        "weights": max(
            difference(whole(a.grad), whole(b.grad))
            for a, b in zip(nn.Sequential(*layers).parameters(), nn.Sequential(*other).parameters(), strict=True)
        ),
        "kinds": [type(one).__name__ for one in gradients],
    }


def order(layers: int) -> Schedule:
    """ZB-H1 on two ranks."""
    half = [layers // 2, layers - layers // 2]
    times = [100 * n for n in half]
    return preset("zb-h1", pipeline(F=times, B=times, W=times, microbatches=MICROBATCHES, layers=half))


def with_pipeline(rank: int, jobs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """(plan, split) → gradients of a pipeline on pp × tp against one process."""
    warnings.simplefilter("ignore")
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")), []
    for how, split in jobs:
        layers = parallel(model(BLOCKS), mesh["tp"], how)
        runner = Pipeline(layers, order(len(layers)), loss=loss, group=mesh.get_group("pp"), split=split)
        inputs, targets = ([batch(m)[i] for m in range(MICROBATCHES)] for i in (0, 1))
        value = runner.step(inputs, targets).loss
        plain = trained(model(BLOCKS))
        right = sum(float(loss(plain(x), y).detach()) for x, y in zip(inputs, targets, strict=True)) / MICROBATCHES
        eager = trained(parallel(model(BLOCKS), mesh["tp"], how))
        found.append(compared(runner.module, eager, plain) | {"loss": [value, right]})
    return found


PLANS = ("tensor", "sequence", "distributed")
# The graph of the sequence's plan: in a pipeline, below, and what it is like.
JOBS = [
    (how, split, (split == "layers") == (how == "tensor"))
    for how in PLANS
    for split in ("layers", "graph")
    if (how, split) != ("sequence", "graph")
]


@pytest.fixture(scope="module")
def two() -> list[list[Any]]:
    """What each job gave on each of two ranks."""
    jobs = [("without_pipeline", JOBS), ("graphs", None), ("handed_on", "layers"), ("handed_on", "graph")]
    return on_ranks(2, __name__, jobs)


def test_gradients_are_those_of_eager_mode_and_of_one_process(two: list[list[Any]]) -> None:
    for found in two:
        for job, one in zip(JOBS, found[0], strict=True):
            assert max(one["eager"], one["plain"]) < 1e-12, job
            assert one["elsewhere"] == [], job
            assert (one["partial"] > 0) == (job[0] != "tensor"), job  # the norms' under sequence parallelism


def test_W_has_every_matrix_and_needs_no_other_rank(two: list[list[Any]]) -> None:
    for found in two:
        for job, one in zip(JOBS, found[0], strict=True):
            assert one["left"] == one["matrices"] == 14, job
            assert one["moved"] > 3, job
            if job[0] == "tensor" or job[1] == "layers":  # else the graph of the words' layer, which has no B, gathers there
                assert one["collectives"] == 0, job


def test_equal_blocks_share_graphs_and_collectives_are_in_F_and_B(two: list[list[Any]]) -> None:
    for found in two:
        one = found[1]
        assert one["same"]
        assert not one["other"]
        assert one["products"] == 7
        assert min(one["collectives"][kind] for kind in "FB") > 0
        assert one["collectives"]["W"] == 0


def test_distributed_tensors_are_handed_on_with_others(two: list[list[Any]]) -> None:
    for found in two:
        for one in found[2:]:
            assert max(one["inputs"], one["weights"]) < 1e-13
            assert one["kinds"] == ["DTensor", "DTensor"]


def test_a_pipeline_of_tensor_parallel_stages_is_right() -> None:
    jobs = [("tensor", "layers"), ("sequence", "graph")]
    for found in on_ranks(4, f"{__name__}:with_pipeline", jobs):
        for job, one in zip(jobs, found, strict=True):
            assert one["loss"][0] == pytest.approx(one["loss"][1], rel=1e-12), job
            assert max(one["eager"], one["plain"]) < 1e-12, job
            assert one["elsewhere"] == [], job
