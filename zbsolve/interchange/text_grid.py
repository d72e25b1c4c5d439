"""Text grids: a row a rank, a cell a pass, as people write them by hand and torch.distributed.pipelining writes its CSV.

Cells are separated by blanks, tabs or commas. A pass is `2F0` (stage 2, forward, microbatch 0), or `F0` where every rank has
one stage, its own. `.`, `-` and empty cells are gaps and mean nothing: the simulator says when a pass runs. A `#` begins a
comment, a label before a colon (`rank 0:`) may stand in front of a row.

`B` has two meanings, and the file as a whole says which: with `I` in it, it is torch's spelling (`I` input gradient, `B` the
whole backward); with `W` and no `I`, `B` is the input gradient; with neither, it is the whole backward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..util.errors import BadInput
from ..util.text import printable
from .foreign_order import ForeignOrder, ReadCell
from .torch_csv import COMMUNICATION, LETTERS, OVERLAPPED

WORD = re.compile(r"(\d{0,9})([A-Z_]+)(\d{0,9})")
GAP = re.compile(r"[-._·–—|]*")
SEPARATOR = re.compile(r" *[,\t] *| +")
LABEL = re.compile(r"[\w \t]*?(\d*)[ \t]*:")
OURS = ("F", "B", "W", "BW", "X")
TORCHS = {theirs: ours for ours, theirs in LETTERS.items()}

Word = tuple[str, str, int, int, int]  # stage or "", kind as written, microbatch, line, cell


def read_text_grid(text: str, where: str) -> ForeignOrder:
    """The order that a grid says; `where` names it in messages. Raises BadInput naming line and cell."""
    rows: list[list[Word]] = []
    overlapped: list[str] = []
    communication = False
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        content = _content(line, f"{where}: line {number}", len(rows))
        if content is None:
            continue
        row = list(_words(content, f"{where}: line {number}", number))
        computing = [word for word in row if word[1] not in COMMUNICATION]
        communication |= len(computing) < len(row)
        parts = enumerate(SEPARATOR.split(content), 1)
        overlapped += [f"line {number}, cell {i}" for i, cell in parts if OVERLAPPED.fullmatch(_bare(cell))]
        rows.append(computing)
    _check_stages(rows, where)
    words = {kind for row in rows for _, kind, *_ in row}
    meaning = _meaning(words)
    cells = tuple(
        tuple(ReadCell(int(stage or rank), meaning[kind], m, line, cell) for stage, kind, m, line, cell in row)
        for rank, row in enumerate(rows)
    )
    torchs = "I" in words or communication
    form = "torch CSV with communication" if communication else "torch CSV" if torchs else "text grid"
    order = ForeignOrder(cells, form, where, "line {}, cell {}", _of_overlaps(overlapped, where))
    order.check_size()
    return order


def _content(line: str, where: str, rank: int) -> str | None:
    """A line's cells without comment and label; None where it is no row. Raises BadInput for the label of another rank."""
    content = line.partition("#")[0].strip()
    if not content:
        return None
    label = LABEL.match(content)
    if label is None:
        return content
    if label[1] and int(label[1]) != rank:
        raise BadInput(f"{where}: it is labelled {label[1]}, but rows are ranks 0, 1, … and this is row {rank}")
    return content[label.end() :].strip()


def _words(content: str, where: str, line: int) -> Iterator[Word]:
    """The words of a row, communication too. Raises BadInput for what is no pass."""
    for number, cell in enumerate(SEPARATOR.split(content), 1):
        bare = _bare(cell)
        if GAP.fullmatch(bare):
            continue
        together = OVERLAPPED.fullmatch(bare)
        for one in together[1].split(";") if together else (bare,):
            found = WORD.fullmatch(one)
            known = found is not None and (found[2] in COMMUNICATION or (found[2] in (*OURS, *TORCHS) and found[3]))
            if found is None or not known:
                raise BadInput(
                    f"{where}, cell {number}: '{printable(cell)[:30]}' is no pass: write 0F3 (stage 0, forward, microbatch "
                    f"3) or F3; kinds are {' '.join(OURS)} and torch's I"
                )
            yield found[1], found[2], int(found[3] or 0), line, number


def _bare(cell: str) -> str:
    """A cell without quotes, in capitals."""
    return cell.strip("\"'").upper()


def _of_overlaps(places: list[str], where: str) -> tuple[str, ...]:
    """A line where a file has cells with a forward and a backward at once."""
    if not places:
        return ()
    what = "1 cell has" if len(places) == 1 else f"{len(places)} cells have"
    return (
        f"{where}: {what} a forward and a backward at once (OVERLAP_F_B), first at {places[0]}: they are read as two "
        "passes, one after the other, with the profile's time for each",
    )


def _check_stages(rows: list[list[Word]], where: str) -> None:
    """Raise BadInput where some names have a stage and others have none."""
    named = {bool(stage): (f"{stage}{kind}{m}", line, cell) for row in rows for stage, kind, m, line, cell in row}
    if len(named) > 1:
        (bare, line, cell), (full, *_) = named[False], named[True]
        raise BadInput(f"{where}: line {line}, cell {cell}: {bare} names no stage, but {full} does: name it everywhere")


def _meaning(words: set[str]) -> dict[str, str]:
    """Word → our kind, for a file with these words."""
    meaning = {kind: kind for kind in OURS}
    if "I" in words:
        return meaning | TORCHS
    return meaning if "W" in words else meaning | {"B": "BW"}
