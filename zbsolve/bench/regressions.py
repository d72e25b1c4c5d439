"""Compares two bench reports: what became worse by more than the noise of the samples; and as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from ..util.errors import BadInput
from ..util.text import format_gap, format_time
from .runs import Report, Result

MIN_REPEATS = 3  # with fewer samples the noise is not known, and times are not compared
NOTICEABLE_SECONDS = 0.05  # smaller differences do not matter
LEAST_NOISE = 0.10  # relative; times on an idle machine vary as much from day to day


@dataclass(frozen=True, slots=True)
class Row:
    """One problem in both reports. now: None if missing. worse, better: what changed: value, bound, time, missing."""

    name: str
    base: Result
    now: Result | None
    worse: tuple[str, ...]
    better: tuple[str, ...]


@dataclass(frozen=True)
class ReportComparison:
    """A comparison of two reports. new: problems that only the newer one has. noise: the relative spread of times; None:
    times are not compared, and `why` says why. pace: the median ratio of times, adjusted for the machine's speed."""

    rows: tuple[Row, ...]
    new: tuple[str, ...]
    noise: float | None
    why: str
    pace: float | None

    @property
    def failed(self) -> bool:
        """Whether anything became worse."""
        return any(row.worse for row in self.rows) or self.slower

    @property
    def slower(self) -> bool:
        """Whether the suite as a whole takes longer, beyond the noise."""
        return self.pace is not None and self.noise is not None and self.pace > 1 + self.noise


def compare_reports(base: Report, now: Report) -> ReportComparison:
    """What became worse or better from `base` to `now`.

    Worse is a value above the worst of the base's repeats, a bound below its lowest, a missing problem, and a time whose
    fastest repeat is longer than the base's slowest by more than the noise. Times are divided by the yardstick measured with
    each, and are compared only between machines of the same kind. Names of suites are not compared. Raises BadInput for
    reports with different seeds or limits, with different problems of the same name, or without a common problem.
    """
    for what in ("seed", "effort", "seconds"):
        a, b = getattr(base, what), getattr(now, what)
        if a != b:
            raise BadInput(f"field '{what}' differs: {a} in the base, {b} now: the two cannot be compared")
    by_name = {result.name: result for result in now.results}
    if not any(result.name in by_name for result in base.results):
        raise BadInput(f"suite '{base.suite}' of the base and suite '{now.suite}' now have no problem in common")
    for result in base.results:
        if result.name in by_name and by_name[result.name].digest != result.digest:
            raise BadInput(f"problem '{result.name}' is another one now (field 'digest'): make a new base")
    why = _no_times(base, now)
    pairs = [(result, by_name[result.name]) for result in base.results if result.name in by_name]
    noise = None if why or not pairs else max(LEAST_NOISE, _noise([result for pair in pairs for result in pair]))
    rows = tuple(_row(result, by_name.get(result.name), noise) for result in base.results)
    known = {result.name for result in base.results}
    pace = None if noise is None else _pace(pairs)
    return ReportComparison(rows, tuple(name for name in by_name if name not in known), noise, why, pace)


def _no_times(base: Report, now: Report) -> str:
    """Why times are not compared, or ""."""
    changed = [what for what in base.machine if base.machine[what] != now.machine.get(what)]
    if changed:
        return f"another machine ({', '.join(changed)})"
    if any(len(result.seconds) < MIN_REPEATS for report in (base, now) for result in report.results):
        return f"fewer than {MIN_REPEATS} repeats"
    return ""


def _paced(result: Result) -> list[float]:
    """Times in multiples of the yardstick measured with each."""
    return [seconds / max(yardstick, 1e-9) for seconds, yardstick in zip(result.seconds, result.yardstick, strict=False)]


def _pace(pairs: list[tuple[Result, Result]]) -> float:
    """The median ratio of the fastest times, over problems that take long enough to compare."""
    ratios = [min(_paced(b)) / min(_paced(a)) for a, b in pairs if min(*a.seconds, *b.seconds) >= NOTICEABLE_SECONDS]
    return median(ratios) if ratios else 1.0


