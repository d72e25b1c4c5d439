"""What a measured step could be, in one line; and each placement that was tried, in a line each."""

from __future__ import annotations

from ..ilp.bounds.bound import IN_ORDER
from ..search.today import UNITS, Better, Today
from ..util.text import aligned, exact_time, format_bytes, format_gap, format_time


def today_line(today: Today) -> str:
    """The answer, one line."""
    said = f"today's step takes {format_time(today.measured)}, of which bubble {today.bubble:.1%}"
    lengths = "" if today.alike else ", microbatches as long as in this one"
    said += f" (its order by the medians of all steps{lengths}: {format_time(today.replayed)})"
    best, saved = today.best, today.replayed - today.even
    if best is not None:
        said += (
            f"; the best schedule in the same memory ({_memory(today)}) takes {format_time(best.value)} ({_proven(best)})"
        )
        if best is not today.found[0]:
            said += f", on placement {best.placement}"
            said += ", each stage cut in two" if best.cut else ""
    even = f"would save {format_time(saved)}" if saved > 0 else "would save nothing"
    return f"{said}; balancing stages {even} of today's"


def _memory(today: Today) -> str:
    most = max(today.room)
    if today.counted:
        return format_bytes(most)
    return f"{most / UNITS:g} microbatches in flight" if most != UNITS else "1 microbatch in flight"


def _proven(one: Better) -> str:
    certificate = one.schedule.certificate
    assert certificate is not None
    order = ", for orders that run each stage's microbatches by number" if certificate.proof.endswith(IN_ORDER) else ""
    return ("proven optimal" if certificate.gap == 0 else f"proven within {format_gap(certificate.gap)}") + order


def today_as_text(today: Today) -> str:
    """The answer, and below it each placement with value, bound and gap."""
    lines = [today_line(today)]
    if today.found:
        rows = [("placement", "step", "bound", "gap", "of today's order")]
        for one in today.found:
            certificate = one.schedule.certificate
            assert certificate is not None
            name = f"{one.placement}{', stages cut in two' if one.cut else ''}"
            change = f"{one.value / today.replayed - 1:+.1%}" if today.replayed else ""
            gap = format_gap(certificate.gap)
            rows.append((name, exact_time(one.value), exact_time(certificate.bound), gap, change))
        lines += [f"  {line}" for line in aligned(rows)]
    return "\n".join(lines) + "\n"
