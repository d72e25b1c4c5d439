"""A user's own work beside the step, scheduled where ranks would wait: the option's text as arguments of `with_work`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..build.work import Work, with_work
from ..kinds import WORK as NAME
from ..problem import Problem
from ..util.errors import BadInput
from ..util.text import numbers_in, parse_bytes, parse_time
from .feature import Feature, Field

Works = tuple[Work, ...]
FORM = re.compile(r"(?P<ranks>any)?(?P<these>[\d,-]*):(?P<time>[^/:]+)(?:/(?P<pieces>\d+|most))?(?P<rest>(?::\w+=[^:]+)*)")
NUMBER, SEVERAL, TIME = "a number", "numbers such as 0,2-3", "a time such as 2ms"
KEYS: dict[str, tuple[str, str, Callable[[str], Any]]] = {  # key → (field of Work, what it is, parser)
    "before": ("before", NUMBER, int),
    "after": ("after", NUMBER, int),
    "takes": ("takes", NUMBER, int),
    "microbatches": ("microbatches", SEVERAL, lambda text: _numbers(text)),
    "comm": ("comm", TIME, lambda text: round(parse_time(text, "work"))),
    "held": ("held", "bytes such as 1GiB", parse_bytes),
    "on": ("stream", "a stream such as d2h", str),
}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(number for part in text.split(",") for number in numbers_in(part))


def _read(said: str) -> Works:
    """Works from text such as "0-3:40ms/8" or "any:1s/100:held=2GiB". Raises BadInput."""
    works: list[Work] = []
    for word in said.split():
        where, known = f"work '{word[:40]}'", FORM.fullmatch(word)
        if known is None or not (known["ranks"] or known["these"]):
            raise BadInput(f"{where}: RANKS:TIME/PIECES, such as 0-3:40ms/8, any:1s/100 or 0:5ms:before=0:held=1GiB")
        words = dict(part.split("=", 1) for part in known["rest"].split(":")[1:])
        if unknown := set(words) - set(KEYS):
            raise BadInput(f"{where}: '{min(unknown)}': {', '.join(KEYS)} are known")
        fields, ranks = dict[str, Any](), known["these"]
        for key, text in (*words.items(), *[("ranks", ranks)] * bool(ranks)):
            field, what, read = KEYS.get(key, ("rank", SEVERAL, _numbers))
            try:
                fields[field] = read(text)
            except (ValueError, BadInput):
                raise BadInput(f"{where}: {key}: '{text[:20]}' is not {what}") from None
        these = fields.pop("rank", None)
        times = tuple(round(parse_time(time, "work")) for time in known["time"].split("+"))
        pieces = None if known["pieces"] == "most" else int(known["pieces"] or len(times))
        for rank in (these,) if known["ranks"] else these:
            works.append(Work(rank, times if len(times) > 1 else times[0], pieces, **fields))
    return tuple(works)


def _build(problem: Problem, staged: Any) -> Problem:
    works = staged.step.work
    return with_work(problem, *works) if works else problem


def _told(problem: Problem) -> Works | None:
    """The works of a problem, or None; only their times, as dependencies and bytes are only in its edges."""
    p, rows = problem.passes, problem.rows("J")
    streams = [p.stream_sets[p.streams[i]][0].split(":")[0] for i in rows]
    return tuple(Work(int(p.rank[i]), int(p.duration[i]), stream=on) for i, on in zip(rows, streams, strict=True)) or None


WORK = Feature(
    NAME,
    (
        Field(
            "work",
            (),
            "work of your own beside the step, where ranks would wait: RANKS:TIME/PIECES, such as 0-3:40ms/8, any:1s/100 or "
            "any:5ms/most, with :before=STAGE, :after=STAGE, :microbatches=, :takes=WORK, :comm=TIME, :held=BYTES, "
            ":on=STREAM (default: none)",
            "WORK",
            read=_read,
            told=_told,
            fixed="is done beside the step",
        ),
    ),
    build=_build,
)
