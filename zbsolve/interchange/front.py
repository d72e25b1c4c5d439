"""Steps whose stages in front train nothing, for engines that know no stage without a backward."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from ..build.untrained import untrained_stages, with_backward
from ..schedule import Schedule


def with_front(schedule: Schedule) -> Schedule:
    """The schedule where stages in front that train nothing have backwards all the same, of no time, as soon as the gradient
    is there: engines know no stage without. The schedule itself where it has all, or none."""
    problem, whole = schedule.problem, with_backward(schedule.problem)
    front = untrained_stages(problem)
    if whole is problem or front == problem.stages:
        return schedule
    times, backward = schedule.timeline(), "BW" if "BW" in problem.passes.kinds else "B"
    spans = {stream: list(zip(*(times[name] for name in names), strict=True)) for stream, names in schedule.order.items()}
    added: dict[str, list[tuple[float, int, int]]] = {}
    for m in range(problem.microbatches):
        ready = times[f"{front}{backward}{m}"][1]
        for stage in reversed(range(front)):
            stream = f"compute:{whole.passes.rank[whole.index[f'{stage}F{m}']]}"
            starts, ends = spans[stream]
            begun = bisect_left(starts, ready)
            ready = max(ready, ends[begun - 1]) if begun else ready
            added.setdefault(stream, []).append((ready, -stage, m))
    order: dict[str, list[str]] = {}
    for stream, names in schedule.order.items():
        row, done, (starts, ends) = order.setdefault(stream, []), 0, spans[stream]
        for ready, stage, m in sorted(added.get(stream, [])):
            until = max(bisect_left(starts, ready), bisect_right(ends, ready))
            row += names[done:until]
            row += [f"{-stage}{kind}{m}" for kind in (("BW",) if backward == "BW" else ("B", "W"))]
            done = until
        row += names[done:]
    return Schedule(whole, {stream: tuple(row) for stream, row in order.items()})
