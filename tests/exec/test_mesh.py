"""Pipelines on meshes: tensor and data parallelism beside them, and the gradients of the whole model in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import gelu, scaled_dot_product_attention

from zbsolve import BadInput
from zbsolve.cli import main
from zbsolve.exec import Pipeline
from zbsolve.exec.base.values import is_dtensor
from zbsolve.exec.mesh import coordinate_of, located, mesh_sizes, process_of

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule, refusal
from ..support.trials import Batches, Trial, mesh_of, too_far, tried

pytestmark = pytest.mark.slow


WIDTH, LENGTH, HEADS = 8, 6, 4


class Block(nn.Module):
    """A transformer block with dropout, whose heads may be spread."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o, self.up, self.down = (
            nn.Linear(a, b) for a, b in [(WIDTH, WIDTH)] * 4 + [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)]
        )
        self.k.bias = None  # its gradient is 0, so its rounding would be all that is compared
        self.heads, self.dropout = HEADS, nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (w(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.dropout(self.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        y: Tensor = x + self.down(gelu(self.up(x)))
        return y


class Layout(nn.Module):
    """Hands its input on as a DTensor with these placements, or as a local tensor (None). Parameters keep their names, as in
    torch's own wrappers."""

    def __init__(self, inner: nn.Module, mesh: Any, given: Any, made: Any) -> None:
        super().__init__()
        self._orig_mod, self.mesh, self.given, self.made = inner, mesh, given, made

    def forward(self, x: Any) -> Any:
        assert isinstance(x, DTensor) == (self.given is not None)
        if self.given is not None:
            assert tuple(x.placements) == (self.given,)
            assert x.device_mesh == self.mesh
            x = x.redistribute(placements=[Replicate()]).to_local()
        y = self._orig_mod(x)
        if self.made is None:
            return y
        y = DTensor.from_local(y, self.mesh, [Replicate()], run_check=False)
        if self.made.is_partial():  # a product of shards, which nobody has added up
            whole = DTensor.from_local(torch.eye(WIDTH, dtype=torch.float64), self.mesh, [Replicate()], run_check=False)
            y = y.redistribute(placements=[Shard(2)]) @ whole.redistribute(placements=[Shard(0)])
            assert y.placements[0].is_partial()
            return y
        return y.redistribute(placements=[self.made])


def layers(numbers: list[int] | None = None, rate: float = 0.1) -> list[nn.Module]:
    """Four blocks, in double precision; each has numbers of its own."""
    made = []
    for i in numbers if numbers is not None else range(4):
        torch.default_generator.manual_seed(1000 + i)
        made.append(Block(rate).double())
    return made


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def batch(microbatch: int, step: int = 0) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(100 * step + microbatch)
    x, y = (torch.randn(2, LENGTH, WIDTH, generator=numbers, dtype=torch.float64) for _ in range(2))
    return x, y


def spread(stage: nn.Module, mesh: Any) -> None:
    """Tensor parallelism, in place."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    assert mesh.mesh_dim_names.count("pp") == 1
    tp = mesh["tp"]
    for block in stage.children():
        parallelize_module(
            block,
            tp,
            {**dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()), **dict.fromkeys(("o", "down"), RowwiseParallel())},
        )
        block.heads = HEADS // tp.size()


def laid_out(made: Sequence[Any], stage: nn.Module, mesh: Any) -> None:
    """Blocks hand on DTensors with these placements, layer by layer; the last one a local tensor."""
    spread(stage, mesh)
    for name, block in list(stage.named_children()):
        i = int(name)
        setattr(stage, name, Layout(block, mesh["tp"], made[i - 1] if i else None, made[i]))


def in_microbatches(place: int, step: int) -> Batches:
    pairs = [batch(3 * place + m, step) for m in range(3)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def trial(
    sizes: dict[str, int], placement: tuple[int, ...], parallelize: Any = None, steps: int = 1, data: Any = None, **how: Any
) -> Trial:
    """Steps on a mesh."""
    return Trial(
        problem=a_problem(placement, 3, layers=4, **how),
        layers=layers,
        batch=in_microbatches,
        loss=loss,
        order=1,
        steps=steps,
        options=lambda: {"mesh": mesh_of(**sizes), "parallelize": parallelize, "seed": 3, "data": data},
    )


def unchanged(stage: nn.Module, mesh: Any) -> nn.Module:
    return stage


INNER, OUTER = {"pp": 2, "tp": 2}, {"tp": 2, "pp": 2}
# In both orders, with one stage a rank, two, and a vee; with split and fused backwards.
TENSOR_PARALLEL = {
    "inner": trial(INNER, (0, 1), spread, steps=2),
    "outer": trial(OUTER, (0, 1, 0, 1), spread),
    "vee, recompute": trial(INNER, (0, 1, 1, 0), spread, recompute="all"),
    "fused": trial(INNER, (0, 1), spread, fused=True),
}
# Activations that are shards, replicas and partial sums.
BETWEEN_STAGES = {
    f"{placement} {made}": trial(INNER, placement, partial(laid_out, [*made, None]))
    for made in (
        [Shard(1)] * 3,
        [Shard(2), Replicate(), Partial()],
        [Partial(), Shard(1), Replicate()],
    )
    for placement in ((0, 1, 0, 1), (0, 1, 1, 0))
}
# Without and with a function that does nothing; dimensions of data by other names; cp has the same batch.
DATA_PARALLEL = {
    "dp": trial({"dp": 2, "pp": 2}, (0, 1, 1, 0), steps=2),
    "dp_shard": trial({"pp": 2, "dp_shard": 2}, (0, 1), unchanged),
    "rows": trial({"pp": 2, "rows": 2}, (0, 1), unchanged, data=("rows",)),
    "cp": trial({"pp": 2, "cp": 2}, (0, 1), unchanged),
}
THREE_DIMENSIONS = {
    "tensor": trial({"dp": 2, "pp": 2, "tp": 2}, (0, 1), spread, steps=2),
    "data": trial({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, (0, 1)),
}


def ran(trial: Trial, pipe: Pipeline) -> dict[str, Any]:
    """Steps on a mesh, and where this rank is in it."""
    found, mesh = trial.ran(pipe), pipe.mesh
    spread_out = [is_dtensor(p) for p in pipe.parameters()]
    return found | {"where": [mesh.coordinate, mesh.place, mesh.places], "dtensors": [sum(spread_out), len(spread_out)]}


def steps(rank: int, name: str) -> dict[str, Any]:
    return tried(rank, f"{__name__}:{name}", ran)


def refused(rank: int, _: None) -> list[str]:
    """What bad input says, on this rank."""
    mesh, schedule = mesh_of(pp=2, tp=2), random_schedule(a_problem((0, 1), 3, layers=4))

    def raising(stage: nn.Module, mesh: Any) -> None:
        raise ValueError("no plan")

    def another(stage: nn.Module, mesh: Any) -> nn.Module:
        return nn.Linear(2, 2)

    tries: list[dict[str, Any]] = [
        {"mesh": mesh_of(stages=2, tp=2)},
        {"mesh": mesh_of(pp=4)},
        {"mesh": mesh, "data": ("rows",)},
        {"mesh": mesh, "data": ("pp",)},
        {"mesh": mesh, "group": mesh.get_group("pp")},
        {"mesh": 4},
        {"data": ("dp",)},
        {"parallelize": spread, "group": mesh.get_group("pp")},
        {"mesh": mesh, "parallelize": raising},
        {"mesh": mesh, "parallelize": another},
        {"mesh": mesh, "parallelize": lambda stage, mesh: 3},
        {"mesh": mesh, "device": "meta"},
    ]
    return [refusal(partial(Pipeline, layers, schedule, loss=loss, **one)) for one in tries]


def counted_bytes(rank: int, _: None) -> list[int]:
    """Bytes that live while DTensors are made: of what is here, each once."""
    from zbsolve.exec.memory import LiveBytes

    mesh = mesh_of(pp=2, tp=2)["tp"]
    x = DTensor.from_local(torch.randn(4, 8), mesh, [Shard(1)], run_check=False)
    weight = torch.nn.Parameter(DTensor.from_local(torch.randn(8, 8), mesh, [Shard(0)], run_check=False))
    found = []
    with LiveBytes([x, weight]) as meter:
        found.append(meter.now)
        doubled = x * 2
        found.append(meter.now)
        y = doubled @ weight
        found.append(meter.now)
        del doubled
        found.append(meter.now)
        del y
        found.append(meter.now)
    return found


STEPS = ("TENSOR_PARALLEL", "BETWEEN_STAGES", "DATA_PARALLEL")
EXACT = 1e-13


@pytest.fixture(scope="module")
def four() -> dict[str, list[Any]]:
    """What four ranks found in one launch, by the names of trials and jobs."""
    jobs = [*(("steps", name) for name in STEPS), ("refused", None), ("counted_bytes", None)]
    found = on_ranks(4, __name__, jobs)
    return {name: [rank[i] for rank in found] for i, name in enumerate((*STEPS, "refused", "counted_bytes"))}


def test_tensor_parallel_stages_have_the_gradients_of_the_whole_model(four: dict[str, list[Any]]) -> None:
    ranks = four["TENSOR_PARALLEL"]
    assert too_far(ranks, EXACT) == {}
    for rank in ranks:
        for one in rank.values():
            assert one["where"][1:] == [0, 1]
            assert 0 < one["dtensors"][0] < one["dtensors"][1]
    assert [rank["inner"]["where"][0] for rank in ranks] == ["tp=0", "tp=1", "tp=0", "tp=1"]
    assert [rank["outer"]["where"][0] for rank in ranks] == ["tp=0", "tp=0", "tp=1", "tp=1"]


def test_dtensors_are_rebuilt_at_the_other_end(four: dict[str, list[Any]]) -> None:
    """Shards, replicas and partial sums, over the wire and within a rank; the job asserts what arrives."""
    assert too_far(four["BETWEEN_STAGES"], EXACT) == {}
    assert [len(rank) for rank in four["BETWEEN_STAGES"]] == [6] * 4


def test_data_coordinates_average_and_others_do_not(four: dict[str, list[Any]]) -> None:
    """The second dimension: dp, dp_shard, rows (said to be of data) and cp, which has the same batch."""
    ranks = four["DATA_PARALLEL"]
    assert too_far(ranks, EXACT) == {}
    for rank in ranks:
        assert {name: one["where"][2] for name, one in rank.items()} == {"dp": 2, "dp_shard": 2, "rows": 2, "cp": 1}
    assert [rank["dp"]["where"][1] for rank in ranks] == [0, 0, 1, 1]
    assert [rank["dp_shard"]["where"][1] for rank in ranks] == [0, 1, 0, 1]


def test_what_does_not_fit_is_said_in_a_line(four: dict[str, list[Any]]) -> None:
    for i, said in enumerate(four["refused"]):
        rank, tp = divmod(i, 2)
        where = f"rank {rank}, stage {rank} (tp={tp}): parallelize"
        assert said[:8] == [
            "mesh: no dimension is called 'pp': 'stages', 'tp'",
            "the schedule is for 2 ranks, but the process group has 4",
            "data: 'rows' is none of the mesh's dimensions beside 'pp': 'pp', 'tp'",
            "data: 'pp' is none of the mesh's dimensions beside 'pp': 'pp', 'tp'",
            "Pipeline: mesh says which ranks there are: leave out group and replicas",
            "mesh: a int is no torch.distributed DeviceMesh",
            "Pipeline: data names dimensions of a mesh: give mesh too",
            "Pipeline: parallelize is for a mesh: give mesh too",
        ]
        assert said[8].startswith(f"{where} raised ValueError at ")
        assert said[8].endswith("no plan")
        assert said[9] == f"{where} gave a Linear without layer '{2 * rank}': wrap layers, not the stage"
        assert said[10] == f"{where} returned a int: it must be a module, or None"
        assert said[11] == "mesh: it is of cpu devices, but device is meta"


def test_three_dimensions() -> None:
    ranks = on_ranks(8, f"{__name__}:steps", "THREE_DIMENSIONS")
    assert too_far(ranks, EXACT) == {}
    for rank, found in enumerate(ranks):
        assert found["tensor"]["where"][1:] == [rank // 4, 2]
        assert found["tensor"]["dtensors"][0]
        assert found["data"]["where"][1:] == [rank % 4, 4]


def test_bytes_of_dtensors_are_those_that_are_here(four: dict[str, list[Any]]) -> None:
    """A product of shards, 4 × 8 numbers on each coordinate, keeps its input for the backward."""
    assert four["counted_bytes"] == [[0, 128, 256, 256, 0]] * 4


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("pp=2,tp", "'tp' is no NAME=SIZE, such as pp=2"),
        ("pp=2,tp=two", "'tp=two' is no NAME=SIZE, such as pp=2"),
        ("pp=2,tp=0", "'tp=0' is no NAME=SIZE, such as pp=2"),
        ("pp=2,,tp=2", "'' is no NAME=SIZE, such as pp=2"),
        ("pp=2,pp=2", "'pp' is there twice"),
        ("pp=4,dp=2", "pp is 4, but the schedule is for 2 ranks"),
    ],
)
def test_a_malformed_mesh_is_said_in_a_line(text: str, line: str) -> None:
    with pytest.raises(BadInput) as said:
        mesh_sizes(text, 2)
    assert str(said.value) == f"--mesh '{text}': {line}"


def test_a_mesh_has_its_dimensions_in_order() -> None:
    assert mesh_sizes("", 4) == {"pp": 4}
    assert mesh_sizes("dp=2,tp=3", 4) == {"dp": 2, "tp": 3, "pp": 4}  # the innermost where it is left out
    assert list(mesh_sizes("dp=2", 4).items()) == [("dp", 2), ("pp", 4)]
    assert list(mesh_sizes(" pp=4, tp=2", 4).items()) == [("pp", 4), ("tp", 2)]


def test_processes_are_counted_with_the_last_dimension_fastest() -> None:
    sizes = {"dp": 2, "pp": 3, "tp": 2}
    assert coordinate_of(sizes, 7) == {"dp": 1, "pp": 0, "tp": 1}
    assert [process_of(sizes, 7, peer) for peer in range(3)] == [7, 9, 11]
    assert [process_of({"pp": 3}, 2, peer) for peer in range(3)] == [0, 1, 2]
    assert located(sizes, 7, "rank 2, pass 0F0: no") == "rank 2 (dp=1, tp=1), pass 0F0: no"
    assert located({"pp": 3}, 1, "rank 2, pass 0F0: no") == "rank 2, pass 0F0: no"


Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def run(forked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`zbsolve run --local` of a small schedule: exit code, the numbers, standard error."""
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "s.json"
    random_schedule(a_problem((0, 1), microbatches=2, layers=4), 1).save(path)

    def of(model: str, *options: str) -> tuple[int, dict[str, Any], str]:
        size = ["--steps", "2", "--warmup", "0", "--local", "--json"]
        code = main(["run", str(path), "--model", f"tests.support.{model}", *size, *options])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else {}, said.err

    return of


@pytest.mark.parametrize(
    ("mesh", "places"),
    [
        ("pp=2,tp=2", 1),
        ("tp=2,pp=2", 1),
        ("pp=2,dp=2", 2),
        ("dp=2,pp=2,tp=2", 2),
        ("pp=2,dp_shard=2", 2),  # FSDP reduces
        ("dp_replicate=2,pp=2,dp_shard=2", 4),  # HSDP
    ],
)
def test_a_run_on_a_mesh_has_the_unsplit_models_gradients(run: Run, mesh: str, places: int) -> None:
    code, said, errors = run("mesh_model:pipeline", "--mesh", mesh, "--check")
    assert code == 0, errors
    assert said["check"]["passed"]
    assert said["check"]["tensors"] == 24
    assert said["mesh"] == mesh_sizes(mesh, 2)
    assert (said["replicas"], said["ranks"], len(said["losses"])) == (places, 2, 2)


def test_the_check_looks_at_every_coordinate(run: Run) -> None:
    code, said, _ = run("mesh_model_wrong:pipeline", "--mesh", "pp=2,tp=2", "--check")
    assert code == 1
    assert not said["check"]["passed"]
    assert said["check"]["where"].endswith("(tp=1)")


def test_what_a_mesh_cannot_run_is_refused(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    many = (
        "zbsolve run: --local: --mesh pp=2,tp=1000 are 2000 processes here, more than 1000: use torchrun on several machines"
    )
    assert run("mesh_model:pipeline", "--mesh", "pp=2,tp=1000") == (2, {}, f"{many}\n")
    path = tmp_path / "s.json"
    assert main(["run", str(path), "--model", "mlp-4", "--local", "--mesh", "tp=2,pp=2"]) == 2
    assert capsys.readouterr().err == (
        "zbsolve run: --mesh tp=2,pp=2: model 'mlp-4' has no parallelize(stage, mesh), which tp needs\n"
    )
    assert main(["run", str(path), "--model", "mlp-4", "--one-device", "cpu", "--mesh", "dp=2,pp=2"]) == 2
    assert capsys.readouterr().err == "zbsolve run: one device: a mesh needs processes of its own\n"
