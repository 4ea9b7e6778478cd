"""Sources to documents: what a person names on the command line becomes texts, or a reason why not.

A source is a file or a folder. Text files are one document each; JSON-lines files are one document per line, in the
field ``text``. Nothing is guessed at: a file that is binary or not UTF-8, a row that is no object with a text, is
rejected with its place and reason, and a source in which more than a small share is malformed is refused, because the
format is then probably not what its owner thinks. (Other formats and tasks join here: one reader each.)

Order does not matter to what comes after: documents are told apart by content, never by name or position.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Format = Literal[
    "auto", "text", "jsonl", "alpaca", "chat", "prompt_completion", "preference", "csv", "parquet", "saved"
]

TEXT_SUFFIXES = frozenset(
    {
        ".txt",
        ".text",
        ".md",
        ".markdown",
        ".rst",
        ".adoc",
        ".tex",
        ".org",
        ".log",
        ".csv",
        ".tsv",
        ".html",
        ".htm",
        ".xml",
        ".yaml",
        ".yml",
        ".toml",
        ".ini",
        ".cfg",
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cu",
        ".rs",
        ".go",
        ".java",
        ".kt",
        ".js",
        ".jsx",
        ".ts",
        ".tsx",
        ".css",
        ".sh",
        ".bash",
        ".sql",
        ".r",
        ".jl",
        ".lua",
        ".rb",
        ".php",
        ".pl",
        ".scala",
        ".swift",
        ".hs",
        ".ml",
    }
)
"""In a folder, files with these suffixes are read as text. A file that is named itself may have any."""
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
MALFORMED_LIMIT = 0.05
"""Largest share of malformed files or rows in a source that is still read."""


class SourceError(ValueError):
    """A source cannot be used; the text says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where text comes from, and the name under which it is sampled and reported."""

    name: str
    path: Path | None = None
    """A file, or a folder that is read recursively (hidden files and folders are left out); may be a link itself."""
    format: Format = "auto"
    """``auto`` goes by suffix."""
    hub: str | None = None
    revision: str | None = None
    subset: str | None = None
    split: str | None = None
    column: str | None = None
    general: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """One text as it was read."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A file or a row that did not become a document."""

    where: str
    """Path within the source, with the line number for rows: ``part.jsonl:17``."""
    reason: str


@dataclass(slots=True)
class Reading:
    """What came of one source."""

    documents: list[Document] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    other_files: Counter[str] = field(default_factory=Counter)
    """Files in the folder that were not looked into, by suffix."""
    malformed: int = 0
    """Those of ``rejected`` that were not merely empty."""

    def reject(self, where: str, reason: str, *, malformed: bool) -> None:
        """Note that something did not become a document."""
        self.rejected.append(Rejected(where, reason))
        self.malformed += malformed


def read(source: Source) -> Reading:
    """Return the documents of a source in the order of their paths, and what was rejected.

    `SourceError` if it does not exist, cannot be read, holds no text, or holds too much that is malformed.
    """
    if not source.name.strip():
        raise SourceError(f"the source {source.path} has an empty name: give it one")
    reading = Reading()
    assert source.path is not None
    try:
        if source.path.is_dir():
            for path in _files(source.path, reading):
                _read_file(source, path, path.relative_to(source.path).as_posix(), reading, chosen=False)
        elif source.path.is_file():
            _read_file(source, source.path, source.path.name, reading, chosen=True)
        elif source.path.exists():
            raise SourceError(f"source {source.name}: {source.path} is neither a file nor a folder")
        else:
            raise SourceError(f"source {source.name}: {source.path} does not exist")
    except OSError as error:
        raise SourceError(
            f"source {source.name}: {error.filename or source.path} cannot be read: {error.strerror}"
        ) from error
    _refuse_if_useless(source, reading)
    return reading


def readable_bytes(source: Source) -> int:
    """Return the size of the files that `read` would read, without reading them; `SourceError` as there."""
    assert source.path is not None
    try:
        if not source.path.is_dir():
            return source.path.stat().st_size
        files = [path for path in _files(source.path, Reading()) if _taken_as(source, path, chosen=False)]
        return sum(path.stat().st_size for path in files)
    except OSError as error:
        raise SourceError(
            f"source {source.name}: {error.filename or source.path} cannot be read: {error.strerror}"
        ) from error


def _files(folder: Path, reading: Reading) -> Iterator[Path]:
    """Yield regular files in a fixed order, and note the links that lead nowhere or out of the folder.

    What lies outside is not what its owner named: it may be half a disk, or the held-out text of another study. Links
    to files within are read like the files that they stand for; links to folders are never entered, so nothing loops,
    and what they lead to within is read in its own place.
    """
    border = os.path.realpath(folder)

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if _is_looked_into(Path(root, name)))
        for name in sorted([*names, *(name for name in folders if Path(root, name).is_symlink())]):
            path = Path(root, name)
            if name.startswith("."):
                continue
            fault = _fault_of_link(path, border) if path.is_symlink() else None
            if fault is not None:
                reading.reject(path.relative_to(folder).as_posix(), fault, malformed=False)
            elif path.is_file():
                yield path


