"""A branch on a feature belongs to the feature: files elsewhere that ask for one are counted, and may only get fewer.

A word in prose, a column of a table or a price is no branch: conditions of `if`, `while`, `x if … else …` and of
comprehensions are read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from ..support.house import MODULES

# Feature → how a condition names it; the files that are its own; how many other files have such a condition.
FEATURES = {
    "vocabulary": (r"vocab|BARRIERS", r"vocab", 2),
    "slices": (r"\bslices\b|sliced|\bcuts\b", r"slice|cuts", 14),
    "offload": (r"offload", r"offload", 3),
    "sharding": (r"\bshards\b|\bshard_|sharded|gathers", r"shard", 6),
    "recompute": (r"recompute", r"recompute", 8),
    "attention exchange": (r"attention_exchange", r"attention", 4),
    "replicas": (r"\breplicas\b", r"replica", 10),
}
SHARED = r"features\.(table|keeping)"  # what goes with what; recompute and offload, which are one choice


def conditions(source: str) -> Iterator[str]:
    """The conditions in a source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield ast.unparse(node.test)
        elif isinstance(node, ast.comprehension):
            yield from map(ast.unparse, node.ifs)


@cache
def conditions_of(module: str) -> tuple[str, ...]:
    """Read once for all features."""
    return tuple(conditions(MODULES[module].read_text(encoding="utf-8")))


def asking(feature: str) -> list[str]:
    """Modules, not the feature's own, with a condition that names it."""
    words, own, _ = FEATURES[feature]
    others = [name for name in MODULES if not re.search(f"{own}|{SHARED}", name)]
    return [name for name in others if any(re.search(words, one) for one in conditions_of(name))]


@pytest.mark.parametrize("feature", FEATURES)
def test_few_other_files_ask_for_a_feature(feature: str) -> None:
    assert len(asking(feature)) <= FEATURES[feature][2], f"{feature}: {asking(feature)}"


def test_the_reader_sees_conditions_alone() -> None:
    source = "offload = 1\nif a.shards > 1: pass\nx = [b for b in c if b.cuts] if d else e\nwhile f: pass"
    assert set(conditions(source)) == {"a.shards > 1", "d", "f", "b.cuts"}
