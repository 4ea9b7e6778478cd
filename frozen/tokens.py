"""Encoded splits: every document's tokens once, in arrays that a process maps instead of reading.

A split is a folder of a few files. ``tokens.npy`` holds all documents' tokens one after another, without separators:
the loader and the evaluation put one before each document, so neither can disagree with the file about it.
``bytes.npy`` holds each document's UTF-8 bytes as counted in the raw text, never derived from tokens (a decoded lone
byte becomes a three-byte replacement character, and a score per byte is then too low). Documents lie in the order of
their content's digest, which is the same on any machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from frozen.corpus import SPLITS, Corpus, Kept, SplitSizes, split_corpus
from frozen.formats import Reading, Source, SourceError, read

SEPARATOR = "<|endoftext|>"
"""The one special token, id 0: stands before every document, in training and in evaluation alike."""
LEAST_VOCABULARY = 257
"""256 bytes and the separator: any text can be encoded."""
LARGEST_VOCABULARY = 1 << 20
CONTEXT, ANSWER, END = 0, 1, 2
"""Marks of a token in a conversation: given, part of an answer (trained on and scored), or what the chat template puts
after an answer to end it (trained on, so that the model learns to stop, but no byte of the answer: not scored)."""
_RECIPE = 1
"""Counts changes of how sources become arrays; part of the cache's digest."""
_RAW_TEXT = ("val", "holdout")
"""Splits whose raw text is kept, so that a score can be recomputed by an independent program."""


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
        if (np.add.reduceat((self.marks == ANSWER).astype(np.int64), self.offsets[:-1]) < 1).any():
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
    parts: list[npt.NDArray[Any]] = []
    for index, document in enumerate(documents):
        part = np.asarray(document)
        if part.size and (part.min() < 0 or part.max() >= vocabulary):
            raise ValueError(f"document {index} holds a token outside the vocabulary of {vocabulary}")
        parts.append(part.astype(kind))
    lengths = np.array([part.size for part in parts], dtype=np.int64)
    folder.mkdir(parents=True)
    arrays = {
        "tokens": np.concatenate(parts) if parts else np.empty(0, kind),
        "offsets": np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        "bytes": np.array(list(byte_counts), dtype=np.int64),
        "source_ids": np.array(list(source_ids), dtype=np.int16),
    }
    if marks is not None:
        arrays["marks"] = np.concatenate([np.asarray(part, dtype=np.uint8) for part in marks])
    for name, array in arrays.items():
        with (folder / f"{name}.npy").open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    meta: dict[str, Any] = {"separator": separator, "vocabulary": vocabulary, "sources": list(sources)}
    if marks is not None:
        meta |= {"marked": True, "pairs": pairs}
    if general:
        meta["general"] = list(general)
    write_text_durably(folder / "split.json", json.dumps(meta, indent=1) + "\n")
    return EncodedSplit.load(folder)


