"""Sharded parameters (FSDP2): two pipelines of two ranks each, and the gradients of the whole batch in one process."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zbsolve import Problem, Schedule, pipeline
from zbsolve.build import with_offload, with_sharding
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.base import torch_private as private
from zbsolve.exec.check import named
from zbsolve.exec.emulate import Times
from zbsolve.exec.sharding.rank import Sharding
from zbsolve.systems import preset

from ..support.exec_ranks import jobs_on
from ..support.exec_tools import Resting, a_problem, devices_alone, metered, part_of, random_schedule, refusal, worst
from ..support.trainings import Training, all_trained, trained
from ..support.trials import Batches, Trial, mesh_of, too_far, tried

pytestmark = pytest.mark.slow


LAYERS, MICROBATCHES, SEED = 4, 4, 3
LIMIT = {"loss": nn.functional.mse_loss, "seed": SEED}


class Block(nn.Module):
    """Shapes that no number of ranks divides, a frozen parameter, one that is never used, one that is not always `used`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.default_generator.manual_seed(number)
        self.inner, self.norm, self.outer = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.never, self.some = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((1,), 1.5))
        self.dropout, self.number = nn.Dropout(0.1), number
        self.used = True

    def put(self, place: int) -> None:
        """On the ranks of this place."""
        self.used = not place or self.number < LAYERS - 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.outer(nn.functional.gelu(self.norm(self.inner(x))))) * self.frozen
        return y * self.some if self.used else y * 1.0


def pp_by_dp() -> Any:
    return mesh_of(pp=2, dp=2)


def fully(mesh: Any) -> Any:
    """Shards layers over the ranks of a mesh, each on its own."""

    def wrap(made: list[nn.Module]) -> None:
        for one in made:
            fully_shard(one, mesh=mesh())

    return wrap


def blocks(numbers: Any = range(LAYERS)) -> list[nn.Module]:
    return [Block(i).double() for i in numbers]


def put(layers: Any, place: int, step: int) -> None:
    """Some parameters are not used at some places."""
    for layer in layers.values():
        layer.put(place)


def batch(place: int, step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(10 * step + place)
    x = torch.randn(2 * MICROBATCHES, 5, generator=numbers, dtype=torch.float64)
    return x, x.flip(0)


def in_microbatches(place: int, step: int) -> Batches:
    x, y = batch(place, step)
    return x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)


def trial(problem: Any, order: int = 0, **more: Any) -> Trial:
    """Steps of a model whose layers are sharded."""
    given = {"layers": blocks, "batch": in_microbatches, "before": put, "wrap": fully(lambda: pp_by_dp()["dp"])}
    options = {"options": lambda: {"group": pp_by_dp().get_group("pp"), "seed": SEED}}
    return Trial(problem=problem, order=order, **given | options | more)


def sharded(runner: Pipeline) -> bool:
    """Is everything sharded again, and nothing left of what was gathered?"""
    parameters = [one for stage in part_of(runner, Sharding).stages.values() for one in stage.parameters]
    left = sum(one.gathered_bytes + one.gradient_bytes for one in parameters)
    return left == 0 and {type(p).__name__ for p in runner.parameters()} == {"DTensor"}


def problem_of(gathers: int, placement: tuple[int, ...] = (0, 1, 1, 0), offload: float = 0.0, **more: Any) -> Problem:
    problem = a_problem(placement, MICROBATCHES, layers=LAYERS, held_until_W=100 if offload else 0, **more)
    problem = with_offload(problem, 3, 3, fraction=offload) if offload else problem
    return with_sharding(problem, 5, 7, parameter_bytes=100, gradient_bytes=100, gathers=gathers) if gathers else problem


def dp_options(split: str = "layers") -> Any:
    return lambda: {"group": pp_by_dp().get_group("pp"), "seed": SEED, "split": split}


CASES = {
    **{f"{gathers} gathers": problem_of(gathers) for gathers in (0, 1, 2)},
    "fused": problem_of(0, (0, 1), fused=True),
    "2 gathers, fused": problem_of(2, fused=True),
    "1 gather, recompute": problem_of(1, recompute="all"),
    "offload": problem_of(0, offload=1.0),
    "2 gathers, offload": problem_of(2, offload=0.6),
    "graph, 2 gathers, recompute": problem_of(2, recompute=(1,)),
}
# By both splits, under random schedules with and without passes AG and RS.
TRIALS = {
    name: trial(problem, number, steps=2, options=dp_options("graph" if "graph" in name else "layers"))
    for number, (name, problem) in enumerate(CASES.items())
}


