"""Sources to documents: what a person names on the command line becomes texts or conversations, or a reason why not.

A source is a file, a folder, or a data set of the Hub. Text files are one document each; files with rows (JSON lines, a
JSON array, CSV, Parquet, what `datasets` saved) are one document per row. What the rows hold is recognised once per
source, by the fields of the first hundred rows (`conversations.shape_of`), said in the reading, and can be overruled:
the formats ``text``, ``jsonl``, ``csv``, ``parquet`` and ``saved`` name how a file is kept, ``alpaca``, ``chat``,
``prompt_completion`` and ``preference`` what its rows hold.

Nothing is guessed at row by row: a file that is binary or not UTF-8, a row that does not fit, is rejected with its
place and reason, and a source in which more than a small share is malformed is refused, because the format is then
probably not what its owner thinks.

Order does not matter to what comes after: documents are told apart by content, never by name or position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Literal, get_args

from frozen import rows
from frozen.conversations import (
    FIELDS,
    KIND_OF,
    Content,
    Empty,
    Kind,
    Misshapen,
    Shape,
    kind_of,
    parse,
    shape_of,
)
from frozen.folders import TEXT_SUFFIXES, files_of
from frozen.rows import Item, Rejected, Row, SourceError

__all__ = [
    "Content",
    "Document",
    "Format",
    "Kind",
    "Reading",
    "Rejected",
    "Source",
    "SourceError",
    "fault_of",
    "look",
    "read",
    "readable_bytes",
]

Format = Literal[
    "auto", "text", "jsonl", "alpaca", "chat", "prompt_completion", "preference", "csv", "parquet", "saved"
]
Container = Literal["text", "jsonl", "json", "csv", "parquet"]
"""How a file is kept."""

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
CSV_SUFFIXES = frozenset({".csv", ".tsv"})
"""Read as rows if their first line names fields that a format knows, else as text like any other."""
MALFORMED_LIMIT = 0.05
"""Largest share of malformed files or rows in a source that is still read."""
_LOOKED_AT = 100
"""Rows by which a format is recognised."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where documents come from, and the name under which they are sampled and reported."""

    name: str
    path: Path | None
    """A file, or a folder that is read recursively (hidden files and folders are left out); may be a link itself."""
    hub: str | None = None
    """Id of a data set on the Hub, in the place of ``path``."""
    revision: str | None = None
    """Of the Hub's data set; absent: the newest."""
    subset: str | None = None
    split: str | None = None
    """Of the Hub's data set or of a saved one; absent: the only one, or ``train``."""
    format: Format = "auto"
    column: str | None = None
    """Field that holds the text (or the messages), where it is not the usual one."""
    general: bool = False
    """Trained on against forgetting only: no part of any split but train."""

    @property
    def place(self) -> str:
        """What a person calls it."""
        return str(self.path) if self.path is not None else f"{self.hub} of the Hub"


@dataclass(frozen=True, slots=True)
class Document:
    """One text, conversation or pair of answers as it was read."""

    source: str
    content: Content
    where: str = field(default="", compare=False)
    """Place in the source: a file, or a row of one."""


@dataclass(slots=True)
class Reading:
    """What came of one source."""

    documents: list[Document] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    other_files: Counter[str] = field(default_factory=Counter)
    """Files in the folder that were not looked into, by suffix."""
    malformed: int = 0
    """Those of ``rejected`` that were not merely empty."""
    shape: Shape = "text"
    """What the documents were recognised as."""
    why: str = "every file is one text"
    """By what they were recognised."""
    containers: Counter[str] = field(default_factory=Counter)
    """Files by how they are kept."""
    notes: Counter[str] = field(default_factory=Counter)
    """What was changed about documents that were read, and how often."""
    revision: str | None = None
    """Commit of the Hub's data set that was read."""

    @property
    def kind(self) -> Kind:
        """What kind of documents these are."""
        return KIND_OF[self.shape]

    def reject(self, where: str, reason: str, *, malformed: bool) -> None:
        """Note that something did not become a document."""
        self.rejected.append(Rejected(where, reason, malformed))
        self.malformed += malformed


@dataclass(frozen=True, slots=True)
class _Text:
    """A file that is one text."""

    where: str
    text: str


def read(source: Source) -> Reading:
    """Return the documents of a source in the order of their paths, and what was rejected.

    `SourceError` if it does not exist, cannot be read, holds no text, or holds too much that is malformed.
    """
    reading = look(source)
    fault = fault_of(source, reading)
    if fault is not None:
        raise SourceError(fault)
    return reading


