"""Reads measured runs of zbsolve and of other engines; the format is recognized by the file's content."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ...schedule.trace import Trace
from ...util.errors import BadInput
from ...util.files import document_kind, head_of
from . import primus_events, straggler_analysis, torch_profiler
from .recording import Recording
from .to_trace import trace_of

KNOWN = "known: zbsolve's own, torch profiler's, a folder of pp_rank_N.json (Primus, Megatron), StragglerAnalysis' parquet"
JSON = (".json", ".json.gz")
HEAD = 1 << 20  # bytes at the beginning of a file, which show its format


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The run in a file or a folder; `-`: a zbsolve trace on standard input. Raises BadInput naming file, rank and field."""
    trace = others_trace(path)
    if trace is not None:
        return trace
    if Path(path).is_file() and document_kind(path) is None:
        raise BadInput(f"{path}: {'no trace that zbsolve knows' if head_of(path, 1) else 'an empty file'} ({KNOWN})")
    return Trace.load(path)


def others_trace(path: str | os.PathLike[str]) -> Trace | None:
    """The measured run of another engine; None if the file's format is not one of these. Raises BadInput for a folder
    without a trace, and for a trace that cannot be used."""
    place = Path(path)
    if place.is_dir():
        return trace_of(_of_folder(place))
    read = _reader(place) if place.is_file() else None
    return None if read is None else trace_of(read(place))


def _of_folder(folder: Path) -> Recording:
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise BadInput(f"{folder}: cannot read: {error.strerror}") from None
    if any(primus_events.RANK_FILE.fullmatch(name) for name in names):
        return primus_events.read(folder)
    files = [folder / name for name in names if name.endswith(JSON) and torch_profiler.MARK in head_of(folder / name, HEAD)]
    if files:
        return torch_profiler.read(folder, files)
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir())[:3]
    below = f"; name one of its folders: {', '.join(inside)}" if inside else ""
    raise BadInput(f"{folder}: a folder without a trace{below} ({KNOWN})")


def _reader(file: Path) -> Callable[[Path], Recording] | None:
    """The reader for the file's format; None: not known here."""
    if primus_events.RANK_FILE.fullmatch(file.name):
        return primus_events.read_rank_alone
    head = head_of(file, HEAD)
    if head.startswith(straggler_analysis.MARK):
        return straggler_analysis.read
    if torch_profiler.MARK in head:
        return lambda path: torch_profiler.read(path, [path])
    return None
