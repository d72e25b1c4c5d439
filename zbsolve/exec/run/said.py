"""What ranks print, told by the process that started them: each line as it comes, once, with the rank's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ..mesh.sizes import named_rank

MOST_KNOWN = 10_000  # lines that are remembered; behind so many each is told


class Said:
    """What the ranks have written to `folder`/said.RANK so far. All ranks often warn of the same: of lines that are alike
    the first is told. sizes: of the mesh."""

    def __init__(self, folder: Path, ranks: int, sizes: Mapping[str, int], tell: Callable[[str], None]) -> None:
        self._paths = [path_of(folder, rank) for rank in range(ranks)]
        self._names = [named_rank(sizes, rank) for rank in range(ranks)]
        self._tell, self._at, self._known = tell, [0] * ranks, set[bytes]()

    def hear(self, last: bool = False) -> None:
        """Tell what is new. last: nothing more comes, so a line may lack its end."""
        for rank, path in enumerate(self._paths):
            if path.stat().st_size == self._at[rank]:
                continue
            with open(path, "rb") as stream:
                stream.seek(self._at[rank])
                text = stream.read()
            whole = text if last else text[: text.rfind(b"\n") + 1]
            self._at[rank] += len(whole)
            for line in whole.splitlines():
                self._told(rank, line)

    def _told(self, rank: int, line: bytes) -> None:
        if not line.strip() or line in self._known:
            return
        if len(self._known) < MOST_KNOWN:
            self._known.add(line)
        self._tell(f"{self._names[rank]}: {line.decode(errors='replace').rstrip()}")


def path_of(folder: Path, rank: int) -> Path:
    """The file that a rank writes to."""
    return folder / f"said.{rank}"
