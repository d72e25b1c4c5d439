"""torch.profiler's Chrome traces of torch.distributed.pipelining (and so of torchtitan): a file a rank, JSON or gzip.

The runtime labels its work `PP:<stage><kind><microbatch>` (torch 2.13): F, I (input gradient), W (weight gradient), B (both)
and communication. In runs on CPUs, the label of a pass with an input from another rank includes the wait for it: the pass
starts with the first operation inside. On devices, labels are on the device's timeline too; there they start with the first
kernel, and waiting is between them. Captured steps have no such labels; there each kernel has the label in its `args`, field
`name`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from ...util.errors import BadInput
from ...util.files import COUNT, checked, parse_json, read_text
from ...util.text import printable
from .recording import HOST, RanPass, RecordedStep, Recording

MARK = b'"traceEvents"'
FORMAT = "torch profiler trace"
LABEL = re.compile(r"PP:(\d{1,6})([A-Z_]+?)(\d{0,9})")
OVERLAPPED = re.compile(r"PP:\(.*\)OVERLAP_F_B")
KINDS = {"F": "F", "I": "B", "W": "W", "B": "BW"}  # torch's word → zbsolve's kind
ON_HOST, ON_DEVICE, OPERATION, KERNEL = "user_annotation", "gpu_user_annotation", "cpu_op", "kernel"
SENDS = "SEND_F"
NO_LABELS = (
    "no pass has a label PP:…: torch's schedules of one stage a rank write none (Schedule1F1B) or others (ScheduleGPipe); "
    "run the same order from a CSV (zbsolve export --to torch-csv), or one of several stages a rank"
)
Place = tuple[str, int, int]  # zbsolve's kind, stage, microbatch


class ArgumentsForm(msgspec.Struct):
    """Arguments of an event; a captured step's kernel has its label here."""

    name: Any = ""


class EventForm(msgspec.Struct):
    """The fields of an event that are used here; `ts` and `dur` in µs."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: ArgumentsForm | None = None

    @property
    def label(self) -> str:
        """The event's name; for a kernel, its label."""
        label = self.args.name if self.cat == KERNEL and self.args is not None else self.name
        return label if isinstance(label, str) else self.name


class RankForm(msgspec.Struct):
    """The rank that wrote a file, and the number of ranks."""

    rank: COUNT
    world_size: COUNT
    backend: str = ""


class TraceForm(msgspec.Struct):
    """A file."""

    traceEvents: list[EventForm]
    distributedInfo: RankForm | None = None
    baseTimeNanoseconds: int = 0


@dataclass(frozen=True)
class _File:
    """The file of one rank."""

    path: Path
    form: TraceForm

    @cached_property
    def labels(self) -> list[EventForm]:
        """Labels of passes on the device's timeline, or on the host's if there is no device. Raises BadInput."""
        events = self.form.traceEvents
        overlapped = next((event.label for event in events if OVERLAPPED.fullmatch(event.label)), None)
        if overlapped is not None:
            raise BadInput(f"{self.path}: {printable(overlapped)}: combined passes cannot be told apart: run without them")
        labels = {where: [e for e in events if e.cat == where and _place(e)] for where in (ON_HOST, ON_DEVICE)}
        if on_device := labels[ON_DEVICE] or self._captured:
            streams: dict[int | str, float] = {}
            for event_form in on_device:
                streams[event_form.tid] = streams.get(event_form.tid, 0.0) + event_form.dur
            busiest = max(streams, key=lambda tid: streams[tid])
            return sorted((event_form for event_form in on_device if event_form.tid == busiest), key=lambda event: event.ts)
        if any(event.cat == KERNEL for event in events):
            raise BadInput(
                f"{self.path}: kernels, but no labels of passes on the device's time line (cat '{ON_DEVICE}', or "
                "args.name of kernels)"
            )
        if not labels[ON_HOST]:
            raise BadInput(f"{self.path}: {NO_LABELS}")
        return sorted(labels[ON_HOST], key=lambda event_form: event_form.ts)

    @property
    def _captured(self) -> list[EventForm]:
        """Passes of captured steps, from the labels of kernels: each lasts from its first to its last kernel on a stream."""
        kernels = [event_form for event_form in self.form.traceEvents if event_form.cat == KERNEL and _place(event_form)]
        kernels.sort(key=lambda event_form: (str(event_form.tid), event_form.ts))
        passes = []
        for (tid, label), group in groupby(kernels, key=lambda event: (event.tid, event.label)):
            run = list(group)
            start, end = run[0].ts, max(event_form.ts + event_form.dur for event_form in run)
            passes.append(EventForm(label, ON_DEVICE, start, end - start, tid))
        return passes

    @cached_property
    def stages(self) -> frozenset[int]:
        """The stages that ran here."""
        return frozenset(stage for label in self.labels if (place := _place(label)) for stage in (place[1],))

    @cached_property
    def sending(self) -> set[int]:
        """The stages that send activations on."""
        matches = (LABEL.fullmatch(event_form.label) for event_form in self.form.traceEvents)
        return {int(match[1]) for match in matches if match and match[2] == SENDS}

    @property
    def rank(self) -> int:
        """The global rank; the lowest stage where the file does not say it."""
        return self.form.distributedInfo.rank if self.form.distributedInfo else min(self.stages)

    @cached_property
    def _operations(self) -> dict[int | str, list[float]]:
        """When operations began, by thread."""
        begins: dict[int | str, list[float]] = {}
        for event_form in self.form.traceEvents:
            if event_form.cat == OPERATION:
                begins.setdefault(event_form.tid, []).append(event_form.ts)
        return {tid: sorted(times) for tid, times in begins.items()}

    def begins(self, label: EventForm) -> float:
        """When the first operation inside a label starts; the label's end if there is none."""
        times = self._operations.get(label.tid, [])
        i = bisect_left(times, label.ts)
        return min(times[i], label.ts + label.dur) if i < len(times) else label.ts + label.dur


