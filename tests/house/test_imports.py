"""The house: packages import one way, nothing in a circle; `import zbsolve` and `verify` stay light."""

from __future__ import annotations

import subprocess
import sys

import networkx

from ..support.house import MODULES, ROOT, importing, imports, package


def rows() -> dict[str, int]:
    """Package → its row in the list of docs/design.md."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("## The house")[1].split("```")[1]
    return {line.split()[0]: i for i, line in enumerate(text.splitlines()) if line.strip()}


def test_a_package_imports_only_those_above_it() -> None:
    known = {"zbsolve": -1, **rows()}
    below = []
    for module in sorted(set(MODULES) - {"zbsolve"}):
        mine = package(module)
        assert mine in known, f"docs/design.md: '{mine}' has no row in the house: give it one"
        theirs = {other: package(other) for other in imports(module)}
        below += [f"{module} imports {a}" for a, one in theirs.items() if one != mine and known[one] >= known[mine]]
    assert below == []


def test_the_list_names_no_package_that_is_not_there() -> None:
    assert set(rows()) == {package(module) for module in MODULES} - {"zbsolve"}


def test_nothing_imports_in_a_circle() -> None:
    graph = networkx.DiGraph([(a, b) for a in MODULES for b in imports(a)])
    circles = [sorted(one) for one in networkx.strongly_connected_components(graph) if len(one) > 1]
    assert circles == []


def test_the_executor_needs_neither_solver_nor_profiler() -> None:
    assert importing("exec", ("greedy", "systems", "ilp", "search", "profiler", "cli")) == []


def test_verify_shares_no_code_with_a_solver() -> None:
    assert importing("verifier", ("timeline", "build", "greedy", "systems", "ilp", "search", "exec")) == []


def test_import_zbsolve_loads_no_torch_and_no_solver() -> None:
    code = (
        "import sys, zbsolve; zbsolve.pipeline([1], [1], [1], microbatches=1); zbsolve.verify; zbsolve.Schedule;"
        "print([m for m in ('torch', 'ortools', 'pulp', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_no_test_module_imports_another() -> None:
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [
            f"{path.name}: {one}"
            for one in lines
            if one.lstrip().startswith("from") and " import " in one and ".test_" in one
        ]
    assert found == []
