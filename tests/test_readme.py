"""The README says what the commands say: its help block is theirs."""

from __future__ import annotations

import re
from pathlib import Path

from zbsolve.cli import parser

README = Path(__file__).parent.parent / "README.md"


def help_block(width_lines: str) -> str:
    return f"```\n{width_lines.strip()}\n```"


def test_the_help_block_is_generated(monkeypatch):
    """After a change of the command line: `python -m tests.test_readme` writes the block anew."""
    monkeypatch.setenv("COLUMNS", "100")
    block = re.search(r"<!-- help -->\n(.*)\n<!-- /help -->", README.read_text(), re.S)
    assert block is not None
    assert block[1] == help_block(parser().format_help())


if __name__ == "__main__":
    import os

    os.environ["COLUMNS"] = "100"
    text = README.read_text()
    block = f"<!-- help -->\n{help_block(parser().format_help())}\n<!-- /help -->"
    README.write_text(re.sub(r"<!-- help -->\n.*<!-- /help -->", lambda _: block, text, flags=re.S))
