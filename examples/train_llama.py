"""A small Llama on text: FSDP2, tensor and pipeline parallelism in one training loop, with clipping, a schedule of learning
rates, evaluation and checkpoints.

    torchrun --nproc-per-node 8 examples/train_llama.py --mesh pp=2,dp=2,tp=2
    python examples/train_llama.py --single                           # the same training in one process: the same losses
    torchrun --nproc-per-node 8 examples/train_llama.py --checkpoint llama --steps 10
    torchrun --nproc-per-node 8 examples/train_llama.py --checkpoint llama --mesh pp=4,dp=2      # goes on from step 10
    torchrun --nproc-per-node 8 examples/train_llama.py --split graph                # the backward split by its graph

The model is made on the meta device: each rank gives memory to its own stages alone. The text is this project's licence.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from zbsolve import Schedule, pipeline, preset
from zbsolve.exec import Pipeline
from zbsolve.exec.layers import materialise

WORDS, LENGTH, WIDTH, HEADS, GROUPS, BLOCKS = 256, 32, 64, 4, 2, 4  # two heads share keys and values
BATCH, MICROBATCHES, STEPS = 16, 4, 20
RATE, WARM_UP, MAX_NORM, EVALUATE_EVERY, HELD_OUT = 3e-3, 5, 1.0, 5, 1_000_000


# --- The model ---


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of x, shape (rows, heads, length, size of a head)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10_000 ** (-torch.arange(half) / half)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)


class Attention(nn.Module):
    """Causal attention with grouped queries. It counts its heads by its inputs, so it may have a part of them."""

    def __init__(self) -> None:
        super().__init__()
        few = WIDTH // HEADS * (HEADS // GROUPS)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, few, few, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(GROUPS, 1) for one in (rotated(k), v))
        y = functional.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH, eps=1e-5), Attention()
        self.feed_norm, self.feed = nn.RMSNorm(WIDTH, eps=1e-5), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


def model() -> nn.Sequential:
    """On the meta device: shapes without memory."""
    with torch.device("meta"):
        head = nn.Sequential(nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WORDS, bias=False))
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(BLOCKS)), head)


def init(number: int, layer: nn.Module) -> None:
    """Starting values of layer `number`; torch's generator is seeded for it."""
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.05)
        else:
            nn.init.ones_(parameter)


def loss(y: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of y, shape (rows, length, words)."""
    return functional.cross_entropy(y.flatten(0, 1), targets.flatten())


def parallelize(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Spread a stage over the dimensions of the mesh beside "pp": matrices over tp, then everything over dp."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ColwiseParallel(), RowwiseParallel()
    for layer in stage.children():
        if isinstance(layer, Block) and mesh["tp"].size() > 1:
            plan = dict.fromkeys(("attention.q", "attention.k", "attention.v", "feed.gate", "feed.up"), columns)
            parallelize_module(layer, mesh["tp"], plan | {"attention.out": rows, "feed.down": rows})
        fully_shard(layer, mesh=mesh["dp"])


# --- The data ---


def corpus() -> Tensor:
    """Bytes of the licence: a text that does not change, so that runs can be compared."""
    text = (Path(__file__).parent.parent / "LICENSE").read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(text: Tensor, step: int, place: int = 0, places: int = 1) -> tuple[Tensor, Tensor]:
    """Part `place` of `places` of a step's batch: windows of the text, and the same one byte on."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[s : s + LENGTH + 1] for s in starts.chunk(places)[place].tolist()])
    return rows[:, :-1], rows[:, 1:]


# --- The loop, twice: on a mesh, and as everybody writes it ---


def schedule_of(ranks: int) -> Schedule:
    """ZB-H1 for so many stages. `zbsolve solve` finds better ones by a measured profile."""
    layers = BLOCKS + 2
    counts = [layers // ranks + (r < layers % ranks) for r in range(ranks)]
    times = [100 * n for n in counts]
    return preset("zb-h1", pipeline(F=times, B=times, W=times, microbatches=MICROBATCHES, layers=counts))


def optimizer_of(parameters: Any) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW; its rate rises, and then falls as a cosine."""
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    return optimizer, LambdaLR(optimizer, lambda i: min((i + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * i / (3 * STEPS))))


def on_mesh(sizes: dict[str, int], steps: int, split: str, checkpoint: str | None) -> list[dict[str, float]]:
    """One rank's loop; the process group is up. What it reports of each step, the same on every rank."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    schedule = schedule_of(sizes["pp"])
    runner = Pipeline(model(), schedule, loss=loss, init=init, mesh=mesh, parallelize=parallelize, split=split)
    optimizer, rates = optimizer_of(runner.parameters())
    if checkpoint is not None and Path(checkpoint).exists():
        runner.load(checkpoint, optimizer=optimizer, rates=rates)  # whatever mesh wrote it
    text, said = corpus(), []
    part = {"place": runner.place, "places": sizes["dp"]}
    while runner.steps < steps:
        result = runner.step(*batch(text, runner.steps, **part))
        norm = runner.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        mean = torch.tensor(result.loss, dtype=torch.float64) / sizes["dp"]  # a step's loss is that of this rank's part
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        said.append({"step": runner.steps, "loss": mean.item(), "norm": norm.item()})
        if runner.steps % EVALUATE_EVERY == 0 or runner.steps == steps:
            said[-1]["held out"] = runner.evaluate(*batch(text, HELD_OUT, **part))
    if checkpoint is not None:
        runner.save(checkpoint, optimizer=optimizer, rates=rates)
    return said


def single(steps: int) -> list[dict[str, float]]:
    """The same training in one process, and the same reports."""
    layers = nn.Sequential(*materialise(dict(enumerate(model())), torch.device("cpu"), init, seed=0).values())
    optimizer, rates = optimizer_of(layers.parameters())
    text, said = corpus(), []
    for step in range(steps):
        inputs, targets = batch(text, step)
        value = loss(layers(inputs), targets)
        value.backward()
        norm = nn.utils.clip_grad_norm_(layers.parameters(), MAX_NORM)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        said.append({"step": step + 1, "loss": value.item(), "norm": norm.item()})
        if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == steps:
            with torch.no_grad():
                inputs, targets = batch(text, HELD_OUT)
                said[-1]["held out"] = loss(layers(inputs), targets).item()
    return said


def main() -> None:
    """Train and say how it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="pp=2,dp=2,tp=2", help="sizes of pp, dp and tp; what is left out is 1")
    parser.add_argument("--single", action="store_true", help="one process, without a mesh")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--split", default="layers", help="layers, graph or inductor")
    parser.add_argument("--checkpoint", help="a folder to go on from, where there is one, and to save into")
    parser.add_argument("--json", help="a file for the reports of all steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.single:
        said, rank = single(options.steps), 0
    else:
        sizes = {"pp": 1, "dp": 1, "tp": 1} | {k: int(n) for k, _, n in (s.partition("=") for s in options.mesh.split(","))}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine
        dist.init_process_group("gloo")
        said, rank = on_mesh(sizes, options.steps, options.split, options.checkpoint), dist.get_rank()
        dist.destroy_process_group()
    if rank == 0:
        for one in said:
            print(", ".join(f"{name} {value:.5f}" if name != "step" else f"step {value:3}" for name, value in one.items()))
        if options.json:
            Path(options.json).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
