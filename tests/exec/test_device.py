"""Ranks on GPUs, as far as a machine without one shows; and on one, where there is one."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zbsolve import BadInput, preset, problem_for
from zbsolve.cli import main
from zbsolve.exec.base.part import Record
from zbsolve.exec.base.program import Message
from zbsolve.exec.lowering import lower
from zbsolve.util.errors import LostRank

from ..support.exec_ranks import on_ranks

torch = pytest.importorskip("torch")

from zbsolve.exec.base.part import Data, Hooks  # noqa: E402
from zbsolve.exec.device import rank_device  # noqa: E402
from zbsolve.exec.device.capture import MOST_GRAPHS, MOST_WATCHED, Captures, Watched, _places, capturing  # noqa: E402
from zbsolve.exec.device.rank_device import (  # noqa: E402
    Guard,
    Marks,
    RankDevice,
    read_marks,
)
from zbsolve.exec.loop import gradients  # noqa: E402
from zbsolve.exec.run import host  # noqa: E402
from zbsolve.exec.run.job import Options  # noqa: E402
from zbsolve.exec.transport import wires  # noqa: E402
from zbsolve.exec.transport.mailbox import Looker, _close, _look  # noqa: E402
from zbsolve.exec.transport.peers import Peers  # noqa: E402

PROGRAMS = lower(preset("zb-h1", problem_for("zb-h1", 3, 6)))
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"rank {program.rank}")
def test_each_message_is_received_once_no_later_than_it_is_taken_and_gone_behind_its_pass(program: Any) -> None:
    place = {action.name: i for i, action in enumerate(program.actions)}
    received = [message for action in program.actions for message in action.receives]
    taken = [action.takes for action in program.actions if isinstance(action.takes, Message)]
    assert sorted(m.after for m in received) == sorted(m.after for m in taken)
    for i, action in enumerate(program.actions):
        assert all(place[message.after] >= i for message in action.receives)
        assert all(place[message.before] + 1 < i for message in action.gone)


def test_communicators_end_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends waits for the device, and so for the kernels of the others: here each waits until all have begun."""
    barrier = threading.Barrier(3)
    monkeypatch.setattr(wires, "ABORT_SECONDS", 300.0)
    wires.abort(SimpleNamespace(abort=lambda: barrier.wait(300.0)) for _ in range(3))
    assert not barrier.broken


def test_one_that_does_not_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "ABORT_SECONDS", 0.1)
    stands, ended = threading.Event(), threading.Event()
    wires.abort([SimpleNamespace(abort=lambda: stands.wait() and ended.set())])  # or this never ends
    assert not ended.is_set()
    stands.set()


class FakeMarks:
    """Events are the times at which they happen, s of the monotonic clock."""

    def done(self, event: float) -> bool:
        return event <= time.monotonic()

    def ns(self, event: float) -> int:
        return round(event * 1e9)


class FakeEvent:
    """An event that happens when it is told to."""

    happened = False

    def query(self) -> bool:
        return self.happened


def guard(stopped: int | None = None, seconds: float = 0.3) -> tuple[Guard, list[str]]:
    """Of rank 1, whose peers have stopped or not; and what was ended."""
    ended: list[str] = []
    peers = SimpleNamespace(
        stopped=lambda: stopped,
        break_devices=lambda: ended.append("communicators"),
        timeout=timedelta(seconds=seconds),
        wires=SimpleNamespace(rank=1),
    )
    return Guard(peers, PROGRAMS[1].actions), ended  # type: ignore[arg-type]


class Looks:
    """One that a thread looks after."""

    def __init__(self) -> None:
        self.times = 0

    def look(self) -> None:
        self.times += 1


def test_nobody_looks_after_a_rank_that_is_closed() -> None:
    """At the end of its process: torch ends that by a signal where another thread is in it."""
    one, busy, closed = Looks(), threading.Event(), threading.Event()
    looking = threading.Thread(target=_look, args=(weakref.WeakMethod(one.look), busy, closed, 0.2, print))
    looking.start()
    _close(busy, closed)
    looking.join(300)
    assert (looking.is_alive(), one.times) == (False, 0)


def test_the_thread_that_looks_after_a_rank_uses_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's GPU is the first one until it is set, and CUDA makes a context there at its first call."""
    set_by: dict[threading.Thread, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: set_by.update({threading.current_thread(): device}))
    before, device = set(threading.enumerate()), torch.device("cuda", 3)
    one = RankDevice(device, SimpleNamespace(timeout=timedelta(seconds=100)), PROGRAMS[1].actions, Hooks())  # type: ignore[arg-type]
    assert wires.came_true(lambda: bool(set_by), 300.0)
    ((thread, of_thread),) = set_by.items()
    assert (thread in before, of_thread) == (False, device)
    del one


