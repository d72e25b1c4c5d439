"""Tasks on processes of this machine and on a Dask cluster: the same answers, workers that die, Ctrl-C, versions."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import zbsolve
from zbsolve import BadInput
from zbsolve.bench.runs import Settings, run_suite
from zbsolve.cli import main
from zbsolve.planner import CLUSTERS, Shape
from zbsolve.profile.step import AUTO, Step
from zbsolve.search import task
from zbsolve.search.task_runner import TaskRunner, solvers_on
from zbsolve.util.dask_workers import workers_on
from zbsolve.util.machine import machine_facts
from zbsolve.util.workers import MAX_DEATHS, Processes, Workers, WorkersLost

from ..support.profiles import equal_layers
from ..support.worker_tasks import answer

pytestmark = pytest.mark.slow

PROBLEMS = {
    "one": zbsolve.pipeline([3, 4], [4, 4], [2, 2], microbatches=4),
    "two": zbsolve.pipeline([3, 4, 3], [4, 4, 5], [2, 2, 1], microbatches=6, held_until_W=1, capacity=[6, 4, 2]),
}
SHAPE = Shape.gpt(1024, 8, 4, vocabulary=8192)
EFFORT = 0.5
PLACES = ("processes", "cluster")
NO_CLUSTER = "dask.distributed is not installed (the extra `cluster`)"


class Places:
    """Two workers of each kind, started when they are first asked for. said: what was told of them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._addresses = stack, {"processes": "2"}
        self.said: list[str] = []

    def address(self, place: str) -> str:
        """What `--on` takes."""
        if place == "cluster" and place not in self._addresses:
            distributed = pytest.importorskip("distributed", reason=NO_CLUSTER)
            late = pytest.importorskip("dask").config.set({"distributed.comm.timeouts.connect": "300s"})
            self._stack.enter_context(late)
            some: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
            cluster = self._stack.enter_context(distributed.LocalCluster(**some))
            self._addresses[place] = cluster.scheduler_address
        return self._addresses[place]

    def toys(self, place: str) -> Any:
        """Workers for `tests.support.worker_tasks`."""
        return workers_on(self.address(place), answer, self.said.append)

    def solvers(self, place: str) -> Any:
        """Workers that solve problems."""
        return solvers_on(self.address(place), self.said.append)


@pytest.fixture(scope="module")
def all_places() -> Iterator[Places]:
    with ExitStack() as stack:
        yield Places(stack)


@pytest.fixture
def places(all_places: Places) -> Places:
    all_places.said.clear()
    return all_places


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine workers start, hear and end late."""
    with suppress(ImportError):
        for limit in ("GRACE", "CONNECT_SECONDS"):
            monkeypatch.setattr(f"zbsolve.util.dask_workers.{limit}", 300.0)
    monkeypatch.setattr("zbsolve.util.workers.GRACE", 300.0)


def answers(workers: Workers, *tasks: str) -> dict[int, str]:
    return dict(workers.run(iter(tasks)))


@pytest.mark.parametrize("place", PLACES)
def test_tasks_are_drawn_when_a_worker_is_free_and_know_what_others_reached(places: Places, place: str) -> None:
    drawn: list[str] = []

    def tasks() -> Iterator[str]:
        for text in ("wait", "a", "b", "c"):
            drawn.append(text)
            yield text

    with places.toys(place) as workers:
        assert workers.count == 2
        came = []
        for number, text in workers.run(tasks()):
            came.append((number, text))
            assert len(drawn) <= len(came) + 2
            if number == 3:
                workers.tell(0.5)
        assert came == [(1, "a"), (2, "b"), (3, "c"), (0, "told 0.5")]
        assert answers(workers, "d") == {0: "d"}
        stopped = workers.run(iter(("e", "wait")))
        assert next(stopped)[1] == "e"
        stopped.close()  # type: ignore[attr-defined]
        assert answers(workers, "f", "g", "h") == {0: "f", 1: "g", 2: "h"}


def test_of_sixteen_processes_each_has_a_task() -> None:
    """However few cores there are: fifteen wait until the sixteenth has answered all others."""
    with workers_on(16, answer) as workers:
        assert workers is not None

        def tasks() -> Iterator[str]:
            yield from ["wait"] * 15
            yield from "abcdefgh"
            workers.tell(0.5)

        said = dict(workers.run(tasks()))
    assert said == {**dict.fromkeys(range(15), "told 0.5"), **dict(enumerate("abcdefgh", 15))}


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_dies_loses_nothing(places: Places, place: str, tmp_path: Path) -> None:
    with places.toys(place) as workers:
        assert answers(workers, "a", f"die {tmp_path / 'died'}", "b") == {0: "a", 1: f"die {tmp_path / 'died'}", 2: "b"}
        assert (tmp_path / "died").exists()
    assert len(places.said) == 1
    assert "its task" in places.said[0]


def test_a_task_that_ends_every_worker_is_given_up(places: Places) -> None:
    with places.toys("processes") as workers, pytest.raises(WorkersLost, match=r"a task ended 4 workers.*SIGKILL"):
        answers(workers, "die")
    assert len(places.said) == MAX_DEATHS + 1


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_ends_what_runs_and_takes_its_answers(places: Places, place: str) -> None:
    def tasks() -> Iterator[str]:
        yield "wait"
        signal.raise_signal(signal.SIGINT)

    with places.toys(place) as workers:
        while workers.count < 2:  # until the one that died in another test is there again
            time.sleep(0.01)
        came = workers.run(tasks())
        assert next(came) == (0, "ended")
        with pytest.raises(KeyboardInterrupt):
            next(came)


def test_no_process_stays_behind(places: Places) -> None:
    with places.toys("processes") as workers:
        assert isinstance(workers, Processes)
        processes = [worker.process for worker in workers._workers]
        assert next(workers.run(iter(("wait", "a")))) == (1, "a")
        processes += [worker.process for worker in workers._workers]
    assert all(one.returncode is not None for one in processes)


def planned(file: Path, workers: Workers | None, **options: Any) -> bytes:
    """A plan's file."""
    zbsolve.plan(SHAPE, 8, 16, CLUSTERS["a100"], memory="12GiB", workers=workers, **options).save(file)
    return file.read_bytes()


