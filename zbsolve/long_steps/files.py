"""Repeated schedules in files."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import msgspec
import numpy as np

from ..problem import Problem
from ..problem_form import ProblemForm
from ..schedule import Certificate, Schedule
from ..util.columns import packed, unpacked
from ..util.errors import BadInput
from ..util.files import COUNT, checked, document_kind, read_one_of, write_document
from .lanes import rank_lanes
from .patterns import as_text, from_text
from .repeated import RepeatedSchedule, Round

KIND = "rounds"
MAX_PASSES = 1 << 26  # of the order of few microbatches: a short text must not fill the memory
MAX_UNROLLED = 3_000_000  # passes that commands take one by one: they need 3 GB


class RoundForm(msgspec.Struct, forbid_unknown_fields=True):
    """What repeats, in a file."""

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
        "round": {
            "microbatches": round.every,
            "period": round.period,
            "begin": packed(round.begin),
            "copies": round.copies,
        },
        "certificate": None if long.certificate is None else long.certificate.to_json(),
        "order": {stream: as_text(own, words) for stream, own in zip(long.streams, long.order, strict=True)},
        "step": long.one.to_json(),
    }
    write_document(path, KIND, body)


def load(path: str | os.PathLike[str]) -> RepeatedSchedule:
    """Read a file of a repeated schedule. Raises BadInput."""
    long, said = _read(path)
    return _with_order(long, said, str(path))


def load_step(path: str | os.PathLike[str]) -> tuple[RepeatedSchedule, str]:
    """A repeated schedule without its orders, which take the most memory, and a digest of all that its file says. Raises
    BadInput."""
    long, said = _read(path)
    return long, hashlib.sha256(json.dumps([long.digest, said]).encode()).hexdigest()[:16]


def _read(path: str | os.PathLike[str]) -> tuple[RepeatedSchedule, dict[str, str]]:
    """A repeated schedule without its orders, and these as texts."""
    where, body = str(path), read_one_of(path, (KIND,))[1]
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


def _with_order(long: RepeatedSchedule, said: dict[str, str], where: str) -> RepeatedSchedule:
    if set(said) != set(long.streams):
        raise BadInput(f"{where}: field 'order' needs {', '.join(long.streams[:4])} …, and no other stream")
    words = [head + tail for head, tail in long.words]
    order = []
    for stream, own in zip(long.streams, rank_lanes(long.one), strict=True):
        here = {words[lane]: lane for lane in own.tolist()}
        order.append(from_text(said[stream], here, long.few * len(own), f"{where}: order: {stream}"))
    return RepeatedSchedule(long.one, long.microbatches, long.few, tuple(order), long.round, long.certificate)


def load_either(path: str | os.PathLike[str]) -> Schedule | RepeatedSchedule:
    """A schedule's file, or a repeated schedule's. Raises BadInput."""
    return load(path) if str(path) != "-" and document_kind(path) == KIND else Schedule.load(path)


def load_unrolled(path: str | os.PathLike[str]) -> Schedule:
    """A schedule's file, or a repeated schedule's with all its passes. Raises BadInput, also where those are too many."""
    found = load_either(path)
    if isinstance(found, Schedule):
        return found
    check_unrolled(found, str(path))
    return found.unrolled()


def check_unrolled(long: RepeatedSchedule, where: str) -> None:
    """Raise BadInput where the passes are too many to be taken one by one."""
    if long.passes > MAX_UNROLLED:
        raise BadInput(f"{where}: {long.passes:,} passes are more than can be taken one by one ({MAX_UNROLLED:,})")


def as_json(long: RepeatedSchedule) -> dict[str, Any]:
    """What a person asks of a repeated schedule, as fields."""
    certificate = {} if long.certificate is None else long.certificate.to_json()
    round = {"microbatches": long.round.every, "period": long.round.period, "copies": long.round.copies + long.further}
    return certificate | {"microbatches": long.microbatches, "passes": long.passes, "round": round}
