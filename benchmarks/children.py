"""Ranks of a benchmark, as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from zbsolve.exec.launch import child_environment


def found_by(module: str, ranks: int, seconds: float, *arguments: str) -> list[Any]:
    """What `ranks` processes `python -m module … --child FOLDER RANK` leave in FOLDER as RANK.json, by rank. They end with
    this one (`worker.end_with_parent`), and after `seconds`. Raises SystemExit where one of them fails."""
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as folder:
        command = [sys.executable, "-m", module, *arguments, "--child", folder]
        children = [
            subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, env=child_environment()) for rank in range(ranks)
        ]
        try:
            codes = [one.wait(seconds) for one in children]
        finally:
            for one in children:
                one.kill()
                one.communicate()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
