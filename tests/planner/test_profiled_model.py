"""Plans of models by their profiles: bounds against exhaustive search, sizes between profiles, and what a profile lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import zbsolve
from zbsolve import Infeasible, Layer, Link, Profile
from zbsolve.planner import CLUSTERS, Layout, ProfiledModel, layout_profile
from zbsolve.planner.bounds import layout_bounds
from zbsolve.planner.layout import FULL, LOOP, NONE, SINGLE, VEE, table_of

from ..support.exhaustive import optimum
from ..support.partitions import partitions

SMALL = replace(CLUSTERS["a100"], inside=Link(0.0, 1.0), constant=3.0)  # a byte of a message takes a µs
CASES = [(1, 1, SINGLE, 2, 2), (2, 1, SINGLE, 2, 3), (3, 1, SINGLE, 2, 2), (2, 2, VEE, 2, 2), (2, 2, LOOP, 2, 2)]


def facts(tp: int = 1, sequences: int = 1) -> dict[str, Any]:
    return {"tensor_ranks": tp, "microbatch": {"sequences": sequences, "tokens": 64}, "states": "adam"}


def random_model(rng: np.random.Generator, blocks: int) -> ProfiledModel:
    """A fused backward shorter or longer than a split one, tensors that two layers count, ends that differ in size."""
    n = rng.integers(0, 4, 20).tolist()
    F, B, W = (int(one) for one in rng.integers(1, 9, 3))
    twice = int(rng.integers(0, 3))
    kept = {"output_kept": int(rng.integers(0, twice + 1)), "input_unneeded": twice}
    block = Layer(
        "b", F, B, W, max(1, B + W + int(rng.integers(-4, 3))), 2 + n[0], 2 + n[1], 1 + n[2], 1 + n[3], n[4], n[5], 0.5
    )
    block = replace(block, transient=n[6], **kept)
    first = Layer("e", n[7], n[8], n[9], n[8] + n[9], n[10], n[11], 2 + n[12], 1 + n[3] + n[13], U=0.5)
    last = Layer("h", n[14], n[15], n[16], max(0, n[15] + n[16] - 1), n[17], 2, 2 + n[18], 0, U=1.0, input_unneeded=n[19])
    tied = ((int(rng.integers(1, 3)), (0, blocks + 1)),) if rng.integers(2) else ()
    middle = [replace(block, name=f"b{i}") for i in range(blocks)]
    return ProfiledModel.of(
        [Profile("given", "m", (first, *middle, last), Link(0.0, 1e12), 4.0, None, facts(), {}, tied=tied)]
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_partition_and_no_schedule_is_below_the_bound(case: tuple[int, ...]) -> None:
    pp, chunks, placement, count, blocks = case
    rng, near, feasible = np.random.default_rng(case), 0, 0
    for trial in range(8):
        model = random_model(rng, blocks)
        layout = Layout(1, 1, pp, chunks, placement, 1, count, FULL if trial % 4 == 3 else NONE)
        profile = layout_profile(model, layout, SMALL)
        full = 10**6 if trial % 2 else int(rng.integers(60, 200))
        bound = float(layout_bounds(model, table_of([layout]), SMALL, full).step[0])
        for fused in (True, False) if chunks * count < 4 else (True,):
            for counts in partitions(len(profile.layers), layout.stages):
                step = zbsolve.Step(pp, count, layout.spot, counts, full, fused=fused)
                try:
                    problem = step.problem(profile)
                    found = optimum(problem)
                except Infeasible:
                    continue
                fixed, _ = step.costs(profile).memory.of_ranks(counts, step.costs(profile).routes)
                update = max(fixed) / 4 * model.update_us / 2
                if found is not None:
                    assert bound <= found + update + 3 + 1e-9
                    near, feasible = near + (bound >= 0.6 * (found + update + 3)), feasible + 1
    assert feasible > 4
    assert near > 0  # bounds that are always loose prove little