@pytest.fixture(scope="module")
def planned_here(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return planned(tmp_path_factory.mktemp("here") / "plan.json", None, effort=EFFORT)


@pytest.mark.parametrize("place", PLACES)
def test_with_effort_a_plan_is_the_same_whoever_computes(
    places: Places, place: str, tmp_path: Path, planned_here: bytes
) -> None:
    """Also where a worker is killed in the middle."""
    killed: list[int] = []
    with places.solvers(place) as workers:

        def kill_one(line: str) -> None:
            if not killed:
                killed.append(a_worker(workers))
                os.kill(killed[0], signal.SIGKILL)

        assert planned(tmp_path / "there.json", workers, effort=EFFORT, progress=kill_one) == planned_here
    assert killed


def raced(workers: Workers | None) -> list[Any]:
    """What `solve_auto`, `frontier` and `run_suite` find, but for times."""
    schedule, tried = zbsolve.solve_auto(equal_layers(), Step(2, 4, AUTO, memory=2000), effort=0.06, workers=workers)
    curve = zbsolve.frontier(equal_layers(), Step(2, 4, "single"), points=3, effort=0.06, workers=workers)
    report = run_suite("two", Settings(effort=0.05, repeats=2), problems=PROBLEMS, workers=workers)
    solved = [(one.name, one.digest, one.proof, one.solver, one.values, one.bounds) for one in report.results]
    assert all(min(*one.seconds, *one.yardstick) > 0 for one in report.results)
    assert report.machine == machine_facts()
    assert zbsolve.verify(schedule.problem, schedule) == ()
    points = [(point.to_json(), point.schedule.to_json()) for point in curve.points]
    return [schedule.to_json(), tried, curve.to_json(), points, solved]


@cache
def raced_here() -> list[Any]:
    return raced(None)


@pytest.mark.parametrize("place", PLACES)
def test_with_effort_races_and_suites_are_the_same_whoever_computes(places: Places, place: str) -> None:
    """Also where there are more processes than cores."""
    with places.solvers(place) if place == "cluster" else solvers_on(3) as workers:
        assert raced(workers) == raced_here()


def a_worker(workers: Any) -> int:
    """The process of one worker."""
    if isinstance(workers, Processes):
        return workers._workers[0].process.pid
    return next(iter(workers._client.run(os.getpid).values()))


def test_seconds_and_ctrl_c_on_processes(places: Places, tmp_path: Path) -> None:
    """What one has reached is told to the others; the best so far is kept where Ctrl-C comes."""

    def press(line: str) -> None:
        signal.raise_signal(signal.SIGINT)

    with places.solvers("processes") as workers:
        assert planned(tmp_path / "plan.json", workers, seconds=1.0)
        assert planned(tmp_path / "early.json", workers, seconds=600.0, progress=press)
    for name in ("plan", "early"):
        assert zbsolve.planner.check_plan(tmp_path / f"{name}.json").wrong == ()


def test_other_versions_are_one_line(places: Places, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = {**task._versions(), "numba": "0.1"}
    with places.solvers("processes") as workers, monkeypatch.context() as patch:
        patch.setattr(task, "_versions", lambda: mine)
        with pytest.raises(BadInput, match=r"versions differ from those of a worker on .*: numba 0.1 here, .* there$"):
            planned(tmp_path / "plan.json", workers, effort=1.0)


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("0", "on '0': a number of processes (1 to 1000), or tcp://host:port of a scheduler"),
        ("many", "on 'many': a number of processes"),
        ("tcp://127.0.0.1:1", "no scheduler answers there" if find_spec("distributed") else "dask.distributed is missing"),
    ],
)
def test_bad_places_are_one_line(on: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    with suppress(ImportError):
        monkeypatch.setattr("zbsolve.util.dask_workers.CONNECT_SECONDS", 0.2)
    assert main(["plan", "gpt-3.6b", "--devices", "4", "--batch", "8", "--on", on]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_task_and_its_answer_are_plain_data() -> None:
    """Errors, too."""
    text = json.dumps({"versions": task._versions(), "problem": 1})
    kind, said, details = json.loads(task.answer_task(text, lambda: 0.0))["error"]
    assert (kind, said) == ("BadInput", "task: field 'problem' has a wrong type (int, not object)")
    assert "Traceback" in details


class Patient:
    """Workers that end when they are told to."""

    count = 2

    def __init__(self) -> None:
        self.told: list[float] = []
        self._end = threading.Event()

    def run(self, tasks: Iterator[str]) -> Iterator[tuple[int, str]]:
        assert self._end.wait(400.0)
        yield from ()

    def tell(self, value: float) -> None:
        self.told.append(value)
        self._end.set()


def test_workers_are_told_that_the_time_is_over() -> None:
    """Whether anybody answers or not."""
    patient = Patient()
    runner = TaskRunner(patient, counted=False, rival=lambda: -math.inf, left=lambda: 0.01)
    assert list(runner.answers(())) == []
    assert patient.told == [-math.inf]
