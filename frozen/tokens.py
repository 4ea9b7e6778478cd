"""Encoded splits: every document's tokens once, in arrays that a process maps instead of reading.

A split is a folder of five files. ``tokens.npy`` holds all documents' tokens one after another, without separators:
the loader and the evaluation put one before each document, so neither can disagree with the file about it.
``bytes.npy`` holds each document's UTF-8 bytes as counted in the raw text, never derived from tokens (a decoded lone
byte becomes a three-byte replacement character, and a score per byte is then too low). Documents lie in the order of
their content's digest, which is the same on any machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

SEPARATOR = "<|endoftext|>"
"""The one special token, id 0: stands before every document, in training and in evaluation alike."""


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
) -> EncodedSplit:
    """Write a split's five files into a new folder, each on disk when this returns, and map it.

    The folder is not published whole by this function: `prepare` does that for all splits together.
    """
    kind = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    parts = [np.asarray(document, dtype=np.int64) for document in documents]
    for index, part in enumerate(parts):
        if part.size and (part.min() < 0 or part.max() >= vocabulary):
            raise ValueError(f"document {index} holds a token outside the vocabulary of {vocabulary}")
    lengths = np.array([part.size for part in parts], dtype=np.int64)
    folder.mkdir(parents=True)
    arrays = {
        "tokens": np.concatenate([part.astype(kind) for part in parts]) if parts else np.empty(0, kind),
        "offsets": np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        "bytes": np.array(list(byte_counts), dtype=np.int64),
        "source_ids": np.array(list(source_ids), dtype=np.int16),
    }
    for name, array in arrays.items():
        with (folder / f"{name}.npy").open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    meta = {"separator": separator, "vocabulary": vocabulary, "sources": list(sources)}
    write_text_durably(folder / "split.json", json.dumps(meta, indent=1) + "\n")
    return EncodedSplit.load(folder)


def write_text_durably(path: Path, text: str) -> None:
    """Write a file as UTF-8, exactly as given, and wait until it is on disk."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
