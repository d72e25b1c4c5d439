"""Reading and writing JSON files: whole or not at all, with a kind and a format version."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import BadInput

VERSION = 1


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises BadInput where `write_text` could not write: worth knowing before the work is done."""
    target = Path(path)
    if str(path) == "-":
        return
    if not str(path) or target.is_dir():
        raise BadInput(f"{path or 'output'}: cannot write: a file name is needed")
    if not target.exists() and not os.access(target.resolve().parent, os.W_OK | os.X_OK):
        raise BadInput(f"{target}: cannot write: no such folder, or not allowed")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` whole or not at all; `-` is standard output. A symbolic link is followed, and what is no
    regular file (a pipe, a device) is written into. Raises BadInput."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    check_writable(path)
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        target = target.resolve()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise BadInput(f"{path}: cannot write: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of `path`; `-` is standard input. Raises BadInput."""
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not a text file") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot read: {error.strerror}") from None


def write_document(path: str | os.PathLike[str], kind: str, body: dict[str, Any]) -> None:
    """Write a `kind` document (for example "schedule") with its format version."""
    write_text(path, json.dumps({"zbsolve": kind, "version": VERSION, **body}, separators=(",", ":")) + "\n")


def read_document(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """The body of a `kind` document. Raises BadInput for damaged, foreign and future files."""
    return read_one_of(path, (kind,))[1]


def read_one_of(path: str | os.PathLike[str], kinds: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Kind and body of a document of one of these kinds. Raises BadInput as `read_document`."""
    text = read_text(path)
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}: damaged JSON at line {error.lineno} column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise BadInput(f"{path}: damaged JSON: nested too deep") from None
    except ValueError:  # Python reads no whole number of thousands of digits
        raise BadInput(f"{path}: damaged JSON: a number of too many digits") from None
    if not isinstance(body, dict) or "zbsolve" not in body:
        raise BadInput(f"{path}: not a zbsolve file (field 'zbsolve' is missing)")
    if body["zbsolve"] not in kinds:
        raise BadInput(f"{path}: holds a {body['zbsolve']}, not a {' or a '.join(kinds)} (field 'zbsolve')")
    if body.get("version") != VERSION:
        raise BadInput(
            f"{path}: format version {body.get('version')!r} is not {VERSION}, the one this zbsolve reads (field 'version')"
        )
    return body["zbsolve"], body


def known_only(body: dict[str, Any], known: Sequence[str], where: str) -> None:
    """BadInput naming `where` and the first field that is none of the `known` ones: a misspelt one must not pass for one
    that was left out."""
    for name in body:
        if name not in known:
            raise BadInput(f"{where}: field '{name[:40]}' is unknown (one of {', '.join(known)})")


def field(body: dict[str, Any], name: str, kinds: type | tuple[type, ...], where: str) -> Any:
    """`body[name]`, checked for its type; BadInput names `where` and the field."""
    if name not in body:
        raise BadInput(f"{where}: field '{name}' is missing")
    value = body[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise BadInput(f"{where}: field '{name}' has a wrong type ({type(value).__name__})")
    return value
