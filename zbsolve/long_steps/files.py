"""Files of repeated schedules; and the part of one for pictures: the passes before its rounds, a round, and those behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from ..problem import Ints, Problem
from ..problem.form import ProblemForm
from ..schedule import Certificate, Schedule
from ..util.columns import compiled, packed, unpacked
from ..util.errors import BadInput
from ..util.files import COUNT, checked, part_of, read_one_of, write_document
from ..util.text import format_time
from .check import checked_starts, earliest_starts, value_of
from .repeated import RepeatedSchedule, Round, rank_lanes

KIND = "rounds"
Orders = dict[str, str]  # stream → the lanes in its order, as a text
MAX_PASSES = 1 << 26  # of the short order: a short text in a file must not fill the memory
MAX_UNROLLED = 3_000_000  # the most passes that commands handle one by one: they need 3 GB

MAX_WIDTH = 96  # the most words of a repeated part in a text
TOKEN = re.compile(r"\s*(?:\(([^()*]*)\)\*(\d{1,9})|([^\s()*]+)(?:\*(\d{1,9}))?)\s*")


class RoundForm(msgspec.Struct, forbid_unknown_fields=True):
    """A `Round` in a file."""

    microbatches: COUNT
    period: COUNT
    begin: str | list[COUNT]
    copies: COUNT


class RepeatedForm(msgspec.Struct, forbid_unknown_fields=True):
    """A repeated schedule in a file."""

    microbatches: COUNT
    few: COUNT
    round: RoundForm
    order: dict[str, str]
    step: ProblemForm
    certificate: Certificate | None = None


def save(long: RepeatedSchedule, path: str | os.PathLike[str]) -> None:
    """Write a file of a repeated schedule, whole or not at all; `-` is standard output."""
    round = long.round
    words = [head + tail for head, tail in long.words]
    body = {
        "microbatches": long.microbatches,
        "few": long.few,
        "round": {"microbatches": round.every, "period": round.period, "begin": packed(round.begin), "copies": round.copies},
        "certificate": None if long.certificate is None else long.certificate.to_json(),
        "order": {stream: as_text(own, words) for stream, own in zip(long.streams, long.order, strict=True)},
        "step": long.one.to_json(),
    }
    write_document(path, KIND, body)


def load(path: str | os.PathLike[str]) -> RepeatedSchedule:
    """Read a file of a repeated schedule. Raises BadInput."""
    return with_orders(*_from_json(read_one_of(path, (KIND,))[1], str(path)), str(path))


def read(path: str | os.PathLike[str]) -> Schedule | tuple[RepeatedSchedule, Orders]:
    """Read a schedule, that of a plan, or a repeated one, with its orders apart: they take most memory. Raises BadInput."""
    kind, body = read_one_of(path, ("schedule", "plan", KIND))
    if kind == KIND:
        return _from_json(body, str(path))
    return Schedule.from_json(part_of(kind, body, "schedule", path), str(path))


def mark(long: RepeatedSchedule, orders: Orders) -> str:
    """A digest of all that is in the file of a repeated schedule, 16 characters."""
    return hashlib.sha256(json.dumps([long.digest, orders]).encode()).hexdigest()[:16]


def _from_json(body: dict[str, Any], where: str) -> tuple[RepeatedSchedule, Orders]:
    """A repeated schedule without its orders, and these."""
    certificate = body.get("certificate")
    derived = {name: certificate.pop(name, None) for name in ("gap", "status")} if isinstance(certificate, dict) else {}
    form = checked(body, RepeatedForm, where)
    microbatch = Problem.from_form(form.step, f"{where}: step")
    if microbatch.microbatches != 1 or not microbatch.in_microbatch.all():
        raise BadInput(f"{where}: field 'step' is not a step of one microbatch")
    if form.certificate is not None:
        form.certificate.check(derived["gap"], derived["status"], where)
    if form.few * len(microbatch.passes) > MAX_PASSES:
        raise BadInput(f"{where}: field 'few': an order of more than {MAX_PASSES} passes")
    begin = unpacked(form.round.begin, f"{where}: round.begin") if isinstance(form.round.begin, str) else form.round.begin
    round = Round(form.round.microbatches, form.round.period, np.array(begin, np.int64), form.round.copies)
    return RepeatedSchedule(microbatch, form.microbatches, form.few, (), round, form.certificate), form.order


def with_orders(long: RepeatedSchedule, orders: Orders, where: str) -> RepeatedSchedule:
    """The repeated schedule with these orders. Raises BadInput naming `where`."""
    if set(orders) != set(long.streams):
        raise BadInput(f"{where}: field 'order' needs {', '.join(long.streams[:4])} …, and no other stream")
    words = [head + tail for head, tail in long.words]
    order = []
    for stream, own in zip(long.streams, rank_lanes(long.one), strict=True):
        here = {words[lane]: lane for lane in own.tolist()}
        order.append(from_text(orders[stream], here, long.few * len(own), f"{where}: order: {stream}"))
    return RepeatedSchedule(long.one, long.microbatches, long.few, tuple(order), long.round, long.certificate)


def load_unrolled(path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule file, or a repeated schedule with all its passes. Raises BadInput, also if those are too many."""
    content = read(path)
    if isinstance(content, Schedule):
        return content
    check_unrolled(content[0], str(path))
    return with_orders(*content, str(path)).unrolled()


