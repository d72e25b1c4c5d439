"""A small GPT on text, in a training loop of one's own.

    torchrun --nproc-per-node 4 examples/train_gpt.py                 # pipelined, by ZB-H1
    python examples/train_gpt.py                                      # the same training in one process, without a schedule
    zbsolve profile examples/train_gpt.py:measured -o profile.json
    zbsolve solve profile.json --ranks 4 --microbatches 8 -o solved.json
    torchrun --nproc-per-node 4 examples/train_gpt.py solved.json     # by the schedule that was found for it
    torchrun --nproc-per-node 2 examples/train_gpt.py --checkpoint gpt --steps 100    # saves; begun anew, it goes on

The model is made on the meta device: each rank gives memory to its own layers alone. The text is this project's licence.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve import Schedule, pipeline, preset
from zbsolve.exec import CrossEntropy, Pipeline
from zbsolve.exec.layers import materialise
from zbsolve.models.presets import Block, Embed, Head

MICROBATCHES, SIZE, LENGTH, WIDTH, BLOCKS = 8, 2, 48, 64, 4
MAX_NORM, SAVE_EVERY, HELD_OUT = 1.0, 25, 1_000_000
LOSS = CrossEntropy()


def model() -> nn.Sequential:
    """On the meta device: shapes without memory."""
    with torch.device("meta"):
        return nn.Sequential(Embed(LENGTH, WIDTH), *(Block(WIDTH, 4) for _ in range(BLOCKS)), Head(WIDTH))


def init(number: int, layer: nn.Module) -> None:
    """Starting values of layer `number`; torch's generator is seeded for it."""
    for name, parameter in layer.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.constant_(parameter, float("norm" in name or "before" in name) if name.endswith("weight") else 0.0)


def batch(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Windows of the text, and the same one byte on."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH - 1, (MICROBATCHES * SIZE,), generator=generator).tolist()
    rows = torch.stack([text[s : s + LENGTH + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


def corpus() -> Tensor:
    """Bytes of the licence: a text that does not change, so that runs can be compared."""
    text = (Path(__file__).parent.parent / "LICENSE").read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def pipelined(steps: int, path: str | None = None, checkpoint: str | None = None) -> list[float]:
    """One rank's loop; the process group is up. The losses, and at last that of a batch which was not trained on, on every
    rank. checkpoint: a folder to go on from, where there is one, and to save into."""
    ranks, layers = dist.get_world_size(), BLOCKS + 2
    counts = [layers // ranks + (r < layers % ranks) for r in range(ranks)]
    problem = pipeline(
        F=[100 * n for n in counts], B=[100 * n for n in counts], W=[100 * n for n in counts],
        microbatches=MICROBATCHES, layers=counts,
    )  # fmt: skip
    schedule = preset("zb-h1", problem) if path is None else Schedule.load(path)
    runner = Pipeline(model(), schedule, loss=LOSS, init=init)
    optimizer = torch.optim.AdamW(runner.parameters(), lr=3e-3)
    text, losses = corpus(), []
    if checkpoint is not None and Path(checkpoint).exists():
        runner.load(checkpoint, optimizer=optimizer)
    while runner.steps < steps:
        inputs, targets = batch(text, runner.steps)
        losses.append(runner.step(inputs, targets).loss)
        runner.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if checkpoint is not None and (runner.steps % SAVE_EVERY == 0 or runner.steps == steps):
            runner.save(checkpoint, optimizer=optimizer)
    return [*losses, runner.evaluate(*batch(text, HELD_OUT))]


def whole() -> nn.Sequential:
    """All layers, with memory and starting values."""
    return nn.Sequential(*materialise(dict(enumerate(model())), torch.device("cpu"), init, seed=0).values())


def measured() -> tuple[nn.Sequential, tuple[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """What `zbsolve profile` asks for: the layers, one microbatch, the loss."""
    inputs, targets = batch(corpus(), step=0)
    return whole(), (inputs[:SIZE], targets[:SIZE]), LOSS


def plain(steps: int) -> list[float]:
    """The same training as everybody writes it, and the same losses."""
    layers = whole()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=3e-3)
    text, losses = corpus(), []
    for step in range(steps):
        inputs, targets = batch(text, step)
        loss = LOSS(layers(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(layers.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        inputs, targets = batch(text, HELD_OUT)
        return [*losses, LOSS(layers(inputs), targets).item()]


def main() -> None:
    """Train and say how it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", nargs="?", help="schedule.json of zbsolve solve")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--checkpoint", help="a folder to go on from, where there is one, and to save into")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        losses, rank = pipelined(options.steps, options.schedule, options.checkpoint), dist.get_rank()
        dist.destroy_process_group()
    else:
        losses, rank = plain(options.steps), 0
    if rank == 0:
        first = options.steps - len(losses) + 1
        print("\n".join(f"step {i:3} loss {loss:.5f}" for i, loss in enumerate(losses[:-1], first)))
        print(f"held out loss {losses[-1]:.5f}")


if __name__ == "__main__":
    main()
