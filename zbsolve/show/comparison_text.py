"""A run beside its prediction, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..util.text import aligned, times_note
from .comparison import Comparison, KindTimes


def comparison_as_text(comparison: Comparison) -> str:
    """The comparison as text: step times, one pass a kind, and the difference rank by rank in ms."""
    c = comparison
    steps, unit, scale = sorted(c.steps), *(("ms", 1e3) if max(c.measured, c.predicted) >= 10_000 else ("µs", 1.0))

    def show(us: float) -> str:
        return f"{us / scale:,.2f}" if scale > 1 else f"{us:,.0f}"

    share = f" ({c.difference / c.predicted:+.2%})" if c.predicted else ""
    lines = [
        *([f"predicted: {note}"] if (note := times_note(c.source)) else []),
        *([c.emulated] if c.emulated else []),
        *([c.launching] if c.launching else []),
        f"step time ({c.objective})  predicted {show(c.predicted)} {unit}, measured {show(c.measured)} {unit}{share}",
        f"  median of {len(steps)} steps, from {show(steps[0])} to {show(steps[-1])} {unit}",
        "",
        *_kind_rows(c.kinds),
        "",
        f"measured − predicted, {unit} a rank; each row adds up ('*': the rank with the longest window;",
        "fill, drain: before the rank's first compute pass and after its last)",
        *_rank_rows(c, show),
    ]
    if c.speedup is not None:
        s = c.speedup
        lines += [
            "",
            f"speed-up over the baseline  predicted {s.predicted:.3f}×, measured {s.measured:.3f}× "
            f"(quartiles {s.low:.3f}× to {s.high:.3f}×)",
            f"  baseline  predicted {show(s.baseline_predicted)} {unit}, measured {show(s.baseline_measured)} {unit}",
        ]
    return "\n".join(lines) + "\n"


def _kind_rows(kinds: Sequence[KindTimes]) -> list[str]:
    rows = [("one pass, µs", "predicted", "measured", "", "quartiles", "passes")]
    for k in kinds:
        ratio = f"{k.measured / k.predicted - 1:+.1%}" if k.predicted else ""
        spread = f"{k.low:,.1f} … {k.high:,.1f}"
        rows.append((f"  {k.kind}", f"{k.predicted:,.1f}", f"{k.measured:,.1f}", ratio, spread, f"{k.passes:,}"))
    return aligned(rows)


def _rank_rows(c: Comparison, show: Callable[[float], str]) -> list[str]:
    kinds = [k.kind for k in c.kinds if any(k.kind in one.measured.passes for one in c.ranks)]
    rows = [("  rank", *kinds, "waiting", "launch", "fill", "drain", "total")]
    for one in c.ranks:
        d = one.difference
        parts = (*(d.passes.get(kind, 0) for kind in kinds), d.waiting, d.launch, d.before, d.after, d.total)
        mark = "*" if one.rank == c.limiting else " "
        rows.append((f"{mark} {one.rank}", *("0" if p == 0 else ("+" if p > 0 else "") + show(p) for p in parts)))
    return aligned(rows)
