"""One rank in torchtitan's own code: its command line, the stages of its debug model, its schedule and some steps, on gloo.

`python -m tests.support.titan_worker FOLDER RANK RANKS` with torchtitan on the path; cases and results are files there. A
case is {"arguments": torchtitan's, "train": False for its stages and order alone, "chunked": see `trained`, "split": by us,
"read": what it reads of the arguments alone}.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zbsolve.exec.run.host import end_with_parent, local_network

from .titan_training import trained

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"  # of experts, in Triton, which torch for a CPU has not


class Absent(types.ModuleType):
    """Stands in for a module of which nothing is used here."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def parsed(arguments: list[str]) -> Any:
    """What torchtitan's own rules make of its command line."""
    import tyro
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.manager import ConfigManager, custom_registry
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, SelectiveAC

    @dataclass
    class Config:
        """The fields of its Trainer.Config that flags here set, with their defaults there."""

        training: TrainingConfig = field(default_factory=TrainingConfig)
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
        activation_checkpoint: ActivationCheckpointingConfig = field(default_factory=SelectiveAC.Config)

    Config.__annotations__ = {
        "training": TrainingConfig,
        "parallelism": ParallelismConfig,
        "activation_checkpoint": ActivationCheckpointingConfig,
    }
    ConfigManager()  # registers how lists are spelled
    return tyro.cli(Config, args=arguments, registry=custom_registry)


def names_of(part: torch.nn.Module) -> list[str]:
    """The modules that a part of the model still has."""
    found: list[str] = []
    for name, child in part.named_children():
        found += [f"{name}.{key}" for key, _ in child.named_children()] if name == "layers" else [name]
    return found


def built(arguments: list[str]) -> dict[str, Any]:
    """This rank's stages and its order, as torchtitan builds them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed import pipeline_parallel
    from torchtitan.models.llama3 import model_registry

    config = parsed(arguments)
    parallelism = config.parallelism
    mesh = init_device_mesh("cpu", (parallelism.pipeline_parallel_degree,), mesh_dim_names=("pp",))
    with torch.device("meta"):
        model = model_registry("debugmodel").model.build()
    stages, parts = pipeline_parallel._pipeline_module_split(
        model,
        mesh,
        parallelism.pipeline_parallel_schedule,
        torch.device("cpu"),
        parallelism.module_fqns_per_model_part,
    )
    schedule = pipeline_parallel._build_pipeline_schedule(
        parallelism=parallelism,
        local_batch_size=config.training.local_batch_size,
        stages=stages,
        loss_fn=lambda output, target: (output.sum(), {}),
    )
    rank = mesh.get_local_rank()
    return {
        "stages": {stage.stage_index: names_of(part) for stage, part in zip(stages, parts, strict=True)},
        "count": stages[0].num_stages,
        "microbatches": schedule._n_microbatches,
        "order": [str(action) for action in schedule.pipeline_order[rank]],
        "homes": {int(stage): home for stage, home in schedule._stages[0].stage_index_to_group_rank.items()},
        "checkpointing": config.activation_checkpoint is not None,
    }


def read(arguments: list[str]) -> dict[str, Any]:
    """What torchtitan reads of its command line."""
    config = parsed(arguments)
    checkpointing = config.activation_checkpoint
    return {
        "training": asdict(config.training),
        "parallelism": asdict(config.parallelism),
        "checkpointing": checkpointing and type(checkpointing).__qualname__.partition(".")[0],
    }


def main() -> None:
    """All cases of the folder."""
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    end_with_parent()
    local_network()
    torch.set_num_threads(1)
    sys.modules[KERNELS] = Absent(KERNELS)
    on_cpu()
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    cases: dict[str, dict[str, Any]] = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    found = {}
    for name, case in cases.items():
        if case.get("split"):
            importlib.import_module("zbsolve.exec.torchtitan")  # from here on
        train = partial(trained, chunked=case.get("chunked", False))
        does = read if case.get("read") else built
        found[name] = train(parsed(case["arguments"])) if case.get("train") else does(case["arguments"])
    (folder / f"result.{rank}").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def on_cpu() -> None:
    """torchtitan takes a machine without an accelerator for one with CUDA."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu


if __name__ == "__main__":
    main()
