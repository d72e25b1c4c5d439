"""Commands of a page, one after the other in one process: `python -m tests.support.page_commands` in the folder where they
run. Standard input has them, a JSON list of lists of words; what each printed goes to standard output, a JSON list.

Ranks are forked with their imports done, as in tests of the executor: each start of torch takes longer than what it runs.
"""

from __future__ import annotations

import io
import json
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from unittest import mock

from zbsolve.cli import main

from .exec_ranks import Forked


def done(words: Sequence[str]) -> str:
    """What `zbsolve …`, `python -m module …` or `python -c code` prints. Raises SystemExit where it fails."""
    program, *rest = words
    with redirect_stdout(io.StringIO()) as said, mock.patch.object(sys, "argv", rest[1:]):
        try:
            if program == "zbsolve":
                sys.exit(main(rest))
            elif rest[0] == "-c":
                exec(compile(rest[1], "page", "exec"), {"__name__": "__main__"})
            else:
                runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                sys.exit(f"{list(words)}: exit code {end.code}: {said.getvalue()}")
    return said.getvalue()


if __name__ == "__main__":
    with mock.patch("zbsolve.exec.run.launch._start", Forked):
        found = [done(words) for words in json.load(sys.stdin)]
    json.dump(found, sys.stdout)
