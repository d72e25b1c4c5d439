"""`Pipeline` in a person's own loop, on gloo ranks."""

from __future__ import annotations

import hashlib
import math
import random
import shutil
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from profiler.memory import held
from profiler.stage_rounds import stages_of
from zbsolve import BadInput, pipeline
from zbsolve.exec import Pipeline
from zbsolve.exec.layers import build, listed, materialise
from zbsolve.exec.memory import LiveBytes
from zbsolve.models.presets import GptSizes, gpt, mlp
from zbsolve.profile.profile import Layer, Link, Profile
from zbsolve.systems import preset

from ..support.exec_ranks import jobs_on, on_ranks
from ..support.exec_tools import a_problem, batch_of, largest, metered, random_schedule, refusal, split_layers, toy
from ..support.trainings import far
from ..support.trials import TRIED, Batches, Trial, too_far

pytestmark = pytest.mark.slow

RANDOM = 80  # schedules


def example(rank: int, steps: int) -> list[float]:
    """The losses of the example's training in double precision, interrupted on the way."""
    from examples.train_gpt import pipelined

    torch.set_default_dtype(torch.float64)  # rounding grows with every step of AdamW
    names = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(names)
    folder = f"{names[0]}/checkpoint"
    first = pipelined(steps // 2, checkpoint=folder)[:-1]
    rest = pipelined(steps, checkpoint=folder)
    torch.set_default_dtype(torch.float32)
    dist.barrier()
    shutil.rmtree(str(names[0]), ignore_errors=True)
    return [*first, *rest]


def twice(rank: int, steps: int) -> list[str]:
    """The digests of this rank's parameters after the same training, two times."""
    digests = []
    for _ in range(2):
        model = mlp(0)
        runner = Pipeline(model.build, random_schedule(a_problem((0, 1, 1, 0), 4), 3), loss=model.loss)
        optimizer = torch.optim.AdamW(runner.parameters(), lr=0.01)
        for step in range(steps):
            runner.step(*batch_of(model, 4, step))
            optimizer.step()
            optimizer.zero_grad()
        state = runner.state_dict()
        digests.append(hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest())
    return digests


def leaks(rank: int, steps: int) -> dict[str, Any]:
    """The least bytes that live after one of the first ten steps and of the last ten, with parameters and gradients left
    out. (Now and then one row lives a little longer than its step.)"""
    model = mlp(0)
    runner = Pipeline(model.build, random_schedule(a_problem((0, 1, 1, 0), 4), 3), loss=model.loss)
    batch = batch_of(model, 4)
    runner.step(*batch)
    meter, seen = LiveBytes(), []
    meter.ignore([*runner.module.parameters(), *(p.grad for p in runner.parameters() if p.grad is not None)])
    with meter:
        for _ in range(steps):
            runner.step(*batch).wait()
            seen.append(meter.now)
    return {"bytes": [min(seen[:10]), min(seen[-10:])], "live": sum(len(stage.live) for stage in runner.stages.values())}


def owned(rank: int, _: None) -> dict[str, Any]:
    """A model on the meta device: what this rank holds of it, its state dict, and what it says of a wrong one."""
    with torch.device("meta"):
        whole = nn.Sequential(OrderedDict((f"part{i}", nn.Linear(4, 4)) for i in range(4)))
    runner = Pipeline(whole, random_schedule(a_problem((0, 1), 2, layers=4)), loss=nn.functional.mse_loss)
    state = runner.state_dict()
    runner.load_state_dict({name: torch.ones_like(value) for name, value in state.items()} | {"other": torch.ones(1)})
    refused = refusal(lambda: runner.step(torch.ones(3, 4), torch.ones(3, 4)))
    return {
        "names": [name for name, _ in runner.named_parameters()],
        "meta": sum(p.is_meta for p in whole.parameters()),
        "sums": {name: float(value.detach().sum()) for name, value in runner.state_dict().items()},
        "refused": refused,
        "ones": runner.step(torch.ones(2, 4), torch.ones(2, 4)).timeline.makespan,
    }


def memories(rank: int, _: None) -> list[dict[str, Any]]:
    """A small GPT by several schedules, its memory profiled layer by layer; a metered step each."""
    model = gpt("small", 0, GptSizes(width=96, blocks=8, heads=4, batch=2, length=64))
    sizes = held(model, stages_of(model, range(len(model.layers))))
    rows = tuple(Layer(f"layer{i}", 10, 10, 10, 20, parameter_bytes=0, **size.costs()) for i, size in enumerate(sizes))
    profile = Profile("measured", "small", rows, Link(1.0, 1000.0), 4.0, None, {}, {})
    result = []
    for spot, name in (((0, 1), "1f1b"), ((0, 1), "zb-h1"), ((0, 1), ""), ((0, 1, 0, 1), ""), ((0, 1, 1, 0), "")):
        counts = split_layers(len(rows), len(spot))
        problem = profile.problem(2, 4, spot, layers=counts, fused=name == "1f1b")
        schedule = preset(name, problem) if name else random_schedule(problem, 2)
        runner = Pipeline(model.build, schedule, loss=model.loss)
        memory = metered(runner, *batch_of(model, 4))
        result.append({"peak": memory.peak, "predicted": memory.predicted_peak, "last": memory.held[-1]})
    return result


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    """What each job gave on each of two ranks."""
    jobs = {"example": 12, "twice": 3, "leaks": 100, "owned": None, "memories": None}
    return jobs_on(2, __name__, jobs)


def test_the_example_trains_as_in_one_process(two: dict[str, list[Any]]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from examples.train_gpt import plain

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        expected = plain(12)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    assert two["example"][0] == two["example"][1]
    assert two["example"][0] == pytest.approx(expected, rel=1e-10)
    assert expected[-1] < expected[0] - 1  # it learns


def test_the_example_can_be_profiled() -> None:
    from examples.train_gpt import BLOCKS, SIZE, whole
    from zbsolve.models.by_name import load

    model = load(f"{Path(__file__).parents[2]}/examples/train_gpt.py:measured")
    inputs, targets = model.batch(0, 0)
    assert len(model.layers) == BLOCKS + 2
    assert inputs.shape == targets.shape
    assert len(inputs) == SIZE
    pairs = zip(torch.nn.Sequential(*model.build()).parameters(), whole().parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


SMALL = gpt("small", 0, GptSizes(width=16, blocks=2, heads=2, batch=2, length=12))


def of_lengths(place: int, step: int) -> Batches:
    """Microbatches of other lengths in each step."""
    lengths = [(12, 5, 12), (5, 5, 12), (7, 3, 5)][step]
    pairs = [[one[:, :length] for one in SMALL.batch(m, step)] for m, length in enumerate(lengths)]
    return [x for x, _ in pairs], [y for _, y in pairs]


SHAPES = {
    "": Trial(
        problem=a_problem((0, 1, 1, 0), 3, layers=4),
        layers=SMALL.build,
        batch=of_lengths,
        loss=SMALL.loss,
        order=1,
        steps=3,
        each=True,
    )
}


def test_what_is_no_number_is_infinitely_far() -> None:
    """As `max` would pass over it."""
    assert largest([0.0, math.nan, 1.0]) == math.inf
    assert far([[1.0, math.nan, math.inf]], [[1.0, math.nan, math.inf]]) == 0.0
    assert far([[math.nan]], [[1.0]]) == far([[1.0]], [[math.nan]]) == far([[1.0]], [[math.inf]]) == math.inf


def test_microbatches_may_differ_in_shape() -> None:
    assert too_far(on_ranks(2, TRIED, f"{__name__}:SHAPES"), 1e-5) == {}


def test_the_same_seed_gives_the_same_bits(two: dict[str, list[Any]]) -> None:
    for first, second in two["twice"]:
        assert first == second


def test_nothing_leaks_over_100_steps(two: dict[str, list[Any]]) -> None:
    for rank in two["leaks"]:
        assert rank["bytes"][1] <= rank["bytes"][0]
        assert rank["live"] == 0


def test_memory_is_what_was_predicted(two: dict[str, list[Any]]) -> None:
    for rank in two["memories"]:
        for one in rank:
            assert one["peak"] == pytest.approx(one["predicted"], rel=0.03)
            assert one["last"] < one["peak"] / 50


def test_a_rank_holds_its_own_layers_alone(two: dict[str, list[Any]]) -> None:
    first, second = two["owned"]
    assert first["names"] == ["part0.weight", "part0.bias", "part1.weight", "part1.bias"]
    assert second["names"] == ["part2.weight", "part2.bias", "part3.weight", "part3.bias"]
    assert first["meta"] == second["meta"] == 4
    assert set(first["sums"].values()) == {16.0, 4.0}
    assert "does not split into 2 microbatches" in first["refused"]
    assert first["ones"] == second["ones"] > 0


def drawn() -> dict[str, Trial]:
    """Random placements and orders on 4 ranks."""
    return {str(seed): drawn_with(seed) for seed in range(RANDOM)}


def drawn_with(seed: int) -> Trial:
    rng = random.Random(seed)
    stages = rng.randint(4, 7)
    spot = [0, 1, 2, 3, *(rng.randrange(4) for _ in range(stages - 4))]
    rng.shuffle(spot)
    m, F = rng.randint(1, 4), [rng.randint(1, 30) for _ in spot]
    times = {"BW": [20] * stages} if rng.random() < 0.3 else {"B": [10] * stages, "W": [10] * stages}
    problem = pipeline(F, **times, placement=tuple(spot), microbatches=m, comm=rng.randint(0, 9), layers=[1] * stages)
    x = torch.linspace(-1, 1, 8 * m).reshape(2 * m, 4)
    return Trial(problem=problem, layers=toy, batch=lambda place, step: (x.chunk(m), x.flip(0).chunk(m)), order=seed)


def test_random_schedules_are_right_and_never_hang() -> None:
    ranks = on_ranks(4, TRIED, f"{__name__}:drawn")
    assert too_far(ranks, 1e-5) == {}
    assert [len(rows) for rows in ranks] == [RANDOM] * 4


def test_layers_are_built_where_they_are_owned() -> None:
    cpu = torch.device("cpu")
    asked: list[list[int]] = []

    def builder(numbers: list[int]) -> list[nn.Module]:
        asked.append(numbers)
        return [nn.Linear(2, 2) for _ in numbers]

    assert sorted(build(builder, [1, 3], cpu)) == [1, 3]
    assert asked == [[1, 3]]
    with pytest.raises(BadInput, match="made 1 layers, not 2"):
        build(lambda numbers: [nn.Linear(2, 2)], [0, 1], cpu)
    with pytest.raises(BadInput, match="a Linear has no order"):
        listed(nn.Linear(2, 2))


def test_meta_layers_get_the_same_values_on_any_rank() -> None:
    def some(numbers: list[int]) -> dict[int, nn.Module]:
        with torch.device("meta"):
            layers = {i: nn.Linear(3, 3) for i in numbers}
            if len(numbers) > 2:
                layers[2].weight = layers[0].weight
        return materialise(layers, torch.device("cpu"), None, seed=4)

    alone, together = some([1]), some([0, 1, 2])
    assert torch.equal(alone[1].weight, together[1].weight)
    assert together[2].weight is together[0].weight

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2, device="meta"))

    with pytest.raises(BadInput, match=r"layer 0\.1: Own has no reset_parameters"):
        materialise({0: nn.Sequential(nn.Linear(2, 2), Own())}, torch.device("cpu"), None, 0)