def test_a_thread_that_looks_ends_with_what_it_looks_after() -> None:
    before, one = set(threading.enumerate()), Looks()
    looker = Looker(one.look, 1e-3)
    (thread,) = set(threading.enumerate()) - before
    looker.busy.set()
    while not one.times:
        time.sleep(1e-3)
    del one
    thread.join(300)
    assert not thread.is_alive()


def test_a_rank_hears_of_one_that_stopped_while_it_waits_for_its_device() -> None:
    one, ended = guard(stopped=2, seconds=100.0)
    one.begin(Record(0), FakeMarks())  # type: ignore[arg-type]
    with pytest.raises(LostRank) as error:
        one.wait(FakeEvent())
    assert (error.value.peer, ended) == (2, ["communicators"])


def test_a_rank_says_which_pass_waits_for_whom_where_nothing_goes_on() -> None:
    one, ended = guard()
    first = PROGRAMS[1].actions[0]
    record = Record(0, arrived=[float("inf")], marks=[(0.0, float("inf"))])
    one.begin(record, FakeMarks())  # type: ignore[arg-type]
    with pytest.raises(LostRank) as error:
        one.wait(FakeEvent())
    assert isinstance(first.takes, Message)
    assert str(error.value) == f"rank 1, pass 1F0: waiting for {first.takes.before} from rank 0: nothing for 0.3 s"
    assert ended == ["communicators"]


