"""A busy neighbour: `python -m profiler.neighbour MODEL SEED LAYERS` runs them until its input ends."""

from __future__ import annotations

import sys

import torch

from zbsolve.exec.failure import one_line
from zbsolve.exec.host import keep_freed_memory
from zbsolve.exec.worker import end_with_parent

from .flow import place
from .models import load
from .rounds import Watch, batches, rounds, stages_of
from .timing import is_out_of_memory

FAILED = "failed: "  # so begins the line of one whose model fails

if __name__ == "__main__":
    end_with_parent()
    keep_freed_memory()
    torch.set_num_threads(1)
    model = load(sys.argv[1], int(sys.argv[2]))
    cpu = torch.device("cpu")
    watch = Watch(cpu)
    turns = rounds([stages_of(model, [int(i) for i in sys.argv[3].split(",")])], batches(model, cpu), watch)
    try:
        next(turns)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        sys.stdout.write(f"{FAILED}{watch.at[1]} of {place(model, watch.at[0])}: {one_line(error)}\n")
        sys.stdout.flush()
        sys.exit(1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in turns:
        pass
