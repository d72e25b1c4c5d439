"""Watching a run: find what is slow, search for a better order by the times of now, and switch to it between steps."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from ...profile.slow import Slow, problem_now, slow_parts
from ...schedule import Schedule
from ...util.errors import BadInput, ZbsolveError
from ...util.files import Fields, temporary_folder
from ...util.machine import child_environment
from ...util.text import format_time
from ..reports import StepResult, trace_of
from ..slack import more_than_plain
from ..step_view import StepView
from ..transport.peers import together
from ..transport.wires import losing
from .gradients import OnRank

WHAT, LEAST_SECONDS = "watching", 1.0  # a search takes at least so long
AGAIN = "import sys; from zbsolve.search.today import order_in_file; order_in_file(*sys.argv[1:])"


@dataclass(frozen=True)
class Watched(Fields):
    """What rank 0 found at a look.

    step: µs of a step, the median. slow: see `profile.slow.slow_parts`. before, after: µs of a step with the order so far
    and with the new one, by the times at the start of the search; None: the order stays. why: the reason that it stays; ""
    where no better order is known yet."""

    step: float
    slow: tuple[Slow, ...]
    before: float | None = None
    after: float | None = None
    why: str = ""

    def __str__(self) -> str:
        lines = [f"a step takes {format_time(self.step)}", *map(str, self.slow)]
        if self.before is not None and self.after is not None:
            lines.append(f"another order from now on: {format_time(self.after)} in place of {format_time(self.before)}")
        return "\n".join([*lines, *([f"the order stays: {self.why}"] if self.why else [])])


class Watch:
    """Watches a pipeline: call it with the result of each step, on every rank.

    every: steps from one look to the next. steps: how many steps before a look are traced; 3 or more show how times vary.
    seconds: for a search in a process beside rank 0, less where the next look comes sooner (but 1 s); 0: none. gain: the
        share of the step that another order must save.

    At a look rank 0 reports what is slow, and starts a search with the measured times: for another order of the same passes
    on the same ranks, within the problem's memory, or if it has no limit, within what each rank holds now. At a later look
    all ranks switch to the order that was found. Gradients of microbatches may then be summed in another order.
    Raises BadInput for numbers that make no sense.
    """

    def __init__(
        self, pipeline: Any, *, every: int = 100, steps: int = 3, seconds: float = 20.0, gain: float = 0.01
    ) -> None:
        if not (1 <= steps <= every and seconds >= 0 and gain >= 0):
            raise BadInput(
                f"Watch: every {every}, steps {steps}, seconds {seconds:g}, gain {gain:g}: 1 ≤ steps ≤ every, 0 ≤ the others"
            )
        self.pipeline, self.every, self.steps, self.seconds, self.gain = pipeline, every, steps, seconds, gain
        self._planned = pipeline.schedule.problem  # slow means slower than its times, whatever order runs later
        self._count, self._seen = 0, list[StepResult]()
        self._search: Search | None = None

    def __call__(self, result: StepResult) -> Watched | None:
        """Call after each step. At a look returns what rank 0 (of the first pipeline) saw; else None. Raises RunFailed."""
        self._count += 1
        if -self._count % self.every < self.steps:
            self._seen.append(result)
        if self._count % self.every:
            return None
        seen, self._seen = self._seen, []
        pipeline, decides = self.pipeline, self.pipeline.rank == 0 and self.pipeline.place == 0
        with pipeline.peers.telling(WHAT):
            why = _stays(pipeline)
            watched, content = self._looked(seen, why) if decides else (None, b"")
            body = b"" if why else _everywhere(pipeline, content)
        if body:
            pipeline.switch(Schedule.from_json(json.loads(body)))
        return watched

    def close(self) -> None:
        """Stop a search that still runs."""
        if self._search is not None:
            self._search.close()

    def _looked(self, seen: Sequence[StepResult], why: str) -> tuple[Watched, bytes]:
        """What is slow now, and as JSON the schedule to switch to (b"": none). why: the reason that the order must stay."""
        emulated = {"emulated": "as passes beside each other are not slower"} if self.pipeline.hooks.emulated else {}
        trace = trace_of(self.pipeline.schedule, seen, (), {"split": self.pipeline.split, **emulated})
        step, slow = trace.steps[trace.median_step].value, slow_parts(trace.of_problem(self._planned))
        running = self._search
        if running is None or why:
            if self.seconds and not why:
                seconds = min(self.seconds, max(LEAST_SECONDS, self.every * step / 1e6))
                self._search = Search(replace(trace.planned(), problem=problem_now(trace)), seconds)
            return Watched(step, slow, why=why), b""
        if not running.ended:
            return Watched(step, slow), b""
        self._search, schedule = None, running.found()
        if schedule is None:
            return Watched(step, slow, why="the search failed"), b""
        before, after = (float(each_schedule.timeline().value) for each_schedule in (running.given, schedule))
        if after > (1 - self.gain) * before:
            return Watched(step, slow, why=f"no other was found that is {self.gain:.1%} shorter"), b""
        return Watched(step, slow, before, after), json.dumps(schedule.to_json()).encode()


class Search:
    """A search for a better order of the schedule `given`, in a process of its own, which ends by itself."""

    def __init__(self, given: Schedule, seconds: float) -> None:
        self.given, files = given, ExitStack()
        folder = files.enter_context(temporary_folder("watch"))
        paths = [str(folder / name) for name in ("now.json", "found.json")]
        given.save(paths[0])
        self._path, words = paths[1], [sys.executable, "-c", AGAIN, *paths, str(seconds)]
        self._process = subprocess.Popen(
            words, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        files.callback(self._process.wait)
        files.callback(self._process.kill)
        self.close = weakref.finalize(self, files.close)

    @property
    def ended(self) -> bool:
        """Has the search ended?"""
        return self._process.poll() is not None

    def found(self) -> Schedule | None:
        """The schedule that it found; None where it failed."""
        try:
            return Schedule.load(self._path)
        except (ZbsolveError, OSError):
            return None
        finally:
            self.close()


def not_switched(pipeline: OnRank) -> str:
    """Why this pipeline keeps its order; "" where it may change."""
    if pipeline.device.type == "cuda":
        return "a GPU's receives and graphs are made for one order"
    if pipeline.ahead:
        return "PostValidated cuts it"
    if pipeline.mesh is not None and pipeline.mesh.others:
        return f"the mesh has a dimension {pipeline.mesh.others[0]}"
    odd = more_than_plain(pipeline.view, pipeline.parts)
    return f"not with {odd}" if odd else ""


def checked_order(pipeline: OnRank, schedule: Schedule) -> StepView:
    """The view of a schedule that the pipeline may switch to. Raises BadInput where passes or their ranks differ."""
    old, new = pipeline.view.step, schedule.problem
    if why := not_switched(pipeline):
        raise BadInput(f"switch: the order stays: {why}")
    e, f, p, q = old.edges, new.edges, old.passes, new.passes
    pairs = ((p.rank, q.rank), (e.before, f.before), (e.after, f.after), (e.carries, f.carries))
    alike = (old.names, old.layers, old.sizes) == (new.names, new.layers, new.sizes)
    if not alike or not all(np.array_equal(a, b) for a, b in pairs):
        raise BadInput("switch: another order of the same passes is needed, on the same ranks, with the same edges")
    return StepView.of(schedule)


def _stays(pipeline: Any) -> str:
    """Why the order stays on some rank (ranks may have different features); "" if it may change. All ranks call this."""
    try:
        with together(pipeline.peers, WHAT):
            if why := not_switched(pipeline):
                raise BadInput(why)
    except BadInput as error:
        return str(error)
    return ""


def _everywhere(pipeline: Any, body: bytes) -> bytes:
    """`body` of rank 0 of the first pipeline, on all ranks, which call this together. Raises LostRank."""
    bodies, replicas = [body], pipeline.replicas if pipeline.rank == 0 else None
    with losing(None):
        for group in (other for other in (replicas, pipeline.group) if other is not None):
            dist.broadcast_object_list(bodies, group=group, group_src=0)
    return bodies[0]
