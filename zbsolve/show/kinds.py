"""How each kind of pass looks: colour, meaning in words, letter in the terminal. A new kind is one more line here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """One kind of pass in pictures. colour: `#rrggbb`. meaning: the words of legends. letters: for the terminal, by
    preference; of the kinds that a schedule has, each takes its first one that no kind before it has taken."""

    colour: str
    meaning: str
    letters: str


# Colours: after Okabe and Ito's set for colour-blind readers, moved apart in lightness (CIE L* from 28 to 90) so that the
# kinds can also be told apart in grey. No two come closer than a CIE ΔE of 7 under any of the three simulated
# deficiencies; F, B and W, which meet most, are farthest apart.
LOOKS: dict[str, Look] = {
    "F": Look("#1a5a9c", "forward", "F"),
    "B": Look("#f3b04b", "gradient of the input", "B"),
    "W": Look("#2fa583", "gradient of the weights", "W"),
    "BW": Look("#d2623a", "both gradients, fused", "BD"),
    "X": Look("#f2e57c", "recompute", "X"),
    "O": Look("#6fb7ee", "offload to the host", "O"),
    "R": Look("#e08cb0", "reload from the host", "R"),
    "S": Look("#9c58b4", "vocabulary, forward", "S"),
    "T": Look("#e3d3f4", "vocabulary, gradients", "T"),
    "C": Look("#4b4d52", "collective", "C"),
    "U": Look("#6a3414", "optimizer update", "U"),
    "AF": Look("#a6db9b", "all-to-all of the forward", "A"),
    "AB": Look("#7d35ef", "all-to-all of the backward", "Z"),
}


def letters(present: Sequence[str]) -> dict[str, str]:
    """The letter of every kind that a schedule has: a fused backward is B where no other pass is."""
    taken: dict[str, str] = {}
    for kind in present:
        free = (letter for letter in LOOKS[kind].letters if letter not in taken.values())
        taken[kind] = next(free, LOOKS[kind].letters[-1])
    return taken


def levels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def brightness(colour: str) -> float:
    """How light a colour looks, 0 to 255 (luma, ITU-R BT.601)."""
    red, green, blue = levels(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def paler(colour: str, chunk: int) -> str:
    """A kind's colour on a rank's later stages: paler by `chunk`, so that chunks can be told apart."""
    share = min(0.45, 0.3 * chunk)
    return "#" + "".join(f"{round(level + (255 - level) * share):02x}" for level in levels(colour))


def ink(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    return "#111" if brightness(colour) > 125 else "#fff"