def _fault_of_link(path: Path, border: str) -> str | None:
    if not path.exists():
        return "a link that leads nowhere"
    target = os.path.realpath(path)
    return (
        None if os.path.commonpath((border, target)) == border else f"a link that leads out of the folder, to {target}"
    )


def _read_file(source: Source, path: Path, where: str, reading: Reading, *, chosen: bool) -> None:
    """Read one file. ``chosen`` files were named by a person, the others were found in a folder."""
    match _taken_as(source, path, chosen=chosen):
        case "rows":
            _read_rows(source, path, where, reading)
        case "text":
            _read_text(source, path, where, reading)
        case None:
            reading.other_files[path.suffix.lower() or "no suffix"] += 1


def _is_looked_into(folder: Path) -> bool:
    """Tell whether a folder may hold text of the owner's.

    Hidden folders and bytecode do not, and neither does the folder of a study: else one study's held-out text would
    be the next one's source, and the same command would read something else every time.
    """
    is_study = (folder / "study.toml").is_file() and (folder / "ledger.db").is_file()
    return not (folder.name.startswith(".") or folder.name == "__pycache__" or is_study)


def _taken_as(source: Source, path: Path, *, chosen: bool) -> Literal["rows", "text"] | None:
    """Tell how a file is read, or that it is not, from its name and the source's format."""
    suffix = path.suffix.lower()
    jsonl = suffix in JSONL_SUFFIXES or (suffix == ".json" and (chosen or source.format == "jsonl"))
    text = suffix in TEXT_SUFFIXES or (chosen and not jsonl)
    if source.format == "jsonl":
        return "rows" if jsonl or chosen else None
    if source.format == "text":
        return "text" if text or chosen else None
    return "rows" if jsonl else "text" if text else None


def _read_text(source: Source, path: Path, where: str, reading: Reading) -> None:
    """Read a file as one document."""
    content = path.read_bytes()
    if b"\0" in content:
        reading.reject(where, "binary: it holds NUL bytes", malformed=True)
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        reading.reject(where, f"not UTF-8: byte {error.start} is 0x{content[error.start]:02x}", malformed=True)
        return
    _add(source, text, where, reading)


def _read_rows(source: Source, path: Path, where: str, reading: Reading) -> None:
    """Read a file of JSON lines; each row stands for itself, so that one broken row costs one row."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{where}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                reading.reject(place, "not UTF-8", malformed=True)
            except (ValueError, RecursionError) as error:
                reading.reject(place, f"not JSON: {str(error)[:80]}", malformed=True)
            else:
                _add_row(source, row, place, reading)
        if file.tell() == 0:
            reading.reject(where, "empty", malformed=False)


def _add_row(source: Source, row: object, place: str, reading: Reading) -> None:
    """Add a row's text, if it has one."""
    if not isinstance(row, dict):
        reading.reject(place, f"expected an object with a field 'text', found {type(row).__name__}", malformed=True)
    elif "text" not in row:
        fields = ", ".join(sorted(map(str, row))[:8])
        reading.reject(place, f"no field 'text' (it has: {fields[:80] or 'none'})", malformed=True)
    elif not isinstance(row["text"], str):
        reading.reject(place, f"the field 'text' is no string but {type(row['text']).__name__}", malformed=True)
    elif not _encodable(row["text"]):
        reading.reject(place, "the text holds half of a surrogate pair and is no valid Unicode", malformed=True)
    else:
        _add(source, row["text"], place, reading)


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _add(source: Source, text: str, where: str, reading: Reading) -> None:
    if text.lstrip("\ufeff").strip():
        reading.documents.append(Document(source.name, text))
    else:
        reading.reject(where, "empty", malformed=False)


def _refuse_if_useless(source: Source, reading: Reading) -> None:
    """Raise if nothing was read, or so much was malformed that the format is probably another one."""
    seen = len(reading.documents) + reading.malformed
    examples = "; ".join(f"{item.where}: {item.reason}" for item in reading.rejected[:3])
    if reading.malformed > MALFORMED_LIMIT * seen:
        raise SourceError(
            f"source {source.name}: {reading.malformed} of {seen} documents in {source.path} are malformed"
            f" (at most {MALFORMED_LIMIT:.0%} may be): {examples}"
        )
    if not reading.documents:
        others = ", ".join(f"{count} {suffix}" for suffix, count in reading.other_files.most_common(5))
        found = examples or (f"only files that are not read as text: {others}" if others else "nothing in it")
        raise SourceError(f"source {source.name}: {source.path} holds no text ({found})")