def tied_whole() -> list[nn.Module]:
    """One parameter in layers of both ranks, and in two of one rank, each sharded on its own."""
    whole = blocks()
    for (a, name), (b, _name) in TIED:
        path, _dot, last = name.partition(".")
        setattr(getattr(whole[b], path), last, whole[a].get_parameter(name))
    return whole


TIED = [[(0, "inner.weight"), (1, "inner.weight")], [(0, "outer.bias"), (3, "outer.bias")]]
TRIALS["tied"] = trial(problem_of(1), 2, steps=2, whole=tied_whole, options=lambda: {**dp_options()(), "tied": TIED})
# Two replicas of two shards each (HSDP), in pipelines of one rank.
HSDP = {"pp": 1, "dp_replicate": 2, "dp_shard": 2}
TRIALS["replicas"] = trial(
    problem_of(1, (0, 0)),
    1,
    wrap=fully(lambda: mesh_of(**HSDP)["dp_replicate", "dp_shard"]),
    options=lambda: {"group": mesh_of(**HSDP).get_group("pp"), "seed": SEED},
)
TRIALS["frozen front"] = trial(
    pipeline([10, 10], BW=[0, 20], microbatches=MICROBATCHES, layers=(2, 2), untrained=1),
    layers=lambda numbers: [
        one.requires_grad_(False) if i < 2 else one for i, one in zip(numbers, blocks(numbers), strict=True)
    ],
    steps=2,
)


def gradients(rank: int, _: None) -> dict[str, Any]:
    """Of each trial, and whether all is sharded again; this rank's place."""

    def run(trial: Trial, pipe: Pipeline) -> dict[str, Any]:
        return trial.ran(pipe) | {"sharded": sharded(pipe), "place": pipe.place}

    return tried(rank, f"{__name__}:TRIALS", run)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


TRAININGS = {
    "plain": Training(trial=trial(problem_of(1), 5), optimizer=adamw, held_out=9),
    "scaled": Training(trial=trial(problem_of(1), 5), optimizer=adamw, scale=8.0),
}


def trainings(rank: int, folder: str) -> dict[str, Any]:
    """Of each training, without a word about gradients, and whether all is sharded again."""

    def run(training: Training, pipe: Pipeline, folder: Path, title: str) -> dict[str, Any]:
        return trained(training, pipe, folder, title) | {"sharded": sharded(pipe)}

    return all_trained(rank, f"{__name__}:TRAININGS", folder, run)


def clipped(rank: int, _: None) -> dict[str, float]:
    """By the norm of the mean gradients."""

    def shard(stage: nn.Module, mesh: Any) -> None:
        fully(lambda: mesh["dp"])(list(stage.children()))

    ran = trial(problem_of(1), 2, wrap=None, options={"mesh": pp_by_dp(), "parallelize": shard, "seed": SEED})
    return ran.clipped(ran.pipeline(), 0.1)