def look(source: Source) -> Reading:
    """Return what a source holds, however much of it is malformed; `SourceError` if it cannot be read at all."""
    if not source.name.strip():
        raise SourceError(f"the source {source.place} has an empty name: give it one")
    reading = Reading()
    try:
        _take_in(source, _items(source, reading), reading)
    except OSError as error:
        raise SourceError(
            f"source {source.name}: {error.filename or source.place} cannot be read: {error.strerror or error}"
        ) from error
    return reading


def readable_bytes(source: Source) -> int:
    """Return the size of the files that `read` would read, without reading them; `SourceError` as there.

    Nothing is known of a data set on the Hub before it is there: 0. Parquet is smaller than what it holds.
    """
    if source.path is None:
        return 0
    try:
        if _is_saved(source):
            files = rows.saved_files(source.path, source.split)
        elif not source.path.is_dir():
            files = [source.path]
        else:
            found = files_of(source.path, lambda where, reason: None)
            files = [path for path in found if _taken_as(source, path, chosen=False) is not None]
        return sum(path.stat().st_size for path in files)
    except OSError as error:
        raise SourceError(
            f"source {source.name}: {error.filename or source.path} cannot be read: {error.strerror}"
        ) from error


# --- files ---------------------------------------------------------------------------------------------------------


def _is_saved(source: Source) -> bool:
    """Tell whether a source is a saved data set; raise if it should be one and is not, or has no splits to choose."""
    path = source.path
    saved = path is not None and path.is_dir() and rows.is_saved(path) and source.format != "text"
    if source.format == "saved" and not saved:
        raise SourceError(f"source {source.name}: {source.place} is no folder that `datasets` saved a data set to")
    if not saved and path is not None and source.split is not None:
        raise SourceError(f"source {source.name}: {path} has no splits, so {source.split!r} cannot be chosen")
    return saved


def _wanted(source: Source) -> frozenset[str]:
    """Return the fields that are worth reading."""
    return FIELDS if source.column is None else FIELDS | {source.column}


def _items(source: Source, reading: Reading) -> Iterator[Item | _Text]:
    """Yield what a source holds, row by row and file by file."""
    path = source.path
    if path is None:
        if source.hub is None:
            raise SourceError(f"source {source.name} names neither a path nor a data set of the Hub")
        found = rows.hub_data(source.hub, source.revision, source.subset, source.split, _wanted(source))
        reading.revision = found.revision
        reading.containers["hub"] += 1
        yield from found.rows
    elif _is_saved(source):
        reading.containers["saved"] += 1
        yield from rows.saved_rows(path, source.split, _wanted(source))
    elif path.is_dir():
        for file in files_of(path, partial(reading.reject, malformed=False)):
            yield from _file_items(source, file, file.relative_to(path).as_posix(), reading, chosen=False)
    elif path.is_file():
        yield from _file_items(source, path, path.name, reading, chosen=True)
    elif path.exists():
        raise SourceError(f"source {source.name}: {path} is neither a file nor a folder")
    else:
        raise SourceError(f"source {source.name}: {path} does not exist")


def _file_items(source: Source, path: Path, where: str, reading: Reading, *, chosen: bool) -> Iterator[Item | _Text]:
    """Yield what one file holds. ``chosen`` files were named by a person, the others were found in a folder."""
    container = _taken_as(source, path, chosen=chosen)
    if container is None:
        reading.other_files[path.suffix.lower() or "no suffix"] += 1
        return
    reading.containers[container] += 1
    if container != "parquet" and rows.is_utf_16(path):
        if container != "text":  # one reason for a whole file of rows: none may be missed for being few
            raise SourceError(f"source {source.name}: {path} is {rows.UTF_16}")
        yield Rejected(where, rows.UTF_16)
        return
    match container:
        case "text":
            yield from _text_item(path, where)
        case "jsonl":
            yield from rows.json_lines(path, where)
        case "json":
            yield from rows.json_array(path, where)
        case "csv":
            yield from rows.csv_rows(path, where)
        case "parquet":
            yield from rows.parquet_rows(path, where, _wanted(source))


def _taken_as(source: Source, path: Path, *, chosen: bool) -> Container | None:
    """Tell how a file is read, or that it is not, from its name, its first line and the source's format."""
    suffix = path.suffix.lower()
    format = source.format
    if format == "text":
        return "text" if chosen or suffix in TEXT_SUFFIXES else None
    if format == "parquet" or (suffix == ".parquet" and format != "csv"):
        return "parquet" if chosen or suffix == ".parquet" else None
    if format == "csv":
        return "csv" if chosen or suffix in CSV_SUFFIXES else None
    if suffix == ".json" and (chosen or format != "auto") and rows.is_json_array(path):
        return "json"
    if suffix in JSONL_SUFFIXES or (suffix == ".json" and (chosen or format != "auto")):
        return "jsonl"
    if suffix in CSV_SUFFIXES and format != "jsonl" and _names_fields(source, path):
        return "csv"
    if format != "auto":  # what the rows hold is known, so a file that was named has some
        return "jsonl" if chosen else None
    return "text" if chosen or suffix in TEXT_SUFFIXES else None


