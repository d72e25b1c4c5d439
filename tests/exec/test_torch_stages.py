"""torch's own pipeline stages with our split, in torch's own runtime with our orders."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zbsolve import BadInput, Schedule
from zbsolve.exec import auxiliary_loss, split_stage
from zbsolve.exec.base.torch_private import load_order, pipeline_runtime
from zbsolve.exec.base.values import full
from zbsolve.exec.check import difference
from zbsolve.exec.torch_stages import FULL_RUNTIME
from zbsolve.interchange.torch_csv import torch_order
from zbsolve.systems import preset

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule
from ..support.products import PRODUCTS, Watching

pytestmark = pytest.mark.slow


WIDTH, INNER, ROWS, BLOCKS = 8, 64, 16, 4


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
    from torch.distributed.pipelining import PipelineStage

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


COUNT = 4
CASTS = tuple(map(int, torch.__version__.split(".")[:2])) >= FULL_RUNTIME  # else torch's own sharded stages fail


def case(schedule: Schedule, how: str = "plain", *, split: bool = True) -> dict[str, Any]:
    order = torch_order(schedule)
    return {"csv": order.csv, "placement": order.placement, "microbatches": COUNT, "how": how, "split": split}


@pytest.fixture(scope="module")
def ran() -> dict[str, list[dict[str, Any]]]:
    """What each case did on each rank."""
    vee, line = preset("zb-v", a_problem((0, 1, 1, 0), COUNT)), random_schedule(a_problem((0, 1), COUNT), 5)
    cases = {
        "ours": case(vee),
        "torch's": case(vee, split=False),
        "line": case(line),
        "mixed": {**case(line), "csv": "0F0,0F1,0B0,0F2,0I1,0F3,0I2,0W1,0W2,0B3\n1F0,1I0,1F1,1B1,1W0,1F2,1B2,1F3,1I3,1W3\n"},
        "own loss": case(vee, "own loss"),
        "full": case(vee, "full"),
        "selective": case(vee, "selective"),
        "raw": case(line, "raw"),
        "compiled": case(line, "compiled"),
    }
    if CASTS:
        cases |= {"sharded": case(vee, "sharded"), "torch's sharded": case(vee, "sharded", split=False)}
    ranks = on_ranks(2, f"{__name__}:run_all", cases)
    return {name: [rank[name] for rank in ranks] for name in cases}


def test_gradients_are_those_of_the_whole_model(ran: dict[str, list[dict[str, Any]]]) -> None:
    for name, ranks in ran.items():
        limit = 2e-2 if "sharded" in name else 1e-12  # FSDP's parameters have low precision there
        assert all(one["worst"] <= limit for one in ranks), (name, ranks)
    # With the same casts, ours are torch's.
    pairs = zip(ran.get("sharded", ()), ran.get("torch's sharded", ()), strict=True)
    assert all(ours["worst"] == pytest.approx(right["worst"], rel=1e-3) for ours, right in pairs)


@pytest.mark.parametrize("name", ["ours", "line", "own loss", "full", "selective", "sharded"])
def test_weight_products_are_in_w(ran: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Two products a block and pass; what checkpointing makes again comes on top of I."""
    if name == "sharded" and not CASTS:
        pytest.skip("torch's own sharded stages fail in this torch")
    again = {"full": 16, "selective": 8}.get(name, 0)
    for one in ran[name]:
        made = {kind: count for kind, count in one["products"].items() if kind != "else"}
        assert made == {"F": 16, "I": 16 + again, "W": 16}


def test_a_whole_backward_is_not_split(ran: dict[str, list[dict[str, Any]]]) -> None:
    for one in ran["mixed"]:
        assert one["products"] == {"else": 0, "F": 16, "B": 16, "I": 8, "W": 8}


def test_no_more_is_kept_after_i_than_by_torch(ran: dict[str, list[dict[str, Any]]]) -> None:
    for name, right in (("ours", "torch's"), ("sharded", "torch's sharded"))[: 1 + CASTS]:
        for ours, torchs in zip(ran[name], ran[right], strict=True):
            mine, others = ([size for kind, size in one["after"] if kind == "I"] for one in (ours, torchs))
            assert len(mine) == len(others) == 8
            assert sum(mine) < sum(others)
            assert max(mine) < max(others)


