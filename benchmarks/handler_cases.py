"""One rank of `benchmarks.handlers`: it takes a turn for each line of its standard input, and prints the samples.

A script that uses only names that other checkouts have too: PYTHONPATH says which one it measures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

SIZES = {"interpreter": (1, 4, 64), "layers": (1, 4, 32), "messages": (2, 2, 32)}  # ranks, stages, microbatches
WARMUPS, STEPS, WIDTH, LIMIT = 5, 15, 64, 60  # LIMIT in seconds


def schedule(ranks: int, stages: int, microbatches: int) -> Any:
    """1F1B where each rank has a stage, W right behind its B; on one rank, one microbatch after the other."""
    from zbsolve import Schedule, pipeline

    spot, ones = tuple(stage % ranks for stage in range(stages)), [10] * stages
    problem = pipeline(ones, ones, ones, placement=spot, microbatches=microbatches, layers=[1] * stages)
    if ranks == stages:
        return Schedule(problem, {f"compute:{r}": one_f_one_b(r, ranks - 1 - r, microbatches) for r in range(ranks)})
    down = [[f"{s}F{m}" for s in range(stages)] for m in range(microbatches)]
    up = [[f"{s}{kind}{m}" for s in reversed(range(stages)) for kind in "BW"] for m in range(microbatches)]
    return Schedule(
        problem, {"compute:0": tuple(name for pair in zip(down, up, strict=True) for one in pair for name in one)}
    )


def one_f_one_b(stage: int, ahead: int, microbatches: int) -> tuple[str, ...]:
    """The passes of one stage, whose forwards are `ahead` of its backwards."""
    names = [f"{stage}F{m}" for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        names += [f"{stage}F{m + ahead}"] if m + ahead < microbatches else []
        names += [f"{stage}B{m}", f"{stage}W{m}"]
    return tuple(names)


def stepper(what: str) -> tuple[Callable[[], Any], int]:
    """One training step of this rank, and its passes."""
    import torch
    from torch import nn

    from zbsolve.exec import Pipeline

    ranks, stages, microbatches = SIZES[what]

    def layers(numbers: list[int]) -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in numbers]

    runner = Pipeline(layers, schedule(ranks, stages, microbatches), loss=nn.functional.mse_loss, timeout=LIMIT)
    x = torch.zeros(4 * microbatches, WIDTH)
    if what == "interpreter":
        piece, loss = torch.zeros(4, WIDTH), torch.zeros(())
        for number, stage in runner.stages.items():
            output, gradient = loss if number == stages - 1 else piece, piece if number else None
            stage.forward = lambda *_, output=output, **__: output
            stage.backward = lambda *_, gradient=gradient: gradient
            stage.weights = lambda *_: None

    def step() -> None:
        runner.step(x, x)

    return step, len(runner.program.actions)


def take_turns(what: str, folder: str, rank: int, root: str) -> None:
    """Print the samples of STEPS steps for each line that comes in, µs a pass."""
    import torch
    import torch.distributed as dist

    import zbsolve

    assert Path(zbsolve.__file__).is_relative_to(root), zbsolve.__file__
    torch.set_num_threads(1)
    how: dict[str, Any] = {"rank": rank, "world_size": SIZES[what][0], "timeout": timedelta(seconds=LIMIT)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", **how)
    step, passes = stepper(what)
    for _ in range(WARMUPS):
        step()
    for _ in sys.stdin:
        samples = []
        for _ in range(STEPS):
            own = time.thread_time()
            step()
            samples.append(round(1e6 * (time.thread_time() - own) / passes, 3))
        print(json.dumps(samples), flush=True)


def main() -> None:
    """Join the other ranks, and take turns until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=SIZES)
    parser.add_argument("folder", help="where the ranks meet")
    parser.add_argument("rank", type=int)
    parser.add_argument("root", help="of the checkout that is measured")
    options = parser.parse_args()
    take_turns(options.what, options.folder, options.rank, options.root)


if __name__ == "__main__":
    main()
