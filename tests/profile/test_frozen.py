"""Parameters that are not trained count once: they have no gradient, no optimizer state, no sum over replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profiler.operation_costs import state_of
from profiler.roofline import estimate
from zbsolve import BadInput, Infeasible, Profile
from zbsolve.cli import main
from zbsolve.features.vocabulary import on_stages
from zbsolve.partition.layer import Layer, Link
from zbsolve.partition.stage_memory import StageMemory
from zbsolve.planner.profiled_model import point_of

from ..support.adapter_models import LENGTH, RANK, WIDTH, WORDS, adapters

FROZEN = tuple(Layer(f"l{i}", 30, 40, 20, 60, 2, 1, 1000, 8, frozen_bytes=900) for i in range(4))
PROFILE = Profile("given", "small", FROZEN, Link(1.0, 100.0), 4.0, None, {}, {}, shard_link=Link(5.0, 50.0))
TABLE, HIDDEN, ADAPTER = 4 * WORDS * WIDTH, 4 * WIDTH * WIDTH, 8 * WIDTH * RANK
SPEC = "tests.support.adapter_models:adapters"


def test_a_stage_by_hand() -> None:
    """900 bytes once and 100 four times; two layers a stage."""
    memory = StageMemory(FROZEN, 4.0)
    assert memory.fixed((0, 2)) == 2 * (900 + 4 * 100)
    assert memory.parameters([2, 2]) == [2000, 2000]
    assert memory.trained([2, 2]) == memory.unreduced([2, 2]) == [200, 200]
    assert memory.of_ranks([2, 2], [(0, 1)])[0] == (2600.0, 2600.0)
    sharded = replace(memory, group=2, gradients=2.0)
    assert sharded.fixed((0, 2)) == 1300
    assert sharded.gathered((0, 2)) == 2000 + 2 * 200


def test_a_frozen_parameter_that_layers_share_counts_once() -> None:
    memory = StageMemory(FROZEN, 4.0, ((500, (0, 3)),))
    assert memory.fixed((0, 1), (3, 4)) == 2 * 1300 - 500
    trained = replace(memory, tied=((100, (0, 3)),), layers=tuple(replace(one, frozen_bytes=0) for one in FROZEN))
    assert trained.fixed((0, 1), (3, 4)) == 4 * (2000 - 100)
    assert trained.own_trained([1, 1, 1, 1], [(0, 1, 1, 0)]) == [1000, 1000, 1000, 900]


def test_only_what_is_trained_is_summed_and_reduced() -> None:
    """An all-reduce over two replicas: 5 µs and half of the bytes at 50 bytes a µs, twice; of 1000 bytes it is 30 µs."""
    problem = PROFILE.problem(4, 4, replicas=2)
    assert problem.passes.duration[problem.rows("C")].tolist() == [12] * 4
    problem = PROFILE.problem(4, 4, shards=2)
    assert set(problem.passes.duration[problem.rows("AG")].tolist()) == {15}
    assert set(problem.passes.duration[problem.rows("RS")].tolist()) == {6}


@pytest.mark.slow
def test_a_profile_says_what_is_frozen(tmp_path: Path) -> None:
    """The estimate of adapters: with four times all parameters the first rank has too little."""
    profile = estimate(SPEC, "h100")
    assert [one.parameter_bytes for one in profile.layers] == [TABLE, *[HIDDEN + ADAPTER] * 4, TABLE]
    assert [one.frozen_bytes for one in profile.layers] == [TABLE, *[HIDDEN] * 4, TABLE]
    assert [one.U > 0 for one in profile.layers] == [False, True, True, True, True, False]
    path = tmp_path / "lora.json"
    profile.save(path)
    assert Profile.load(path) == profile
    fixed = profile.problem(2, 4, layers=(3, 3)), StageMemory(profile.layers, profile.states).fixed((0, 3))
    assert fixed[1] == TABLE + 2 * HIDDEN + 4 * 2 * ADAPTER
    argv = ["solve", str(path), "--ranks", "2", "--microbatches", "4", "--effort", "0.05", "-o", str(tmp_path / "s.json")]
    assert main([*argv, "--memory", "300KiB"]) == 0
    all_trained = replace(profile, layers=tuple(replace(one, frozen_bytes=0) for one in profile.layers))
    with pytest.raises(Infeasible, match="parameters and optimizer states"):
        all_trained.problem(2, 4, memory="300KiB")


def test_a_frozen_vocabulary_counts_once_on_every_shard() -> None:
    profile = estimate(SPEC, "h100")
    assert profile.vocabulary is not None
    assert profile.vocabulary.frozen_bytes(2) == profile.vocabulary.parameter_bytes(2) == TABLE
    model, shard = on_stages(profile, "sharded", 2)
    assert (shard.parameter_bytes, shard.frozen_bytes, shard.trained_bytes) == (TABLE, TABLE, 0)
    assert [one.parameter_bytes for one in model.layers] == [0, *[HIDDEN + ADAPTER] * 4, 0]
    assert StageMemory(model.layers, 4.0, common=shard).fixed((0, 3)) == TABLE + 2 * HIDDEN + 8 * ADAPTER


def test_weights_in_buffers_count_once_and_nobody_shards_them() -> None:
    """900 of 8 bits beside 100 that Adam trains, two layers a stage."""
    memory = StageMemory(tuple(replace(one, parameter_bytes=100, frozen_bytes=0, buffer_bytes=900) for one in FROZEN), 4.0)
    assert memory.fixed((0, 2)) == memory.fixed((0, 1), (2, 3)) == 2 * (900 + 4 * 100)
    assert replace(memory, group=2).fixed((0, 2)) == 2 * (900 + 4 * 50)
    assert replace(memory, states=0.0).fixed((0, 2)) == 0
    profile = estimate("tests.support.adapter_models:quantised", "h100")
    assert [one.buffer_bytes for one in profile.layers] == [0, *[WIDTH * WIDTH + 4 * WIDTH] * 4, 0]
    assert Profile.from_json(profile.to_json()) == profile


def test_the_optimizers_state_is_of_what_is_trained() -> None:
    """A base of 16 bits with adapters of 32: Adam in one precision, and the other way round mixed."""
    layers: Any = adapters()[0]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = parameter.data.bfloat16() if not parameter.requires_grad else parameter.data
    parameters = [p for layer in layers for p in layer.parameters()]
    assert state_of(None, parameters).name == "adam"
    assert state_of(None, [p.bfloat16().detach().requires_grad_(p.requires_grad) for p in parameters]).name == "adam-mixed"


def test_what_makes_no_sense_is_refused() -> None:
    body = PROFILE.to_json()
    body["layers"][1]["frozen_bytes"] = 1001
    with pytest.raises(BadInput, match=r"layers\[1\]: field 'frozen_bytes' is 1001, more than all parameters"):
        Profile.from_json(body)
    facts = {"microbatch": {"sequences": 1, "tokens": LENGTH}, "tensor_ranks": 1}
    with pytest.raises(BadInput, match="'frozen_bytes': a plan takes parameters that are all trained"):
        point_of(replace(PROFILE, facts=facts), "p.json")
    quantised = tuple(replace(one, frozen_bytes=0, buffer_bytes=11) for one in FROZEN)
    with pytest.raises(BadInput, match="'buffer_bytes': a plan does not count weights that are no parameters"):
        point_of(replace(PROFILE, facts=facts, layers=quantised), "p.json")
    layers = (Layer("tower", 1, 0, 0, 0, 0, 0, 0, 0), *(replace(one, frozen_bytes=0) for one in FROZEN))
    with pytest.raises(BadInput, match="layer 0 has no backward, no parameters: a plan takes"):
        point_of(replace(PROFILE, facts=facts, layers=layers), "p.json")


def test_numbers_say_it(tmp_path: Path) -> None:
    path = str(tmp_path / "p.json")
    argv = ["numbers", "--ranks", "2", "--F", "1ms", "--B", "1ms", "--W", "1ms", "--parameters", "8GB", "frozen=7GB"]
    assert main([*argv, "--states", "4", "-o", path]) == 0
    assert {one.frozen_bytes for one in Profile.load(path).layers} == {7 * 10**9}
