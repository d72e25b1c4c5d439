"""Plans of models by their profiles: bounds against exhaustive search, sizes between profiles, and what a profile lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbsolve
from zbsolve import BadInput, Infeasible, Layer, Link, Profile
from zbsolve.cli import main
from zbsolve.planner import CLUSTERS, Layout, ProfiledModel, Shape, check_plan, layout_profile
from zbsolve.planner.engines import PLANNED
from zbsolve.planner.layout import FULL, LOOP, NONE, SELECTIVE, SINGLE, VEE, table_of
from zbsolve.planner.plan_file import model_from_json, model_to_json

from ..support.exhaustive import optimum
from ..support.partitions import partitions
from ..support.plans import layout_bounds

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
                    near, feasible = near + (bound >= 0.8 * (found + update + 3)), feasible + 1
    assert feasible > 4
    assert near > 0  # bounds that are always loose prove little


def profile_of(tp: int, sequences: int, blocks: int = 6, **changes: Any) -> Profile:
    """Costs in proportion to sequences over tensor ranks, and a constant; in small numbers of 2 and 5."""

    def layer(name: str, work: float, output: int, parameters: int) -> Layer:
        F = 300 + work * sequences / tp
        kept = 2_000_000 * sequences // tp
        return Layer(name, F, F, 0.9 * F, 1.8 * F, kept, kept, parameters // tp, output * sequences, U=parameters / tp / 1e4)

    middle = [layer(f"block{i}", 9000, 500_000, 40_000_000) for i in range(blocks)]
    layers = (layer("embedding", 100, 500_000, 20_000_000), *middle, layer("head", 5000, 0, 20_000_000))
    found = Profile("measured", f"m@batch={sequences}", layers, Link(9.0, 1e3), 4.0, None, facts(tp, sequences), {})
    return replace(found, **changes)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two numbers of tensor ranks, and three sizes of one of them."""
    folder, found = tmp_path_factory.mktemp("profiles"), []
    for tp, sequences in ((1, 1), (1, 2), (1, 4), (2, 2)):
        profile_of(tp, sequences).save(path := folder / f"{tp}-{sequences}.json")
        found.append(str(path))
    return found


@pytest.mark.parametrize(
    ("states", "factor", "by_profile", "any_engine"),
    [
        ("adam-mixed", 8.0, 2, 4),
        ("adam-mixed-float-gradients", 9.0, 4, 4),  # as its user says, whatever the engine does by itself
    ],
)
def test_states_are_alike_by_name_and_by_profile(states: str, factor: float, by_profile: int, any_engine: int) -> None:
    """Weights 2, gradients 2 or 4, master copy and moments 12 bytes a parameter: 16 in `run`, 18 in Megatron."""
    profile = profile_of(1, 1, states=factor, facts={**facts(1, 1), "states": states})
    model, name = ProfiledModel.of([profile]), Shape.gpt(1024, 8, 6)
    assert model.state_parts == replace(name, gradients=any_engine).state_parts == name.state_parts == (2, 4, 12)
    assert replace(model, gradients=PLANNED["zbsolve"].gradients).state_parts == (2, by_profile, 12)
    assert replace(model, gradients=PLANNED["megatron"].gradients).state_parts == (2, 4, 12)
    again = model_from_json(model_to_json(replace(model, gradients=2)), "model")
    assert again.state_parts == (2, by_profile, 12)


