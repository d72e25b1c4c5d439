"""Waits that are left out, one at a time, and what sees each: `python -m tests.make_believe_gpu planted [words]`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("zbsolve", "profiler", "tests", "benchmarks")
SECONDS = 300
DEVICE, COPIES, OFFLOAD = "device/rank_device.py", "device/copying.py", "offload/rank.py"


class Planted(NamedTuple):
    """What is wrong, where in `zbsolve/exec`; the text that is there, and the one in its place; the check that should see
    it, and what that says."""

    error: str
    file: str
    right: str
    wrong: str
    check: str
    says: str = "race: "


ROWS = (
    Planted(
        "a pass takes a message without waiting",
        DEVICE,
        "        self.marks.computing.wait_event(coming.there)\n",
        "",
        "plain",
    ),
    Planted(
        "a message is received into memory that is still used",
        DEVICE,
        "        stream.wait_event(coming.free)\n",
        "",
        "plain",
    ),
    Planted(
        "a message is sent before it is made",
        DEVICE,
        "        self._sent[message] = self._wires.send(row, message.destination), row\n",
        "        with torch.cuda.stream(torch.cuda.Stream(self._device)):\n"
        "            self._sent[message] = self._wires.send(row, message.destination), row\n",
        "plain",
    ),
    Planted(
        "what was sent is given up without waiting",
        DEVICE,
        "        if work is not None:\n            work.wait()\n",
        "        del work\n",
        "plain",
    ),
    Planted(
        "a graph does not end what it has sent",
        DEVICE,
        "        for message in list(self._sent):\n            self.gone(message)\n",
        "        self._sent.clear()\n",
        "captured",
    ),
    Planted(
        "a step on a stream of its own does not wait for its batch",
        "device/capture.py",
        "        self._stream.wait_stream(before)\n",
        "",
        "captured",
    ),
    Planted(
        "a reload does not wait for who had its memory before",
        OFFLOAD,
        "partial(_copy_back, targets, away), [self.side.copies.mark()]\n",
        "partial(_copy_back, targets, away), []\n",
        "offload",
    ),
    Planted(
        "what is offloaded goes before it is copied",
        COPIES,
        "        self.copies.join(copy, self.seconds)\n        over()\n",
        "        over()\n",
        "offload",
    ),
    Planted(
        "a collective does not wait for what it is given",
        COPIES,
        "            for event in behind:\n                stream.wait_event(event)\n            start.record(stream)\n",
        "            start.record(stream)\n",
        "vocabulary",
    ),
    Planted(
        "memory is given up that a collective still reads",
        "vocabulary/rank.py",
        "self._kept[m].partial, self._kept[m].partial_slope\n",
        "self._kept[m].partial, None\n",
        "smoothed labels",
    ),
    Planted(
        "an offload does not wait for the reload that had its host buffer before",
        OFFLOAD,
        "            behind.append(read)\n",
        "            pass\n",
        "late offload",
    ),
    Planted(
        "gradients are read before their sum is there",
        "exchange.py",
        "                joined(work, timeout, self.flat.device)\n",
        "                pass\n",
        "replicas",
    ),
    Planted(
        "a graph waits for a copy of the step before",
        OFFLOAD,
        "        self._read.clear()  # these copies are done; a graph must not wait for their events",
        "        # these copies are done; a graph must not wait for their events",
        "offload",
        "waits in a graph for what is not in it",
    ),
    Planted(
        "a pair's communicator is made by its first message in a step",
        "transport/wires.py",
        "            (pair.send if send else pair.recv)([row], 1 - place[0], DATA).wait()\n",
        "            del send, row\n",
        "plain",
        "a communicator is made in the middle of a step",
    ),
    Planted(
        "graphs are still there when the communicators end whose messages they have",
        "pipeline.py",
        "            weakref.finalize(self, destroy, self._runner.capture().graphs)",
        "            self._runner.capture()",
        "loop",
        "a communicator would not end",
    ),
    Planted(
        "a graph does not know the generator that a layer draws from",
        "device/capture.py",
        "            graph.register_generator_state(drawer)\n",
        "            pass\n",
        "dropout",
        "draws from a generator that was not registered",
    ),
    Planted(
        "the communicator of collectives is made by the first one",
        "vocabulary/rank.py",
        "        connect([own], device, timeout)\n",
        "",
        "vocabulary",
        "a communicator is made in the middle of a step",
    ),
)


def missed(words: list[str], built: Path) -> list[str]:
    """The errors that nobody sees, of those that have one of the words (none: of all)."""
    found = list[str]()
    with tempfile.TemporaryDirectory(prefix="zb-") as name:
        root = Path(name)
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, root / folder)
        for row in ROWS:
            if words and not any(word in row.error for word in words):
                continue
            path = root / "zbsolve" / "exec" / row.file
            text = path.read_text(encoding="utf-8")
            if text.count(row.right) != 1:
                found.append(f"{row.error}: its text is not there once")
                continue
            path.write_text(text.replace(row.right, row.wrong), encoding="utf-8")
            said = _said(root, row.check, built)
            path.write_text(text, encoding="utf-8")
            line = next((line for line in said.splitlines() if row.says in line), "")
            print(f"{row.error}: {line.strip()[:300] or 'NOT SEEN'}", flush=True)
            found += [] if line else [f"{row.error}: check '{row.check}' says {said[-300:]}"]
    return found


def _said(root: Path, check: str, built: Path) -> str:
    """What a check says of the files in `root`."""
    environment = os.environ | {"PYTHONPATH": str(root), "MAKE_BELIEVE_BUILT": str(built)}
    command = [sys.executable, "-m", "tests.make_believe_gpu", "exactly", check]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=2 * SECONDS)
    return done.stdout + done.stderr