def write_text_durably(path: Path, text: str) -> None:
    """Write a file as UTF-8, exactly as given, and wait until it is on disk."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def train_tokenizer(texts: Iterable[str], vocabulary: int, folder: Path) -> int:
    """Train a byte-level BPE tokenizer and save it where ``AutoTokenizer.from_pretrained`` finds it.

    Any text can be encoded and decodes to itself. Returns the size of the vocabulary, which is smaller than asked for
    if the texts do not hold enough different pairs. The same texts give the same files.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not LEAST_VOCABULARY <= vocabulary <= LARGEST_VOCABULARY:
        raise ValueError(
            f"a vocabulary of {vocabulary} is not possible: {LEAST_VOCABULARY} to {LARGEST_VOCABULARY} are"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True)
    write_text_durably(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SEPARATOR,
        "eos_token": SEPARATOR,
        "pad_token": SEPARATOR,
        "clean_up_tokenization_spaces": False,
    }
    write_text_durably(folder / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
    return int(tokenizer.get_vocab_size())


def encode(texts: Sequence[str], tokenizer: Path) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield each text's tokens. A text that spells out the separator is encoded as the characters it is made of."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    loaded.encode_special_tokens = True
    for begin in range(0, len(texts), 1024):
        for encoding in loaded.encode_batch(texts[begin : begin + 1024], add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Encoded data in the cache: ``train``, ``probe``, ``val``, ``holdout``, ``tokenizer`` and ``report.json``."""

    folder: Path
    digest: str
    """Of everything that the data was made from: the folder's name."""
    report: dict[str, Any]
    """What was read, dropped and why."""
    reused: bool
    """Whether it lay in the cache already, whole and unchanged."""

    @property
    def vocabulary(self) -> int:
        """Size of the tokenizer's vocabulary; smaller than asked for if there was too little text."""
        return int(self.report["vocabulary"])


@dataclass(frozen=True, slots=True)
class NewTokenizer:
    """Stand-in until the data's own is merged."""

    vocabulary: int


@dataclass(frozen=True, slots=True)
class GivenTokenizer:
    """Stand-in until the data's own is merged."""

    folder: Path
    vocabulary: int


@dataclass(frozen=True, slots=True)
class GuardSource:
    """Stand-in until the data's own is merged."""

    source: Source
    bytes: int


def prepare(
    sources: Sequence[Source],
    sizes: SplitSizes,
    tokenizer: NewTokenizer | GivenTokenizer | int,
    cache: Path,
    progress: Callable[[str], None] = lambda _: None,
    *,
    kind: Literal["text", "conversation", "preference"] = "text",
    guard: GuardSource | None = None,
) -> Prepared:
    """Read, clean, split and encode sources once; the same inputs are found in the cache the next time.

    Folders appear in ``cache`` whole or not at all, named by a digest of their inputs (the texts, not their places).
    One that is found is hashed again before it is used, because studies share its files, and made anew if it changed.
    `SourceError` and `ValueError` say what is wrong with the inputs, and then nothing is written.
    """
    from filelock import FileLock

    tokenizer = NewTokenizer(tokenizer) if isinstance(tokenizer, int) else tokenizer
    if not isinstance(tokenizer, NewTokenizer) or kind != "text" or guard is not None:
        raise SourceError("this part of the data is not built yet")
    vocabulary = tokenizer.vocabulary
    names = [source.name for source in sources]
    if not sources or len(set(names)) != len(names):
        raise SourceError(f"expected one or more sources with different names, got {', '.join(names) or 'none'}")
    if not LEAST_VOCABULARY <= vocabulary <= LARGEST_VOCABULARY:
        raise ValueError(
            f"a vocabulary of {vocabulary} is not possible: {LEAST_VOCABULARY} to {LARGEST_VOCABULARY} are"
        )
    readings = {}
    for source in sorted(sources, key=lambda source: source.name):
        progress(f"reading {source.name}")
        readings[source.name] = read(source)
    digest = _digest(readings, sizes, vocabulary)
    folder = cache / digest
    if folder.is_dir() and _unchanged(folder):
        return Prepared(folder, digest, _report(folder), reused=True)
    documents = [document for reading in readings.values() for document in reading.documents]
    corpus = split_corpus(documents, sizes, progress)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        for leftover in cache.glob(".building-*"):  # of a process that died: nobody else is here
            shutil.rmtree(leftover)
        if folder.is_dir() and _unchanged(folder):
            return Prepared(folder, digest, _report(folder), reused=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=cache) as aside:
            built = Path(aside, digest)
            _build(built, corpus, readings, vocabulary, progress)
            if folder.exists():
                shutil.rmtree(folder)
            built.rename(folder)
            _sync_folder(cache)
    return Prepared(folder, digest, _report(folder), reused=False)


def _digest(readings: dict[str, Reading], sizes: SplitSizes, vocabulary: int) -> str:
    """Return the identity of the inputs: names and texts in any order, what is asked for, and who does it."""
    texts = {
        name: sorted(hashlib.sha256(document.text.encode("utf-8")).hexdigest() for document in reading.documents)
        for name, reading in readings.items()
    }
    rejected = {
        name: sorted((item.where, item.reason) for item in reading.rejected) for name, reading in readings.items()
    }
    tools = {name: importlib.metadata.version(name) for name in ("datasketch", "numpy", "tokenizers")}
    inputs = [_RECIPE, texts, rejected, asdict(sizes), vocabulary, tools]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _build(
    folder: Path, corpus: Corpus, readings: dict[str, Reading], vocabulary: int, progress: Callable[[str], None]
) -> None:
    """Write everything into a new folder, the manifest last."""
    progress(f"training a tokenizer of {vocabulary} tokens")
    tokenizer = folder / "tokenizer"
    actual = train_tokenizer((kept.text for kept in corpus.splits["train"]), vocabulary, tokenizer)
    report = {"vocabulary": actual, **corpus.report.as_json(), "rejected": _rejections(readings), "tokens": {}}
    for name in SPLITS:
        progress(f"encoding {name}")
        texts = corpus.splits[name]
        report["tokens"][name] = len(_write_texts(folder / name, texts, tuple(readings), tokenizer, actual).tokens)
    write_text_durably(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_text_durably(folder / "manifest.json", json.dumps(_manifest(folder), indent=1) + "\n")
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _sync_folder(path)


def _write_texts(
    folder: Path, texts: Sequence[Kept], sources: tuple[str, ...], tokenizer: Path, vocabulary: int
) -> EncodedSplit:
    """Encode one split, and keep its raw text if it is one that scores are made on."""
    split = write_split(
        folder,
        documents=encode([kept.text for kept in texts], tokenizer),
        byte_counts=[kept.bytes for kept in texts],
        source_ids=[sources.index(kept.source) for kept in texts],
        sources=sources,
        separator=0,
        vocabulary=vocabulary,
    )
    if folder.name in _RAW_TEXT:
        rows = (
            {"text": kept.text, "source": kept.source, "bytes": kept.bytes, "sha256": kept.digest} for kept in texts
        )
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text_durably(folder / "documents.jsonl", lines)
    return split


def _rejections(readings: dict[str, Reading]) -> dict[str, Any]:
    """Return what did not become a document, by source: all counts, and the first hundred places."""
    return {
        name: {
            "rejected": len(reading.rejected),
            "first": [asdict(item) for item in reading.rejected[:100]],
            "other_files": dict(sorted(reading.other_files.items())),
        }
        for name, reading in readings.items()
    }


def _manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file but the manifest, by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    digests = {}
    for path in files:
        with path.open("rb") as file:
            digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _unchanged(folder: Path) -> bool:
    """Return whether a cached folder holds exactly the files it was published with."""
    manifest = folder / "manifest.json"
    try:
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return bool(recorded == _manifest(folder))


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def _sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
