"""The README and the pages say what is there: links, options, names and files exist, and the help is the commands' own."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import zbsolve
from zbsolve.cli.app import COMMANDS, parser
from zbsolve.kinds import OURS

from ..support.docs import PAGES, blocks, text_of
from ..support.house import ROOT

HELP, GLOSSARY = "docs/commands.md", "docs/design.md"
KIND_ROWS = re.compile(r"^\| `[A-Z]+` \|.*\n", re.M)
PACKAGES = ("build", "exec", "interchange", "partition", "planner", "show")
PUBLIC = ("zbsolve", *(f"zbsolve.{one}" for one in PACKAGES), "torch", "pathlib", "peft", "transformers")
MEGATRON = {
    *("--pipeline-model-parallel-layout", "--pipeline-model-parallel-size", "--num-layers"),
    *("--microbatch-group-size-per-virtual-pipeline-stage", "--num-layers-per-virtual-pipeline-stage"),
    *("--num-virtual-stages-per-pipeline-rank", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
}
TORCHTITAN = {"--parallelism", "--training"}  # and what is in them, behind a dot
TORCHRUN = {"--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"}
DASK = {"--nworkers", "--nthreads"}
OTHERS = {"--measure", "--fix", "--config-settings"}
FOREIGN = {
    *TORCHRUN,
    *MEGATRON,
    *TORCHTITAN,
    *DASK,
    *OTHERS,
    "--loading",
}  # options of other programs, and of the example of CONTRIBUTING
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)#]*)(?:#([^)]+))?\)")


def help_block() -> str:
    """The command line's own help, 100 columns wide."""
    return f"```text\n{parser().format_help().strip()}\n```"


def test_the_help_block_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the command line: `python -m tests.house.test_docs` writes the block anew."""
    monkeypatch.setenv("COLUMNS", "100")
    block = re.search(r"<!-- help -->\n(.*)\n<!-- /help -->", text_of(HELP), re.S)
    assert block is not None
    assert block[1] == help_block()


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").split()) <= 700


def headings(page: str) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    plain = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    found = re.findall(r"^#+ (.*)$", plain, re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in found}


def test_links_lead_somewhere() -> None:
    for page in (*PAGES, "CHANGELOG.md"):
        folder = (ROOT / page).parent
        for path, anchor in LINK.findall(text_of(page)):
            target = (folder / path).resolve() if path else ROOT / page
            assert target.exists(), f"{page}: {path}"
            if anchor:
                assert anchor in headings(str(target.relative_to(ROOT))), f"{page}: {path}#{anchor}"
        for path in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text_of(page)):
            assert (folder / path).exists(), f"{page}: {path}"


def test_the_index_has_every_page_by_its_question() -> None:
    listed = dict(re.findall(r"^\* \[(.*)\]\((.*)\)$", text_of("docs/README.md"), re.M))
    titles = {text_of(page).splitlines()[0].removeprefix("# "): page for page in PAGES if page.startswith("docs/")}
    del titles["The pages"]
    assert {question: f"docs/{path}" for question, path in listed.items()} == titles
    assert all(question.endswith("?") for question in titles)


def options(of: argparse.ArgumentParser) -> set[str]:
    """Every option of a command line and of its commands."""
    found: set[str] = set()
    for action in of._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                found |= options(one)
    return found


def test_options_exist() -> None:
    known = options(parser()) | FOREIGN
    for page in PAGES:
        jobs = "\n".join(block.text for block in blocks(page) if block.language == "yaml")
        shell = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", jobs))
        named = set(re.findall(r"(?<![\w<!-])--[a-z][\w-]*", text_of(page))) - shell
        assert named - known <= example_options(page), page


def example_options(page: str) -> set[str]:
    """Options of the project's own scripts that the page runs."""
    scripts = set(re.findall(r"(examples/\w+\.py)", text_of(page)))
    return {word for script in scripts for word in re.findall(r'"(--[a-z-]+)"', text_of(script))}


def test_files_and_modules_exist() -> None:
    for page in PAGES:
        text = re.sub(r"(?:The new file|above) `[^`]*`", "", text_of(page))
        for path in re.findall(r"`((?:benchmarks|docs|examples|profiler|tests|zbsolve)/[\w./-]*)`", text):
            assert (ROOT / path).exists(), f"{page}: {path}"
        for module in re.findall(r"python -m (benchmarks\.\w+)", text):
            assert (ROOT / module.replace(".", "/") / "__main__.py").exists(), f"{page}: {module}"
        for script, table in re.findall(r"python -m benchmarks ([a-z_]+) ([a-z_]+)", text):
            assert f"\ndef {table}(" in text_of(f"benchmarks/{script}.py"), f"{page}: {script} {table}"
        extras = re.findall(r"pip install '\.\[(\w+)\]'", text)
        assert all(re.search(rf"^{one} = \[", text_of("pyproject.toml"), re.M) for one in extras), page


