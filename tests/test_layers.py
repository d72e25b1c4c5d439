"""The house: each layer imports only those above it; `import zbsolve` and `verify` stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# First match wins. A module may import modules of a lower number, and its neighbours in a package.
LAYERS = [
    ("zbsolve.errors", 0),
    ("zbsolve.clock", 1),
    ("zbsolve.files", 1),
    ("zbsolve.layer", 1),
    ("zbsolve.machine", 1),
    ("zbsolve.placement", 1),
    ("zbsolve.problem", 2),
    ("zbsolve.partition_kernel", 1),
    ("zbsolve.partition_alpa", 3),
    ("zbsolve.partition", 2),
    ("zbsolve.timeline", 3),
    ("zbsolve.schedule", 4),
    ("zbsolve.trace", 5),
    ("zbsolve.verifier", 5),
    ("zbsolve.graphs", 5),
    ("zbsolve.versions", 5),
    ("zbsolve.rounds", 5),
    ("zbsolve.systems", 6),
    ("zbsolve.profile_report", 9),
    ("zbsolve.profile_rows", 9),
    ("zbsolve.profile", 6),
    ("zbsolve.drift", 7),
    ("zbsolve.from_trace", 7),
    ("zbsolve.assign_mesh", 8),
    ("zbsolve.assign", 7),
    ("zbsolve.text", 1),
    ("zbsolve.greedy", 7),
    ("zbsolve.ilp", 8),
    ("zbsolve.compare", 7),
    ("zbsolve.show", 8),
    ("zbsolve.export", 8),
    ("zbsolve.state", 9),
    ("zbsolve.finder", 10),
    ("zbsolve.prover", 10),
    ("zbsolve.search", 11),
    ("zbsolve.workers", 1),
    ("zbsolve.race", 12),
    ("zbsolve.auto", 13),
    ("zbsolve.bench_suites", 7),
    ("zbsolve.bench_compare", 13),
    ("zbsolve.bench", 12),
    ("zbsolve.frontier_svg", 13),
    ("zbsolve.frontier", 12),
    ("profiler.models", 8),
    ("profiler.presets", 8),
    ("profiler.published", 8),
    ("profiler.huggingface", 8),
    ("profiler.blocks", 8),
    ("zbsolve.exec", 9),
    ("profiler", 10),
    ("zbsolve.cli", 14),
]
MODULES = sorted([*ROOT.glob("zbsolve/**/*.py"), *ROOT.glob("profiler/**/*.py")])


def layer(module: str) -> int | None:
    return next((n for name, n in LAYERS if module == name or module.startswith((name + ".", name + "_"))), None)


def imports(path: Path) -> list[str]:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            found += [full] + [f"{full}.{alias.name}" for alias in node.names]
    return [name for name in found if name.startswith(("zbsolve.", "profiler"))]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_layers_above_it(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    if module == "zbsolve":
        return
    mine = layer(module)
    assert mine is not None, f"{module} has no layer: give it one"
    for name in imports(path):
        theirs = layer(name)
        neighbours = name.split(".")[:2] == module.split(".")[:2] or name.partition("_")[0] == module.partition("_")[0]
        same = theirs == mine and (neighbours or module.startswith("profiler"))
        assert theirs is None or theirs < mine or same, f"{module} (layer {mine}) imports {name} (layer {theirs})"


def rows() -> dict[str, int]:
    """Name → its row in the list of docs/design.md; a package's and a family's files (`show_svg`) go by its name."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("## Layers")[1].split("```")[1]
    names = [line.split("  ")[0] for line in text.splitlines() if line.strip() and not line.startswith(" ")]
    return {name.strip(" /"): i for i, row in enumerate(names) for name in row.split(",")}


def row_of(module: str, known: dict[str, int]) -> int | None:
    name = module.removeprefix("zbsolve.").split(".")[0]
    while name not in known and "_" in name:
        name = name.rpartition("_")[0]
    return known.get(name)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_design_names_every_module_above_those_that_import_it(path):
    module, known = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), rows()
    if module == "zbsolve":
        return
    mine = row_of(module, known)
    assert mine is not None, f"docs/design.md: {module} is in none of the layers"
    for name in imports(path):
        theirs = row_of(name, known)
        assert theirs is None or theirs <= mine, f"docs/design.md: {module} imports {name}, which stands below it"


def test_the_design_names_no_layer_that_is_not_there():
    tops = {path.relative_to(ROOT).parts[1] for path in MODULES if path.parts[-2] != "profiler"} | {"profiler"}
    assert {name for name in rows() if name not in tops and f"{name}.py" not in tops} == set()


def test_import_zbsolve_loads_no_torch_and_no_solver():
    code = (
        "import sys, zbsolve; zbsolve.pipeline([1], [1], [1], microbatches=1); zbsolve.verify; zbsolve.Schedule;"
        "print([m for m in ('torch', 'ortools', 'pulp', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_verify_shares_no_code_with_a_solver():
    for name in imports(ROOT / "zbsolve/verifier.py"):
        assert layer(name) is not None
        assert not name.startswith(("zbsolve.greedy", "zbsolve.ilp", "zbsolve.search", "zbsolve.timeline", "zbsolve.exec"))
