"""What changed from one profile to another, as text."""

from __future__ import annotations

from ..profile.changes import KINDS, MIN_SAMPLES, Change, Drift
from ..util.text import aligned


def drift_as_text(found: Drift) -> str:
    """A row a layer, a column a kind; `*`: beyond the spread, `?`: too few samples to say."""
    kinds = [kind for kind in KINDS if any(one.what == kind for one in found.layers)]
    names = list(dict.fromkeys(one.layer for one in found.layers))
    cells = {(one.layer, one.what): _cell(one) for one in (*found.layers, *found.total)}
    rows = [("", *(f"{kind} " for kind in kinds))]
    rows += [(name or "all layers", *(cells.get((name, kind), "– ") for kind in kinds)) for name in (*names, "")]
    lines = aligned(rows)
    link = next(one for one in found.total if one.what == "link")
    lines.append(f"largest message: {link.old:,.1f} → {link.new:,.1f} µs ({_cell(link).strip()})")
    marked = [one.beyond for one in found.layers]
    lines.append(f"{sum(map(bool, marked))} of {len(marked)} times changed beyond their spread (*)")
    if None in marked:
        lines[-1] += f"; {marked.count(None)} have fewer than {MIN_SAMPLES} samples on one side (?)"
    lines += [f"{one.layer}: {one.what} {one.old:,.0f} → {one.new:,.0f} bytes" for one in found.bytes]
    lines += [f"only in the older: {', '.join(found.only_old)}"] * bool(found.only_old)
    lines += [f"only in the newer: {', '.join(found.only_new)}"] * bool(found.only_new)
    return "\n".join(lines) + "\n"


def _cell(one: Change) -> str:
    """`+3.1%*`; a blank in place of the mark, so that numbers stand under each other."""
    share = "new" if one.change is None else f"{one.change:+.1%}"
    mark = " " if not one.layer and one.what != "link" else {True: "*", False: " ", None: "?"}[one.beyond]
    return f"{share}{mark}"
