"""Reading and writing JSON files: atomically, with a kind and a format version; gzip if the name says so. Also folders for
temporary files that are removed even after a process is killed: by the next one that makes such a folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeVar

import msgspec

from .errors import BadInput, CannotRead

VERSIONS = {"schedule": 2, "trace": 2}  # format version of a kind, written and at most read; default 1
ZIPPED, ZIP_LEVEL = b"\x1f\x8b", 6  # how a gzip file begins, and how hard ours are compressed
MAX_BYTES = 1 << 32  # of a file's text: a small compressed file must not fill the memory
LINE_DEPTH = 3  # down to this nesting depth objects have one line per field
TRIAL_BYTES = 4096  # of free disk space required before the work begins
TEMPORARY = "zbsolve-"  # how the names of temporary folders begin
OWNED = ".owned"  # a file in such a folder, locked by its owner; the lock ends with the process, however that ends
T = TypeVar("T")
AMOUNT = Annotated[float, msgspec.Meta(ge=0, lt=2.0**62)]  # µs, bytes, factors: beyond, sums do not fit
COUNT = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


def ending_of(path: str) -> str:
    """The ending of a file's name without `.gz`: `.json` of `x.json.gz`; "" of `gpt-1.5b`, whose dot is a number's."""
    return ending if (ending := PurePath(path.removesuffix(".gz")).suffix)[1:2].isalpha() else ""


class Fields:
    """A dataclass whose form in a file has exactly its fields."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)  # type: ignore[call-overload]


class CannotWrite(BadInput):
    """A file that cannot be written now. path: of the file; text: the contents that were to be written."""

    def __init__(self, path: str | os.PathLike[str], why: str, text: str | bytes) -> None:
        super().__init__(f"{path}: cannot write: {why}")
        self.path, self.text = Path(path), text


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise BadInput if `write_text` would fail, also for a full disk: better known before the work is done."""
    if str(path) == "-":
        return
    target = Path(path)
    why = _obstacle(target)
    if not why and (target.is_file() or not target.exists()):
        try:
            _new_file(target.resolve().parent, f".{target.name}.", "", [b" " * TRIAL_BYTES]).unlink()
        except OSError as error:
            why = _reason(error)
    if why:
        raise BadInput(f"{str(path) or 'output'}: cannot write: {why}")


def _obstacle(target: Path) -> str:
    """Why a file cannot be written, as far as can be told without trying; "" if nothing is in the way."""
    if target == Path() or target.is_dir():
        return "a file name is needed"
    if not target.exists() and not os.access(target.resolve().parent, os.W_OK | os.X_OK):
        return "no such folder, or not allowed"
    return ""


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` atomically, compressed if the name ends in `.gz`; `-` is standard output. A symbolic link is
    followed, and a file that is not regular (a pipe, a device) is written in place. Raises CannotWrite, which keeps the
    text."""
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        _write(path, [text.encode("utf-8")], text)


def write_parts(path: str | os.PathLike[str], parts: Iterable[str]) -> None:
    """As `write_text`, for a text that is produced in parts and never held whole. Raises BadInput, not CannotWrite, on
    failure, since nothing keeps such a text."""
    if str(path) == "-":
        sys.stdout.writelines(parts)
    else:
        _write(path, (part.encode("utf-8") for part in parts), None)