class Low(nn.Module):
    """A layer of a model in bfloat16: its numbers are rounded, its gradients are added up by whoever wants them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.default_generator.manual_seed(number)
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(nn.functional.gelu(self.norm(self.inner(x))))
        return y


def mixed(rank: int, _: None) -> list[float]:
    """Parameters in bfloat16, gradients added up and reduced in float32."""
    mesh, policy = pp_by_dp(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def build(numbers: list[int]) -> list[nn.Module]:
        made: list[nn.Module] = [Low(i) for i in numbers]
        for one in made:
            fully_shard(one, mesh=mesh["dp"], mp_policy=policy)
        return made

    whole = [Low(i) for i in range(LAYERS)]
    sums = {place: torch.zeros_like(p) for place, p in named(dict(enumerate(whole))).items()}
    batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(place)) for place in range(2)]
    for x in (part for one in batches for part in one.chunk(MICROBATCHES)):
        low = nn.Sequential(*(Low(i) for i in range(LAYERS))).bfloat16()
        (nn.functional.mse_loss(low(x.bfloat16()).float(), x.flip(0)) / MICROBATCHES).backward()
        for place, p in named(dict(enumerate(low))).items():
            assert p.grad is not None
            sums[place] += p.grad.float() / 2
    for place, p in named(dict(enumerate(whole))).items():
        p.grad = sums[place]
    found = []
    for split, gathers in (("layers", 0), ("layers", 2), ("graph", 0)):
        schedule = random_schedule(problem_of(gathers), 3)
        how: dict[str, Any] = {"loss": lambda y, t: nn.functional.mse_loss(y.float(), t)}
        runner = Pipeline(build, schedule, group=mesh.get_group("pp"), split=split, **how)
        x = batches[runner.place]
        parts = x.chunk(MICROBATCHES)
        runner.step(list(parts), [part.flip(0) for part in parts])
        runner.wait_gradients()
        found.append(worst(runner, whole))
    return found


def refused(rank: int, _: None) -> list[str]:
    """What is said of layers that cannot be run as they are wrapped."""
    mesh, world = pp_by_dp(), dist.init_device_mesh("cpu", (4,))
    schedule = random_schedule(a_problem((0, 1), 2, layers=LAYERS), 1)

    def said(wrap: Any, **more: Any) -> str:
        def build(numbers: list[int]) -> list[nn.Module]:
            made: list[nn.Module] = [Block(i) for i in numbers]
            wrap(dict(zip(numbers, made, strict=True)))
            return made

        return refusal(lambda: Pipeline(build, schedule, **({"group": mesh.get_group("pp")} | LIMIT | more)))

    def all_of(layers: Any, over: Any = mesh["dp"]) -> None:
        for layer in layers.values():
            fully_shard(layer, mesh=over)

    def some(layers: Any) -> None:
        fully_shard(layers[min(layers)], mesh=mesh["dp"])

    def two_ways(layers: Any) -> None:
        first, second = layers.values()
        fully_shard(first, mesh=mesh["dp"])
        fully_shard(second, mesh=world)

    def other_shapes(layers: Any) -> None:
        if rank == 3:
            layers[3].never = nn.Parameter(torch.ones(5))
        all_of(layers)

    def as_one(layers: Any) -> None:
        fully_shard(list(layers.values()), mesh=mesh["dp"])

    runner = trial(schedule).pipeline()
    return [
        said(some),
        said(two_ways),
        said(lambda layers: all_of(layers, world)),
        said(all_of, replicas=mesh.get_group("dp")),
        refusal(lambda: PostValidated(runner, torch.optim.SGD(runner.parameters(), lr=0.1))),
        said(other_shapes),
        said(as_one),
    ]


def gathered_late(problem: Problem, plain: Schedule) -> Schedule:
    """`plain` with gathers that wait for the pass before their first user, and reductions as soon as may be."""
    order, syncs, edges = dict(plain.order), list[tuple[str, str]](), problem.edges
    for rank in range(problem.ranks):
        place, row = {name: i for i, name in enumerate(order[f"compute:{rank}"])}, list[tuple[int, str]]()
        for i in problem.rows("AG", "AGB", "RS", rank=rank).tolist():
            name = problem.names[i]
            if problem.passes[i].kind == "RS":
                row.append((max(place[problem.names[a]] for a in edges.before[edges.after == i].tolist()), name))
                continue
            first = min(place[problem.names[b]] for b in edges.after[edges.before == i].tolist())
            row.append((first, name))
            if first:
                syncs.append((order[f"compute:{rank}"][first - 1], name))
        order[f"comm:{rank}"] = tuple(name for _, name in sorted(row))
    return Schedule(problem, order, tuple(syncs))


def memories(rank: int, _: None) -> list[dict[str, int]]:
    """A step in which bytes are counted, where passes gather and reduce. Parameters weigh so much more than activations that
    messages do not count, which live until they are sent: on a busy machine that takes some passes."""
    mesh, width, found = pp_by_dp(), 384, []

    def build(numbers: list[int]) -> list[nn.Module]:
        made: list[nn.Module] = [nn.Linear(width, width, bias=False) for _ in numbers]
        for one in made:
            fully_shard(one, mesh=mesh["dp"])
        return made

    weight, row = 4 * width * width, 4 * 2 * width
    for name, placement, gathers in (("zb-h1", (0, 1), 1), ("zb-v", (0, 1, 1, 0), 1), ("gpipe", (0, 1), 2)):
        first = [0] + [row] * (len(placement) - 1)  # the batch is the caller's
        held = {"held_until_W": first} | ({} if name == "gpipe" else {"held_until_B": 0, "held_from_B": row})
        plain = a_problem(placement, MICROBATCHES, layers=len(placement), fused=name == "gpipe", **held)
        sizes = {"parameter_bytes": weight, "gradient_bytes": weight}
        problem = with_sharding(plain, 5, 7, **sizes, gathers=gathers)
        schedule = gathered_late(problem, preset(name, plain))
        x = torch.randn(2 * MICROBATCHES, width)
        runner = Pipeline(build, schedule, group=mesh.get_group("pp"), **LIMIT)
        with mock.patch("zbsolve.exec.rank.LiveBytes", Resting):
            memory = metered(runner, x, x)
        found.append({"peak": memory.peak, "predicted": memory.predicted_peak, "weight": weight})
    return found


def emulated(rank: int, _: None) -> list[list[float]]:
    """Passes beside computing on emulated devices: each one's time as a share of its device's, and by how much a user began
    before its end."""
    problem = problem_of(2)
    schedule = random_schedule(problem, 4)
    times = Times.of(schedule, "schedule")
    times = replace(times, passes={name: 1000 * us for name, us in times.passes.items()})
    runner = trial(schedule).pipeline(emulate=times)
    with devices_alone():
        timeline = runner.step(*batch(runner.place, 0)).timeline
    found, edges = [], problem.edges
    for i in problem.rows("AG", "AGB", "RS").tolist():
        name = problem.names[i]
        start, end = timeline[name]
        users = [timeline[problem.names[b]][0] for b in edges.after[edges.before == i].tolist()]
        found.append([(end - start) / times.passes[name], max([0.0, *(end - one for one in users)])])
    return found


def private_names(rank: int, _: None) -> list[str]:
    """What of FSDP's private names is not as the executor needs it."""
    mesh, half = pp_by_dp(), MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64, cast_forward_inputs=False)
    plain, low = nn.Linear(4, 3), nn.Linear(4, 3)
    plain.register_forward_hook(lambda *_: None)
    fully_shard(plain, mesh=mesh["dp"])
    fully_shard(low, mesh=mesh["dp"], mp_policy=half)
    before = private.fsdp_gathers(plain)
    shard, _bias = private.fsdp_parameters(plain)
    handle = plain.unshard(async_op=True)
    (work,) = private.fsdp_gathers(plain)
    work.wait(timedelta(seconds=300))
    handle.wait()
    low.unshard()
    weight, _bias = private.fsdp_parameters(low)
    weight.unsharded_param.grad = torch.ones_like(weight.unsharded_param)
    for _time in range(2):
        weight.accumulate_unsharded_grad_if_needed()
        weight.to_accumulated_grad_if_needed()
        weight.unsharded_param.grad = torch.ones_like(weight.unsharded_param)
    hooks = {*plain._forward_hooks, *plain._forward_pre_hooks}
    older = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_group="one"))  # torch 2.11
    checks = {
        "groups": len(private.fsdp_groups(plain)) == 1 and private.fsdp_groups(older) == ["one"],
        "gathers": before == [] == private.fsdp_gathers(plain),
        "unsharded": plain.weight is shard.unsharded_param and tuple(plain.weight.shape) == (3, 4),
        "mesh": shard.mesh_info.mesh == mesh["dp"] and shard.fsdp_placement.dim == 0,
        "types": (shard.reduce_dtype, weight.reduce_dtype) == (None, torch.float32),
        "sum": weight.unsharded_accumulated_grad.eq(2).all() and weight.unsharded_accumulated_grad.dtype == torch.float32,
        "casts": private.fsdp_casts(plain) == (None, None) and private.fsdp_casts(low) == (None, torch.float64),
        "together": private.fsdp_together(plain) == 1,
        "hooks": len(private.fsdp_hooks(plain) & hooks) == 2 and len(hooks) == 3,
        "marks": [name for name in vars(plain) if private.fsdp_mark(name)]
        != []
        == [name for name in vars(nn.Linear(4, 3)) if private.fsdp_mark(name)],
        "left": not {name for name in vars(plain) if not private.fsdp_mark(name)} - set(vars(nn.Linear(4, 3))),
    }
    plain.reshard()
    checks["sharded"] = plain.weight is shard.sharded_param
    return [name for name, holds in checks.items() if not holds]


