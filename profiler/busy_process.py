"""A process that keeps a core busy: `python -m profiler.busy_process MODEL SEED LAYERS` runs these layers until its input
ends."""

from __future__ import annotations

import sys

import torch

from zbsolve.exec.run.host import keep_freed_memory
from zbsolve.exec.run.worker import end_with_parent
from zbsolve.exec.transport.failure import is_out_of_memory, one_line
from zbsolve.models.by_name import load

from .dataflow import place
from .stage_rounds import PassTimer, batches, rounds, stages_of

FAILURE_PREFIX = "failed: "  # what such a process says begins so where its model fails

if __name__ == "__main__":
    end_with_parent()
    keep_freed_memory()
    torch.set_num_threads(1)
    model = load(sys.argv[1], int(sys.argv[2]))
    cpu = torch.device("cpu")
    timer = PassTimer(cpu)
    turns = rounds([stages_of(model, [int(i) for i in sys.argv[3].split(",")])], batches(model, cpu), timer)
    try:
        next(turns)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        sys.stdout.write(f"{FAILURE_PREFIX}{timer.at[1]} of {place(model, timer.at[0])}: {one_line(error)}\n")
        sys.stdout.flush()
        sys.exit(1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in turns:
        pass