def test_a_stage_with_nothing_for_w_says_why(ran: dict[str, list[dict[str, Any]]]) -> None:
    what = "so I makes all its weight gradients, and W has nothing to do"
    for rank in range(2):
        assert ran["raw"][rank]["said"] == [f"stage {rank}: none of its layers is one of torch's own, {what}"]
        assert ran["compiled"][rank]["said"] == [f"stage {rank}: it is compiled by torch.compile, {what}"]
        assert all(not ranks[rank]["said"] for name, ranks in ran.items() if name not in ("raw", "compiled"))


def stage_of(module: nn.Module, own: bool = False, **more: Any) -> Any:
    """A stage of torch's. own: with a backward of its own."""
    from torch.distributed.pipelining import PipelineStage

    kind = type("Own", (PipelineStage,), {"backward_one_chunk": lambda *given, **named: None}) if own else PipelineStage
    stage = kind(module, 0, 1, torch.device("cpu"), **more)
    checks = "_validate_fwd_input", "_validate_fwd_outputs"  # those of torch 2.11 need shapes that a runtime finds
    vars(stage).update(dict.fromkeys(checks, lambda *given: None))
    return stage


class Talking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        auxiliary_loss(x.sum())
        return super().forward(x)


@pytest.mark.usefixtures("alone")
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(3, 3)
    with pytest.raises(BadInput, match=r"^stage: Linear is no PipelineStage of torch\.distributed\.pipelining$"):
        split_stage(linear)
    with pytest.raises(BadInput, match=r"^stage 0: Own has a backward_one_chunk of its own"):
        split_stage(stage_of(linear, own=True))
    with pytest.raises(BadInput, match=r"^stage 0: it has a dw_builder already"):
        split_stage(stage_of(linear, dw_builder=lambda: lambda: None))
    with pytest.raises(BadInput, match=r"^stage 0: wrapped in DistributedDataParallel, whose hooks"):
        split_stage(stage_of(nn.Sequential(nn.parallel.DistributedDataParallel(linear))))
    stage = split_stage(stage_of(nn.Sequential(Talking(3, 3), linear)))
    with pytest.raises(BadInput, match=r"^auxiliary_loss: torch's runtime knows the loss"):
        stage.forward_one_chunk(0, (torch.ones(2, 3),))
    fully_shard(stage.submod[1], mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(
        BadInput, match=r"^stage 0: fully_shard wraps parts of its module: call it on the module itself too$"
    ):
        split_stage(stage_of(stage.submod)).forward_one_chunk(0, (torch.ones(2, 3),))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    cast = stage_of(fully_shard(nn.Linear(3, 3), mesh=dist.init_device_mesh("cpu", (1,)), mp_policy=low))
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(BadInput, match=r"^torch 2\.11\.0: fully_shard's mixed precision in torch's runtime"):
        split_stage(cast)


@pytest.mark.usefixtures("alone")
def test_wrapped_afterwards_is_seen_at_the_first_forward() -> None:
    stage = split_stage(stage_of(nn.Linear(3, 3)))
    stage.submod = nn.parallel.DistributedDataParallel(stage.submod)
    with pytest.raises(BadInput, match=r"^stage 0: wrapped in DistributedDataParallel"):
        stage.forward_one_chunk(0, (torch.ones(2, 3),))


@pytest.mark.usefixtures("alone")
def test_outside_of_passes_the_backward_is_autograds() -> None:
    stage = split_stage(stage_of(nn.Linear(3, 3)))
    x = torch.ones(2, 3)
    stage.submod(x).sum().backward()  # as torch does to find out shapes
    assert stage.submod.weight.grad.tolist() == [[2.0] * 3] * 3
    with torch.no_grad():
        assert stage.forward_one_chunk(0, (x,)).grad_fn is None
