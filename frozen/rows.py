"""Files and data sets to rows: one reader for each way in which rows are kept.

Every reader yields rows in their order, each with its place (``part.jsonl:17``), and what cannot be read as a
`Rejected` in the place of the row, so that one broken row costs one row. Nothing is guessed at and nothing is executed:
data sets of the Hub are read without the code that some bring along. Memory is bounded by the largest row, except for
JSON arrays and the strings of a CSV file's largest field.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST_ROW_BYTES = 64 << 20
"""A longer line is skipped unread: it is a file without line ends, not a row."""
_BATCH_ROWS = 256
_DELIMITERS = ",;\t|"
_LARGEST_FIELD = (1 << 31) - 1
"""Characters; what the csv module can be set to on every platform."""


class SourceError(ValueError):
    """A source cannot be used; the text says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A file or a row that did not become a document."""

    where: str
    """Path within the source, with the line number for rows: ``part.jsonl:17``."""
    reason: str
    malformed: bool = True
    """False: merely empty, or not looked into."""


class Row(NamedTuple):
    """One row as it was read."""

    where: str
    value: object
    """A mapping from field to value, if the file is what its owner thinks."""


Item = Row | Rejected


UTF_16 = "UTF-16, which is not read: save it as UTF-8"


def is_utf_16(path: Path) -> bool:
    """Tell whether a file begins with UTF-16's byte-order mark, as some shells and spreadsheets write it."""
    with path.open("rb") as file:
        return file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def json_lines(path: Path, where: str) -> Iterator[Item]:
    """Yield the rows of a file with one JSON value per line; blank lines are none."""
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), start=1):
            place = f"{where}:{number}"
            if line is None:
                yield Rejected(place, f"a line of more than {LARGEST_ROW_BYTES >> 20} MB")
            elif line.strip():
                yield _json_row(line, place)
        if file.tell() == 0:
            yield Rejected(where, "empty", malformed=False)


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield lines, and None for one that is longer than a row may be: it is read in parts and forgotten."""
    while line := file.readline(LARGEST_ROW_BYTES + 1):
        if len(line) <= LARGEST_ROW_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LARGEST_ROW_BYTES)
        yield None


def _json_row(line: bytes, place: str) -> Item:
    try:
        return Row(place, json.loads(line.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        return Rejected(place, f"not UTF-8: byte {error.start} of the line is 0x{error.object[error.start]:02x}")
    except (ValueError, RecursionError) as error:
        return Rejected(place, f"not JSON: {str(error)[:80]}")


def is_json_array(path: Path) -> bool:
    """Tell whether a file begins as a JSON array does."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def json_array(path: Path, where: str) -> Iterator[Item]:
    """Yield the elements of a JSON array; their place is their number, from 1.

    `SourceError` where the array breaks off, because nothing tells where the next element would begin.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8: byte {error.start}") from error
    decoder = json.JSONDecoder()
    place, number = _skip_space(text, 0) + 1, 0
    while True:
        place = _skip_space(text, place)
        if number == 0 and text[place : place + 1] == "]":
            break
        number += 1
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{path} is no JSON array: element {number}: {str(error)[:80]}") from error
        yield Row(f"{where}:{number}", value)
        place = _skip_space(text, place)
        if text[place : place + 1] == "]":
            break
        if text[place : place + 1] != ",":
            raise SourceError(f"{path} is no JSON array: it breaks off after element {number}")
        place += 1
    if text[place + 1 :].strip():
        raise SourceError(f"{path} is no JSON array: something follows its end")


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\n", "\r", "\t"):
        place += 1
    return place


# --- CSV ----------------------------------------------------------------------------------------------------------


def csv_fields(path: Path) -> list[str]:
    """Return the names in the first line of a CSV file; none if it has no such line."""
    with _csv_reader(path) as reader:
        return next(iter(reader), [])


def csv_rows(path: Path, where: str) -> Iterator[Item]:
    """Yield the rows of a CSV file under the names in its first line; a row's place is the line on which it ends.

    The delimiter is the one of comma, semicolon, tab and bar that the first line has most of. Of a row that cannot be
    read every line is rejected: a quotation mark that is not closed swallows rows up to the next one, or to the end.
    """
    with _csv_reader(path) as reader:
        names: list[str] = next(reader, [])
        if not names:
            yield Rejected(where, "empty", malformed=False)
            return
        if len(set(names)) != len(names):
            raise SourceError(f"{path}: two columns have the same name: {', '.join(names)[:80]}")
        while True:
            first = reader.line_num + 1
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                reason = f"not CSV: {error} in the row that begins on line {first}"
                if reader.line_num > first:
                    reason += " (is a quotation mark not closed?)"
                yield from (Rejected(f"{where}:{line}", reason) for line in range(first, reader.line_num + 1))
                continue
            place = f"{where}:{reader.line_num}"
            if not values:
                continue
            if len(values) != len(names):
                yield Rejected(place, f"{len(values)} fields, where the first line names {len(names)}")
            else:
                yield Row(place, dict(zip(names, values, strict=True)))


@contextmanager
def _csv_reader(path: Path) -> Iterator[Any]:
    """Open a CSV file. What is not UTF-8 is read as surrogates, so that it costs its row and no other."""
    before = csv.field_size_limit(_LARGEST_FIELD)
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            first = file.readline(1 << 20)
            file.seek(0)
            delimiter = max(_DELIMITERS, key=first.count)
            yield csv.reader(file, delimiter=delimiter, strict=True)
    finally:
        csv.field_size_limit(before)


# --- Parquet, saved data sets, the Hub ----------------------------------------------------------------------------


def parquet_rows(path: Path, where: str, wanted: Collection[str]) -> Iterator[Item]:
    """Yield the rows of a Parquet file with those of the ``wanted`` fields that it has; without any, with all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            batches = file.iter_batches(_BATCH_ROWS, columns=[name for name in names if name in wanted] or None)
            yield from _table_rows(batches, where)
    except pa.ArrowException as error:
        raise SourceError(f"{path} cannot be read as Parquet: {_one_line(error)}") from error


