"""Kinds of passes: a row of `TABLE` for each, from which everything that is known of a kind derives.

Users add rows of their own with `register`. A handler runs a kind (see `exec.handlers`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .util.errors import BadInput

LABEL, COLOUR, WORDS = re.compile("[A-Z]{1,8}"), re.compile("#[0-9a-f]{6}"), re.compile(r"[\w ,.:()/+–-]{1,60}")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of pass.

    label: the kind in a pass's name. words: its text in legends. colour: `#rrggbb`.
    letters: for the terminal; a kind takes the first of them that no other kind of the schedule has; "": those of its label.
    half: the half of a microbatch's step that it is part of, "forward" or "backward"; "": neither.
    feature: the feature that brings it into a step; "": a plain step has it. For your own kinds the default is the label.
    adds_gradients: it adds to the gradients of its stage's parameters, or of its shard of a vocabulary.
    per_step: its number is not a microbatch's but that of an update, or of one of the stage's ranks.
    begun: it only starts work, such as a copy; its rank goes on at once.
    away: a rank other than the stage's runs it, to help that rank.
    together: it is part of a collective: all ranks run their passes of one microbatch together.
    free: passes of one stage run in any order that their edges allow, not by number.
    """

    label: str
    words: str
    colour: str
    letters: str = ""
    half: str = ""
    feature: str = ""
    adds_gradients: bool = False
    per_step: bool = False
    begun: bool = False
    away: bool = False
    together: bool = False
    free: bool = False


RECOMPUTE, OFFLOAD, UPDATES, EXCHANGE, ALL_TO_ALL = "recompute", "offload", "updates", "exchange", "all-to-all"
SHARDING, VOCABULARY, ATTENTION, OVERLAP = "sharding", "vocabulary", "attention exchange", "overlap"
WORK, LINKS, SLICES = "work", "links", "slices"
# Feature → features that are built after it: their builders know its passes, and its builder knows none of theirs.
LATER = {
    "side inputs": (OFFLOAD, ALL_TO_ALL, VOCABULARY, ATTENTION, SHARDING, UPDATES),
    RECOMPUTE: (UPDATES, SHARDING),
    VOCABULARY: (UPDATES, SHARDING, OFFLOAD),
    OFFLOAD: (UPDATES, SHARDING),
    SLICES: (UPDATES, SHARDING),
    UPDATES: (SLICES,),
    SHARDING: (SLICES,),
}
F, B = "forward", "backward"

