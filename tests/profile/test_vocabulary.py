"""A profile that knows what a sharded vocabulary costs: files, numbers for any ranks, collectives, what is left of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zbsolve import BadInput, Link, Profile
from zbsolve.features.vocabulary import without_vocabulary
from zbsolve.partition.layer import Layer
from zbsolve.profile import ShardCosts, ShardPasses, VocabularyCosts

LINK = Link(1.0, 100.0)


def close(found: float, wanted: float) -> bool:
    return math.isclose(found, wanted)


def layer(name: str, time: float, parameters: int) -> Layer:
    return Layer(name, time, time, time, 2 * time, 10, 10, parameters, 8)


def row(ranks: int, time: float, rows: int, **how: Any) -> ShardCosts:
    two = ShardPasses(time / 3, 2 * time / 3, 40 * rows)
    return ShardCosts(ranks, ShardPasses(2 * time / 3, time / 3, 40 * rows, 80, merge=2.0), two, 100 * rows, 3.0, **how)


LAYERS = (layer("embedding", 1, 1000), layer("a", 10, 70), layer("b", 10, 70), layer("head", 60, 1030))
COSTS = VocabularyCosts(
    "given",
    size=10,
    hidden_bytes=400,
    statistic_bytes=20,
    output=3,
    output_rest=layer("head", 2, 30),
    shards=(row(2, 93, 5), row(4, 48, 3, broadcast=7.0, reduce=9.0, statistics=5.0)),
    embedding=0,
    embedding_rest=layer("embedding", 0, 0),
    tied=True,
)
PROFILE = Profile("given", "small", LAYERS, LINK, 4.0, None, {}, {}, tied=((1000, (0, 3)),), vocabulary=COSTS)


def test_files_hold_it_and_those_without_stay_as_they_are(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE
    replace(PROFILE, vocabulary=None).save(tmp_path / "old.json")
    assert "vocabulary" not in json.loads((tmp_path / "old.json").read_text())


def test_rows_between_and_beyond_say_so() -> None:
    assert COSTS.shard(2) is COSTS.shards[0]
    between, more = COSTS.shard(3), COSTS.shard(10)
    third = (1 / 3 - 1 / 4) / (1 / 2 - 1 / 4)
    assert close(between.one.S, (48 + third * 45) * 2 / 3)
    assert (between.parameter_bytes, between.scaled) == (400, "interpolated between 2 and 4 ranks")
    assert close(more.one.S + more.one.T, 93 - 4 * 45 * (1 / 2 - 1 / 10))  # 3 µs + 180 µs / ranks
    assert (more.parameter_bytes, more.scaled) == (100, "scaled from 4 ranks")
    steep = replace(COSTS, shards=(row(2, 93, 5), row(4, 30, 3))).shard(8)  # less than in proportion is not believed
    assert close(steep.two.T, 10)
    alone = replace(COSTS, shards=(row(4, 48, 3),)).shard(2)
    assert close(alone.one.S, 64)
    assert alone.one.merge == 2
    assert alone.parameter_bytes == 500


def test_collectives_are_measured_or_follow_from_the_link() -> None:
    assert [row.ranks for row in COSTS.shards if row.broadcast is not None] == [4]
    assert (COSTS.broadcast(4, LINK), COSTS.reduce(4, LINK), COSTS.statistics(4, LINK)) == (7, 9, 5)
    assert (COSTS.broadcast(2, LINK), COSTS.reduce(2, LINK)) == (5, 5)  # one message: 1 µs and 400 bytes
    assert [COSTS.statistics(ranks, LINK) for ranks in (2, 8)] == pytest.approx([1.2, 3 + 7 * 0.2])  # an all-gather
    # A tree sends three times at 8 ranks; scatter and all-gather 2 · 7/8 of the bytes in 3 + 7 messages.
    assert COSTS.broadcast(8, LINK) == pytest.approx(3 * 5)
    large = replace(COSTS, hidden_bytes=4000)
    assert large.broadcast(8, LINK) == pytest.approx(3 + 7 + 2 * 7 / 8 * 40)
    assert large.reduce(8, LINK) == pytest.approx(3 + 3 + 2 * 7 / 8 * 40)
    assert (COSTS.broadcast(1, LINK), COSTS.reduce(1, LINK), COSTS.statistics(1, LINK)) == (0, 0, 0)


def test_what_the_builder_takes() -> None:
    one, two = (COSTS.passes(4, LINK, barriers) for barriers in (1, 2))
    assert (one.S, one.T, two.S, two.T) == (32, 16, 16, 32)
    assert (one.broadcast, one.reduce, one.statistics, one.lookup) == (7, 9, 5 + 2, 12)
    assert (one.held_shard, one.held_hidden, one.barriers, two.barriers) == (120, 400, 1, 2)
    plain = replace(COSTS, embedding=None, embedding_rest=None, tied=False)
    assert plain.passes(4, LINK).lookup is None


def test_what_is_left_of_the_model_keeps_its_numbers() -> None:
    rest = without_vocabulary(PROFILE)
    assert [one.F for one in rest.layers] == [0, 10, 10, 2]
    assert (rest.tied, rest.vocabulary) == ((), None)
    spread = COSTS.parameter_bytes(4) * 4 + sum(one.parameter_bytes for one in rest.layers)
    assert spread - sum(one.parameter_bytes for one in LAYERS) == 4 * 300 - 2000  # tied: one weight of two; padded to 3 rows
    with pytest.raises(BadInput, match="the profile has no field 'vocabulary'"):
        without_vocabulary(rest)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output": 2}, "p.json: vocabulary: output is layer 2 and embedding 0 of 4 layers: the last one"),
        ({"shards": []}, r"p.json: vocabulary: shards are for \[\] ranks: ascending numbers from 1 to 10"),
        ({"size": 3}, r"shards are for \[2, 4\] ranks: ascending numbers from 1 to 3"),
        ({"embedding": None}, "'embedding' and 'embedding_rest' go together"),
        ({"hidden_bytes": "4 apples"}, "p.json: vocabulary: field 'hidden_bytes'"),
        ({"sizes": 3}, "p.json: .*sizes"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "p.json"
    PROFILE.save(path)
    body = json.loads(path.read_text())
    body["vocabulary"] |= change
    path.write_text(json.dumps(body))
    with pytest.raises(BadInput, match=said):
        Profile.load(path)


def test_more_shards_than_words_are_refused() -> None:
    with pytest.raises(BadInput, match="vocabulary: 10 words cannot be sharded over 11 ranks"):
        COSTS.shard(11)
    with pytest.raises(BadInput, match="vocabulary: barriers: 3"):
        COSTS.passes(2, LINK, 3)
