"""Encoded splits: every document's tokens once, in arrays that a process maps instead of reading.

A split is a folder of a few files. ``tokens.npy`` holds all documents' tokens one after another, without separators:
the loader and the evaluation put one before each document, so neither can disagree with the file about it.
``bytes.npy`` holds each document's UTF-8 bytes as counted in the raw text, never derived from tokens (a decoded lone
byte becomes a three-byte replacement character, and a score per byte is then too low). Documents lie in the order of
their content's digest, which is the same on any machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

CONTEXT, ANSWER, END = 0, 1, 2
"""Marks of a token in a conversation: given, part of an answer (trained on and scored), or what the chat template puts
after an answer to end it (trained on, so that the model learns to stop, but no byte of the answer: not scored)."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSplit:
    """One split as token arrays. Documents are numbered from 0 in the order of their content's digest."""

    tokens: npt.NDArray[Any]
    """uint16 or uint32 [tokens]: all documents, one after another, without separators; memory-mapped."""
    offsets: npt.NDArray[np.int64]
    """[documents + 1]: document ``i`` is ``tokens[offsets[i]:offsets[i + 1]]``."""
    bytes: npt.NDArray[np.int64]
    """[documents]: UTF-8 bytes of the raw text."""
    source_ids: npt.NDArray[np.int16]
    """[documents]: index into `sources`."""
    sources: tuple[str, ...]
    separator: int
    """Token that stands before every document."""
    vocabulary: int
    """Width of the logits; every token is below it."""
    marks: npt.NDArray[np.uint8] | None = None
    """[tokens]: `CONTEXT`, `ANSWER` or `END`. None: plain text, every token is trained on and scored."""
    pairs: bool = False
    """Preferences: documents 2 i and 2 i + 1 are the chosen and the rejected answer to one prompt."""
    general: tuple[str, ...] = ()
    """Those of `sources` that are trained on against forgetting only: general-domain text."""

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.bytes)

    def document(self, index: int) -> npt.NDArray[Any]:
        """Return the tokens of one document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Map a split; `ValueError` says what does not fit together. Tokens are mapped, never read as a whole."""
        meta = json.loads((folder / "split.json").read_text(encoding="utf-8"))
        split = cls(
            tokens=_map(folder / "tokens.npy"),
            offsets=_map(folder / "offsets.npy"),
            bytes=_map(folder / "bytes.npy"),
            source_ids=_map(folder / "source_ids.npy"),
            sources=tuple(meta["sources"]),
            separator=meta["separator"],
            vocabulary=meta["vocabulary"],
            marks=_map(folder / "marks.npy") if meta.get("marked", False) else None,
            pairs=meta.get("pairs", False),
            general=tuple(meta.get("general", ())),
        )
        problem = split._contradiction()
        if problem is not None:
            raise ValueError(f"{folder} is not a sound split: {problem}")
        return split

    def _contradiction(self) -> str | None:
        """Return what the arrays contradict each other in, or None."""
        kinds = [str(array.dtype) for array in (self.tokens, self.offsets, self.bytes, self.source_ids)]
        if kinds[0] not in ("uint16", "uint32") or kinds[1:] != ["int64", "int64", "int16"]:
            return f"unexpected array types {', '.join(kinds)}"
        if len(self.offsets) != self.documents + 1 or len(self.source_ids) != self.documents:
            return f"{self.documents} byte counts, {len(self.offsets)} offsets, {len(self.source_ids)} source ids"
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens) or (np.diff(self.offsets) < 1).any():
            return f"offsets do not cut {len(self.tokens)} tokens into documents of at least one token"
        if self.documents == 0 or (self.bytes < 1).any():
            return "it has no documents, or an empty one"
        if self.source_ids.min() < 0 or self.source_ids.max() >= len(self.sources):
            return f"a document comes from a source that is none of the {len(self.sources)} named"
        if not 0 <= self.separator < self.vocabulary:
            return f"separator {self.separator} lies outside the vocabulary of {self.vocabulary}"
        if self.pairs and (self.documents % 2 or self.marks is None):
            return "its preference pairs are not marked, or one lacks its other half"
        if not set(self.general) <= set(self.sources):
            return f"general sources {', '.join(self.general)} are not all among the {len(self.sources)} named"
        return self._contradiction_of_marks()

    def _contradiction_of_marks(self) -> str | None:
        if self.marks is None:
            return None
        if str(self.marks.dtype) != "uint8" or self.marks.shape != self.tokens.shape or self.marks.max() > END:
            return f"marks of {self.marks.dtype}{list(self.marks.shape)} do not fit {len(self.tokens)} tokens"
        if not np.logical_or.reduceat(self.marks == ANSWER, self.offsets[:-1]).all():
            return "a document has no answer to score"
        return None