# Colours: Okabe and Ito's set for colour-blind readers, moved apart in lightness (CIE L* from 28 to 90) so that kinds also
# differ in grey. Any two differ by a CIE ΔE of 7 or more under each of three simulated deficiencies; F, B and W differ most.
# fmt: off
OURS = (
    Kind("F", "forward", "#1a5a9c", "F", F),
    Kind("B", "gradient of the input", "#f3b04b", "B", B),
    Kind("W", "gradient of the weights", "#2fa583", "W", B, adds_gradients=True),
    Kind("BW", "both gradients, fused", "#d2623a", "BD", B, adds_gradients=True),
    Kind("X", "recompute", "#f9e67b", "X", B, RECOMPUTE),
    Kind("O", "offload to the host", "#6fb7ee", "O", "", OFFLOAD, begun=True),
    Kind("R", "reload from the host", "#e08cb0", "R", "", OFFLOAD, begun=True),
    Kind("S", "vocabulary, forward", "#9c58b4", "S", F, VOCABULARY),
    Kind("T", "vocabulary, gradients", "#e3d3f4", "T", B, VOCABULARY, adds_gradients=True),
    Kind("C", "collective", "#4b4d52", "C", "", EXCHANGE, per_step=True),
    Kind("U", "optimizer update", "#6a3414", "U", "", UPDATES, per_step=True),
    Kind("AF", "all-to-all of the forward", "#a8db9b", "A", F, ALL_TO_ALL),
    Kind("AB", "all-to-all of the backward", "#8336f1", "Z", B, ALL_TO_ALL),
    Kind("AG", "all-gather of parameters", "#0f00f0", "G", "", SHARDING, per_step=True, begun=True),
    Kind("AGB", "all-gather for the backward", "#8475fe", "H", "", SHARDING, per_step=True, begun=True),
    Kind("RS", "reduce-scatter of gradients", "#7c6b4f", "E", "", SHARDING, per_step=True, begun=True),
    Kind("VB", "vocabulary: hidden states", "#b35a94", "V", F, VOCABULARY, begun=True, together=True),
    Kind("VR", "vocabulary: barrier", "#a43c0f", "N", F, VOCABULARY, begun=True, together=True),
    Kind("VG", "vocabulary: input gradient", "#7e15bd", "I", B, VOCABULARY, begun=True, together=True),
    Kind("VE", "embedding", "#b8bb67", "K", F, VOCABULARY, begun=True, together=True),
    Kind("VS", "embedding: gradient", "#ddc211", "Q", B, VOCABULARY, adds_gradients=True, begun=True, together=True),
    Kind("FQ", "forward up to attention", "#cb7b10", "P", F, ATTENTION),
    Kind("FA", "attention that stays", "#6ba76b", "M", F, ATTENTION),
    Kind("FH", "attention for another rank", "#f26ed0", "+", F, ATTENTION, away=True),
    Kind("BQ", "backward down to attention", "#0bc28b", "Y", B, ATTENTION),
    Kind("BA", "gradients of attention that stays", "#93e3c7", "J", B, ATTENTION),
    Kind("BH", "gradients of attention for another rank", "#c50c3c", "*", B, ATTENTION, away=True),
    Kind("J", "work beside the step", "#a6cbf8", "j", "", WORK, per_step=True, free=True),
    Kind("MF", "message of the forward", "#ccea90", ">", F, LINKS, begun=True),
    Kind("MB", "message of the backward", "#876cd8", "<", B, LINKS, begun=True),
)  # a new kind goes to the end: digests count from the top
# fmt: on
TABLE: dict[str, Kind] = {kind.label: kind for kind in OURS}
KINDS: list[str] = list(TABLE)  # column `kind` of a table of passes indexes it


def register(kind: Kind) -> None:
    """Add a kind of your own. Files with such passes have its row, so reading one needs no `register`. A known label keeps
    its words, colour and letters. Raises BadInput for an invalid row, and for a known label whose other fields differ."""
    where = f"kind '{kind.label[:20]}'"
    for field, form, what in (("label", LABEL, "1 to 8 of A to Z"), ("colour", COLOUR, "such as #1a5a9c"),
                              ("words", WORDS, "1 to 60 letters, digits and ,.:()/+-")):  # fmt: skip
        if not form.fullmatch(getattr(kind, field)):
            raise BadInput(f"{where}: field '{field}': {what}")
    if kind.half not in ("", F, B):
        raise BadInput(f"{where}: field 'half': '{F}', '{B}' or nothing")
    if not (kind.letters.isascii() and (kind.letters or "x").isprintable()):
        raise BadInput(f"{where}: field 'letters': ASCII letters")
    kind = replace(kind, letters=kind.letters or kind.label, feature=kind.feature or kind.label)
    known = TABLE.setdefault(kind.label, kind)
    if kind.label not in KINDS:
        KINDS.append(kind.label)
    elif replace(kind, words=known.words, colour=known.colour, letters=known.letters) != known:
        raise BadInput(f"{where}: is there already, as '{known.words}', and is another kind of pass")


def kinds_that(**facts: object) -> tuple[str, ...]:
    """Labels of the kinds with these fields, such as `kinds_that(away=True)`."""
    return tuple(label for label, row in TABLE.items() if all(getattr(row, what) == value for what, value in facts.items()))


# Messages to and from helpers of attention look like those between stages: more colours could not be told apart.
for _label, _words in {"FS": "queries to", "FR": "attention from", "BS": "gradients to", "BR": "gradients from"}.items():
    register(Kind(_label, f"message: {_words} a helper", TABLE[f"M{_label[0]}"].colour, feature=LINKS, begun=True))
