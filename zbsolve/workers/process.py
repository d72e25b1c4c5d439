"""A worker process: `python -m zbsolve.workers.process module:function shared parent` answers the lines that come in."""

from __future__ import annotations

import math
import mmap
import os
import struct
import sys
from importlib import import_module

NUMBER_BYTES = 8


def main() -> None:
    """Answer tasks until standard input ends. shared: of a file with the number that others have reached; parent: the
    process that started this one: without it, work ends."""
    name, shared, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    module, function = name.split(":")
    answering = getattr(import_module(module), function)
    number = mmap.mmap(shared, NUMBER_BYTES, access=mmap.ACCESS_READ)

    def rival() -> float:
        return -math.inf if os.getppid() != parent else float(struct.unpack("d", number[:NUMBER_BYTES])[0])

    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        for line in sys.stdin.buffer:
            answers.write(answering(line.decode().rstrip("\n"), rival).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
