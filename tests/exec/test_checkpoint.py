"""Checkpoints: training goes on to the same bits on the same ranks, and within rounding on others."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zbsolve import Schedule
from zbsolve.build import with_updates
from zbsolve.exec import Pipeline, PostValidated, auxiliary_loss
from zbsolve.exec.loop.checkpoint_files import _IndexUnpickler
from zbsolve.models.model import Model
from zbsolve.models.presets import GptSizes, gpt

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, batch_of, random_schedule, refusal

pytestmark = pytest.mark.slow


SIZES = GptSizes(width=16, blocks=2, heads=2, batch=1, length=8)
MODEL, UNTIED = gpt("small", 0, SIZES, tied=True), gpt("small", 0, SIZES)
AT, STEPS = 3, 7
PLACES = {1: (0, 0), 2: (0, 1, 1, 0), 3: (0, 1, 2)}


class Noisy(nn.Module):
    """A layer with dropout in front, which draws from a generator of its own, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.dropout, self.own = inner, nn.Dropout(0.2), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        auxiliary_loss(torch.rand((), dtype=x.dtype, generator=self.own))
        y: Tensor = self.inner(self.dropout(x))
        return y


def layers(numbers: list[int], model: Model = MODEL) -> list[nn.Module]:
    """A small GPT in double precision, with dropout."""
    made = [layer.double() for layer in model.build(numbers)]
    return [Noisy(layer) if 0 < i < 3 else layer for i, layer in zip(numbers, made, strict=True)]


class Loop:
    """A training loop of one's own. kind: how it updates."""

    def __init__(self, ranks: int, kind: str, seed: int = 7) -> None:
        problem = a_problem(PLACES[ranks], 4, layers=4)
        inside = kind == "inside"
        model = UNTIED if inside else MODEL
        schedule: Schedule = random_schedule(with_updates(problem, 5, every=2, delay=1) if inside else problem, 3)
        update = (lambda p: [torch.optim.SGD(p[1:], 0.1, momentum=0.9), torch.optim.Adam(p[:1], 0.1)]) if inside else None
        build, how = partial(layers, model=model), {"loss": MODEL.loss, "seed": seed}
        self.runner = Pipeline(build, schedule, tied=model.tied, update=update, **how)
        self.objects: dict[str, Any] = {}
        if inside:
            return
        biases = [p for p in self.runner.parameters() if p.dim() < 2]
        weights = [p for p in self.runner.parameters() if p.dim() > 1]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.1}]
        optimizer: torch.optim.Optimizer
        if kind == "validated":
            optimizer = PostValidated(self.runner, [torch.optim.AdamW([g], 0.01) for g in groups], max_norm=1.0)
        else:
            optimizer = torch.optim.NAdam(groups, 0.01)
        rates = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, AT + 1, AT + 1], 0.5)  # its milestones are a Counter
        self.objects = {"optimizer": optimizer, "rates": rates}

    def train(self, until: int) -> list[float]:
        """Steps up to this one, on batches that random numbers of all kinds pick; the losses."""
        results = []
        while self.runner.steps < until:
            picked = int(torch.randint(1000, ())) + random.randrange(1000) + int(np.random.randint(1000))
            results.append(self.runner.step(*batch_of(MODEL, 4, picked)))
            if self.objects:
                self.objects["optimizer"].step()
                self.objects["optimizer"].zero_grad()
                self.objects["rates"].step()
        self.runner.finish()
        return [one.loss for one in results]


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def saved(rank: int, argument: dict[str, Any]) -> dict[str, list[float]]:
    """Train, save on the way; the losses of all steps behind the checkpoint, for each kind of loop."""
    found = {}
    for kind in argument["kinds"]:
        seeded(3)
        loop = Loop(argument["ranks"], kind)
        loop.train(AT)
        for _ in range(2):  # the second one takes the place of the first
            loop.runner.save(Path(argument["folder"]) / kind, **loop.objects)
        found[kind] = loop.train(STEPS)
    return found


def resumed(rank: int, argument: dict[str, Any]) -> dict[str, list[float]]:
    """Go on from the checkpoints, in new pipelines with other starting values."""
    found = {}
    for kind in argument["kinds"]:
        seeded(rank)
        loop = Loop(argument["ranks"], kind, seed=1)
        with torch.no_grad():
            for parameter in loop.runner.parameters():
                parameter.add_(1.0)
        loop.runner.load(Path(argument["folder"]) / kind, **loop.objects)
        assert loop.runner.steps == AT
        found[kind] = loop.train(STEPS)
    return found