def test_python_imports_public_names_alone() -> None:
    for page in PAGES:
        about = re.fullmatch(r"docs/export-(\w+)\.md", page)  # such a page imports its engine, and the exported file
        engine = about[1] if about else "torch"
        written = set(re.findall(r"^# (\w+)\.py$", text_of(page), re.M))  # files that the page has shown
        trees = {
            str(block): ast.parse(block.text)
            for block in blocks(page)
            if block.language == "python" and page != "CONTRIBUTING.md"
        }
        for block, node in ((block, node) for block, tree in trees.items() for node in ast.walk(tree)):
            if isinstance(node, ast.ImportFrom):
                public = node.module in PUBLIC or re.match(rf"torch\.|{engine}(\.|_schedule$|$)", str(node.module))
                assert public, f"{block}: {node.module}"
            elif isinstance(node, ast.Import):
                assert {one.name for one in node.names} <= {*PUBLIC, engine, *written}, block


def test_the_citation_is_of_this_version() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load(text_of("CITATION.cff"))
    assert cited["version"] == zbsolve.__version__
    assert {"cff-version", "message", "title", "authors", "type", "abstract", "license", "keywords"} <= set(cited)
    assert cited["cff-version"] == "1.2.0"
    assert all("name" in one or "family-names" in one for one in cited["authors"])
    assert f'license = "{cited["license"]}"' in text_of("pyproject.toml")


def test_the_changelog_is_grouped() -> None:
    versions = re.split(r"^## ", text_of("CHANGELOG.md"), flags=re.M)[1:]
    assert versions[0].startswith("Unreleased\n")
    assert re.match(rf"{re.escape(zbsolve.__version__)} \(\d{{4}}-\d\d-\d\d\)\n", versions[1])
    for one in versions:
        groups = re.findall(r"^### (.*)$", one, re.M)
        assert groups or one.strip() == "Unreleased", one[:40]
        assert set(groups) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def kinds() -> str:
    """Rows of the glossary's kinds of passes."""
    return "".join(f"| `{kind.label}` | {kind.words} | {kind.feature} |\n" for kind in OURS)


def test_the_glossary_has_every_kind() -> None:
    """After a change of the kinds: `python -m tests.house.test_docs` writes the rows anew."""
    assert KIND_ROWS.findall(text_of(GLOSSARY)) == kinds().splitlines(keepends=True)


def workflows() -> list[tuple[str, Any]]:
    """This repository's, and those that pages show: where they are, and what they say."""
    yaml = pytest.importorskip("yaml")
    own = [(path.name, path.read_text(encoding="utf-8")) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]
    shown = [(str(block), block.text) for page in PAGES for block in blocks(page) if block.language == "yaml"]
    return [(where, yaml.safe_load(text)) for where, text in own + shown]


def test_workflows_run_what_is_there() -> None:
    seen = workflows()
    assert [where for where, _ in seen][:2] == ["bench.yml", "ci.yml"]
    assert len(seen) > 2
    targets = re.findall(r"^(\w+):", text_of("Makefile"), re.M)
    for where, workflow in seen:
        assert set(workflow) == {"name", True, "permissions", "jobs"}, where  # YAML 1.1 reads `on` as true
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        assert all(("run" in step) != ("uses" in step) for step in steps), where
        for line in "\n".join(step.get("run", "") for step in steps).splitlines():
            words = shlex.split(line.partition(" | ")[0]) or [""]
            if words[0] == "make":
                assert set(words[1:]) <= set(targets), line
            if Path(words[0]).name == "zbsolve":
                parser().parse_args(words[1:])


def test_each_command_has_its_function_in_python() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", text_of(HELP), re.M)
    assert {name for name, _ in rows} == set(COMMANDS)
    for _, cell in rows:
        for name in re.findall(r"`(\S+)`", cell):
            module, _, function = name.rpartition(".")
            assert hasattr(import_module(module), function), name


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    written = f"<!-- help -->\n{help_block()}\n<!-- /help -->"
    (ROOT / HELP).write_text(
        re.sub(r"<!-- help -->\n.*<!-- /help -->", lambda _: written, text_of(HELP), flags=re.S), encoding="utf-8"
    )
    before, *_, behind = re.split(f"(?:{KIND_ROWS.pattern})+", text_of(GLOSSARY), flags=re.M)
    (ROOT / GLOSSARY).write_text(before + kinds() + behind, encoding="utf-8")
