"""Divided documents to encoded splits: which tokens each kind of document becomes, and what stands before them.

**Texts** are encoded whole, without special tokens. Before each stands the separator: of a tokenizer of our own the one
special token; of a given one the token that it puts before a text itself, else bos, else eos.

**Conversations** are encoded by `frozen.chat`. If all of them begin with the same token (``<s>``, ``<|im_start|>``),
that token is the separator and is taken off each, so that what a model sees is exactly what its template writes. Else
the separator is that of texts. General *texts* among conversations are learnt token by token, and begin with what a
text begins with, as context, where that is not the separator already.

**Pairs** are two documents each, the chosen answer and then the rejected one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frozen.chat import Chat, Encoded, Unencodable
from frozen.conversations import Conversation, Preference, canonical, row_of
from frozen.corpus import GUARD, Kept
from frozen.encoder import Encoder
from frozen.formats import MALFORMED_LIMIT, Document, Reading, SourceError
from frozen.pieces import digest_of
from frozen.splits import ANSWER, CONTEXT, EncodedSplit, write_split, write_text_durably

RAW_TEXT = ("val", "holdout", GUARD)
"""Splits whose raw contents are kept, so that a score can be recomputed by an independent program."""
_SHOWN = 100
_CHECKED_AT_ONCE = 256

Conversations = dict[str, tuple[Encoded, ...]]
"""Encoded conversations and pairs (the chosen one first) by the digest of their content."""


def encode_conversations(
    readings: Mapping[str, Reading], chat: Chat, progress: Callable[[str], None]
) -> tuple[dict[str, list[Document]], Conversations]:
    """Encode what is a conversation or a pair, by source; what cannot be is rejected in its reading.

    The documents that come back are as they were encoded: trimmed, where the template trims. `SourceError` if nothing
    of a source is left.
    """
    documents: dict[str, list[Document]] = {}
    encoded: Conversations = {}
    for name, reading in readings.items():
        if reading.kind == "text":
            documents[name] = reading.documents
            continue
        progress(f"encoding {len(reading.documents)} conversations of {name}")
        kept = documents.setdefault(name, [])
        for document in reading.documents:
            try:
                content, parts = _encoded(document, chat)
            except Unencodable as fault:
                reading.reject(document.where, str(fault), malformed=False)
                continue
            kept.append(replace(document, content=content))
            encoded[digest_of(canonical(content))] = parts
        if not kept:
            last = reading.rejected[-1]
            raise SourceError(
                f"source {name}: none of its {len(reading.documents)} conversations can be encoded"
                f" ({last.where}: {last.reason})"
            )
    return documents, encoded


def _encoded(document: Document, chat: Chat) -> tuple[Conversation | Preference, tuple[Encoded, ...]]:
    """Return a document's content and encoding; `Unencodable` if it has none."""
    content = document.content
    if isinstance(content, Conversation):
        one = chat.encode(content)
        return one.conversation, (one,)
    assert isinstance(content, Preference)
    chosen, rejected = (chat.encode(side, learnt="last") for side in content.conversations)
    answers = [side.conversation.answers[-1] for side in (chosen, rejected)]
    if answers[0] == answers[1]:
        raise Unencodable("chosen and rejected are equal, but for white space that the chat template takes away")
    prompt = chosen.conversation.turns[:-1]
    return replace(content, prompt=prompt, chosen=answers[0], rejected=answers[1]), (chosen, rejected)


