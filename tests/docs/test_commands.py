"""Every command and every Python block of the README and the pages is run, one page after the other from top to bottom.

The README goes first: the files that its commands make are what the other pages begin with. Commands are made cheaper as
CHEAPER says, but for those whose output the page shows. What is not run is in NOT_RUN, with the reason; it is parsed.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from zbsolve.cli import main
from zbsolve.cli.app import parser

from ..support.docs import PAGES, Block, blocks, commands
from ..support.exec_ranks import Forked, on_ranks
from ..support.house import ROOT


def run_page(rank: int, argument: dict[str, Any]) -> list[str]:
    """Run the Python blocks of a page as one script in `folder`. The process group is up already. Returns the names that the
    script has defined."""
    os.chdir(argument["folder"])
    names: dict[str, Any] = {"__name__": "page"}
    with mock.patch("torch.distributed.init_process_group"):
        for place, text in argument["blocks"]:
            exec(compile(text, place, "exec"), names)
    return sorted(names)


pytestmark = pytest.mark.slow

pytest.importorskip("torch")

CHEAPER = (
    # pattern, replacement, why
    (r" --capture", "", "for GPUs"),
    (r"16_000, 512", "64, 16", "the same model, but small"),
    (r"512, 16_000", "16, 64", "the same model, but small"),
    (r"16_000, \(4, 128\)", "64, (2, 8)", "the same model, but small"),
    (r"\(512, 8, ", "(16, 2, ", "the same model, but small"),
    (r"range\(12\)", "range(2)", "the same model, but small"),
    (r"(zbsolve profile .*@length=512')", r"\1 --seconds 0.2", "ten seconds"),
    (r"gpt-1\.5b@layers=2,batch=1 --seconds 60", "gpt-tiny --seconds 0.2", "three minutes"),
    (
        r'"num_hidden_layers": 4}@length=512',
        '"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 64}'
        "@length=8",
        "a minute",
    ),
    (r"(zbsolve profile mymodel\S+)", r"\1 --seconds 0.2", "ten seconds"),
    (r"(zbsolve profile (seq2seq|clip)\S+) --seconds 0\.5", r"\1 --seconds 0.1", "a second"),
    (r"(zbsolve explore.*--seconds) 2", r"\1 0.2", "two seconds each"),
    (
        r"(?<!-)(profile|now)\.json --ranks \d+ --microbatches \d+",
        r"\1.json --ranks 2 --microbatches 4",
        "ranks share two cores",
    ),
    (r"h200\.json --ranks 8 --microbatches 24", "h200.json --ranks 2 --microbatches 4", "ranks share two cores"),
    (r"(zbsolve solve.*?) --(?:seconds|effort) [\d.]+", r"\1", "less search, see the next two"),
    (r"(zbsolve solve(?!.*--method (?!\S*,auto)))", r"\1 --effort 0.02", "up to 30 seconds"),
    (r"times\.json --ranks 4 --microbatches 12", "times.json --ranks 4 --microbatches 4", "ten seconds"),
    (r"--frontier( \d+)?", "--frontier 2 --effort 0.002", "a minute; the last effort counts"),
    (r"(zbsolve check.* --period) --seconds \d+", r"\1 --seconds 1", "ten seconds"),
    (r"(zbsolve profile .*--from-trace \S+)", r"\1 --seconds 0.1", "ten seconds"),
    (r"llama3-8b@batch=4", "llama3-8b@batch=2", "ten seconds"),
    (r"(zbsolve plan.* --effort) [\d.]+", r"\1 0.05", "ten seconds"),
    (r"gpt-3\.6b --devices 16 --batch 64", "gpt-3.6b@layers=8 --devices 8 --batch 16", "three seconds"),
    (r'"gpt-3\.6b"\), 16, 64', '"gpt-3.6b@layers=8"), 8, 16', "three seconds"),
    (r"(zbsolve run.*)", r"\1 --steps 1 --warmup 0", "seven steps"),
    (r"--mesh pp=4,tp=2", "--mesh pp=2,tp=2", "ranks share two cores"),
    (r"bench small --effort 1", "bench small --effort 0.001 --repeats 1", "a minute"),
    (r'"a100"\], effort=(1\.0|0\.3)', '"a100"], effort=0.05', "ten seconds"),
    (r"seconds=10", "effort=0.02", "up to ten seconds"),
    (r"train_gpt\.py --steps 50", "train_gpt.py --steps 1", "fifty steps"),
)
NOT_RUN = (
    # how a command begins, why
    ("torchrun", "starts processes on several machines; tests/exec/test_run.py starts torchrun on one"),
    ("make", "makes an environment of its own"),
    (". .venv", "the environment that make has made"),
    ("pip install", "needs the network"),
    ("zbsolve bench small --effort 0.3", "takes half a minute, and every pull request runs it"),
)
STAND_INS = {"base.json": "now.json", "old.json": "profile.json", "new.json": "profile.json"}  # earlier results that one has
RUN = [page for page in PAGES if page != "CONTRIBUTING.md"]  # test_contributing.py follows that one
ESTIMATES: dict[str, bytes] = {}  # command without its last word → the file that it made
CHANCE = re.compile(r"(?<=[%B])( +)\d+\.\d(?=  )|\bby [\w -]+ in \d+\.\d s\b")  # seconds, and which thread was first


class Reader:
    """Somebody who does what a page says, in a folder."""

    def __init__(self, page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks, self.monkeypatch = blocks(page), monkeypatch
        self.names: dict[str, Any] = {"__name__": "page"}
        self.said = ""  # by the last command, on standard output
        monkeypatch.chdir(folder)
        monkeypatch.delenv("RANK", raising=False)

    def follow(self) -> None:
        """The whole page."""
        scripts = [block for block in self.blocks if block.language == "python" and not _file(block)]
        together = any("init_process_group" in block.text for block in scripts)
        for i, block in enumerate(self.blocks):
            exact = any(after.mark.startswith("output") for after in self.blocks[i + 1 : i + 2])
            if block.language == "sh":
                for words in commands(block if exact else _cheaper(block)):
                    self.command(block, words)
            elif block.mark.startswith("output"):
                self.compare(block)
            elif block.language == "python" and _file(block):
                Path(_file(block)).write_text(_cheaper(block).text, encoding="utf-8")
            elif block.language == "python" and not together:
                exec(compile(_cheaper(block).text, str(block), "exec"), self.names)
        if together:
            on_ranks(2, f"{__name__}:run_page", {"folder": os.getcwd(), "blocks": [_placed(b) for b in scripts]})

    def command(self, block: Block, words: Sequence[str]) -> None:
        """One command, or two with a pipe between them."""
        for beginning, _ in NOT_RUN:
            if " ".join(words).startswith(beginning):
                return parsed(block, words)
        self.said = ""
        for part in _split(words):
            self.run(block, part)
        return None

    def run(self, block: Block, words: Sequence[str]) -> None:
        for name, other in STAND_INS.items():
            if name in words and not Path(name).exists():
                shutil.copy(other, name)
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(self.said))
        if words[0] == "python":
            self.monkeypatch.setattr(sys, "argv", list(words[1:]))
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
            return
        assert words[0] == "zbsolve", f"{block}: {words[0]} is not a command that this test knows"
        with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as errors:
            try:
                code = 0 if estimated(words) else main(words[1:])
            except SystemExit as end:  # --version, and what the parser refuses
                code = end.code
        self.said = said.getvalue()
        assert code == 0, f"{block}: {shlex.join(words)}: exit code {code}: {errors.getvalue()}{self.said}"

    def compare(self, block: Block) -> None:
        """What the last command said is what the page shows."""
        first = re.fullmatch(r"output(?:: first (\d+) lines)?", block.mark)
        assert first is not None, f"{block}: {block.mark}"
        said = self.said.splitlines()[: int(first[1]) if first[1] else None]
        assert _without_chance("\n".join(said)) == _without_chance(block.text.rstrip("\n")), str(block)


def estimated(words: Sequence[str]) -> bool:
    """Whether the command is an estimate that another page has asked for: then its file is there. Several pages begin with
    the same one, which takes seconds, and is the same wherever it is made."""
    if "--estimate" not in words or words[-2] != "-o" or "--report" in words:
        return False
    model, out = " ".join(words[:-1]), Path(words[-1])
    if model in ESTIMATES:
        out.write_bytes(ESTIMATES[model])
        return True
    assert main(words[1:]) == 0
    ESTIMATES[model] = out.read_bytes()
    return True


def parsed(block: Block, words: Sequence[str]) -> None:
    """A command that is not run: the parsers of all programs in it take it."""
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert set(words[1:]) <= set(targets), f"{block}: {words}"
        return
    if words[0] in (".", "pip"):
        named = re.findall(r"\[(\w+)\]", words[-1])
        assert all(re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M) for extra in named)
        return
    rest = list(words[1:])
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(rest)
        rest = options.training_script_args
        if not options.module:
            assert (ROOT / options.training_script).exists(), f"{block}: {words}"
            return
        assert options.training_script == "zbsolve"
    found: argparse.Namespace = parser().parse_args(rest)
    assert callable(found.command)


def _file(block: Block) -> str:
    """The name of the file that a block shows, in its first line; "" where it is no file."""
    named = re.match(r"# (\w+\.py)\n", block.text)
    return named[1] if named else ""


def _cheaper(block: Block) -> Block:
    lines = block.text.replace("\\\n", " ").split("\n") if block.language == "sh" else [block.text]
    for pattern, replacement, _ in CHEAPER:
        lines = [re.sub(pattern, replacement, line) for line in lines]
    return Block(block.page, block.line, block.language, block.mark, "\n".join(lines))


def _placed(block: Block) -> tuple[str, str]:
    return str(block), _cheaper(block).text


def _split(words: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "|":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _without_chance(text: str) -> str:
    return CHANCE.sub("(chance)", text)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, links: list[Any]) -> Path:
    """The folder in which the README's commands were run."""
    folder = tmp_path_factory.mktemp("given")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("zbsolve.exec.run.launch._start", Forked)
        monkeypatch.setattr("profiler.measurement.measure_links", lambda *given: links)
        Reader("README.md", folder, monkeypatch).follow()
    return folder


def test_the_readme_does_what_it_says(given: Path) -> None:
    made = {"mymodel.py", "profile.json", "schedule.json", "schedule.html", "trace.json"}
    assert made <= {path.name for path in given.iterdir()}


@pytest.mark.parametrize("page", [page for page in RUN if page != "README.md"])
@pytest.mark.usefixtures("forked", "one_link")
def test_a_page_does_what_it_says(page: str, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "hf:" in "".join(block.text for block in blocks(page)):
        pytest.importorskip("transformers")
    shutil.copytree(given, tmp_path, dirs_exist_ok=True)
    Reader(page, tmp_path, monkeypatch).follow()


def test_every_rule_is_used() -> None:
    """A rule that matches nothing is left over from a page that changed."""
    text = "\n".join(block.text.replace("\\\n", " ") for page in RUN for block in blocks(page))
    assert [rule for rule in CHEAPER if not re.search(rule[0], text, re.M)] == []
    assert [rule for rule in NOT_RUN if f"\n{rule[0]}" not in f"\n{text}"] == []
    assert [name for name in STAND_INS if name not in text] == []