def _map(path: Path) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def write_split(
    folder: Path,
    *,
    documents: Iterable[npt.ArrayLike],
    byte_counts: Iterable[int],
    source_ids: Iterable[int],
    sources: tuple[str, ...],
    separator: int,
    vocabulary: int,
    marks: Iterable[npt.ArrayLike] | None = None,
    pairs: bool = False,
    general: tuple[str, ...] = (),
) -> EncodedSplit:
    """Write a split's files into a new folder, each on disk when this returns, and map it.

    ``byte_counts`` are of what is scored: the text, or the answers where there are ``marks``, one array per document.

    The folder is not published whole by this function: `prepare` does that for all splits together.
    """
    kind = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    folder.mkdir(parents=True)
    lengths = _write_stream(folder / "tokens.npy", _checked(documents, vocabulary), kind)
    if marks is not None:
        _write_stream(folder / "marks.npy", marks, np.uint8)
    arrays = {
        "offsets": np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        "bytes": np.array(list(byte_counts), dtype=np.int64),
        "source_ids": np.array(list(source_ids), dtype=np.int16),
    }
    for name, array in arrays.items():
        _write_stream(folder / f"{name}.npy", [array], array.dtype.type)
    meta: dict[str, Any] = {"separator": separator, "vocabulary": vocabulary, "sources": list(sources)}
    if marks is not None:
        meta |= {"marked": True, "pairs": pairs}
    if general:
        meta["general"] = list(general)
    write_text_durably(folder / "split.json", json.dumps(meta, indent=1) + "\n")
    return EncodedSplit.load(folder)


def _checked(documents: Iterable[npt.ArrayLike], vocabulary: int) -> Iterator[npt.NDArray[Any]]:
    """Yield documents' tokens; `ValueError` for one that has no logit."""
    for index, document in enumerate(documents):
        part = np.asarray(document)
        if part.size and (part.min() < 0 or part.max() >= vocabulary):
            raise ValueError(f"document {index} holds a token outside the vocabulary of {vocabulary}")
        yield part


def _write_stream(path: Path, parts: Iterable[npt.ArrayLike], kind: type[np.generic]) -> npt.NDArray[np.int64]:
    """Write one array part by part, so that memory holds one part; return the parts' lengths.

    numpy reserves room in the header for a longer shape, so that it can be written again when the length is known.
    """
    lengths: list[int] = []
    with path.open("wb") as file:
        _write_header(file, kind, 0)
        for part in parts:
            array = np.asarray(part).astype(kind, copy=False)
            file.write(array.tobytes())
            lengths.append(array.size)
        end = file.tell()
        file.seek(0)
        _write_header(file, kind, sum(lengths))
        if end != file.tell() + sum(lengths) * np.dtype(kind).itemsize:
            raise AssertionError(f"the header of {path} did not keep its size")
        file.flush()
        os.fsync(file.fileno())
    return np.array(lengths, dtype=np.int64)


def _write_header(file: IO[bytes], kind: type[np.generic], length: int) -> None:
    descr = np.lib.format.dtype_to_descr(np.dtype(kind))
    np.lib.format.write_array_header_1_0(file, {"shape": (length,), "fortran_order": False, "descr": descr})


def write_text_durably(path: Path, text: str) -> None:
    """Write a file as UTF-8, exactly as given, and wait until it is on disk."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
