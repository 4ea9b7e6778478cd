"""Data for a study: sources read, divided and encoded once, by a tokenizer of our own or the base model's.

`prepare` is the whole way; the parts are `frozen.formats` (reading), `frozen.corpus` (dividing), `frozen.encoding` and
`frozen.splits` (arrays).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from frozen import encoding
from frozen.chat import BUILT_IN, Chat
from frozen.conversations import Kind, canonical
from frozen.corpus import GUARD, SPLITS, Corpus, SplitSizes, split_corpus
from frozen.encoder import Encoder
from frozen.formats import Document, Reading, Source, SourceError, read
from frozen.pieces import digest_of
from frozen.splits import ANSWER, CONTEXT, END, EncodedSplit, write_split, write_text_durably
from frozen.vocabulary import SEPARATOR, encode, refuse_vocabulary, train_tokenizer

__all__ = [
    "ANSWER",
    "CONTEXT",
    "END",
    "SEPARATOR",
    "EncodedSplit",
    "GivenTokenizer",
    "GuardSource",
    "Kind",
    "NewTokenizer",
    "Prepared",
    "encode",
    "prepare",
    "train_tokenizer",
    "write_split",
    "write_text_durably",
]

_RECIPE = 2
"""Counts changes of how sources become arrays; part of the cache's digest."""
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt"),
)
"""What of a base model's folder is its tokenizer; the first is needed, the others are taken along."""
_WHAT = {"text": "texts", "conversation": "conversations", "preference": "preference pairs"}


@dataclass(frozen=True, slots=True)
class NewTokenizer:
    """A tokenizer that is trained on the train split."""

    vocabulary: int
    """Most tokens; fewer if the texts do not hold enough different pairs."""


@dataclass(frozen=True, slots=True)
class GivenTokenizer:
    """The base model's own tokenizer."""

    folder: Path
    """Holds tokenizer.json and, for conversations, a chat template; without one a plain built-in one is used."""
    vocabulary: int
    """Width of the logits; many models have more than their tokenizer has tokens."""


@dataclass(frozen=True, slots=True)
class GuardSource:
    """General-domain text that is scored beside val, to see what a model forgets."""

    source: Source
    bytes: int
    """Most text that is scored."""


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


def prepare(
    sources: Sequence[Source],
    sizes: SplitSizes,
    tokenizer: NewTokenizer | GivenTokenizer,
    cache: Path,
    progress: Callable[[str], None] = lambda _: None,
    *,
    kind: Kind = "text",
    guard: GuardSource | None = None,
) -> Prepared:
    """Read, clean, split and encode sources once; the same inputs are found in the cache the next time.

    Folders appear in ``cache`` whole or not at all, named by a digest of their inputs (the contents, not their places).
    One that is found is hashed again before it is used, because studies share its files, and made anew if it changed.
    `SourceError` and `ValueError` say what is wrong with the inputs, and then nothing is written.

    Sources that are ``general`` feed train only: texts, or conversations if the others are. Preferences take none.
    """
    from filelock import FileLock

    _check(sources, tokenizer, kind, guard)
    encoder = Encoder(tokenizer.folder) if isinstance(tokenizer, GivenTokenizer) else None
    if encoder is not None and encoder.size > tokenizer.vocabulary:
        raise ValueError(
            f"the tokenizer in {encoder.folder} has tokens up to {encoder.size - 1}, but the model has only"
            f" {tokenizer.vocabulary} logits: they do not belong together"
        )
    readings = {}
    for source in sorted(sources, key=lambda source: source.name):
        progress(f"reading {source.name}")
        readings[source.name] = _read(source, kind)
    guarding = None
    if guard is not None:
        progress(f"reading {guard.source.name}")
        guarding = _read(guard.source, "text")
    general = tuple(source.name for source in sorted(sources, key=lambda source: source.name) if source.general)
    inputs = _Inputs(readings, sizes, tokenizer, encoder, kind, general, guard, guarding)
    digest = inputs.digest()
    folder = cache / digest
    if folder.is_dir() and _unchanged(folder):
        return Prepared(folder, digest, _report(folder), reused=True)
    material = inputs.divided(progress)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        for leftover in cache.glob(".building-*"):  # of a process that died: nobody else is here
            shutil.rmtree(leftover)
        if folder.is_dir() and _unchanged(folder):
            return Prepared(folder, digest, _report(folder), reused=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=cache) as aside:
            built = Path(aside, digest)
            _build(built, inputs, material, progress)
            if folder.exists():
                shutil.rmtree(folder)
            built.rename(folder)
            _sync_folder(cache)
    return Prepared(folder, digest, _report(folder), reused=False)


