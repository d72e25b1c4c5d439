"""`Pipeline` in a person's own loop, on gloo ranks."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zbsolve import BadInput, pipeline
from zbsolve.exec.layers import build, listed, materialise
from zbsolve.models.presets import GptSizes, gpt

from ..support.exec_jobs import toy
from ..support.exec_ranks import jobs_on, on_ranks
from ..support.exec_tools import a_problem, largest
from ..support.trainings import far
from ..support.trials import TRIED, Batches, Trial, too_far

pytestmark = pytest.mark.slow

RANDOM = 80  # schedules


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    """What each job gave on each of two ranks."""
    jobs = {"example": 12, "twice": 3, "leaks": 100, "owned": None, "memories": None}
    return jobs_on(2, "tests.support.exec_jobs", jobs)


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


def drawn(seed: int) -> Trial:
    """A random placement and order on 4 ranks."""
    rng = random.Random(seed)
    stages = rng.randint(4, 7)
    spot = [0, 1, 2, 3, *(rng.randrange(4) for _ in range(stages - 4))]
    rng.shuffle(spot)
    m, F = rng.randint(1, 4), [rng.randint(1, 30) for _ in spot]
    times = {"BW": [20] * stages} if rng.random() < 0.3 else {"B": [10] * stages, "W": [10] * stages}
    problem = pipeline(F, **times, placement=tuple(spot), microbatches=m, comm=rng.randint(0, 9), layers=[1] * stages)
    x = torch.linspace(-1, 1, 8 * m).reshape(2 * m, 4)
    return Trial(problem=problem, layers=toy, batch=lambda place, step: (x.chunk(m), x.flip(0).chunk(m)), order=seed)


DRAWN = {str(seed): drawn(seed) for seed in range(RANDOM)}


def test_random_schedules_are_right_and_never_hang() -> None:
    ranks = on_ranks(4, TRIED, f"{__name__}:DRAWN")
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