def is_saved(folder: Path) -> bool:
    """Tell whether a folder is what `datasets` saves: one data set, or several splits of one."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")) and (
        (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()
    )


def saved_rows(folder: Path, split: str | None, wanted: Collection[str]) -> Iterator[Item]:
    """Yield the rows of a data set that ``save_to_disk`` wrote; its Arrow files are read as they are."""
    import pyarrow as pa

    part = saved_split(folder, split)
    for path in saved_files(folder, split):
        where = path.relative_to(folder).as_posix() if part != folder else path.name
        try:
            with pa.memory_map(str(path)) as memory, pa.ipc.open_stream(memory) as reader:
                yield from _table_rows((_with(wanted, batch) for batch in reader), where)
        except pa.ArrowException as error:
            raise SourceError(f"{path} cannot be read as Arrow: {_one_line(error)}") from error


def saved_split(folder: Path, split: str | None) -> Path:
    """Return the folder of the wanted split: the named one, the only one, or ``train``."""
    listing = folder / "dataset_dict.json"
    if not listing.is_file():
        if split is not None:
            raise SourceError(f"{folder} holds one saved data set without splits: leave out the split {split!r}")
        return folder
    known = _json_object(listing).get("splits")
    names = [name for name in known if isinstance(name, str)] if isinstance(known, list) else []
    chosen = split or (names[0] if len(names) == 1 else "train")
    if chosen not in names or Path(chosen).name != chosen:
        raise SourceError(f"{folder} has no split {chosen!r}: it has {', '.join(names) or 'none'}")
    return folder / chosen


def saved_files(folder: Path, split: str | None) -> list[Path]:
    """Return the Arrow files of a saved data set, in order."""
    part = saved_split(folder, split)
    listed = _json_object(part / "state.json").get("_data_files")
    names = [entry.get("filename") for entry in listed or () if isinstance(entry, Mapping)]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise SourceError(f"{part / 'state.json'} lists no data files of its own folder")
    return [part / str(name) for name in names]


def _json_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {_one_line(error)}") from error
    if not isinstance(value, Mapping):
        raise SourceError(f"{path} holds no object")
    return value


class HubData(NamedTuple):
    """A data set of the Hub, and the commit that it is of."""

    rows: Iterable[Item]
    revision: str


def hub_data(hub: str, revision: str | None, subset: str | None, split: str | None, wanted: Collection[str]) -> HubData:
    """Download a data set (or find it in the cache of `datasets`); `SourceError` says why that was not possible.

    Without ``revision`` it is the newest, and the commit is returned, so that the same data can be named later.
    """
    import datasets
    import httpx2
    from datasets.exceptions import DatasetsError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    if Path(hub).exists():
        raise SourceError(f"{hub} is a file or folder here: give it as a path")
    try:
        # A commit that is known needs no asking, and may lie in the cache of a machine without a network.
        commit = (
            revision if revision and _is_commit(revision) else str(HfApi().dataset_info(hub, revision=revision).sha)
        )
        chosen = split or _split_of(datasets.get_dataset_split_names(hub, subset, revision=commit))
        data = datasets.load_dataset(hub, subset, split=chosen, revision=commit)
    except (DatasetsError, httpx2.HTTPError, HFValidationError, OSError, ValueError) as error:
        raise SourceError(f"data set {hub} of the Hub: {hub_fault(error)}") from error
    return HubData(dataset_rows(data, hub, wanted), commit)


def _is_commit(revision: str) -> bool:
    return len(revision) == 40 and set(revision) <= set("0123456789abcdef")


def _split_of(names: list[str]) -> str:
    """Return the split to read where none was named."""
    if len(names) == 1:
        return names[0]
    if "train" in names:
        return "train"
    raise ValueError(f"it has the splits {', '.join(names)}: name one")


def dataset_rows(data: Any, where: str, wanted: Collection[str]) -> Iterator[Item]:
    """Yield the rows of a ``datasets.Dataset``; its columns of pictures or sound are never decoded."""
    batches = data.with_format("arrow").iter(_BATCH_ROWS)
    yield from _table_rows((_with(wanted, table) for table in batches), where)


def hub_fault(error: Exception) -> str:
    """Return the cause of a failed download in a sentence, and what to do."""
    import httpx2
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    text = _one_line(error)
    match error:
        case GatedRepoError():
            return "it is gated: ask for access on its page, then `hf auth login`"
        case RevisionNotFoundError():
            return f"it has no such revision ({text})"
        case RepositoryNotFoundError() | HFValidationError():
            return "there is none of this name, or it is private: check the name, or `hf auth login`"
        case DatasetNotFoundError() if "gated" in text:
            return "it is gated: ask for access on its page, then `hf auth login`"
        case DatasetNotFoundError():
            return "there is none of this name, or it is private: check the name, or `hf auth login`"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set: unset it, or download the data beforehand and give the folder"
        case httpx2.TransportError() | ConnectionError() | TimeoutError():
            return f"the Hub cannot be reached ({text}): download the data elsewhere and give the folder"
        case _:
            return text


def _with(wanted: Collection[str], table: Any) -> Any:
    """Return a table or batch with those of the wanted columns that it has; with all of them if it has none."""
    names = [name for name in table.schema.names if name in wanted]
    return table.select(names) if names else table


def _table_rows(batches: Iterable[pa.RecordBatch | pa.Table], where: str) -> Iterator[Item]:
    """Yield rows with their number, from 1."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield Row(f"{where}:{number}", row)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