def _check(
    sources: Sequence[Source], tokenizer: NewTokenizer | GivenTokenizer, kind: Kind, guard: GuardSource | None
) -> None:
    """Raise for what does not go together, before anything is read."""
    names = [source.name for source in sources] + ([guard.source.name] if guard is not None else [])
    if not sources or len(set(names)) != len(names):
        raise SourceError(f"expected one or more sources with different names, got {', '.join(names) or 'none'}")
    if all(source.general for source in sources):
        raise SourceError("every source is general: at least one has to be what the study is about")
    if kind == "preference" and any(source.general for source in sources):
        raise SourceError("preferences are trained on alone: leave out the general sources")
    if guard is not None and guard.bytes < 1:
        raise ValueError(f"a guard set of {guard.bytes} bytes holds nothing")
    if isinstance(tokenizer, NewTokenizer):
        if kind != "text":
            raise ValueError(f"{_WHAT[kind]} need a base model's tokenizer: a new model has not learnt to read yet")
        refuse_vocabulary(tokenizer.vocabulary)


def _read(source: Source, kind: Kind) -> Reading:
    """Return a source's reading; `SourceError` if it holds another kind of documents."""
    reading = read(source)
    if reading.kind == kind or (source.general and reading.kind == "text"):
        return reading
    raise SourceError(
        f"source {source.name} holds {_WHAT[reading.kind]} ({reading.shape}: {reading.why}), but {_WHAT[kind]} are"
        " needed: choose another task, or name the format if this is a mistake"
    )


