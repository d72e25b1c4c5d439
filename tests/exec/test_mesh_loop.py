"""The whole training loop on meshes, against one process: clipping, accumulation, schedules of learning rates, evaluation,
checkpoints that other meshes load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import LambdaLR

from zbsolve import Schedule, pipeline, preset
from zbsolve.exec.base.values import full
from zbsolve.exec.check import difference

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import refusal, split_layers, worst
from ..support.tensor_parallel import WORDS, loss, model, parallel
from ..support.trainings import Training, all_trained
from ..support.trials import Batches, Trial, mesh_of, too_far

pytestmark = pytest.mark.slow

BLOCKS, MICROBATCHES, ROWS, MAX_NORM = 2, 2, 8, 0.2


def rows(step: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, or a part of it."""
    words = torch.randint(WORDS, (ROWS, 9), generator=torch.Generator().manual_seed(step))
    return words[part, :-1], words[part, 1:]


def batch(places: int, place: int, step: int) -> Batches:
    """A coordinate's part of the batch, where there are so many."""
    each = ROWS // places
    x, y = rows(step, slice(place * each, (place + 1) * each))
    return x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)


def order(ranks: int) -> Schedule:
    """ZB-H1 on so many ranks."""
    counts = split_layers(BLOCKS + 2, ranks)
    times = [100 * n for n in counts]
    return preset("zb-h1", pipeline(F=times, B=times, W=times, microbatches=MICROBATCHES, layers=counts))


def on_mesh(how: str = "sequence", **sizes: int) -> Trial:
    """A mesh of these sizes, whose stages are tensor-parallel along tp."""

    def parallelize(stage: nn.Module, whole: Any) -> None:
        if "tp" in sizes:
            parallel(list(stage.children()), whole["tp"], how)

    return Trial(
        problem=order(sizes["pp"]),
        layers=lambda numbers: [model(BLOCKS)[i] for i in numbers],
        batch=partial(batch, sizes.get("dp", 1)),
        loss=loss,
        options=lambda: {"mesh": mesh_of(**sizes), "parallelize": parallelize},
    )


def training(trial: Trial, **how: Any) -> Training:
    """AdamW, clipping, two steps an update, and a schedule of rates, which the third update needs: a checkpoint behind the
    first has the second's rate."""
    loop = {"optimizer": adamw, "rates": falling, "updates": 3, "each": 2, "clip": MAX_NORM, "held_out": 99}
    return Training(trial=trial, **loop, **how)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.05)


def falling(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def one_inf(layers: Mapping[int, nn.Module], update: int, rank: int | None) -> None:
    """In the second update's gradients, on one rank of the mesh alone."""
    if update == 1 and rank in (2, None):
        gradient = next(layers[max(layers)].parameters()).grad
        getattr(gradient, "to_local", lambda: gradient)().view(-1)[0] = math.inf


PP_TP = on_mesh(pp=2, tp=2)
SAVED = {
    "pp, tp": training(PP_TP, saved=1),
    "dp, pp": training(on_mesh("tensor", dp=2, pp=2), saved=1),
    "dp, tp": training(on_mesh("tensor", pp=1, dp=2, tp=2), saved=1),
}
AGAIN = {f"{name} again": training(one.trial, after=name) for name, one in SAVED.items()}
ELSEWHERE = {
    "pp": training(on_mesh(pp=4, tp=1), after="pp, tp"),
    "pp, dp": training(on_mesh(pp=2, dp=2), after="pp, tp"),
    "all three": training(on_mesh(pp=1, dp=2, tp=2), after="pp, tp"),
    "tensors": training(on_mesh("tensor", pp=2, tp=2), after="dp, pp"),
    "stages": training(on_mesh("tensor", pp=4), after="dp, tp"),
}
OTHERS = {
    "scaled": Training(trial=PP_TP, optimizer=lambda p: torch.optim.SGD(p, 0.1), scale=2.0**16, spoil=one_inf),
    "late": Training(trial=PP_TP, optimizer=adamw, late=MAX_NORM),
    "clipped": Training(trial=PP_TP, optimizer=adamw, clip=MAX_NORM),
}
TRAININGS = SAVED | AGAIN | ELSEWHERE | OTHERS


def others(rank: int, _: None) -> dict[str, Any]:
    """What a scaler of other ranks is told; forward alone, and the whole model's weights given to a part of it."""
    runner, whole = on_mesh(pp=2, tp=2).pipeline(), nn.Sequential(*model(BLOCKS))
    alone = ShardedGradScaler("cpu", process_group=dist.new_group([rank], use_local_synchronization=True))
    said = refusal(lambda: runner.step(*rows(0), scaler=alone))
    for p in whole.parameters():
        p.data.mul_(1.5)
    runner.load_state_dict(whole.state_dict())
    y = runner.forward(rows(0)[0], everywhere=True)
    apart = worst(runner, whole, torch.Tensor.detach)
    return {"said": said, "output": difference(full(y), whole(rows(0)[0]).detach()), "weights": apart}


def four_ranks(rank: int, folder: str) -> dict[str, Any]:
    return {**all_trained(rank, f"{__name__}:TRAININGS", folder), "others": others(rank, None)}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found of each training."""
    return on_ranks(4, f"{__name__}:four_ranks", str(tmp_path_factory.mktemp("checkpoints")))


def test_losses_norms_and_weights_are_those_of_one_process(four: list[dict[str, Any]]) -> None:
    """Also of what goes on from a checkpoint, on the same mesh and on others."""
    assert too_far([{name: rank[name] for name in TRAININGS} for rank in four], 1e-9, scaled=1e-6) == {}  # in float32
    for name, one in TRAININGS.items():
        norms = [[update[one.each] for update in rank[name]["seen"]] for rank in four if one.clip]
        assert norms == norms[:1] * len(norms)  # the same bits on all ranks
        assert not norms or max(norms[0]) > MAX_NORM  # it did clip


def test_a_checkpoint_goes_on_to_the_same_bits(four: list[dict[str, Any]]) -> None:
    for again, one in AGAIN.items():
        for rank in four:
            first, seen = rank[one.after], rank[again]["seen"]
            assert (rank[again]["bits"], seen) == (first["bits"], first["seen"][1:])


def test_an_inf_on_one_rank_skips_the_step_of_all(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert [row[-1] for row in rank["scaled"]["seen"]] == [2.0**16, 2.0**15, 2.0**15]
        assert rank["others"]["said"].startswith("scaler: its process group lacks rank")


def test_late_validation_is_clip_and_step(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert rank["late"]["bits"] == rank["clipped"]["bits"]
        assert [row[0] for row in rank["late"]["seen"]] == [row[0] for row in rank["clipped"]["seen"]]


def test_forwards_and_whole_state_dicts(four: list[dict[str, Any]]) -> None:
    assert max(max(rank["others"]["output"], rank["others"]["weights"]) for rank in four) < 1e-12