def planned(model: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Exit code, and what is printed, of a plan for eight H100s."""
    code = main(["plan", model, "--devices", "8", "--batch", "16", "--cluster", "h100", "--effort", "0.1", *options])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_a_model_that_only_the_profiler_knows_is_planned_by_its_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    """28 heads: four tensor ranks, and not eight. Estimates on tensor ranks split norms over them."""
    model = "qwen2-7b@layers=2,length=128"
    code, said = planned(model, capsys, "--fix", "tp=4,pp=2", "--for", "megatron")
    assert code == 0
    assert "layers by profiles (h100 roofline) of sequences a microbatch at tp 1: 1, 4, 32; tp 2: 1, 4, 32; tp 4" in said
    assert "dp 1 tp 4 pp 2 single" in said
    assert "sequence parallel, zero 0" in said
    assert planned(model, capsys, "--fix", "tp=8") == (
        2,
        "zbsolve plan: no layout has tp 8: with all before tp there are 1, 2, 4 (dp × tp × pp is 8 devices)\n",
    )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("deepseek-tiny", "model 'deepseek-tiny': layers: field 'parameter_bytes': block0 has 145056 and block1 269984"),
        ("qwen2-7", "model 'qwen2-7': unknown; did you mean qwen2-7b or qwen2-72b"),
        ("gpt-3.5b", "model 'gpt-3.5b': unknown; did you mean gpt-3.6b or gpt-1.5b"),
        ("nothing:here", "model 'nothing:here': no module named 'nothing'"),
    ],
)
def test_a_model_that_is_not_planned_is_refused_by_name(model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = planned(model, capsys)
    assert (code, told.count("\n"), said in told) == (2, 1, True), told


def test_sizes_between_profiles_lie_on_lines() -> None:
    model = ProfiledModel.of(profile_of(*one) for one in ((1, 1), (1, 2), (1, 8), (2, 4)))
    assert (list(model.sizes(1)), list(model.sizes(2)), list(model.sizes(4))) == ([*range(1, 9)], [4], [])
    first, block, last = model.at(1, 5)
    true = profile_of(1, 5).layers
    for mine, one in ((first, true[0]), (block, true[1]), (last, true[-1])):
        assert (mine.F, mine.BW, mine.held_until_W) == pytest.approx((one.F, one.BW, one.held_until_W))
    assert model.error == pytest.approx(0)
    assert model.at(1, 2)[1].F == profile_of(1, 2).layers[1].F
    with pytest.raises(BadInput, match="no profile says what 9 sequences on 1 tensor ranks cost"):
        model.at(1, 9)
    late = profile_of(1, 2)
    slow = replace(late, layers=tuple(replace(one, F=one.F * 1.5) for one in late.layers))
    off = ProfiledModel.of([profile_of(1, 1), slow, profile_of(1, 8)])
    assert off.error == pytest.approx(1 - 2.9 / 3.4, abs=1e-3)
    assert "off by up to" in off.source


def test_recompute_and_zero_change_blocks_as_they_do_by_formulas() -> None:
    model, layout = ProfiledModel.of([profile_of(1, 2)]), Layout(4, 1, 2, 1, SINGLE, 2, 4)
    plain, full, sharded = (
        layout_profile(model, one, CLUSTERS["a100"])
        for one in (layout, layout._replace(recompute=FULL), layout._replace(zero=3))
    )
    block, again, moved = (one.layers[1] for one in (plain, full, sharded))
    assert again.B - block.B == again.BW - block.BW == block.F  # X is not known: F's time
    assert again.held_until_B + again.held_until_W == block.output_bytes
    assert again.transient - block.transient == block.held_until_B + block.held_until_W
    assert pytest.approx(moved.B - block.B, abs=1) == 2 * (moved.F - block.F)
    assert moved.transient == block.transient + 2 * block.parameter_bytes
    assert (plain.states, sharded.states) == (4.0, 1.0)
    with pytest.raises(BadInput, match="do not say what selective recompute saves"):
        layout_profile(model, layout._replace(recompute=SELECTIVE), CLUSTERS["a100"])


def test_the_command_plans_profiles(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    limits = ["--devices", "4", "--batch", "16", "--cluster", "a100", "--effort", "0.3"]
    assert main(["plan", *files, *limits, "-o", str(path)]) == 0
    said = capsys.readouterr().out
    for words in ("m: 4 devices", "left out: all that no profile tells", "layers by profiles (measured)", "tokens/s", "–"):
        assert words in said
    found = check_plan(path)
    assert found.wrong == ()
    assert 0 <= 1 - found.bound / found.step < 0.1
    sizes = "of sequences a microbatch at tp 1: 1, 2, 4; tp 2: 2"
    assert Profile.load(path).source.startswith(f"estimated: layers by profiles (measured) {sizes}")
    assert main(["check", str(path)]) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"facts": {}}, "facts: 'tensor_ranks' is missing"),
        ({"facts": {"tensor_ranks": 1}}, "facts: 'microbatch' does not say 'sequences'"),
        ({"facts": facts() | {"mesh": {"cp": 2}}}, "'mesh' has cp"),
        ({"layers": profile_of(1, 1).layers[:2]}, "layers: 2: a first layer, blocks and a last layer are needed"),
        ({"rank_factors": (1.0, 2.0)}, "field 'rank_factors' is of one step"),
        ({"tied": ((5, (0, 1)),)}, "field 'tied'"),
        ({"layers": (*profile_of(1, 1).layers, profile_of(1, 1).layers[0])}, "field 'parameter_bytes': block0 has"),
        ({"layers": tuple(replace(one, F=0.2) for one in profile_of(1, 1).layers)}, "F of a block is 0.2"),
    ],
)
def test_what_a_profile_lacks_is_one_line(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    profile_of(1, 1, **changes).save(path)
    assert main(["plan", str(path), "--devices", "2", "--batch", "4"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert said in error
    assert error.count("\n") == 1


def test_profiles_that_do_not_go_together(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    profile_of(1, 3, blocks=5).save(other)
    rest = ["--devices", "2", "--batch", "4"]
    for models, said in (
        ([files[0], files[0]], "as " + files[0]),
        ([files[0], str(other)], f"{other}: 7 layers, but"),
        ([files[0], "gpt-3.6b"], "model 'gpt-3.6b': beside profiles"),
        (["gpt-3.6b", "gpt-1t"], "name one, or profiles of one"),
        ([files[3]], "the model has tp 2 with 2 to 2 sequences a microbatch, which makes no layout"),
    ):
        assert main(["plan", *models, *(["--devices", "1", "--batch", "4"] if models == [files[3]] else rest)]) == 2
        assert said in capsys.readouterr().err