def refused(rank: int, argument: dict[str, Any]) -> list[str]:
    """What ranks hear of checkpoints that do not fit, and of what cannot be saved."""
    folder, loop = Path(argument["folder"]), Loop(2, "plain")
    order = random_schedule(a_problem((0, 1), 2, layers=2))
    other = Pipeline(lambda numbers: [nn.Linear(3, 3) for _ in numbers], order, loss=nn.functional.mse_loss)
    sgd = torch.optim.SGD(loop.runner.parameters(), 0.1, momentum=0.9)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(loop.objects["optimizer"], 9)
    tries: list[Any] = [
        lambda: loop.runner.load(folder / "nothing"),
        lambda: loop.runner.load(folder / "evil"),
        lambda: loop.runner.load(folder / "plain", other=loop.objects["optimizer"]),
        lambda: other.load(folder / "plain"),
        lambda: loop.runner.save(folder / "new", lock=Odd()),
        lambda: loop.runner.save(folder / "text", **loop.objects),
        lambda: loop.runner.save(folder / "text" / "under", **loop.objects),
        lambda: loop.runner.load(folder / "plain", optimizer=sgd),
        lambda: loop.runner.load(folder / "plain", rates=rates),
    ]
    said = [refusal(one) for one in tries]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loop.runner.load(folder / "plain", optimizer=loop.objects["optimizer"])
    return [*said, " ".join(f"{Path(one.filename).stem}: {one.message}" for one in warned)]


class Odd:
    """A state that is not data."""

    def state_dict(self) -> Any:
        return {"function": Path.cwd}


KINDS = ["plain", "validated", "inside"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[str, list[float]]:
    """The losses of training that was not interrupted, behind the checkpoints that it left."""
    first, second = on_ranks(2, f"{__name__}:saved", {"ranks": 2, "folder": str(folder), "kinds": KINDS})
    assert first == second
    assert len(first["plain"]) == 4
    assert len({*first["plain"]}) == 4
    return first  # type: ignore[no-any-return]


def gone_on(folder: Path, ranks: int, kinds: list[str]) -> dict[str, list[float]]:
    found = on_ranks(ranks, f"{__name__}:resumed", {"ranks": ranks, "folder": str(folder), "kinds": kinds})
    assert all(one == found[0] for one in found)
    return found[0]  # type: ignore[no-any-return]


def test_on_the_same_ranks_training_goes_on_to_the_same_bits(folder: Path, straight: dict[str, list[float]]) -> None:
    """With dropout, tied weights, late validation, a learning rate schedule, updates inside a step, and batches that random
    numbers pick."""
    assert gone_on(folder, 2, KINDS) == straight


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_other_ranks_training_goes_on_within_rounding(folder: Path, straight: dict[str, list[float]], ranks: int) -> None:
    kinds = [kind for kind in KINDS if kind != "inside"]  # there other stages see other versions of weights
    found = gone_on(folder, ranks, kinds)
    for kind in kinds:
        assert found[kind] == pytest.approx(straight[kind], rel=1e-11)


def test_nothing_but_the_checkpoint_stays(folder: Path, straight: dict[str, list[float]]) -> None:
    assert {path.name for path in folder.iterdir()} >= set(KINDS)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_paths_are_read_as_python_3_13_writes_them() -> None:
    written = re.sub(rb"cpathlib\n", b"cpathlib._local\n", pickle.dumps(Path("a"), 2))
    assert b"pathlib._local" in written
    assert _IndexUnpickler(io.BytesIO(written)).load() == Path("a")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_what_does_not_fit_is_refused_by_all(folder: Path, straight: dict[str, list[float]]) -> None:
    (folder / "evil").mkdir()
    (folder / "evil" / ".metadata").write_bytes(pickle.dumps(Evil()))
    (folder / "text").write_text("mine")
    first, second = on_ranks(2, f"{__name__}:refused", {"folder": str(folder)})
    nothing, evil, name, model, state, taken, under, optimizer, rates, warned = first
    assert nothing == f"{folder}/nothing: not a checkpoint: No such file or directory"
    assert evil == f"{folder}/evil: not a checkpoint: UnpicklingError: it names posix.system, which is not data"
    assert name == f"{folder}/plain: it has no 'other'"
    assert model == f"{folder}/plain: model.0.weight is missing"
    assert state.startswith("checkpoint: its state holds more than numbers, words, lists and tensors: ")
    assert taken == f"{folder}/text: cannot write: there is something else, which is no checkpoint"
    assert under.startswith(f"{folder}/text/under: cannot write: ")
    assert optimizer == f"{folder}/plain: 'optimizer' is the state of NAdam, not of SGD"
    assert rates == f"{folder}/plain: 'rates' is the state of MultiStepLR, not of CosineAnnealingLR"
    assert warned == f"test_checkpoint: {folder}/plain: it has 'rates' too, which is not loaded"
    assert all(second[:-1])
    assert not second[-1]  # rank 0 alone warns
    assert (folder / "text").read_text() == "mine"
    assert not (folder / "new").exists()
