"""`zbsolve check schedule.json --profile new.json`: does an order still hold by new times, and is it still the best?"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..util.text import format_gap, format_time, parse_share
from .tools import print_json, profile_from, searching, tell_other_model

if TYPE_CHECKING:
    from ..schedule import Schedule

USUAL_SHARE = "1%"  # that the order may take longer than the best that is found


@dataclass(frozen=True)
class StillGood:
    """An order by a profile's times. wrong: why it does not hold, or "". value: what it takes, µs; before: by its file's
    times; best: the shortest that was found; bound: what none is below. within: the share that it may be longer."""

    wrong: str
    value: int
    before: int
    best: int
    bound: int
    within: float

    @property
    def excess(self) -> float:
        """How much longer than the best it is, as a share of the best."""
        return self.value / self.best - 1 if self.best else 0.0

    @property
    def good(self) -> bool:
        """It holds, and is within the share."""
        return not self.wrong and self.excess <= self.within

    def to_json(self) -> dict[str, Any]:
        """All numbers; null where the order does not hold."""
        said = {"good": self.good, "holds": not self.wrong, "why": self.wrong, "within": self.within, "before": self.before}
        found = {name: None if self.wrong else getattr(self, name) for name in ("value", "best", "bound", "excess")}
        return said | found


def check_again(options: argparse.Namespace) -> int:
    """Time the order of a schedule's file by a profile, and search for a shorter one. 1 where it does not hold any more, or
    one is shorter by more than `--within`. Raises BadInput."""
    from ..schedule import Schedule

    within = parse_share(USUAL_SHARE if options.within is None else options.within, "--within")
    schedule, profile = Schedule.load(options.schedule), profile_from(options.profile, "check")
    tell_other_model(schedule, profile, "check")
    found = _still_good(schedule, profile, within, options)
    if options.json:
        print_json(found.to_json())
    else:
        print("\n".join(_lines(options, found)))
    return 0 if found.good else 1


def _still_good(schedule: Schedule, profile: Any, within: float, options: argparse.Namespace) -> StillGood:
    from ..schedule import GIVEN
    from ..search.certify import certified
    from ..search.order_on_profile import order_on, why_not
    from ..search.solver import solve

    found, before = order_on(schedule, profile, replicas=options.replicas), int(schedule.timeline().value)
    wrong = why_not(found)
    if wrong:
        return StillGood(wrong, 0, before, 0, 0, within)
    value, quick = int(found.timeline().value), certified(found, GIVEN).certificate
    assert quick is not None
    if value <= (1 + within) * quick.bound:
        return StillGood("", value, before, value, quick.bound, within)  # no search finds one that is so much shorter
    with searching("check") as (search, _):
        best = solve(found.problem, seconds=options.seconds, hint=found, prefer=None, progress=lambda s: search.show("", s))
    assert best.certificate is not None
    return StillGood("", value, before, best.certificate.value, max(best.certificate.bound, quick.bound), within)


def _lines(options: argparse.Namespace, found: StillGood) -> list[str]:
    """What holds and what not, in words."""
    name, by = options.schedule, f"by the times of {options.profile}"
    if found.wrong:
        return [f"{name}: does not hold {by}: {found.wrong}"]
    lines = [
        f"{name}: holds {by}",
        f"it takes {format_time(found.value)}, and {format_time(found.before)} by its own times",
    ]
    at_most = format_gap(1 - found.bound / found.value if found.value else 0.0)
    proven = f"proven: at most {at_most} less is possible"
    if found.bound >= found.value:
        proven = "proven: no order of its passes is shorter"
    if not found.good:
        less = 1 - found.best / found.value
        return [*lines, f"another order takes {less:.2%} less, {format_time(found.best)}: solve it again with this profile"]
    if found.best < found.value:
        proven = f"the best that was found takes {1 - found.best / found.value:.2%} less; {proven}"
    return [*lines, f"still within {found.within:.2%} of the best; {proven}"]
