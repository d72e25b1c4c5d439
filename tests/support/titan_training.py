"""Some steps of torchtitan's Llama debug model on this rank, in torchtitan's own stages, sharding, loss and schedule.

Its `Trainer` calls `step(arg_mbs=…)` of a newer torch than ours, so the loop is here. Its attention has no backward on a
CPU, so the model has another of its own."""

from __future__ import annotations

import warnings
import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from zbsolve.exec.base.values import local

from .products import Watching

STEPS, LENGTH, WORDS = 3, 16, 2048


def trained(config: Any, chunked: bool) -> dict[str, Any]:
    """The losses of some steps (empty where the last stage is elsewhere), the products that the last of them did by kind of
    action, and what was said of stages and schedules. config: what torchtitan made of its command line. chunked: with the
    loss that is the model's default, which runs the head's backward by itself."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = pipelined(config, chunked)
        losses, products = steps(made, config.training.local_batch_size)
    lines = [str(one.message) for one in said if str(one.message).startswith(("stage", "schedule"))]
    return {"losses": losses, "products": products, "said": lines}


def steps(made: SimpleNamespace, microbatches: int) -> tuple[list[float], dict[str, int]]:
    """The losses of all steps, and the products of the last."""
    optimizer = torch.optim.AdamW([p for part in made.parts for p in part.parameters()], lr=1e-3)
    losses, watching = [], Watching()
    for stage in made.schedule._stages:
        watching.watch(stage)
    with watching:
        for number in range(STEPS):
            optimizer.zero_grad()
            watching.products.clear()
            losses += step(made, microbatches, number)
            optimizer.step()
    return losses, dict(watching.products)


def pipelined(config: Any, chunked: bool) -> SimpleNamespace:
    """torchtitan's schedule, with its model parts initialized."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    ranks, backend = config.parallelism.pipeline_parallel_degree, config.parallelism.spmd_backend
    utils.set_spmd_backend(backend)
    sizes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "ep"), 1)
    dims = ParallelDims(**sizes, pp=ranks, world_size=ranks, spmd_backend=backend)
    spec, compiling = model_registry("debugmodel"), CompileConfig()
    for layer in spec.model.layers:
        layer.attention = replace(layer.attention, inner_attention=ScaledDotProductAttention.Config())
    set_llama3_sharding_config(spec.model, enable_sp=config.parallelism.enable_sequence_parallel)
    with torch.device("meta"):
        model = spec.model.build()
    loss = (ChunkedLossWrapper if chunked else CrossEntropyLoss).Config().build(compile_config=compiling)
    schedule, parts, first, last = spec.pipelining_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=compiling,
        ac_config=config.activation_checkpoint,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=loss,
    )
    for part in parts:
        fill(part)
    if chunked and last:  # as its Trainer does
        loss.set_lm_head(parts[-1].lm_head)
        parts[-1]._skip_lm_head = True
    context = utils.get_spmd_context(parallel_dims=dims)
    return SimpleNamespace(schedule=schedule, parts=parts, first=first, last=last, context=context)


def fill(part: Any) -> None:
    """Buffers are torchtitan's; parameters depend on their names alone, so they are alike however the model is cut."""
    part.to_empty(device="cpu")
    with torch.no_grad():
        part.init_states(buffer_device=None)
        for name, parameter in part.named_parameters():
            seed = zlib.crc32(name.replace("_checkpoint_wrapped_module.", "").encode())
            numbers = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            local(parameter).copy_(numbers * 0.02 if parameter.dim() > 1 else torch.ones(parameter.shape))


def step(made: SimpleNamespace, microbatches: int, number: int) -> list[float]:
    """One step's loss on the last stage's rank, nothing elsewhere; gradients are there afterwards."""
    words = torch.randint(0, WORDS, (microbatches, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    inputs, labels = words[:, :-1], words[:, 1:]
    losses: list[Tensor] | None = [] if made.last else None
    with made.context():
        made.schedule.step(
            *([inputs] if made.first else []),
            target=labels if made.last else None,
            losses=losses,
            loss_kwargs={"global_valid_tokens": torch.tensor(float(labels.numel()))},
            return_outputs=False,
        )
    return [] if losses is None else [float(torch.stack(losses).detach().sum())]
