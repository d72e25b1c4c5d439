"""A busy neighbour: `python -m profiler.neighbour MODEL SEED LAYERS` runs them until its input ends."""

from __future__ import annotations

import sys

import torch

from zbsolve.exec.host import keep_freed_memory
from zbsolve.exec.worker import end_with_parent

from .models import load
from .rounds import Watch, batches, rounds, stages_of

if __name__ == "__main__":
    end_with_parent()
    keep_freed_memory()
    torch.set_num_threads(1)
    model = load(sys.argv[1], int(sys.argv[2]))
    cpu = torch.device("cpu")
    turns = rounds(stages_of(model, [int(i) for i in sys.argv[3].split(",")]), batches(model, cpu), Watch(cpu))
    next(turns)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in turns:
        pass
