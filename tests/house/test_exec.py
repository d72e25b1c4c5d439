"""The executor's folders: base knows no feature, what imports what goes one way, the interpreter names no feature."""

from __future__ import annotations

import ast

import networkx
import pytest

from zbsolve.exec.base.part import Part

from ..support.house import MODULES, imports

EXEC = "zbsolve.exec."
FEATURES = ("offload", "updates", "vocabulary", "sharding", "slices", "attention", "exchange", "sides", "work")
WORDS = ("offload", "update", "version", "vocabular", "shard", "fsdp", "slice", "attention", "exchange", "replica")


def folder(module: str) -> str:
    """The folder of exec that a module lies in; a module at exec's door is its own."""
    return module.removeprefix(EXEC).split(".")[0]


def arrows() -> set[tuple[str, str]]:
    """Pairs of folders of exec of which the first imports from the second; imports in functions and for types count."""
    mine = [module for module in MODULES if module.startswith(EXEC)]
    pairs = {(folder(a), folder(b)) for a in mine for b in imports(a) if b.startswith(EXEC)}
    return {(a, b) for a, b in pairs if a != b}


def test_base_imports_no_other_folder() -> None:
    assert {b for a, b in arrows() if a == "base"} == set()
    assert {b for a, b in arrows() if a == "backward"} == {"base"}


def test_folders_form_no_circle() -> None:
    graph = networkx.DiGraph(arrows())
    assert [sorted(one) for one in networkx.strongly_connected_components(graph) if len(one) > 1] == []
    assert len(graph) > 20


def test_each_feature_is_a_folder_and_has_a_part() -> None:
    from zbsolve.exec.handlers import PARTS

    homes = {folder(kind.__module__) for kind in _below(Part) if kind.__module__.startswith(EXEC)}
    assert homes == set(FEATURES)
    assert len(PARTS) == len(FEATURES) + 1  # sums over ranks: those of a pipeline, and replicas


def _below(kind: type) -> set[type]:
    return {one for child in kind.__subclasses__() for one in {child, *_below(child)}}


def named(source: str) -> set[str]:
    """The words for features in a source's code; prose does not count."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[0] = ast.Pass()
    return {word for word in WORDS if word in ast.unparse(tree).lower()}


@pytest.mark.parametrize("module", ["interpreter", "rank", "assembly", "base.part", "base.handler", "lowering"])
def test_no_feature_is_named(module: str) -> None:
    """But for sums over ranks and updates, whose edges lowering reads, and for slices, which number passes."""
    allowed = {
        "assembly": {"exchange", "slice"},
        "base.handler": {"slice"},
        "rank": {"version"},  # of torch
        "lowering": {"update", "version", "slice", "vocabular"},
    }
    assert named(MODULES[EXEC + module].read_text(encoding="utf-8")) <= allowed.get(module, set())


def test_assembly_imports_few_modules() -> None:
    assert len(imports(f"{EXEC}assembly")) <= 20


def test_the_reader_sees_what_it_should() -> None:
    source = '"""offload"""\ndef f():\n    """shard"""\n    return state.versions, "Replicas"  # slice'
    assert named(source) == {"version", "replica"}