def _names_fields(source: Source, path: Path) -> bool:
    """Tell whether the first line of a CSV file names what is looked for."""
    names = dict.fromkeys(rows.csv_fields(path), "")
    return source.format in get_args(Shape) or shape_of(names, source.column) is not None


def _text_item(path: Path, where: str) -> Iterator[Rejected | _Text]:
    """Yield a file as one text."""
    content = path.read_bytes()
    if b"\0" in content:
        yield Rejected(where, "binary: it holds NUL bytes")
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        yield Rejected(where, f"not UTF-8: byte {error.start} is 0x{content[error.start]:02x}")
        return
    yield _Text(where, text)


# --- documents -----------------------------------------------------------------------------------------------------


def _take_in(source: Source, items: Iterable[Item | _Text], reading: Reading) -> None:
    """Turn what a source holds into documents; what its rows hold is recognised on the way."""
    iterator = iter(items)
    head = list(islice(iterator, _LOOKED_AT))
    recognised = False
    for index, item in enumerate(chain(head, iterator)):
        match item:
            case Rejected(where, reason, malformed):
                reading.reject(where, reason, malformed=malformed)
            case _Text(where, text):
                # Beside conversations, texts are a README or a licence.
                if recognised and reading.kind != "text":
                    reading.other_files[Path(where).suffix.lower() or "no suffix"] += 1
                else:
                    _add_text(source, text, where, reading)
            case Row(where, value):
                if not recognised:
                    rest = head[index:] if index < len(head) else [item]
                    reading.shape, reading.why = _recognise(source, rest)
                    recognised = True
                    if reading.kind != "text":
                        _set_texts_aside(reading)
                _add_row(source, value, where, reading)


def _recognise(source: Source, items: Iterable[Item | _Text]) -> tuple[Shape, str]:
    """Return what most of the rows hold, and the reason; rows that fit nothing are read as text, and rejected."""
    if source.format in get_args(Shape) and source.format != "text":
        shape: Shape = source.format  # type: ignore[assignment]  # a member, as was just asked
        return shape, "the format was asked for"
    values = [item.value for item in items if isinstance(item, Row)]
    votes = Counter(shape_of(value, source.column) for value in values if isinstance(value, Mapping))
    known = [(count, found) for found, count in votes.items() if found is not None]
    if not known:
        return "text", "no format has the rows' fields, so they are read as texts"
    count, (shape, fields) = max(known)
    plural = "fields" if " and " in fields else "field"
    return shape, f"{count} of the first {len(values)} rows have the {plural} {fields}"


def _set_texts_aside(reading: Reading) -> None:
    """Take back the texts that came before the first conversation."""
    for document in reading.documents:
        reading.other_files[Path(document.where).suffix.lower() or "no suffix"] += 1
    reading.containers.pop("text", None)
    reading.documents.clear()


def _add_row(source: Source, value: object, where: str, reading: Reading) -> None:
    """Add what a row says, if it fits."""
    try:
        content, note = parse(value, reading.shape, source.column)
    except Empty as empty:
        reading.reject(where, str(empty), malformed=False)
    except Misshapen as fault:
        reading.reject(where, str(fault), malformed=True)
    else:
        assert kind_of(content) == reading.kind
        reading.documents.append(Document(source.name, content, where))
        if note is not None:
            reading.notes[note] += 1


def _add_text(source: Source, text: str, where: str, reading: Reading) -> None:
    if text.lstrip("\ufeff").strip():
        reading.documents.append(Document(source.name, text, where))
    else:
        reading.reject(where, "empty", malformed=False)


def fault_of(source: Source, reading: Reading) -> str | None:
    """Say why a source is refused: nothing was read, or so much is malformed that the format is probably another."""
    seen = len(reading.documents) + reading.malformed
    broken = [item for item in reading.rejected if item.malformed]
    examples = "; ".join(f"{item.where}: {item.reason}" for item in (broken or reading.rejected)[:3])
    if reading.malformed > MALFORMED_LIMIT * seen:
        read_as = "" if reading.shape == "text" else f", read as {reading.shape} because {reading.why}"
        return (
            f"source {source.name}: {reading.malformed} of {seen} documents in {source.place} are malformed"
            f" (at most {MALFORMED_LIMIT:.0%} may be){read_as}: {examples}"
        )
    if not reading.documents:
        others = ", ".join(f"{count} {suffix}" for suffix, count in reading.other_files.most_common(5))
        found = examples or (f"only files that are not read as text: {others}" if others else "nothing in it")
        return f"source {source.name}: {source.place} holds no text ({found})"
    return None
