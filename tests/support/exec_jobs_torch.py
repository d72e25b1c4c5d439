"""What the tests of torch's own stages run on two gloo ranks (see `exec_ranks`): its runtime, our orders, our split."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zbsolve.exec import split_stage
from zbsolve.exec.base.torch_private import load_order, pipeline_runtime
from zbsolve.exec.base.values import full
from zbsolve.exec.check import difference
from zbsolve.exec.memory import LiveBytes

WIDTH, INNER, ROWS, BLOCKS = 8, 64, 16, 4
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default}
ACTIONS = {"F": "forward_one_chunk", "I": "backward_one_chunk", "W": "backward_weight_one_chunk"}


@dataclass
class Case:
    """csv: the order. how: what is done to the blocks. split: by us, or by torch."""

    csv: str
    placement: Sequence[int]
    microbatches: int
    how: str = "plain"
    split: bool = True

    @property
    def type(self) -> torch.dtype:
        """Of inputs and parameters."""
        return torch.float32 if self.how == "sharded" else torch.float64


# --- The model ---


class Block(nn.Module):
    """Two products, a norm and a bias. raw: the products are not those of layers."""

    def __init__(self, number: int, raw: bool) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.raw = raw

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        hidden = x @ self.inner.weight.t() + self.inner.bias if self.raw else self.inner(x)
        hidden = nn.functional.gelu(hidden)
        return x + (hidden @ self.outer.weight.t() if self.raw else self.outer(hidden))


class Part(nn.Module):
    """Some blocks; where the loss is made by a head, the last stage has it."""

    def __init__(self, case: Case, numbers: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        for i in numbers:
            torch.default_generator.manual_seed(i)
            self.blocks[str(i)] = Block(i, case.how == "raw")
        self.head = nn.Linear(WIDTH, WIDTH) if case.how == "own loss" and BLOCKS - 1 in numbers else None
        self.to(case.type)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of the output, behind the head."""
        return nn.functional.mse_loss(output if self.head is None else self.head(output), target)

    def own_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """A number with the gradient of the loss. The head's gradients are made here, as by torchtitan's chunked loss."""
        leaf = output.detach().requires_grad_()
        self.loss(leaf, target).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return (output * leaf.grad).sum()


def selective(block: nn.Module) -> nn.Module:
    """Every second product is kept, as torchtitan does by default."""

    def contexts() -> Any:
        counts: Counter[bool] = Counter()

        def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            counts[ctx.is_recompute] += func in PRODUCTS
            keep = func in PRODUCTS and counts[ctx.is_recompute] % 2
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpoint_wrapper(block, context_fn=contexts)


def compiled(block: nn.Module) -> nn.Module:
    block.compile(backend="eager")
    return block


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "full": checkpoint_wrapper,
    "selective": selective,
    "compiled": compiled,
}


def change(part: Part, how: str) -> None:
    """Wrap the blocks, after the stage was split: as torchtitan does."""
    for name, block in part.blocks.items():
        part.blocks[name] = CHANGES.get(how, lambda same: same)(block)
    if how == "sharded":  # for one rank of data parallelism too, as torchtitan does
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "fsdp"))["fsdp"]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*part.blocks.values(), part):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


# --- Steps ---


class Watching(LiveBytes):
    """Counts matrix products by action, and the bytes that live after each."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()
        self.after: list[tuple[str, int]] = []
        self.doing = "else"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products[self.doing] += func in PRODUCTS
        return super().__torch_dispatch__(func, types, args, kwargs)

    def watch(self, stage: Any) -> None:
        """Count what this stage does."""
        for kind, name in ACTIONS.items():
            setattr(stage, name, partial(self._run, kind, getattr(stage, name)))

    def _run(self, kind: str, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.doing = "B" if kwargs.get("full_backward") else kind
        result = action(*args, **kwargs)
        self.after.append((self.doing, self.now))
        self.doing = "else"
        return result


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    numbers = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, case.microbatches * ROWS, WIDTH, dtype=case.type, generator=numbers)
    return x, target


def right(case: Case) -> dict[str, Tensor | None]:
    """The gradients of the whole model in one process."""
    model = Part(case, range(BLOCKS))
    for x, target in zip(*(one.chunk(case.microbatches) for one in batch(case)), strict=True):
        (model.loss(model(x), target) / case.microbatches).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def gradients(parts: Sequence[Part]) -> dict[str, Tensor | None]:
    """By the names that the whole model has."""
    found = {name: full(p.grad) for part in parts for name, p in part.named_parameters() if p.grad is not None}
    return {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in found.items()}


def run(rank: int, case: Case) -> dict[str, Any]:
    """Two steps; what the second did, and the largest difference of a gradient from the whole model's."""
    each, last = BLOCKS // len(case.placement), len(case.placement) - 1
    parts, stages = {}, []
    for number, home in enumerate(case.placement):
        if home == rank:
            part = parts[number] = Part(case, range(number * each, (number + 1) * each))
            stage = PipelineStage(part, number, last + 1, torch.device("cpu"))
            names = list(part.state_dict())
            stages.append(split_stage(split_stage(stage)) if case.split else stage)
            assert list(part.state_dict()) == names
            change(part, case.how)
    loss = parts.get(last) and (parts[last].own_loss if case.how == "own loss" else parts[last].loss)
    runtime = pipeline_runtime(stages, case.microbatches, loss_fn=loss or nn.functional.mse_loss)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "order.csv").write_text(case.csv)
        load_order(runtime, f"{folder}/order.csv")
    x, target = batch(case)
    given, more = ((x,) if 0 in parts else ()), {"target": target if last in parts else None}
    parameters = [p for part in parts.values() for p in part.parameters()]
    runtime.step(*given, **more)  # finds out shapes, and makes gradients, whose memory stays
    for p in parameters:
        if p.grad is not None:
            p.grad.zero_()
    watching = Watching()
    watching.ignore([x, target, *parameters, *(p.grad for p in parameters if p.grad is not None)])
    for stage in stages:
        watching.watch(stage)
    with watching:
        runtime.step(*given, **more)
    expected = right(case)
    found = gradients(list(parts.values()))
    assert set(found) == {name for name in expected if any(name in mine for mine in map(names_of, parts.values()))}
    worst = max(difference(grad, expected[name]) for name, grad in found.items())
    return {"worst": worst, "products": dict(watching.products), "after": watching.after}


def names_of(part: Part) -> list[str]:
    """The whole model's names of its parameters."""
    return [name.replace("_checkpoint_wrapped_module.", "") for name, _ in part.named_parameters()]


def run_all(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Cases by name; what each did on this rank."""
    found = {}
    for name, case in cases.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found[name] = run(rank, Case(**case))
        found[name]["said"] = sorted(str(one.message) for one in said if "stage" in str(one.message))
    return found
