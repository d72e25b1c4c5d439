"""Offload on two gloo ranks: exact gradients, memory as predicted on the device and in the host, an enforced limit."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import gpu_offload
from benchmarks.gpu_offload import TINY, Captured, OneStage, all_forwards_first, in_turn
from benchmarks.splits import Sizes
from zbsolve import BadInput, Problem, Schedule, Trace
from zbsolve.build import Host, with_offload
from zbsolve.cli import main
from zbsolve.exec import Pipeline, RunFailed
from zbsolve.exec.awaits import crossings
from zbsolve.exec.base.part import Hooks
from zbsolve.exec.check import reference
from zbsolve.exec.device.copying import Launched, LaunchedCopies
from zbsolve.exec.emulate import Times
from zbsolve.exec.handlers import Data
from zbsolve.exec.lowering import lower
from zbsolve.exec.memory import Memory
from zbsolve.exec.offload import rank as offload_rank
from zbsolve.exec.offload.keeper import ALIGNED, HostPool, Keeper, come_back_together, in_groups, packed, room_for
from zbsolve.exec.offload.rank import Offload
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.greedy.syncs import with_syncs
from zbsolve.models.presets import mlp
from zbsolve.problem import Edge, Pass
from zbsolve.systems import preset

from ..support.exec_ranks import jobs_on
from ..support.exec_tools import a_problem, metered, random_schedule, refusal, run_here, worst
from ..support.systems_jobs import INNER, MESSAGE, bytes_of
from ..support.systems_jobs import batch as wide_batch
from ..support.systems_jobs import layers as wide_layers
from ..support.trainings import Training, all_trained
from ..support.trials import Batches, Trial, too_far, tried

pytestmark = pytest.mark.slow


LAYERS, MICROBATCHES, SEED, ROWS, WIDTH, HIDDEN = 4, 4, 3, 6, 4, 96
SMALL, LARGE = ROWS * WIDTH * 8, ROWS * HIDDEN * 8  # bytes of what a layer takes, and of what is inside


class Layer(nn.Module):
    """Keeps its input, three larger tensors of which two share a storage, and a mask; a buffer is a part of its work."""

    scale: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.default_generator.manual_seed(number)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, HIDDEN))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.tanh(self.up(x)) * self.scale
        left, right = inside[:, ::2], inside[:, 1::2]
        y: Tensor = x + self.dropout(self.down(torch.cat([left * right, right], 1)))
        return y


def layers(numbers: list[int]) -> list[nn.Module]:
    return [Layer(i).double() for i in numbers]


def offloaded(fraction: Any = 1.0, which: Any = None, placement: tuple[int, ...] = (0, 1), **more: Any) -> Problem:
    how = {"layers": LAYERS, "held_until_B": 600, "held_until_W": 400, "held_input": 100, **more}
    problem = a_problem(placement, MICROBATCHES, **how)
    return with_offload(problem, 5, 6, fraction=fraction, which=which)


def in_parts_of_four(place: int, step: int) -> Batches:
    numbers = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH, dtype=torch.float64, generator=numbers)
    return x.chunk(MICROBATCHES), x.flip(0).chunk(MICROBATCHES)


CASES = {
    "full": offloaded(),
    "half": offloaded(0.5, placement=(0, 1, 1, 0)),
    "some": offloaded([1.0, 0.3], [[True, False, True, True], [False, True, True, False]]),
    "fused": offloaded(fused=True),
    "recomputed": offloaded(recompute=(1,)),
    "recomputed in part": offloaded(recompute="all:1"),
    "graph, half, recomputed": offloaded(0.5, recompute=(1,), placement=(0, 1, 1, 0)),
}
TRIALS = {
    name: Trial(
        problem=problem,
        layers=layers,
        batch=in_parts_of_four,
        order=number,
        steps=2,
        options={"seed": SEED, "split": "graph" if "graph" in name else "layers"},
    )
    for number, (name, problem) in enumerate(CASES.items())
}


# A step that was too large is made anew, when the next one's first forwards have run and copies have begun.
TRAININGS = {
    "late": Training(
        trial=replace(TRIALS["full"], order=2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        updates=4,
        late=4.0,
    )
}


def gradients(rank: int, _: None) -> dict[str, Any]:
    """Of each trial, and of an evaluation behind it; how many buffers in host memory are there for further steps."""

    def run(trial: Trial, pipe: Pipeline) -> dict[str, Any]:
        found = trial.ran(pipe)
        found["evaluated"] = trial.evaluated(pipe, [in_parts_of_four(0, 9)])
        return found | {"buffers": len(pipe._runner.interpreter.state.part(Offload).pool.free)}

    return tried(rank, f"{__name__}:TRIALS", run)


def sized(placement: tuple[int, ...], fraction: Any) -> Problem:
    """A step of `systems_jobs.Layer`, with the bytes that it keeps."""
    stages = len(placement)
    return with_offload(a_problem(placement, 8, layers=stages, **bytes_of(stages)), 4, 4, fraction=fraction)


def memories(rank: int, _: None) -> list[dict[str, Any]]:
    """What a rank holds on its device and in host memory, and what is predicted."""
    result = []
    for number, (placement, fraction) in enumerate([((0, 1), 1.0), ((0, 1), 0.5), ((0, 1, 1, 0), [1.0, 0.25, 0.0, 0.6])]):
        schedule = random_schedule(sized(placement, fraction), number)
        runner = Pipeline(wide_layers, schedule, loss=nn.functional.mse_loss, seed=SEED)
        memory = metered(runner, *wide_batch(8))
        result.append({name: getattr(memory, name) for name in ("held", "predicted", "host", "predicted_host")})
    return result


def limited(rank: int, _: None) -> dict[str, Any]:
    """1F1B, and offload in a third of what that needs at any moment."""
    kept = INNER + MESSAGE
    plain = a_problem((0, 1), 8, layers=8, fused=True, held_until_B=4 * kept)
    runner, memory = wide_run(preset("1f1b", plain), None)
    most = torch.tensor([memory.most, memory.peak])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    limit = int(most[0]) // 3
    other, small = wide_run(in_parts(4, kept), limit)
    whole = wide_layers(list(range(8)))
    inputs, targets = (dict(enumerate(part)) for part in wide_batch(8))
    for _step in range(2):
        reference(whole, Data(inputs, targets), nn.functional.mse_loss)
    return {
        "worst": max(worst(one, whole) for one in (runner, other)),
        "limit": limit,
        "most": small.most,
        "peaks": (int(most[1]), small.peak, small.predicted_peak),
    }


def cheats(rank: int, limit: int) -> str:
    """The same stages with slow copies, whose schedule minds no memory. Its process group is of no use afterwards."""
    return refusal(lambda: wide_run(in_parts(400, None), limit, group=dist.new_group()), RunFailed)


def in_parts(copy: int, capacity: int | None) -> Schedule:
    """Eight stages on two ranks, whose copies take `copy` µs."""
    problem = a_problem((0, 1) * 4, 8, layers=8, fused=True, held_until_B=INNER + MESSAGE)
    made = replace(with_offload(problem, copy, copy), capacity=None if capacity is None else (capacity,) * 2)
    return with_syncs(list_schedule(made, deepest_first(made)))


def wide_run(schedule: Schedule, limit: int | None, **more: Any) -> tuple[Pipeline, Memory]:
    """Two steps, and what the second one held."""
    how = {"loss": nn.functional.mse_loss, "hooks": Hooks(limit=limit)}
    runner = Pipeline(wide_layers, schedule, **how, **more)
    return runner, metered(runner, *wide_batch(8))


def shared(rank: int, _: None) -> list[dict[str, Any]]:
    """Two ranks on one bus, and two with little host memory; the second one's copies are slow. How often a copy began before
    one of the other rank had ended that it had to wait for, really and on emulated devices."""
    result, right = [], wide_layers([0, 1])
    reference(right, Data(*(dict(enumerate(part)) for part in wide_batch(8))), nn.functional.mse_loss)
    for host in (Host(shared_bus=2), Host(2 * (INNER + MESSAGE))):
        problem = a_problem((0, 1), 8, layers=2, fused=True, held_until_B=INNER + MESSAGE)
        made = replace(with_offload(problem, 20, 20, host=host), capacity=(2 * (INNER + MESSAGE),) * 2)
        schedule = with_syncs(list_schedule(made, deepest_first(made)))
        names = schedule.problem.names
        pairs = [(names[a], names[b]) for a, b in crossings(schedule)]
        for times in (None, Times.of(schedule, "schedule")):
            runner = Pipeline(wide_layers, schedule, loss=nn.functional.mse_loss, emulate=times)
            with noted(0.01 * rank) as here:
                timeline = runner.step(*wide_batch(8)).timeline
            everywhere: list[Any] = [None, None]
            dist.all_gather_object(everywhere, here)
            times_of = everywhere[0] | everywhere[1] if times is None else timeline
            early = sum(times_of[after][0] < times_of[before][1] for before, after in pairs)
            result.append({"worst": worst(runner, right), "early": early, "crossings": len(pairs)})
    return result


@contextmanager
def noted(pause: float) -> Iterator[dict[str, tuple[int, int]]]:
    """When the work of copies began and ended inside, by name, ns: ends before others hear of them. What comes back takes
    `pause` seconds more."""
    found: dict[str, tuple[int, int]] = {}

    def noting(copy: Any, kind: str) -> Any:
        def run(*given: Any) -> None:
            began = time.monotonic_ns()
            copy(*given)
            time.sleep(pause if kind == "R" else 0)
            found[given[1].name.replace("O", kind)] = began, time.monotonic_ns()

        return run

    out, back = noting(Offload._copy_out, "O"), noting(offload_rank._copy_back, "R")
    with mock.patch.object(Offload, "_copy_out", out), mock.patch.object(offload_rank, "_copy_back", back):
        yield found


def trainings(rank: int, folder: str) -> dict[str, Any]:
    return all_trained(rank, f"{__name__}:TRAININGS", folder)


SMALL = Sizes(width=512, heads=8, blocks=2, batch=4, length=256, rounds=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    jobs = {"gradients": None, "memories": None, "limited": None, "shared": None}
    return jobs_on(2, __name__, jobs | {"trainings": str(tmp_path_factory.mktemp("none")), "cheats": 100_000})


def test_gradients_are_those_of_the_unsplit_model(two: dict[str, list[Any]]) -> None:
    """Under random schedules, over two steps; whatever is offloaded, however the backward is split."""
    assert too_far(two["gradients"], 1e-12) == {}
    for rank in two["gradients"]:
        assert rank.keys() == TRIALS.keys()
        assert all(0 < one["buffers"] <= 16 and one["evaluated"] <= 1e-12 for one in rank.values())


def test_memory_is_as_predicted_on_the_device_and_in_the_host(two: dict[str, list[Any]]) -> None:
    for rank in two["memories"]:
        for one in rank:
            assert max(one["held"]) == pytest.approx(max(one["predicted"]), rel=0.03)
            assert max(one["host"]) == pytest.approx(max(one["predicted_host"]), rel=0.03)
            assert one["host"][-1] == one["predicted_host"][-1] == 0
            assert max(one["host"]) > 0
    for one in two["memories"][0][:2]:  # only forwards send here: what has left is not there after them
        assert one["held"] == pytest.approx(one["predicted"], abs=MESSAGE / 2)


def test_a_third_of_1f1bs_memory_is_enough_and_enforced(two: dict[str, list[Any]]) -> None:
    for rank in two["limited"]:
        assert rank["worst"] <= 1e-12
        assert rank["most"] <= rank["limit"]
        plain, held, predicted = rank["peaks"]
        assert held == pytest.approx(predicted, rel=0.03)
        assert held < plain / 3


def test_copies_wait_for_those_of_other_ranks(two: dict[str, list[Any]]) -> None:
    """On one bus, and in one host memory; on this machine's time and on emulated devices'."""
    for rank in two["shared"]:
        for one in rank:
            assert one["crossings"] > 10
            assert one["early"] == 0
            assert one["worst"] <= 1e-12


def test_an_optimizer_that_is_validated_late_steps_as_the_unsplit_models(two: dict[str, list[Any]]) -> None:
    assert too_far(two["trainings"], 1e-12) == {}
    assert sum(rank["late"]["amended"] for rank in two["trainings"]) > 0  # a rank that hears of all in time steps at once


def test_a_schedule_that_holds_more_fails_with_rank_pass_and_bytes(two: dict[str, list[Any]]) -> None:
    for said in two["cheats"]:
        assert "out of memory: the device has 100000 bytes (97.7 KiB) for activations, " in said
        assert said.startswith(("rank 0, pass 0F", "rank 0, pass 2F", "rank 1, pass 1F"))
        assert "\n" not in said


def test_views_of_one_storage_are_one_piece_and_weights_and_batch_stay() -> None:
    numbers = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(8, 8, generator=numbers).requires_grad_() for _ in range(2))
    keeper = Keeper(torch.device("cpu"), [x])
    keeper.fix([weight])
    with keeper.saving():
        inside = (x @ weight).tanh()  # the product's factors stay, the value is kept
        left, right = inside[:, ::2], inside.t()[1:]
        y = (left.square().sum() + (right * right).sum()) * 2
    assert [piece.size for piece in keeper.pieces.values()] == [8 * 8 * 4]
    (piece,) = keeper.chosen(0.25)
    host = torch.empty(room_for([piece]), dtype=torch.uint8)
    assert piece.moved == len(host) == 64
    host.copy_(piece.bytes_on_device()[:64])
    want = torch.autograd.grad(2 * (x @ weight).tanh()[:, ::2].square().sum(), [x], retain_graph=True)
    piece.leave()
    assert piece.rest is not None
    assert piece.rest.nbytes == 8 * 8 * 4 - 64
    with pytest.raises(BadInput, match="its reload must come before"):
        torch.autograd.grad(y, [x], retain_graph=True)
    piece.come_back().copy_(host)
    z = 2 * (x @ weight).tanh().t()[1:].square().sum()
    want = [a + b for a, b in zip(want, torch.autograd.grad(z, [x]), strict=True)]
    assert torch.allclose(torch.autograd.grad(y, [x])[0], want[0])


def test_host_buffers_are_used_again_and_a_lack_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(pinned=False)
    pool.make(2, 1000)
    first, second = pool.take(1000), pool.take(900)
    assert (len(first), len(second), pool.free) == (1000, 1000, [])
    pool.give_back(first)
    assert pool.take(600) is first
    pool.give_back(first)
    assert len(pool.take(4000)) == 4000  # the other shape's buffer goes
    assert pool.free == []
    monkeypatch.setattr("zbsolve.exec.offload.keeper.free_memory", lambda: 5 << 20)
    with pytest.raises(BadInput, match=r"3 host buffers of 2.00 MiB need 6.00 MiB, but this machine has 5.00 MiB free"):
        pool.make(3, 2 << 20)


def test_small_pieces_move_as_one_and_come_back_into_one_piece_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbsolve.exec.offload.keeper.PACKED", 400)
    monkeypatch.setattr("zbsolve.exec.offload.keeper.TOGETHER", 330)
    keeper = Keeper(torch.device("cpu"))
    tensors = [torch.full((count,), float(i)) for i, count in enumerate((100, 1, 17, 25, 20))]
    views = [keeper.keep(one) for one in tensors]
    groups = in_groups(keeper.chosen())
    assert [[piece.size for piece in group] for group in groups] == [[400], [100, 80, 68], [4]]
    host = torch.zeros(room_for([piece for group in groups for piece in group]), dtype=torch.uint8)
    staging = torch.zeros(ALIGNED + 330, dtype=torch.uint8)
    for group in groups:
        part = packed(group, staging) if len(group) > 1 else group[0].bytes_on_device()
        host[group[0].place : group[0].place + len(part)] = part
        for piece in group:
            piece.leave()
    for group in groups:
        target = come_back_together(group)
        target.copy_(host[group[0].place : group[0].place + len(target)])
    assert all(torch.equal(view.tensor(), tensor) for view, tensor in zip(views, tensors, strict=True))
    assert len({view.tensor().untyped_storage().data_ptr() for view in views}) == 3


class Deferred(LaunchedCopies):
    """Copies as a device may do them: as late as it can, each on its stream behind what was launched there before. mark:
    computing is done when it is launched. joined: the copies that computing waited for; behind: those that others did."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.waiting: dict[str, list[tuple[int, Callable[[], None], list[Any]]]] = {}
        self.joined: list[int] = []
        self.behind: list[int] = []
        self.count = 0

    def mark(self) -> Any:
        return None

    def begin(self, name: str, work: Callable[[], None], behind: Sequence[Any], over: None = None) -> Launched:
        self.count += 1
        copies = [one for one in behind if one is not None]
        self.waiting.setdefault(name, []).append((self.count, work, copies))
        self.behind += copies
        return Launched(self.count, self.count, self.count)

    def join(self, copy: Launched, timeout: float) -> None:
        self.joined.append(copy.over)
        self._do(copy.over)

    def _do(self, number: int) -> None:
        for queue in self.waiting.values():
            if any(number == one for one, _, _ in queue):
                while queue and queue[0][0] <= number:
                    _, work, behind = queue.pop(0)
                    for one in behind:
                        self._do(one)
                    with torch.no_grad():
                        work()


