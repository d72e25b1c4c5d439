"""Work of a user's own beside the step, put where ranks would wait: what is said of it, as `with_work` takes it."""

from __future__ import annotations

import re
from typing import Any

from ..build.work import Work, with_work
from ..kinds import WORK as NAME
from ..problem import Problem
from ..util.errors import BadInput
from ..util.text import numbers_in, parse_bytes, parse_time
from .feature import Feature, Field

Works = tuple[Work, ...]
FORM = re.compile(r"(?P<ranks>any|[\d,-]+):(?P<time>[^/:]+)(?:/(?P<pieces>\d+))?(?P<rest>(?::\w+=[^:]+)*)")


def _read(said: str) -> Works:
    """Works from words such as "0-3:40ms/8" and "any:1s/100:held=2GiB". Raises BadInput."""
    found: list[Work] = []
    for word in said.split():
        known = FORM.fullmatch(word)
        if known is None:
            raise BadInput(
                f"work '{word[:40]}': RANKS:TIME/PIECES, such as 0-3:40ms/8, any:1s/100 or 0:5ms:before=0:held=1GiB"
            )
        rest = dict(one.split("=") for one in known["rest"].split(":")[1:])
        if unknown := set(rest) - {"before", "after", "held"}:
            raise BadInput(f"work '{word[:40]}': '{min(unknown)}': before, after and held can be said")
        where = {name: int(rest[name]) for name in ("before", "after") if rest.get(name, "").isdecimal()}
        if any(name in rest and name not in where for name in ("before", "after")):
            raise BadInput(f"work '{word[:40]}': before and after are numbers of stages")
        held = parse_bytes(rest["held"]) if "held" in rest else 0
        ranks = (None,) if known["ranks"] == "any" else numbers_in(known["ranks"])
        time = round(parse_time(known["time"], "work"))
        found += [Work(rank, time, int(known["pieces"] or 1), held=held, **where) for rank in ranks]
    return tuple(found)


def _build(problem: Problem, staged: Any) -> Problem:
    works = staged.step.work
    return with_work(problem, *works) if works else problem


def _told(problem: Problem) -> Works | None:
    """None where there is none. Its times alone: what waits for what, and bytes, only its edges say."""
    p, rows = problem.passes, problem.rows("J")
    return tuple(Work(int(p.rank[i]), int(p.duration[i])) for i in rows) or None


WORK = Feature(
    NAME,
    (
        Field(
            "work",
            (),
            "work of your own beside the step, where ranks would wait: RANKS:TIME/PIECES, such as 0-3:40ms/8 or any:1s/100, "
            "with :before=STAGE, :after=STAGE, :held=BYTES (default: none)",
            "WORK",
            read=_read,
            told=_told,
            fixed="is done beside the step",
        ),
    ),
    build=_build,
)
