"""Ending a run after the step that runs: some rank is asked, and all of them agree on which step that is."""

from __future__ import annotations

import threading

import torch

from ..pipeline import Pipeline

asked_to_stop = threading.Event()  # of this process


def goes_on(pipeline: Pipeline) -> bool:
    """Begin a step together: does it run? Not where a rank was asked to stop. All ranks call this. Raises RunFailed."""
    flag = torch.tensor([int(asked_to_stop.is_set())])
    pipeline.peers.wait(pipeline.wires.control.allreduce([flag]), "start of a step")
    return not int(flag)