@dataclass(slots=True)
class Writer:
    """Writes splits, and counts what came of them."""

    encoder: Encoder
    sources: tuple[str, ...]
    general: tuple[str, ...]
    vocabulary: int
    """Width of the logits."""
    separator: int
    """Of texts."""
    check: bool = True
    """Whether texts are decoded again: a tokenizer of our own loses nothing."""
    lossy: list[str] = field(default_factory=list)
    """Beginnings of texts that their tokens do not give back."""
    seen: int = 0
    """Texts that were encoded."""
    lengths: dict[str, list[npt.NDArray[np.int64]]] = field(default_factory=dict)
    """Tokens per document, by source."""

    def texts(self, folder: Path, kept: Sequence[Kept], sources: tuple[str, ...]) -> EncodedSplit:
        """Write a split of texts."""
        split = write_split(
            folder,
            documents=self._text_tokens([one.text for one in kept]),
            byte_counts=[one.bytes for one in kept],
            source_ids=[sources.index(one.source) for one in kept],
            sources=sources,
            separator=self.separator,
            vocabulary=self.vocabulary,
            general=tuple(name for name in self.general if name in sources),
        )
        self._finish(folder, kept, [one.bytes for one in kept], split)
        return split

    def conversations(
        self, folder: Path, kept: Sequence[Kept], encoded: Conversations, common: int | None, *, pairs: bool
    ) -> EncodedSplit:
        """Write a split of conversations or pairs; ``common`` is what all of them begin with."""
        separator = self.separator if common is None else common
        parts = self._parts(kept, encoded, common)
        documents = [part for several in parts for part in several]
        split = write_split(
            folder,
            documents=(part.tokens for part in documents),
            marks=(part.marks for part in documents),
            byte_counts=[part.bytes for part in documents],
            source_ids=[
                self.sources.index(one.source) for one, several in zip(kept, parts, strict=True) for _ in several
            ],
            sources=self.sources,
            separator=separator,
            vocabulary=self.vocabulary,
            pairs=pairs,
            general=self.general,
        )
        counts = [[part.bytes for part in several] for several in parts]
        self._finish(folder, kept, [count if pairs else count[0] for count in counts], split)
        return split

    def _parts(self, kept: Sequence[Kept], encoded: Conversations, common: int | None) -> list[tuple[Encoded, ...]]:
        """Return what each document becomes, without the token that all begin with."""
        texts = iter(self._text_tokens([one.content for one in kept if isinstance(one.content, str)]))
        parts: list[tuple[Encoded, ...]] = []
        begin = 0 if common is None else 1
        for one in kept:
            if isinstance(one.content, str):
                parts.append((self._learnt(next(texts), one, common),))
            else:
                parts.append(
                    tuple(
                        replace(part, tokens=part.tokens[begin:], marks=part.marks[begin:])
                        for part in encoded[one.digest]
                    )
                )
        return parts

    def _learnt(self, tokens: npt.NDArray[np.uint32], kept: Kept, common: int | None) -> Encoded:
        """Return a text as a document all of which is learnt."""
        marks = np.full(len(tokens), ANSWER, np.uint8)
        if common is not None and common != self.separator:
            tokens = np.concatenate([np.array([self.separator], np.uint32), tokens])
            marks = np.concatenate([np.array([CONTEXT], np.uint8), marks])
        return Encoded(tokens, marks, kept.bytes, Conversation(()))

    def _text_tokens(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the tokens of texts, and note which of them lose something."""
        for begin in range(0, len(texts), _CHECKED_AT_ONCE):
            batch = texts[begin : begin + _CHECKED_AT_ONCE]
            tokens = list(self.encoder.texts(batch))
            for text, ids in zip(batch, tokens, strict=True):
                if not len(ids):
                    raise SourceError(
                        f"the tokenizer in {self.encoder.folder} makes no token of the text {text[:60]!r}:"
                        " it cannot encode this data"
                    )
            self.seen += len(batch)
            if self.check:
                self.lossy += [batch[number][:80] for number in self.encoder.lossy(batch, tokens)]
            yield from tokens

    def refuse_if_lossy(self) -> None:
        """Raise if the tokenizer is none for this data."""
        if len(self.lossy) > MALFORMED_LIMIT * self.seen:
            raise SourceError(
                f"the tokenizer in {self.encoder.folder} cannot encode {len(self.lossy)} of {self.seen} texts without"
                f" loss (at most {MALFORMED_LIMIT:.0%} may be), the first: {self.lossy[0][:60]!r}"
            )

    def _finish(self, folder: Path, kept: Sequence[Kept], counts: Sequence[Any], split: EncodedSplit) -> None:
        """Keep the raw contents of a split that scores are made on, and the lengths of its documents."""
        lengths = np.diff(split.offsets)
        for number, name in enumerate(split.sources):
            self.lengths.setdefault(name, []).append(lengths[split.source_ids == number])
        if folder.name in RAW_TEXT:
            rows = (
                {**row_of(one.content), "source": one.source, "bytes": count, "sha256": one.digest}
                for one, count in zip(kept, counts, strict=True)
            )
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_text_durably(folder / "documents.jsonl", lines)

    def token_lengths(self) -> dict[str, dict[str, int]]:
        """Return how long the documents of each source are."""
        return {name: spread(np.concatenate(parts)) for name, parts in self.lengths.items()}


def common_first(kept: Sequence[Kept], encoded: Conversations) -> int | None:
    """Return the token with which all conversations begin, or None."""
    first = {int(part.tokens[0]) for one in kept if not isinstance(one.content, str) for part in encoded[one.digest]}
    return first.pop() if len(first) == 1 else None


def spread(lengths: npt.NDArray[np.int64]) -> dict[str, int]:
    """Return the median, the ninth decile and the largest of some lengths."""
    if not len(lengths):
        return {"median": 0, "p90": 0, "longest": 0}
    median, p90 = np.quantile(lengths, (0.5, 0.9), method="inverted_cdf")
    return {"median": int(median), "p90": int(p90), "longest": int(lengths.max())}


def source_report(reading: Reading, *, general: bool) -> dict[str, Any]:
    """Return what a source was recognised as, for the report."""
    return {
        "format": reading.shape,
        "why": reading.why,
        "files": dict(sorted(reading.containers.items())),
        "documents": len(reading.documents),
        "malformed": reading.malformed,
        "notes": dict(sorted(reading.notes.items())),
        "general": general,
        "revision": reading.revision,
    }


def rejections(reading: Reading) -> dict[str, Any]:
    """Return what did not become a document: the count, and the first hundred places."""
    return {
        "rejected": len(reading.rejected),
        "first": [{"where": item.where, "reason": item.reason} for item in reading.rejected[:_SHOWN]],
        "other_files": dict(sorted(reading.other_files.items())),
    }