def _noise(results: list[Result]) -> float:
    """The relative spread (largest − smallest) / median of times that nine of ten problems stay within."""
    spreads = sorted((max(t) - min(t)) / max(median(t), 1e-9) for t in map(_paced, results) if median(t) > 0)
    return spreads[int(0.9 * (len(spreads) - 1))] if spreads else 0.0


def _row(base: Result, now: Result | None, noise: float | None) -> Row:
    if now is None:
        return Row(base.name, base, None, ("missing",), ())
    worse, better = [], []
    for name, lost, won in (
        ("value", now.value > max(base.values), now.value < min(base.values)),
        ("bound", now.bound < min(base.bounds), now.bound > max(base.bounds)),
        ("time", _slower(base, now, noise), _slower(now, base, noise)),
    ):
        if lost:
            worse.append(name)
        elif won:
            better.append(name)
    return Row(base.name, base, now, tuple(worse), tuple(better))


def _slower(base: Result, now: Result, noise: float | None) -> bool:
    if noise is None or median(now.seconds) - median(base.seconds) < NOTICEABLE_SECONDS:
        return False
    return min(_paced(now)) > max(_paced(base)) * (1 + noise)


def regressions_as_markdown(
    comparison: ReportComparison, machine: Mapping[str, object], title: str = "zbsolve bench"
) -> str:
    """A table for a pull request: a verdict, what changed, and the rest in a folded section."""
    changed = [row for row in comparison.rows if row.worse or row.better]
    lines = [f"### {title}: {'worse' if comparison.failed else 'fine'}", "", _summary(comparison, machine), ""]
    if changed:
        lines += [*_table(changed), ""]
    same = [row for row in comparison.rows if not (row.worse or row.better)]
    if same:
        lines += [f"<details><summary>{len(same)} unchanged</summary>", "", *_table(same), "", "</details>", ""]
    return "\n".join(lines)


def _summary(comparison: ReportComparison, machine: Mapping[str, object]) -> str:
    worse = sum(bool(row.worse) for row in comparison.rows)
    better = sum(bool(row.better) and not row.worse for row in comparison.rows)
    optimal = sum(row.now is not None and row.now.bound >= row.now.value for row in comparison.rows)
    words = [f"{len(comparison.rows)} problems: {worse} worse, {better} better; {optimal} proven optimal."]
    if comparison.new:
        words.append(f"{len(comparison.new)} are new: {', '.join(comparison.new)}.")
    if comparison.noise is None or comparison.pace is None:
        words.append(f"Times are not compared: {comparison.why or 'nothing in common'}.")
    else:
        words.append(
            f"Times: {comparison.pace:.2f}× in the median against a noise of {comparison.noise:.0%}"
            f"{', slower as a whole' if comparison.slower else ''} ({machine.get('cpu')}, {machine.get('cores')} cores)."
        )
    return " ".join(words)


def _table(rows: list[Row]) -> list[str]:
    lines = ["| problem | value | bound | gap | seconds | |", "|---|---|---|---|---|---|"]
    for row in rows:
        base, now = row.base, row.now
        verdict = "; ".join(
            [f"**worse: {', '.join(row.worse)}**"] * bool(row.worse)
            + [f"better: {', '.join(row.better)}"] * bool(row.better)
        )
        name = row.name.replace("|", "\\|")
        if now is None:
            lines.append(f"| {name} | {format_time(base.value)} → – | | | | {verdict} |")
            continue
        cells = (
            name,
            _change(base.value, now.value),
            _change(base.bound, now.bound),
            format_gap(now.gap),
            _change(f"{median(base.seconds):.2f}", f"{median(now.seconds):.2f}"),
            verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _change(before: object, after: object) -> str:
    """`12 → 11`, or one of them where they are the same."""
    return str(after) if before == after else f"{before} → {after}"