def events(offload: Any, name: str) -> tuple[Any, Any]:
    """Events of the device at the start and the end of a pass's copy in the last step."""
    copy = offload.side.done[name] if name in offload.side.done else offload.side.begun[name][0]
    return copy.start, copy.end


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.13])
@pytest.mark.parametrize("order", [all_forwards_first, in_turn])
def test_copies_that_a_device_does_late_leave_gradients_exact(
    order: Callable[..., Any], fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched, small pieces packed, and done only when computing waits for them; over two steps with the same buffers."""
    monkeypatch.setattr("zbsolve.exec.offload.keeper.PACKED", 3000)
    slow = gpu_offload.Times(O=2000, R=2000)
    kept, moved = OneStage(order(False), "cpu", TINY), OneStage(order(True, slow, fraction), "cpu", TINY)
    offload = moved.offload
    assert offload is not None
    copies = offload.side.copies = Deferred(offload.device)
    offload.side.launched = True
    for step in range(2):
        for one in (kept, moved):
            one.interpreter.begin(one.data)
            one.interpreter.run_all(one.interpreter.program.actions)
        if step == 0:
            buffers, behind = {buffer.data_ptr() for buffer in offload.pool.free}, len(copies.behind)
    assert all(torch.equal(a, b) for a, b in zip(moved.gradients(), kept.gradients(), strict=True))
    assert {buffer.data_ptr() for buffer in offload.pool.free} == buffers
    assert offload.pool.held == 0
    assert sorted(copies.joined) == list(range(1, copies.count + 1))
    names = [action.name for action in moved.interpreter.program.actions if action.kind in "OR"]
    assert len({events(offload, name) for name in names}) == len(names)
    again = len(names) // 2 - len(buffers)  # copies to a buffer wait for the one that read it last in this step
    assert (behind, len(copies.behind)) == (again, 2 * again)
    assert fraction < 1 or set(offload._staging) == {"d2h:0"}


@pytest.mark.usefixtures("forked")
def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule with copies runs as it says, and `compare` and the trace know them; one that no machine has the memory for
    does not begin."""
    path, out = str(tmp_path / "schedule.json"), str(tmp_path / "trace.json")
    schedule = random_schedule(offloaded(0.5, layers=8), 5)
    schedule.save(path)
    options = ["--model", "mlp-tiny", "--local", "--steps", "1", "--warmup", "0"]
    assert main(["run", path, *options, "--check", "--memory-limit", "4MiB", "--json", "-o", out]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["check"]["passed"] is True
    assert found["memory_limit"] == 4 << 20
    assert min(found["host_peaks"]) > 0
    assert main(["compare", path, out]) == 0
    assert "\n  O " in capsys.readouterr().out
    step, index = Trace.load(out).median(), schedule.problem.index
    assert all(step.start[index[f"0R{m}"]] >= step.end[index[f"0O{m}"]] for m in range(4))
    random_schedule(with_offload(a_problem((0, 1), 4, held_until_W=10**15), 5, 5)).save(path)
    assert main(["run", path, *options]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"zbsolve run: the schedule keeps [\d.,]+ TiB in host:0, but this machine has .* free\n", said)


@pytest.mark.parametrize(
    ("edges", "line"),
    [
        (["0F0 0R0", "0R0 0B0", "0O0 0R0"], "pass 0O0: no edge orders 0F0 and 0O0"),
        (["0F0 0O0", "0R0 0B0"], "pass 0O0: no edge orders 0O0 and 0R0"),
        (["0F0 0O0", "0O0 0R0"], "pass 0R0: no edge orders 0R0 and 0B0"),
    ],
)
def test_a_copy_that_would_come_too_early_or_too_late_is_refused(edges: list[str], line: str) -> None:
    passes = [Pass(kind, 0, 0, 0, 1) for kind in ("F", "B", "W")]
    passes += [Pass("O", 0, 0, 0, 1, streams=("d2h:0",)), Pass("R", 0, 0, 0, 1, streams=("h2d:0",))]
    rows = [Edge(*pair.split()) for pair in ("0F0 0B0", "0B0 0W0", *edges)]
    with pytest.raises(BadInput, match=line):
        lower(random_schedule(Problem.of(passes, rows)))


def test_one_device_refuses_copies_by_name() -> None:
    with pytest.raises(BadInput, match="one device: copies to host memory need a process for each rank"):
        run_here(random_schedule(offloaded(layers=8)), mlp(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_copies_run_on_streams_of_a_real_gpu_from_and_to_pinned_memory() -> None:
    kept, moved = (OneStage(all_forwards_first(offload), "cuda", SMALL) for offload in (False, True))
    for one in (kept, moved, kept, moved):
        one.step()
    for found, right in zip(moved.gradients(), kept.gradients(), strict=True):
        assert float((found - right).abs().max()) <= 1e-5 * float(right.abs().max())
    assert moved.offload is not None
    assert moved.offload.pool.free
    assert all(buffer.is_pinned() for buffer in moved.offload.pool.free)
    assert moved.peak() < 0.7 * kept.peak()
    moved.step()
    names = [action.name for action in moved.interpreter.program.actions if action.kind in "OR"]
    pairs = [events(moved.offload, name) for name in names]
    for pair in pairs:
        assert 0 < pair[0].elapsed_time(pair[1]) < 1e3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_cuda_graph_captures_a_step_with_its_copies() -> None:
    kept, moved = (OneStage(all_forwards_first(offload), "cuda", SMALL) for offload in (False, True))
    kept.step()
    graph = Captured(moved)  # its steps before run on the stream that captures: on two streams autograd's would meet
    for gradient in (*kept.gradients(), *moved.gradients()):
        gradient.zero_()
    kept.step()
    graph.step()
    for found, right in zip(moved.gradients(), kept.gradients(), strict=True):
        assert float((found - right).abs().max()) <= 1e-5 * float(right.abs().max())
    assert moved.offload is not None
    pair = events(moved.offload, "0O2")
    assert 0 < pair[0].elapsed_time(pair[1]) < 1e3