JOBS = ["gradients", "clipped", "mixed", "refused", "memories", "emulated", "private_names"]
ALL_OR_NONE = "is not sharded, but layer {} is: call fully_shard on every layer of a stage, or on none"
OWN_MESH = "stages of the same pipeline: give fully_shard a mesh of the ranks with this stage"


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return jobs_on(4, __name__, dict.fromkeys(JOBS) | {"trainings": folder})


def test_gradients_are_those_of_the_whole_batch(four: dict[str, list[Any]]) -> None:
    """Shards of unequal size, frozen and unused parameters, dropout, tied ones, replicas; whatever schedule and split."""
    assert too_far(four["gradients"], 1e-12) == {}
    for rank, found in enumerate(four["gradients"]):
        assert found.keys() == TRIALS.keys()
        assert all(one["sharded"] for one in found.values())
        assert (found["replicas"]["place"], found["tied"]["place"]) == (rank, rank % 2)


def test_optimizers_and_scalers_see_the_mean(four: dict[str, list[Any]]) -> None:
    assert too_far(four["trainings"], 1e-10) == {}
    assert [one["sharded"] for rank in four["trainings"] for one in rank.values()] == [True] * 8


def test_clipping_is_by_the_norm_of_the_whole_model(four: dict[str, list[Any]]) -> None:
    for rank in four["clipped"]:
        assert rank["norm"] == pytest.approx(rank["right"], rel=1e-12)
        assert rank["worst"] <= 1e-12