def check_unrolled(long: RepeatedSchedule, where: str) -> None:
    """Raise BadInput if there are too many passes to handle one by one."""
    if long.passes > MAX_UNROLLED:
        raise BadInput(f"{where}: {long.passes:,} passes are more than can be taken one by one ({MAX_UNROLLED:,})")


def as_json(long: RepeatedSchedule) -> dict[str, Any]:
    """The numbers of a repeated schedule for `--json`."""
    certificate = {} if long.certificate is None else long.certificate.to_json()
    round = {"microbatches": long.round.every, "period": long.round.period, "copies": long.round.copies + long.further}
    return certificate | {"microbatches": long.microbatches, "passes": long.passes, "round": round}


def as_text(row: Ints, words: Sequence[str]) -> str:
    """Indices into `words`, shape (n,), as a text that `from_text` reads back."""
    parts = []
    for at, width, times in compiled(_parts)(np.ascontiguousarray(row, np.int64), MAX_WIDTH).tolist():
        part = " ".join(words[word] for word in row[at : at + width].tolist())
        parts.append(part if times == 1 else f"({part})*{times}" if width > 1 else f"{part}*{times}")
    return " ".join(parts)


def _parts(row: Ints, widest: int) -> Ints:
    """Split a row into repeated parts: begin, width and number of repeats of each, shape (parts, 3). At each place it takes
    the width, up to `widest`, that saves the most words."""
    parts, count, at = np.empty((len(row), 3), np.int64), 0, 0
    while at < len(row):
        width, times, saved = 1, 1, -1
        for wide in range(1, min(widest, (len(row) - at) // 2) + 1):
            end = at + wide
            while end < len(row) and row[end] == row[end - wide]:
                end += 1
            more = (end - at) // wide - 1
            if more > 0 and more * wide - 1 > saved:
                width, times, saved = wide, more + 1, more * wide - 1
        parts[count, 0], parts[count, 1], parts[count, 2] = at, width, times
        count += 1
        at += width * times
    return parts[:count]


def from_text(text: str, index: Mapping[str, int], most: int, where: str) -> Ints:
    """The indices, shape (n,), that a text stands for. Raises BadInput for an unknown word, or more than `most` words."""
    parts, at, total = [], 0, 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise BadInput(f"{where}: '{text[at : at + 20]}' is no pass such as 0F, and no part such as (0F 0B)*12")
        names = match[1].split() if match[1] is not None else [match[3]]
        unknown = [name for name in names if name not in index]
        if unknown:
            raise BadInput(f"{where}: the step has no passes {unknown[0][:20]}")
        times = int(match[2] or match[4] or 1)
        total += times * len(names)
        if total > most:
            raise BadInput(f"{where}: more than {most} passes")
        parts.append(np.tile(np.array([index[name] for name in names], np.int64), times))
        at = match.end()
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def schedule_to_show(long: RepeatedSchedule, where: str) -> Schedule:
    """The schedule for a picture: all passes, or if these are too many, only as many rounds as keep the times of the whole
    step, apart from the time of the rounds that are left out. Its source tells what is shown; its certificate is that of
    the whole step. Raises BadInput for a schedule that is not valid."""
    if long.passes <= MAX_UNROLLED:
        return long.unrolled()
    start = checked_starts(long)
    part = next(filter(None, (_with_copies(long, copies, start) for copies in range(1, long.round.copies + 1))))
    check_unrolled(part, where)
    shown, whole = part.sample(earliest_starts(part.one, part.few, part.order, part.round)), long.certificate
    return shown if whole is None else shown.certified(replace(whole, objective=f"the whole step's {whole.objective}"))


def _with_copies(long: RepeatedSchedule, copies: int, start: Ints) -> RepeatedSchedule | None:
    """The short order with fewer copies of the round; None if some pass is then not simply earlier by those rounds."""
    problem, round, out = long.one, long.round, long.round.copies - copies
    few = long.few - out * round.every
    begins = (int(round.begin[lanes].sum()) for lanes in rank_lanes(problem))
    cuts = (
        slice(first, first + out * round.every * own.size // long.few) for first, own in zip(begins, long.order, strict=True)
    )
    order = tuple(np.delete(own, cut) for own, cut in zip(long.order, cuts, strict=True))
    behind = np.arange(few) >= round.begin[:, None] + copies * round.every
    wanted = np.take_along_axis(start, np.arange(few) + behind * out * round.every, axis=1) - behind * out * round.period
    part = replace(round, copies=copies)
    if (earliest_starts(problem, few, order, part) != wanted).any():
        return None
    whole = format_time(value_of(problem, start) + long.further * round.period)
    note = f"part of a step of {long.microbatches:,} microbatches and {whole}: {out + long.further:,} of its "
    note += f"{round.copies + long.further:,} rounds, {format_time(round.period)} each, are left out"
    named = replace(problem, source=f"{note}; {problem.source}" if problem.source else note)
    return RepeatedSchedule(named, few, few, order, part)
