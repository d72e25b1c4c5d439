"""What goes with what: every row of the table refuses, all else builds and can be scheduled; the docs print both tables."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest

from zbsolve import BadInput, Problem, Step, verify
from zbsolve.build import Work
from zbsolve.cli.step_options import OPTIONS
from zbsolve.features.feature import NOT_OPEN, Field
from zbsolve.features.table import APART, CONDITIONS, FEATURES, Apart
from zbsolve.kinds import TABLE
from zbsolve.partition.file import Partition
from zbsolve.partition.layer import Given, Link
from zbsolve.profile.step import PLAIN_FIELDS, STEP_FIELDS

from ..support.exec_tools import random_schedule
from ..support.house import ROOT
from ..support.profiles import PROFILE

# What makes each of the table's conditions hold: fields of a step, and what is different about the profile.
HOLDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recompute": ({"recompute": "0"}, {}),
    "fused": ({"fused": True}, {}),
    "work": ({"work": (Work(1, 9, 3),)}, {}),
    "sharded parameters": ({"shards": 2}, {}),
    "replicas": ({"replicas": 2}, {}),
    "sharded vocabulary": ({"vocabulary": "sharded"}, {}),
    "offload": ({"offload": "half"}, {}),
    "all-to-all": ({}, {"layers": {i: {"all_to_all": 5.0} for i in range(4, 8)}}),
    "side inputs": ({}, {"layers": {1: {"gives": (Given("memory", 16),)}, 6: {"takes": ("memory",)}}}),
    "slices": ({"slices": 2}, {}),
    "recompute of part of a stage": ({"recompute": "0:1"}, {}),
    "lengths": ({"lengths": (32, 64, 128, 16)}, {}),
    "sizes": ({"sizes": (1, 2, 1, 3)}, {}),
    "whole sequences": ({"slices": 1}, {}),
    "uneven slices": ({"slices": (1, 2)}, {}),
    "attention exchange": ({"attention_exchange": True}, {}),
    "several routes": ({"placement": "mirror"}, {}),
    "submeshes": ({"partition": Partition("toy", "single", (4, 4), (2, 2))}, {}),
    "a single rank": ({"ranks": 1}, {}),
    "messages that occupy their sender": ({"blocking": True}, {}),
    "unlike ranks or microbatches": ({}, {"rank_factors": (1.0, 1.5)}),
    "links that messages share": ({}, {"link": replace(PROFILE.link, shared="rank")}),
    "a link between sites": ({}, {"site_link": Link(50.0, 1.0, shared="1+1")}),
}
for feature in FEATURES:  # one that is new: its field as a page offers it, and its price as a fact of the profile
    if feature.name in CONDITIONS:
        offered = {row.name: row.parse(row.offered[0]) for row in feature.fields if row.offered}
        HOLDS.setdefault(feature.name, (offered, {"facts": PROFILE.facts | {feature.name: 50.0}}))
PAGE = ROOT / "docs/features.md"
ROWS = {frozenset((row.one, row.other)): row for row in APART}


def made(*names: str) -> Any:
    """The problem of a step that has all of these."""
    said: dict[str, Any] = {"ranks": 2, "microbatches": 4}
    profile = PROFILE
    for name in names:
        step, change = HOLDS[name]
        layers = [replace(layer, **change.get("layers", {}).get(i, {})) for i, layer in enumerate(profile.layers)]
        said, profile = said | step, replace(profile, **change | {"layers": tuple(layers)})
    return Step(**said).problem(profile)


def test_the_tables_name_the_same() -> None:
    assert set(HOLDS) == {"recompute", "fused", *CONDITIONS}
    assert {name for row in APART for name in (row.one, row.other)} <= set(CONDITIONS)
    assert len(ROWS) == len(APART)


@pytest.mark.parametrize("row", APART, ids=lambda row: f"{row.one}, {row.other}")
def test_what_does_not_go_together_is_refused(row: Apart) -> None:
    names = (row.one, row.other)  # an exchange of attention is of slices
    sliced = ["slices"] if "attention exchange" in names and not any("slices" in n or "seq" in n for n in names) else []
    with pytest.raises(row.error) as error:
        made(*sliced, row.one, row.other)
    assert str(error.value) == f"{row.one}: {row.why}"


def brought(problem: Problem) -> set[str]:
    """The features whose passes a problem has."""
    return {TABLE[kind].feature for kind in problem.passes.kinds}


def both(one: str, other: str) -> bool:
    """Whether two conditions can hold at once, and nothing says that they do not go together. Uneven slices and an exchange
    of attention are of slices, so what does not go with those does not go with them."""
    if {one, other} & {"whole sequences", "a single rank"} or frozenset((one, other)) in ROWS:
        return False
    if {one, other} & {"uneven slices", "attention exchange"} and any(
        frozenset(("slices", name)) in ROWS for name in (one, other)
    ):
        return False
    same = {"several routes", "submeshes"}, {"slices", "uneven slices"}, {"all-to-all", "messages that occupy their sender"}
    uneven = {"submeshes", "unlike ranks or microbatches"}  # a profile of unlike ranks is not spread over submeshes
    return {one, other} not in (*same, uneven)


@pytest.mark.parametrize(("one", "other"), [pair for pair in combinations(HOLDS, 2) if both(*pair)])
def test_all_else_goes_together(one: str, other: str) -> None:
    """With both, the step has the passes of each, and an order of it passes the verifier."""
    sliced = ["slices"] if "attention exchange" in (one, other) and "uneven slices" not in (one, other) else []
    problem = made(*sliced, one, other)
    assert brought(problem) == brought(made(*sliced, one)) | brought(made(*sliced, other))
    assert verify(problem, random_schedule(problem)) == ()


def test_a_steps_fields_are_the_features_and_the_options() -> None:
    """An option is declared once: in its feature."""
    names = [field.name for field in STEP_FIELDS]
    assert sorted(names) == sorted(one.name for one in fields(Step))  # type: ignore[arg-type]
    assert names == list(OPTIONS)
    declared = [field.name for feature in FEATURES for field in feature.fields]
    assert names == [*(one.name for one in PLAIN_FIELDS), *declared]
    assert all(getattr(Step(2, 2), field.name) == field.default for field in STEP_FIELDS[2:])
    assert {field.name for field in STEP_FIELDS if field.closed is not NOT_OPEN} == {
        "placement", "partition", "recompute", "vocabulary", "offload", "slices", "gathers", "order", "sizes",
    }  # fmt: skip


def row_of(field: Field, feature: str) -> str:
    """A field's row in the docs."""
    words = field.words.replace("|", "\\|")
    said = " ".join([field.option, *([field.metavar] if field.metavar else [])])
    return f"| `{said}` | `{field.name}` | {words} | {feature} |"


def tables() -> list[str]:
    """The tables of the docs: a step's fields, and what does not go together."""
    of = {field.name: feature.name for feature in FEATURES for field in feature.fields}
    rows = [row_of(field, of.get(field.name, "")) for field in STEP_FIELDS]
    options = ["| option | field of `Step` | what it says | feature |", "|---|---|---|---|", *rows]
    apart = ["| what | not with | why |", "|---|---|---|", *(f"| {r.one} | {r.other} | {r.why} |" for r in APART)]
    return ["\n".join(options), "\n".join(apart)]


def test_the_docs_print_both_tables() -> None:
    """After a change of features: `python -m tests.features.test_table` writes them anew."""
    text = PAGE.read_text(encoding="utf-8")
    assert [table for table in tables() if table not in text] == []


def test_wrong_names_are_errors() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'reload'"):
        Step(2, 2, reload=True)
    with pytest.raises(BadInput, match="slices"):
        Step(2, 2, slices=0)


if __name__ == "__main__":
    written = iter(tables())
    text = re.sub(r"^\|(.+\n\|)+.*$", lambda _: next(written), PAGE.read_text(encoding="utf-8"), flags=re.M)
    PAGE.write_text(text, encoding="utf-8")