def test_a_rank_whose_passes_go_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at 0, 350, 700 and 1,050 ms, where nothing may go on for 500; and none behind that."""
    one, ended = guard(seconds=0.5)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rank_device, "time", SimpleNamespace(monotonic=lambda: clock.now))
    marks = SimpleNamespace(done=lambda event: event <= clock.now)
    one.begin(Record(0, arrived=[0] * 4, marks=[(0.0, 0.35 * i) for i in range(4)]), marks)  # type: ignore[arg-type]
    one.end()  # no thread looks meanwhile
    for clock.now in (0.0, 0.1, 0.4, 0.8, 1.1, 1.5):
        one.look()
    assert (one.cause, ended) == (None, [])
    clock.now = 1.7
    one.look()
    assert ended == ["communicators"]


def test_a_rank_without_a_store_still_sees_that_nothing_goes_on() -> None:
    """The store is gone with the rank that had it."""
    one, ended = guard()
    one._peers.stopped = _no_store  # type: ignore[method-assign]
    one.begin(Record(0, arrived=[float("inf")], marks=[(0.0, float("inf"))]), FakeMarks())  # type: ignore[arg-type]
    with pytest.raises(LostRank, match=r"nothing for 0\.3 s"):
        one.wait(FakeEvent())
    assert ended == ["communicators"]


def _no_store() -> None:
    raise RuntimeError("Connection was likely closed")


def test_marks_of_a_graph_are_not_done_before_its_first_replay() -> None:
    marks, event = Marks(torch.device("cuda"), fixed=True), FakeEvent()
    event.happened = True  # as one says of itself that was never recorded
    assert not marks.done(event)


def test_why_communicators_were_ended_is_said_and_not_what_came_of_it() -> None:
    one, cause = RankDevice.__new__(RankDevice), LostRank("it waits for ranks that stopped", 2)
    one.guard = SimpleNamespace(cause=cause, end=lambda: None)  # type: ignore[assignment]
    with pytest.raises(LostRank, match="ranks that stopped"), one.guarded():
        raise RuntimeError("NCCL communicator was aborted")


def test_all_communicators_of_a_device_end_at_once() -> None:
    barrier = threading.Barrier(2)
    peers = Peers(SimpleNamespace(abort=lambda: barrier.wait(9.0)), 1.0)  # type: ignore[arg-type]
    peers.beside.append(lambda: barrier.wait(9.0))  # type: ignore[arg-type]
    peers.break_devices()
    assert not barrier.broken


class FailingGraph:
    """As torch's: where a capture broke off, ending it raises too, and leaves the stream that captured the current one."""

    def __init__(self, streams: list[str], *given: Any, **named: Any) -> None:
        self.streams = streams

    def __enter__(self) -> None:
        self.streams.append("capturing")

    def __exit__(self, *error: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_capture_that_breaks_off_says_what_broke_it_and_leaves_the_stream_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = ["own"]
    monkeypatch.setattr(torch.cuda, "graph", partial(FailingGraph, streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    with pytest.raises(ValueError, match="waits for the device"), capturing(None, None, None):
        raise ValueError("it waits for the device")
    assert streams == ["own", "capturing", "own"]
    with pytest.raises(RuntimeError, match="previous error"), capturing(None, None, None):
        pass
    assert streams[-1] == "own"


@pytest.mark.parametrize("change", ["frozen", "moved", "merged"])
def test_a_graph_is_not_replayed_for_parameters_that_are_frozen_or_elsewhere_or_have_adapters(change: str) -> None:
    module = torch.nn.Linear(2, 2)
    module.merged_adapters = adapters = list[str]()  # type: ignore[assignment]
    captures = Captures(torch.device("cuda"), module, lambda *_: Record(0), lambda: None)
    captures.key = partial(_key_on_a_cpu, captures.key)  # type: ignore[method-assign]
    data = Data({}, {})
    graph: Any = SimpleNamespace(places=_places(module))
    captures.graphs[captures.key(data)] = graph
    assert captures.of(data, "") is graph
    if change == "frozen":
        module.weight.requires_grad_(False)
    elif change == "merged":
        adapters.append("default")  # as peft does, which adds them to the weight in place
    else:
        module.weight.data = module.weight.data.clone()
    assert captures.of(data, "") is None


def test_a_step_that_fails_ends_its_graphs_which_keep_communicators_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("current_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    captures = Captures(torch.device("cuda"), torch.nn.Linear(2, 2), lambda *_: Record(0), lambda: None)
    ended = list[str]()
    captured: Any = SimpleNamespace(graph=SimpleNamespace(reset=lambda: ended.append("a")))
    captures.graphs |= {"a": captured, "b": None}
    with captures.computing():
        pass
    assert ended == []
    with pytest.raises(ValueError, match="a rank is lost"), captures.computing():
        raise ValueError("a rank is lost")
    assert (ended, captures.graphs) == (["a"], {})


def test_few_shapes_are_known_where_each_step_has_another_one() -> None:
    captures = Captures(torch.device("cuda"), torch.nn.Linear(2, 2), lambda *_: Record(0), lambda: None)
    captures.key = lambda data: data.seed  # type: ignore[method-assign]
    for step in range(MOST_WATCHED + 5):
        captures.watch(Data({}, {}, step))
    assert list(captures._watched) == list(range(5, MOST_WATCHED + 5))
    with pytest.warns(UserWarning, match="not captured: of what others do"):
        assert captures.of(Data({}, {}, 5), "of what others do") is None
    captures.graphs = dict.fromkeys(range(MOST_GRAPHS), SimpleNamespace())  # type: ignore[arg-type]
    captures.watch(Data({}, {}, 1000))
    with pytest.warns(UserWarning, match="more than 4 shapes"):
        assert captures.of(Data({}, {}, 64), "") is None
    assert 1000 not in captures._watched
    assert 64 not in captures.graphs
    assert len(captures.said) == 2


def _key_on_a_cpu(key: Any, data: Data) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda kind: False)
        return key(data)


def test_times_are_the_devices_and_launching_the_hosts() -> None:
    record = Record(0, arrived=[0, 2.0], start=[100, 200], end=[150, 290], marks=[(1.0, 2.0), (3.0, 4.0)], later={1: 5.0})
    read_marks(record, FakeMarks())  # type: ignore[arg-type]
    assert record.launched == [50, 90]
    assert (record.start, record.end) == ([10**9, 3 * 10**9], [2 * 10**9, 5 * 10**9])
    assert record.arrived == [0, 2 * 10**9]


def test_a_watched_step_knows_which_code_draws_random_numbers_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from zbsolve.exec.backward.layer_split import run_layers

    still = SimpleNamespace(get_offset=lambda: 0)
    monkeypatch.setattr("zbsolve.exec.device.capture._generator", lambda device: still)
    linear, dropout, x = torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.ones(3, 2)
    for layers, said in (([linear], ""), ([linear, dropout], "layer 1 draws random numbers on the CPU")):
        watched = Watched()
        with watched.watching(7, linear, torch.device("cpu")):
            run_layers(layers, x, 0, 7)
        assert (watched.host, watched.draws) == (said, [])


def test_a_watched_step_that_recomputes_draws_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recompute puts the generators back; what it drew on the device is kept."""
    from zbsolve.exec.backward.layer_split import run_layers
    from zbsolve.exec.backward.replay import torch_random_kept

    drawn = SimpleNamespace(get_offset=lambda: 4)
    monkeypatch.setattr("zbsolve.exec.device.capture._generator", lambda device: drawn)
    layers, x, watched = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], torch.ones(3, 2), Watched()
    with watched.watching(7, layers[0], torch.device("cpu")):
        run_layers(layers, x, 0, 7)
        with torch_random_kept():
            run_layers(layers, x, 0, 8)
        run_layers(layers, x, 0, 9)
    assert (watched.host, watched.draws) == ("", [(offset, layer) for offset in (0, 1, 2) for layer in (0, 1)])


def test_what_a_process_needs_that_shares_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "at_once", lambda: True)
    alone, shared = host.device_environment(0, 1), host.device_environment(3, 4)
    assert alone["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert "NCCL_HOSTID" not in alone
    assert shared["NCCL_HOSTID"] != host.device_environment(2, 4)["NCCL_HOSTID"]
    assert (shared["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], shared["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("25", "8")


def test_what_a_rank_of_torchrun_needs_is_set_before_the_driver_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", host.PLACE: "/none"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("the driver is used"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    host.set_environment("cpu", share=True)
    assert len(environment) == 3
    host.set_environment("auto", share=True)
    assert (environment["NCCL_HOSTID"], environment["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("h3", "16")


@pytest.mark.parametrize(("starts", "serves"), [(True, True), (True, False), (False, False)])
def test_mps_is_used_where_its_server_starts_and_is_stopped(
    starts: bool, serves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, control = tmp_path / "run", tmp_path / host.CONTROL
    folder.mkdir()
    ends = "touch $CUDA_MPS_PIPE_DIRECTORY/control" if starts else "exit 1"
    begun = f'if [ "$1" = -d ]; then echo $CUDA_VISIBLE_DEVICES > {tmp_path}/seen; {ends}'
    control.write_text(f"#!/bin/sh\n{begun}; else cat >> {tmp_path}/told; fi\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv(host.PLACE, str(tmp_path / "none"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1" if serves else "1,2")
    monkeypatch.setattr(host, "START_SECONDS", 5.0 if starts else 0.5)
    monkeypatch.setattr(host, "PROBE", f"exit({int(not serves)})")
    with host.together(folder):
        assert host.at_once() == serves
        assert ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in host.device_environment(1, 2)) == serves
    assert not host.at_once()
    assert (tmp_path / "seen").read_text() == ("GPU-1\n" if serves else "\n")
    told = tmp_path / "told"
    assert (told.read_text() if told.exists() else "") == "quit -t 2\n" * starts


@without_gpu
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--device", "cuda"], "device 'cuda': torch sees no CUDA device here"),
        (["--capture"], "--capture is for GPUs, and this run is on CPUs"),
    ],
)
def test_what_needs_a_gpu_says_so_in_a_line(options: list[str], line: str, tmp_path: Any, capsys: Any) -> None:
    preset("1f1b", problem_for("1f1b", 2, 2)).save(tmp_path / "s.json")
    assert main(["run", str(tmp_path / "s.json"), "--model", "mlp-2", "--local", *options]) == 2
    assert capsys.readouterr().err == f"zbsolve run: {line}\n"


def test_emulated_devices_are_processes_of_cpus() -> None:
    assert Options(emulate="schedule").on(4).device == "cpu"


def refused(rank: int, _: None) -> list[str]:
    """What a pipeline says, on one rank, to a device that its group knows nothing of, and to capture on a CPU."""
    from zbsolve.exec import Pipeline

    schedule, said = preset("1f1b", problem_for("1f1b", 1, 2)), []
    for how in ({"device": torch.device("cuda", 0)}, {"capture": True}):
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "set_device", lambda device: None)
                Pipeline([torch.nn.Linear(2, 2)], schedule, loss=torch.nn.functional.mse_loss, **how)  # type: ignore[arg-type]
        except BadInput as error:
            said.append(str(error))
    return said


def test_a_group_without_nccl_and_a_gpu_are_refused_in_a_line() -> None:
    (found,) = on_ranks(1, "tests.exec.test_device:refused")
    assert len(found) == 2
    assert "carries no tensors on cuda:0: init_process_group('cpu:gloo,cuda:nccl') does" in found[0]
    assert found[1] == "Pipeline: capture is for a GPU, and this is the device cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("at_once", [False, True], ids=["in turns", "by MPS"])
def test_ranks_on_one_gpu_have_the_unsplit_models_gradients_under_delays(at_once: bool) -> None:
    from benchmarks.gpu_ranks import Case, ranks_run, wrong_of

    cases = [Case("vee", delays=True, steps=30), Case(kind="dropout", delays=True, steps=10, capture=True)]
    run = ranks_run(cases, 2, "cuda", at_once, 60.0)
    assert wrong_of(run) == []
    assert [len(one["rows"]) for one in run] == [2, 2]


def test_a_norm_that_waits_for_a_lost_pipeline_ends_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps no guard looks: reading the norm would wait on the device for ever."""

    def never(device: torch.device, timeout: timedelta) -> None:
        raise TimeoutError(f"nothing for {timeout.total_seconds():g} s")

    monkeypatch.setattr(gradients, "passed", never)
    peers = SimpleNamespace(telling=lambda what: nullcontext(), timeout=timedelta(seconds=7))
    module = torch.nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    pipeline = SimpleNamespace(module=module, parts=(), mesh=None, peers=peers, device=torch.device("cuda", 0))
    with pytest.raises(LostRank, match="waiting for the gradients: nothing for 7 s"):
        gradients.norm_power(pipeline, 2.0)
