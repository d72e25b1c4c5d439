"""The pages as tests read them: their fenced blocks, and the commands in those."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from .house import ROOT

PAGES = ("README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block. language: `sh`, `python`, `text`, `yaml`. mark: of the comment right above it, "" where there is none.
    line: where its text begins."""

    page: str
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    """A page, named from the repository's root."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> tuple[Block, ...]:
    """All fenced blocks of a page, in their order."""
    text = text_of(page)
    return tuple(
        Block(page, text.count("\n", 0, found.start("text")) + 1, found["language"], found["mark"] or "", found["text"])
        for found in FENCE.finditer(text)
    )


def commands(block: Block) -> Iterator[tuple[str, ...]]:
    """The words of each command of a `sh` block: one a line, or several lines where one ends in a backslash or inside
    quotes."""
    pending = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        pending += line
        try:
            words = tuple(shlex.split(pending, comments=True))
        except ValueError:  # a quotation goes on
            pending += "\n"
            continue
        pending = ""
        if words:
            yield words