@dataclass(frozen=True, slots=True)
class _Material:
    """Documents, divided, and as far as they are conversations also encoded."""

    corpus: Corpus
    conversations: encoding.Conversations


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything that encoded data is made from."""

    readings: dict[str, Reading]
    sizes: SplitSizes
    tokenizer: NewTokenizer | GivenTokenizer
    encoder: Encoder | None
    kind: Kind
    general: tuple[str, ...]
    guard: GuardSource | None
    guarding: Reading | None

    def digest(self) -> str:
        """Return the identity of the inputs: names and contents in any order, what is asked for, and who does it."""
        read = self.readings | ({} if self.guarding is None else {"": self.guarding})
        contents = {
            name: sorted(digest_of(canonical(document.content)) for document in reading.documents)
            for name, reading in read.items()
        }
        rejected = {
            name: sorted((item.where, item.reason) for item in reading.rejected) for name, reading in read.items()
        }
        known = {name: encoding.source_report(reading, general=name in self.general) for name, reading in read.items()}
        tools = {name: importlib.metadata.version(name) for name in ("datasketch", "jinja2", "numpy", "tokenizers")}
        guard = None if self.guard is None else [self.guard.source.name, self.guard.bytes]
        inputs = [_RECIPE, contents, rejected, known, asdict(self.sizes), self._tokenizer(), self.kind, guard, tools]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    def _tokenizer(self) -> list[Any]:
        """Return the identity of the tokenizer."""
        if isinstance(self.tokenizer, NewTokenizer):
            return [self.tokenizer.vocabulary]
        files = {
            name: hashlib.sha256((self.tokenizer.folder / name).read_bytes()).hexdigest()
            for name in _TOKENIZER_FILES
            if (self.tokenizer.folder / name).is_file()
        }
        return [self.tokenizer.vocabulary, files, BUILT_IN]

    def divided(self, progress: Callable[[str], None]) -> _Material:
        """Return the splits. Conversations are encoded first, so that none is in a split that cannot be encoded."""
        documents = {name: reading.documents for name, reading in self.readings.items()}
        conversations: encoding.Conversations = {}
        if self.encoder is not None and any(reading.kind != "text" for reading in self.readings.values()):
            documents, conversations = encoding.encode_conversations(self.readings, Chat(self.encoder), progress)
        guard: list[Document] = [] if self.guarding is None else self.guarding.documents
        try:
            corpus = split_corpus(
                [document for found in documents.values() for document in found],
                self.sizes,
                progress,
                general=self.general,
                guard=guard,
                guard_bytes=0 if self.guard is None else self.guard.bytes,
            )
        except SourceError as error:
            raise SourceError(f"{error}{self._lost(documents)}") from error
        return _Material(corpus, conversations)

    def _lost(self, documents: Mapping[str, list[Document]]) -> str:
        """Say how many conversations could not be encoded, if some could not: too little may be left because of it."""
        lost = sum(len(reading.documents) - len(documents[name]) for name, reading in self.readings.items())
        if not lost:
            return ""
        first = next(
            reading.rejected[-len(reading.documents) + len(documents[name])]
            for name, reading in self.readings.items()
            if len(documents[name]) < len(reading.documents)
        )
        return f"; {lost} conversations cannot be encoded, the first: {first.where}: {first.reason}"


def _build(folder: Path, inputs: _Inputs, material: _Material, progress: Callable[[str], None]) -> None:
    """Write everything into a new folder, the manifest last."""
    splits = material.corpus.splits
    tokenizer = folder / "tokenizer"
    if isinstance(inputs.tokenizer, NewTokenizer):
        progress(f"training a tokenizer of {inputs.tokenizer.vocabulary} tokens")
        vocabulary = train_tokenizer((kept.text for kept in splits["train"]), inputs.tokenizer.vocabulary, tokenizer)
    else:
        vocabulary = inputs.tokenizer.vocabulary
        _copy_tokenizer(inputs.tokenizer.folder, tokenizer, templated=inputs.kind != "text")
    encoder = Encoder(tokenizer)
    writer = encoding.Writer(
        encoder=encoder,
        sources=tuple(inputs.readings),
        general=inputs.general,
        vocabulary=vocabulary,
        separator=encoder.separator,
        check=inputs.encoder is not None,
    )
    every = [kept for name in SPLITS for kept in splits[name]]
    common = encoding.common_first(every, material.conversations) if inputs.kind != "text" else None
    lengths: dict[str, dict[str, int]] = {}
    tokens: dict[str, int] = {}
    for name in (*SPLITS, *((GUARD,) if GUARD in splits else ())):
        progress(f"encoding {name}")
        if name == GUARD:
            assert inputs.guard is not None
            split = writer.texts(folder / name, splits[name], (inputs.guard.source.name,))
        elif inputs.kind == "text":
            split = writer.texts(folder / name, splits[name], writer.sources)
        else:
            split = writer.conversations(
                folder / name, splits[name], material.conversations, common, pairs=inputs.kind == "preference"
            )
        tokens[name] = len(split.tokens)
        lengths[name] = encoding.spread(np.diff(split.offsets))
    writer.refuse_if_lossy()
    report = _new_report(inputs, material, writer, common) | {"tokens": tokens, "lengths": lengths}
    write_text_durably(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_text_durably(folder / "manifest.json", json.dumps(_manifest(folder), indent=1) + "\n")
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _sync_folder(path)


def _copy_tokenizer(source: Path, target: Path, *, templated: bool) -> None:
    """Take along a base model's tokenizer; the template by which conversations were rendered belongs to it."""
    target.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if templated and Encoder(target).template is None:
        write_text_durably(target / "chat_template.jinja", BUILT_IN)


def _new_report(inputs: _Inputs, material: _Material, writer: encoding.Writer, common: int | None) -> dict[str, Any]:
    """Return what people want to know of how the data came to be, apart from what the splits count."""
    separator = writer.separator if common is None else common
    lengths = writer.token_lengths()
    read = inputs.readings | (
        {inputs.guard.source.name: inputs.guarding} if inputs.guard is not None and inputs.guarding is not None else {}
    )
    template = None
    if inputs.kind != "text":
        template = "built-in" if inputs.encoder is not None and inputs.encoder.template is None else "the model's own"
    return {
        "kind": inputs.kind,
        "vocabulary": writer.vocabulary,
        "separator": {
            "token": separator,
            "text": writer.encoder.name(separator),
            "of_every_conversation": common is not None,
        },
        "template": template,
        "sources": {
            name: encoding.source_report(reading, general=name in inputs.general) | {"tokens": lengths.get(name)}
            for name, reading in read.items()
        },
        **material.corpus.report.as_json(),
        "rejected": {name: encoding.rejections(reading) for name, reading in read.items()},
        "lossy": {"texts": len(writer.lossy), "of": writer.seen, "first": writer.lossy[:10]},
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