def test_mixed_precision_adds_up_in_the_reduction_type(four: dict[str, list[Any]]) -> None:
    """Adding up in bfloat16 would be off by 2⁻⁹ or so."""
    assert max(max(rank) for rank in four["mixed"]) <= 1e-4


def test_what_does_not_fit_is_one_line(four: dict[str, list[Any]]) -> None:
    """Ranks 0 and 1 have stage 0 of the two pipelines, ranks 2 and 3 have stage 1."""
    for rank, said in enumerate(four["refused"]):
        s, first, here = rank // 2, rank // 2 * 2, "0, 1" if rank < 2 else "2, 3"
        where = f"rank {s}, stage {s}: layer"
        some, two_ways, world, replicas, late, shapes, as_one = said
        assert some == f"{where} {first + 1}'s never {ALL_OR_NONE.format(first)}"
        assert two_ways == f"{where} {first + 1} is sharded over ranks 0, 1, 2, 3, but layer {first} over ranks {here}"
        assert world.startswith(f"{where} {first} is sharded over ranks 0, 1, 2, 3, but rank ")
        assert world.endswith(OWN_MESH)
        assert replicas.startswith(f"{where} {first} is sharded by FSDP, and replicas would average its gradients again")
        assert as_one == f"{where} {first}: fully_shard wrapped several modules as one: call it on each of them"
        assert late.startswith("PostValidated: parameters are sharded by FSDP")
        assert shapes.endswith(
            f"stage 1: it is sharded with rank {3 if rank in (0, 2) else 2}, whose schedule, layers or mesh differ"
        )


def test_memory_has_what_passes_gather_and_reduce(four: dict[str, list[Any]]) -> None:
    for rank in four["memories"]:
        for one in rank:
            assert one["peak"] == pytest.approx(one["predicted"], rel=0.03)
            assert one["peak"] >= 2 * one["weight"]


def test_passes_beside_computing_take_their_devices_time(four: dict[str, list[Any]]) -> None:
    """Who waits for a gather begins when it has ended on its device."""
    for rank in four["emulated"]:
        assert len(rank) == 20
        for share, early in rank:
            assert share == pytest.approx(1.0)
            assert early <= 0


def test_private_names_of_fsdp(four: dict[str, list[Any]]) -> None:
    assert four["private_names"] == [[]] * 4
