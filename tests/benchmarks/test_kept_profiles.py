"""The profiles under benchmarks/profiles: whole, honest about where they come from, and of use."""

from dataclasses import replace

import pytest

from benchmarks.profiles import FOLDER, kept, names
from benchmarks.profiles.__main__ import DEVICES, MODELS, sources
from benchmarks.systems import model_row
from profiler import estimate
from profiler.devices import DEVICES as DATA_SHEETS
from profiler.devices import host_link
from zbsolve import solve, verify
from zbsolve.models.by_name import load

ALL = names()


def test_the_published_models_are_there() -> None:
    assert {name for name in ALL if name.startswith("estimated")} == {f"estimated-{m}-{d}" for m in MODELS for d in DEVICES}
    assert {name for name, _ in sources(measuring=False)} <= set(ALL)
    assert any(name.startswith("measured") for name in ALL)


@pytest.mark.parametrize("name", ALL)
def test_a_kept_profile_says_where_it_comes_from_and_is_solved(name: str) -> None:
    profile, ranks = kept(name), 4
    assert (FOLDER / f"{name}.json").stat().st_size < 300_000
    assert load(profile.model).layer_names == tuple(layer.name for layer in profile.layers)
    if name.startswith("estimated"):
        assert profile.source == f"estimated: {profile.facts['device']} roofline"
        assert profile.samples == {}
        assert name.endswith(profile.facts["device"])
        assert profile.vocabulary is not None
        assert profile.host == host_link(DATA_SHEETS[profile.facts["device"]])
    else:
        assert name.startswith("measured")
        assert profile.source == "measured"
        assert profile.facts["processor"]
        for layer in profile.facts["measured_layers"]:
            assert all(len(profile.samples[f"{layer}/{kind}"]) >= 9 for kind in ("F", "B", "W", "BW"))
        assert not [line for line in profile.facts["warnings"] if line.startswith("disturbed")]
    assert "host" not in profile.facts
    problem = replace(profile, capacity=None).problem(ranks, 8)
    schedule = solve(problem, effort=0.01)
    assert verify(problem, schedule) == ()
    assert problem.source == f"{profile.source}: {profile.model}"


@pytest.mark.parametrize("name", ["estimated-gpt-1.5b-a100", "estimated-mixtral-8x7b-h200"])
@pytest.mark.slow
def test_estimates_are_what_the_code_gives(name: str) -> None:
    """Otherwise: python -m benchmarks.profiles."""
    old = kept(name)
    new = estimate(old.model, old.facts["device"])
    assert old.layers == new.layers
    assert (old.link, old.states, old.capacity, old.tied) == (new.link, new.states, new.capacity, new.tied)
    assert old.host == new.host
    assert old.vocabulary == new.vocabulary


def test_what_there_is_to_win() -> None:
    row = model_row(kept("estimated-gpt-1.5b-h200"), 4, 0.5)
    assert row is not None
    assert row["equal"]["fits"]
    assert row["vee"]["us"] < row["single"]["us"] < row["balanced"]["us"] <= row["equal"]["us"]
    assert all(row[what]["bound_us"] <= row[what]["us"] for what in ("single", "vee"))
    assert model_row(kept("estimated-llama3-70b-a100"), 8, 0.5) is None
