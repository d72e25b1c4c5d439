"""Offload on two gloo ranks: exact gradients, memory as predicted on the device and in the host, an enforced limit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_offload import TINY, Captured, OneStage, Times, all_forwards_first, in_turn
from benchmarks.splits import Sizes
from zbsolve import BadInput, Problem, Trace
from zbsolve.build import with_offload
from zbsolve.cli import main
from zbsolve.exec.device.copying import Launched, LaunchedCopies
from zbsolve.exec.lowering import lower
from zbsolve.exec.offload.keeper import ALIGNED, HostPool, Keeper, come_back_together, in_groups, packed, room_for
from zbsolve.models.presets import mlp
from zbsolve.problem import Edge, Pass

from ..support.exec_jobs_offload import TRIALS, offloaded
from ..support.exec_ranks import jobs_on
from ..support.exec_tools import a_problem, random_schedule, run_here
from ..support.systems_jobs import MESSAGE
from ..support.trials import too_far

pytestmark = pytest.mark.slow

SMALL = Sizes(width=512, heads=8, blocks=2, batch=4, length=256, rounds=1)
JOBS = {"gradients": None, "memories": None, "limited": None, "shared": None, "trained": None, "cheats": 100_000}


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return jobs_on(2, "tests.support.exec_jobs_offload", JOBS)


def test_gradients_are_those_of_the_unsplit_model(two: dict[str, list[Any]]) -> None:
    """Under random schedules, over two steps; whatever is offloaded, however the backward is split."""
    assert too_far(two["gradients"], 1e-12) == {}
    for rank in two["gradients"]:
        assert rank.keys() == TRIALS.keys()
        assert all(0 < one["buffers"] <= 16 for one in rank.values())


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


def test_an_optimizer_that_is_validated_late_steps_as_without_offload(two: dict[str, list[Any]]) -> None:
    for rank in two["trained"]:
        assert rank["worst"] <= 1e-12
        assert 0 < rank["loss"] < 10
    assert sum(rank["amended"] for rank in two["trained"]) > 0  # a rank that hears of all in time steps rightly at once


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
    kept, moved = OneStage(order(False), "cpu", TINY), OneStage(order(True, Times(O=2000, R=2000), fraction), "cpu", TINY)
    offload = moved.offload
    assert offload is not None
    copies = offload.side.copies = Deferred(offload.device)
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
