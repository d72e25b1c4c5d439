"""How kinds of passes look: the letter of each in the terminal, its colour by stage."""

from __future__ import annotations

from collections.abc import Sequence

from ..kinds import TABLE

PALEST = 0.6  # the share of white in the colour of the last of three stages or more


def letters(present: Sequence[str]) -> dict[str, str]:
    """The letter of every kind that a schedule has: a fused backward is B where no other pass is."""
    taken: dict[str, str] = {}
    for kind in present:
        free = (letter for letter in TABLE[kind].letters if letter not in taken.values())
        taken[kind] = next(free, TABLE[kind].letters[-1])
    return taken


def levels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def brightness(colour: str) -> float:
    """How light a colour looks, 0 to 255 (luma, ITU-R BT.601)."""
    red, green, blue = levels(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def shades(kind: str, chunks: int) -> tuple[str, ...]:
    """The colour of a kind on each of a rank's `chunks` stages: the later the stage, the paler, so that they can be told
    apart."""
    full = levels(TABLE[kind].colour)
    shares = (PALEST * chunk / max(chunks - 1, 2) for chunk in range(chunks))
    return tuple(_hex([level + (255 - level) * share for level in full]) for share in shares)


def _hex(values: Sequence[float]) -> str:
    return "#" + "".join(f"{round(level):02x}" for level in values)


def ink(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    return "#111" if brightness(colour) > 125 else "#fff"
