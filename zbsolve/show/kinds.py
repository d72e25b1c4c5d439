"""How kinds of passes look: the letter of each in the terminal, its colour in other palettes and by stage."""

from __future__ import annotations

from collections.abc import Sequence

from ..kinds import TABLE
from ..util.errors import BadInput

# Ramps from dark to light for other readers: each kind stands where its own lightness is, so that a new kind needs no colour
# in them. colour-blind: cividis (Nuñez, Anderton, Renslow 2018), which looks alike with and without a colour deficiency.
PALETTES: dict[str, tuple[str, ...]] = {
    "standard": (),
    "colour-blind": ("#00224e", "#2a3f6d", "#575d6d", "#7d7c78", "#a59c74", "#d2c060", "#fee838"),
    "grey": ("#242424", "#404040", "#5e5e5e", "#7f7f7f", "#a0a0a0", "#c4c4c4", "#e8e8e8"),
}
# The share of white in the colour of the last of three stages or more; less on a ramp, where pale is another kind's colour.
PALEST, PALEST_ON_RAMP = 0.6, 0.3
DARKEST, LIGHTEST = 28.0, 90.0  # CIE L* of the colours of `kinds.OURS`


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


def lightness(colour: str) -> float:
    """CIE L*, 0 to 100."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (one / 255 for one in levels(colour))]
    return float(116 * (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]) ** (1 / 3) - 16)


def brightness(colour: str) -> float:
    """How light a colour looks, 0 to 255 (luma, ITU-R BT.601)."""
    red, green, blue = levels(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def shades(kind: str, chunks: int, palette: str = "standard") -> tuple[str, ...]:
    """The colour of a kind on each of a rank's `chunks` stages: the later the stage, the paler, so that they can be told
    apart. Raises BadInput for a palette that is not one of PALETTES."""
    if palette not in PALETTES:
        raise BadInput(f"palette '{palette[:40]}' is unknown: one of {', '.join(PALETTES)}")
    ramp = PALETTES[palette]
    palest = PALEST_ON_RAMP if ramp else PALEST
    own = TABLE[kind].colour
    full = levels(_along(ramp, (lightness(own) - DARKEST) / (LIGHTEST - DARKEST)) if ramp else own)
    shares = (palest * chunk / max(chunks - 1, 2) for chunk in range(chunks))
    return tuple(_hex([level + (255 - level) * share for level in full]) for share in shares)


def _along(ramp: Sequence[str], position: float) -> str:
    """The colour of a ramp at a position between 0 and 1, linear between its colours."""
    at = min(1.0, max(0.0, position)) * (len(ramp) - 1)
    low = min(int(at), len(ramp) - 2)
    pairs = zip(levels(ramp[low]), levels(ramp[low + 1]), strict=True)
    return _hex([a + (b - a) * (at - low) for a, b in pairs])


def _hex(values: Sequence[float]) -> str:
    return "#" + "".join(f"{round(level):02x}" for level in values)


def ink(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    return "#111" if brightness(colour) > 125 else "#fff"
