"""torch's own pipeline stages with our split, in torch's own runtime with our orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage

from zbsolve import BadInput, Schedule
from zbsolve.exec import auxiliary_loss, split_stage
from zbsolve.exec.torch_stages import FULL_RUNTIME
from zbsolve.interchange.torch_csv import torch_order
from zbsolve.systems import preset

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule

pytestmark = pytest.mark.slow

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
    ranks = on_ranks(2, "tests.support.exec_jobs_torch:run_all", cases)
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


def stage_of(module: nn.Module, kind: type[PipelineStage] = PipelineStage, **more: Any) -> PipelineStage:
    stage = kind(module, 0, 1, torch.device("cpu"), **more)
    checks = "_validate_fwd_input", "_validate_fwd_outputs"  # those of torch 2.11 need shapes that a runtime finds
    vars(stage).update(dict.fromkeys(checks, lambda *given: None))
    return stage


class Own(PipelineStage):
    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Its own way."""


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
        split_stage(stage_of(linear, Own))
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