def _place(event: EventForm) -> Place | None:
    """The pass that a label names; None if it names none."""
    match = LABEL.fullmatch(event.label)
    if match is None or match[2] not in KINDS or not match[3]:
        return None
    return KINDS[match[2]], int(match[1]), int(match[3])


def read(path: Path, files: Sequence[Path]) -> Recording:
    """The run of all ranks. path: as it was named. Raises BadInput naming file, rank and label."""
    everybody = sorted((_read(file) for file in files), key=lambda each: each.rank)
    kept, left_out = _one_pipeline(everybody)
    home = {stage: rank for rank, file in enumerate(kept) for stage in file.stages}
    _check_all_there(path, kept, home)
    counts = [_steps(file) for file in kept]
    odd = next((i for i, steps in enumerate(counts) if len(steps) != len(counts[0])), None)
    if odd is not None:
        raise BadInput(
            f"{kept[odd].path}: rank {kept[odd].rank}: {len(counts[odd])} steps, and rank {kept[0].rank} has "
            f"{len(counts[0])}: steps are mixed"
        )
    first = kept[0].form.baseTimeNanoseconds
    steps = []
    for number, labels in enumerate(zip(*counts, strict=True), 1):
        passes = list[RanPass]()
        for rank, (file, marks) in enumerate(zip(kept, labels, strict=True)):
            passes += _passes(file, marks, rank, home, (file.form.baseTimeNanoseconds - first) / 1e3)
        steps.append(RecordedStep(str(number), tuple(passes)))
    info = kept[0].form.distributedInfo
    facts = {"ranks": len(kept), **({"backend": info.backend} if info and info.backend else {})}
    return Recording(str(path), FORMAT, HOST, tuple(steps), {}, facts, left_out)


def _read(file: Path) -> _File:
    text = read_text(file)
    try:
        return _File(file, msgspec.json.decode(text, type=TraceForm))
    except (msgspec.DecodeError, RecursionError):  # including ValidationError; `checked` then names the field
        return _File(file, checked(parse_json(text, file), TraceForm, str(file)))


def _one_pipeline(files: Iterable[_File]) -> tuple[list[_File], tuple[str, ...]]:
    """The first file for each set of stages, and a line about the others, which are of replicas."""
    kept: dict[frozenset[int], _File] = {}
    same_stages: list[int] = []
    seen: dict[int, Path] = {}
    for file in files:
        if file.rank in seen:
            raise BadInput(f"{file.path}: rank {file.rank}, as {seen[file.rank].name} is: a file a rank is needed")
        seen[file.rank] = file.path
        if kept.setdefault(file.stages, file) is not file:
            same_stages.append(file.rank)
    note = f"replicas: ranks {', '.join(map(str, same_stages))} ran the same stages as others"
    return list(kept.values()), (note,) if same_stages else ()


def _check_all_there(path: Path, files: Sequence[_File], home: dict[int, int]) -> None:
    """Raise BadInput where a stage that takes a message is in no file."""
    for file in files:
        missing = next((stage + 1 for stage in sorted(file.sending) if stage + 1 not in home), None)
        if missing is not None:
            world = f" (world size {file.form.distributedInfo.world_size})" if file.form.distributedInfo else ""
            ranks = ", ".join(str(each.rank) for each in files)
            raise BadInput(
                f"{path}: stage {missing - 1} on rank {file.rank} sends to stage {missing}, and no file has passes of that: "
                f"the file of a rank is missing (there are those of ranks {ranks}{world}); name the folder of all"
            )


def _steps(file: _File) -> list[dict[Place, EventForm]]:
    """The labels of each step: the n-th label of each pass belongs to step n. Raises BadInput if numbers differ."""
    marks: dict[Place, list[EventForm]] = {}
    for label in file.labels:
        place = _place(label)
        if place is not None:
            marks.setdefault(place, []).append(label)
    most = max(marks.values(), key=len)
    fewest = min(marks.values(), key=len)
    if len(fewest) < len(most):
        raise BadInput(
            f"{file.path}: rank {file.rank}: label {fewest[0].name} is there {len(fewest)} times and {most[0].name} "
            f"{len(most)} times: steps are mixed, or the profile begins or ends inside one"
        )
    return [{place: row[number] for place, row in marks.items()} for number in range(len(most))]


def _passes(
    file: _File, labels: dict[Place, EventForm], rank: int, home: dict[int, int], offset: float
) -> Iterable[RanPass]:
    """The passes of one step on one rank, without the wait for inputs."""
    for (kind, stage, microbatch), label in labels.items():
        sender = {"F": stage - 1, "B": stage + 1, "BW": stage + 1}.get(kind, -1)
        waits = label.cat == ON_HOST and home.get(sender, rank) != rank
        start = file.begins(label) if waits else label.ts
        yield RanPass(kind, stage, microbatch, rank, start + offset, label.ts + label.dur + offset)