def _encoded(parts: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """The bytes of a file with this name. The same text gives the same bytes: gzip's time stamp is left out."""
    if path.suffix != ".gz":
        yield from parts
        return
    zipping = zlib.compressobj(ZIP_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    for part in parts:
        yield zipping.compress(part)
    yield zipping.flush()


def _store(target: Path, data: Iterable[bytes]) -> None:
    """Write these parts atomically; in place for a file that is not regular. Raises OSError."""
    if target.exists() and not target.is_file():
        with target.open("wb") as stream:
            stream.writelines(data)
        return
    target = target.resolve()
    temporary = _new_file(target.parent, f".{target.name}.", "", data)
    try:
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """As `write_text`, for binary data; `-` is refused with BadInput."""
    if str(path) == "-":
        raise BadInput("-: this is no text for standard output: name a file")
    _write(path, [data], data)


def _write(path: str | os.PathLike[str], data: Iterable[bytes], kept: str | bytes | None) -> None:
    """kept: the contents that CannotWrite keeps; None: raise BadInput instead."""
    target = Path(path)
    try:
        if why := _obstacle(target):
            raise OSError(0, why)
        _store(target, _encoded(data, target))
    except BrokenPipeError:
        raise
    except OSError as error:
        why = _reason(error)
        raise (BadInput(f"{path}: {why}") if kept is None else CannotWrite(path, why, kept)) from error


def write_elsewhere(error: CannotWrite) -> Path | None:
    """Write what could not be written to the folder for temporary files, or else to the home folder, under its name with a
    unique suffix. Returns the path; None if that fails too."""
    data = error.text.encode("utf-8") if isinstance(error.text, str) else error.text
    for folder in (tempfile.gettempdir(), Path.home()):
        with suppress(OSError):
            return _new_file(Path(folder), f"{error.path.stem}-", error.path.suffix, _encoded([data], error.path))
    return None


def _new_file(folder: Path, prefix: str, suffix: str, data: Iterable[bytes]) -> Path:
    """A new file of these parts with the usual permissions, on the disk when this returns, or not there. Raises OSError."""
    handle, name = tempfile.mkstemp(suffix, prefix, folder)
    made = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.writelines(data)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        made.chmod(0o666 & ~umask)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    return made


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of `path`, also of gzip, without a spreadsheet's byte order mark; `-` is standard input. Raises BadInput."""
    try:
        if str(path) != "-" and Path(path).stat().st_size > MAX_BYTES:
            raise BadInput(f"{path}: a file of more than {MAX_BYTES} bytes is not read")
        data = _standard_input() if str(path) == "-" else Path(path).read_bytes()
        return (_unzipped(data, path) if data.startswith(ZIPPED) else data).decode("utf-8-sig")
    except FileNotFoundError:
        raise CannotRead(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not a text file") from None
    except OSError as error:
        raise CannotRead(f"{path}: cannot read: {error.strerror}") from None


def head_of(path: str | os.PathLike[str], count: int) -> bytes:
    """The first `count` bytes of a file, after decompression if it is gzip. Raises BadInput."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(count)
    except OSError as error:
        raise CannotRead(f"{path}: cannot read: {error.strerror}") from None
    if not data.startswith(ZIPPED):
        return data
    try:
        return zlib.decompressobj(wbits=31).decompress(data, count)
    except zlib.error:
        raise BadInput(f"{path}: damaged gzip file") from None


def _standard_input() -> bytes:
    """All of standard input, which may be replaced by a text stream."""
    stream = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read().encode("utf-8") if stream is None else stream.read()


def _unzipped(data: bytes, path: str | os.PathLike[str]) -> bytes:
    """The decompressed data. Raises BadInput where it is damaged or too long."""
    unzip = zlib.decompressobj(wbits=31)
    try:
        text = unzip.decompress(data, MAX_BYTES)
    except zlib.error:
        raise BadInput(f"{path}: damaged gzip file") from None
    if unzip.unconsumed_tail:
        raise BadInput(f"{path}: more than {MAX_BYTES} bytes when it is not compressed")
    if not unzip.eof:
        raise BadInput(f"{path}: damaged gzip file: its end is missing")
    return text


def document_kind(path: str | os.PathLike[str]) -> str | None:
    """The kind of the zbsolve document in a file; None if it is no such document, or no file. Raises BadInput."""
    if not Path(path).is_file():
        return None
    text = read_text(path)
    if not text.lstrip().startswith("{"):
        return None
    named = re.match(r'\s*\{\s*"zbsolve"\s*:\s*"(\w+)"', text)  # as we write it: the rest need not be read
    body = {"zbsolve": named[1]} if named else parse_json(text, path)
    return str(body["zbsolve"]) if isinstance(body, dict) and "zbsolve" in body else None


def write_document(path: str | os.PathLike[str], kind: str, body: dict[str, Any]) -> None:
    """Write a `kind` document (for example "schedule") with its format version."""
    version = VERSIONS.get(kind, 1)
    document = {"zbsolve": kind, "version": version, **body}
    text = json.dumps(document, separators=(",", ":")) if version == 1 else _as_lines(document)
    write_text(path, text + "\n")


def _as_lines(body: Any, depth: int = 0) -> str:
    """Readable JSON: one field per line in the outer objects."""
    if depth == LINE_DEPTH or not isinstance(body, dict) or not body:
        return json.dumps(body, separators=(", ", ": "))
    indent = "\n" + " " * (depth + 1)
    fields = (f"{json.dumps(name)}: {_as_lines(value, depth + 1)}" for name, value in body.items())
    return "{" + indent + f",{indent}".join(fields) + indent[:-1] + "}"


def read_document(path: str | os.PathLike[str], kind: str, form: type[T]) -> T:
    """The body of a `kind` document, converted to its form. Raises BadInput for damaged files, files of other programs or
    later versions, and naming the field that does not fit the form."""
    return checked(read_one_of(path, (kind,))[1], form, str(path))


def read_one_of(path: str | os.PathLike[str], kinds: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Kind and unchecked body of a document of one of these kinds. Raises BadInput as `read_document`."""
    text = read_text(path)
    hint = "; zbsolve import reads orders by hand and of other engines" if "schedule" in kinds else ""
    try:
        body = parse_json(text, path)
    except BadInput as error:
        raise BadInput(f"{error}{hint}" if text.strip() and text.lstrip()[0] not in "{[" else str(error)) from None
    if not isinstance(body, dict) or "zbsolve" not in body:
        raise BadInput(f"{path}: not a zbsolve file (field 'zbsolve' is missing){hint}")
    kind, version = body.pop("zbsolve"), body.pop("version", None)
    if kind not in kinds:
        raise BadInput(f"{path}: holds a {kind}, not a {' or '.join(kinds)} (field 'zbsolve')")
    newest = VERSIONS.get(kind, 1)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BadInput(f"{path}: format version {version!r} is not a whole number from 1 on (field 'version')")
    if version > newest:
        raise BadInput(
            f"{path}: format version {version} of a {kind} needs a newer zbsolve: this one reads up to {newest} "
            "(field 'version')"
        )
    return kind, body


def read_part_of(path: str | os.PathLike[str], kind: str, holders: Sequence[str]) -> Any:
    """The body of a `kind` document, or of the one inside a document of other kinds (`holders`). Raises BadInput."""
    return part_of(*read_one_of(path, (kind, *holders)), kind, path)


def part_of(kind: str, body: dict[str, Any], wanted: str, path: str | os.PathLike[str]) -> Any:
    """The body of the `wanted` document within that of a document of `kind`, possibly the same. Raises BadInput."""
    if kind != wanted and wanted not in body:
        raise BadInput(f"{path}: field '{wanted}' is missing")
    return body if kind == wanted else body[wanted]


def parse_json(text: str, path: str | os.PathLike[str]) -> Any:
    """The JSON value of a file's text; msgspec takes half the time, json accepts NaN (a diverged loss in a trace) and knows
    the line of an error. Raises BadInput."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise BadInput(f"{path}: damaged JSON: the file is empty") from None
        raise BadInput(f"{path}: damaged JSON at line {error.lineno} column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise BadInput(f"{path}: damaged JSON: nested too deep") from None
    except ValueError:  # Python refuses whole numbers of thousands of digits
        raise BadInput(f"{path}: damaged JSON: a number of too many digits") from None


def checked(body: Any, form: type[T], where: str) -> T:
    """Parsed JSON converted to its form, a type that msgspec supports. Raises BadInput naming `where` and the field."""
    try:
        return msgspec.convert(body, form)
    except msgspec.ValidationError as error:
        raise BadInput(f"{where}: {_explained(str(error), body, form)}") from None


def _explained(error: str, body: Any, form: type[Any]) -> str:
    """msgspec's message in our words: where in the file, which field, what is wrong with it."""
    what, _, path = error.partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    lone = re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", what)
    if lone:
        at = f"{place}: " if place else ""
        if lone[1] == "missing required":
            return f"{at}field '{lone[2]}' is missing"
        known = ", ".join(_known(form, place))
        return f"{at}field '{lone[2][:40]}' is unknown (one of {known}); a newer zbsolve may have written it"
    owner, name, index = re.fullmatch(r"(?:(.*)\.)?([^.\[\]]*)((?:\[[^\]]*\])*)", place).groups()  # type: ignore[union-attr]
    at = f"{owner}: " if owner else ""
    field = f"field '{name}'{index}" if name else f"the document{index}"
    wrong = re.fullmatch(r"Expected `(.*)`, got `(.*)`", what)
    if wrong:
        return f"{at}{field} has a wrong type ({wrong[2]}, not {wrong[1]})"
    needed = re.sub(r", got \d+$", "", what.removeprefix("Expected ").replace("`", ""))
    return f"{at}{field} is {_value(body, place)}; {needed} is needed" if "Expected" in what else f"{at}{field}: {what}"


def _steps(place: str) -> list[tuple[str, str]]:
    """The steps (name, "") and ("", index) of a path such as `layers[0].F`."""
    return re.findall(r"([^.\[\]]+)(?![^\[]*\])|\[([^\]]*)\]", place)


def _value(body: Any, place: str) -> str:
    """The value at that path, shortened; keys of objects that msgspec does not name are not followed."""
    for name, index in _steps(place):
        if index == "...":
            return "…"
        body = body[name] if name else body[int(index)]
    return str(body)[:20]


def _known(form: type[Any], place: str) -> list[str]:
    """The names of the form's fields at that path."""
    shape: Any = msgspec.inspect.type_info(form)
    for name, index in _steps(place):
        if name:
            shape = next(field.type for field in shape.fields if field.encode_name == name)
        else:
            shape = shape.value_type if index == "..." else shape.item_type
        if isinstance(shape, msgspec.inspect.UnionType):
            shape = next(option for option in shape.types if not isinstance(option, msgspec.inspect.NoneType))
    return [field.encode_name for field in shape.fields]


# --- Temporary folders ---


@contextmanager
def temporary_folder(what: str) -> Iterator[Path]:
    """A new folder `zbsolve-<what>-…`, removed at the end; before, those of dead processes are removed."""
    remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{what}-"))
    lock = os.open(folder / f"{OWNED}.new", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # While the owner lives, the file never exists unlocked under its name.
        os.rename(folder / f"{OWNED}.new", folder / OWNED)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers() -> tuple[Path, ...]:
    """Remove this user's folders whose owners are gone; returns them."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # another user's, or another process removes it now
            if folder.stat().st_uid == os.getuid() and not folder.is_symlink() and _abandoned(folder / OWNED):
                shutil.rmtree(folder)
                removed.append(folder)
    return tuple(removed)


def _abandoned(lock: Path) -> bool:
    """Whether no process has locked this file. Raises OSError if it does not exist."""
    handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True
