"""Documents to splits: clean, cut, deduplicate, and divide by content.

A split must be a function of the texts alone: not of file names, the order of reading, the machine or a random number.
So every text has the SHA-256 of its UTF-8 bytes as its name, and splits are filled in the order of these digests:
holdout, val, probe, and the rest is train.

**Long documents** are cut into pieces of at most 16 KiB, at line borders that the text itself chooses (a line's own
checksum decides, after half a piece), so that two versions of a long document are cut at the same places again after
the lines in which they differ. A piece is what everything below calls a text. Pieces of one document go to one split,
because a model that has trained on half a document knows its names; only a document so long that it would fill an
eighth of the smallest split alone is spread by its pieces.

**Leakage.** Equal texts and near-duplicates are dropped wherever they are, before the division, so no split holds two
versions of a text. Then train texts that quote most of a held-out text (or are mostly such a quote) are dropped from
train. Both are reported.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from frozen.duplicates import HeldOut, Shingles, near_duplicates, shingles
from frozen.formats import Document, SourceError

HELD_OUT = ("holdout", "val", "probe")
"""In the order in which they are filled."""
SPLITS = ("train", "probe", "val", "holdout")
PIECE_BYTES = 16 * 1024
_BORDER_LINES = 16
"""One line in so many may end a piece once the piece is half full."""
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")
_UNIT_SHARE = 8
"""A document stays together if it is at most this part of the smallest held-out split."""


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """Least UTF-8 bytes of the splits that are not train; each ends up less than one document above."""

    probe_bytes: int
    val_bytes: int
    holdout_bytes: int

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")

    def of(self, split: str) -> int:
        """Return the size of one of the held-out splits."""
        sizes: dict[str, int] = asdict(self)
        return sizes[f"{split}_bytes"]

    @property
    def least_bytes(self) -> int:
        """Bytes that four splits need: train must be no smaller than the three others together."""
        return 2 * (self.probe_bytes + self.val_bytes + self.holdout_bytes)


@dataclass(frozen=True, slots=True)
class Kept:
    """One text of a split."""

    digest: str
    """SHA-256 of the text's UTF-8 bytes, in hexadecimal."""
    source: str
    text: str
    """As it is trained on and scored: line ends are ``\\n``, no byte-order mark."""

    @property
    def bytes(self) -> int:
        """UTF-8 bytes: what a score per byte is divided by."""
        return len(self.text.encode("utf-8"))


@dataclass(slots=True)
class CorpusReport:
    """What became of the documents, in counts and UTF-8 bytes, for people; `as_json` for the report file."""

    read: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Source to documents, texts (pieces) and bytes."""
    dropped: dict[str, dict[str, Counter[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Counter))
    )
    """Source to reason to texts and bytes."""
    splits: dict[str, dict[str, Counter[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Counter))
    )
    """Split to source to texts and bytes."""

    def drop(self, kept: Kept, reason: str) -> None:
        """Count a text that was dropped."""
        self.dropped[kept.source][reason].update(texts=1, bytes=kept.bytes)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values, sorted by name."""
        return {
            "read": {source: dict(counts) for source, counts in sorted(self.read.items())},
            "dropped": _plain(self.dropped),
            "splits": {name: _plain(self.splits)[name] for name in SPLITS if name in self.splits},
        }


def _plain(table: Mapping[str, Mapping[str, Counter[str]]]) -> dict[str, dict[str, dict[str, int]]]:
    return {outer: {inner: dict(row) for inner, row in sorted(rows.items())} for outer, rows in sorted(table.items())}


@dataclass(frozen=True, slots=True)
class Corpus:
    """The four splits, each in the order of its texts' digests."""

    splits: dict[str, list[Kept]]
    report: CorpusReport


def split_corpus(
    documents: Iterable[Document], sizes: SplitSizes, progress: Callable[[str], None] = lambda _: None
) -> Corpus:
    """Return the four splits; `SourceError`, with numbers, if the texts do not fill them."""
    report = CorpusReport()
    units = _units(documents, sizes, report)
    units = _without_equals(units, report)
    texts = sorted((kept for unit in units.values() for kept in unit), key=lambda kept: kept.digest)
    progress(f"looking for near-duplicates among {len(texts)} texts")
    known = {kept.digest: shingles(kept.text) for kept in texts}
    units = _without_near_duplicates(units, texts, known, report, progress)
    _refuse_if_too_small(units, sizes, report)
    splits = _divide(units, sizes)
    splits["train"] = _without_quotes(splits, known, report)
    _refuse_if_too_small({"": splits["train"]}, sizes, report, train=True)
    for name, split in splits.items():
        split.sort(key=lambda kept: kept.digest)
        for kept in split:
            report.splits[name][kept.source].update(texts=1, bytes=kept.bytes)
    return Corpus(splits, report)


Units = dict[str, list[Kept]]
"""Texts that go to one split together, by the digest that decides which."""


def digest_of(text: str) -> str:
    """Return a text's name: SHA-256 of its UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def normalise(text: str) -> str:
    """Return a text with line feeds as line ends, without byte-order mark, blank first lines and trailing space."""
    return _trim(text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff"))


def _trim(text: str) -> str:
    """Return a text without blank first lines and trailing white space; the first line keeps its indentation."""
    return _BLANK_LINES.sub("", text).rstrip()


def _units(documents: Iterable[Document], sizes: SplitSizes, report: CorpusReport) -> Units:
    """Normalise and cut the documents. Where a text has several sources, the first by name counts."""
    together = max(PIECE_BYTES, min(map(sizes.of, HELD_OUT)) // _UNIT_SHARE)
    normal = sorted((document.source, normalise(document.text)) for document in documents)
    units: Units = {}
    for source, text in normal:
        size = len(text.encode("utf-8"))
        pieces = [Kept(digest_of(piece), source, piece) for piece in cut(text)]
        report.read[source].update(documents=1, texts=len(pieces), bytes=size)
        if size <= together:
            digest = digest_of(text)
            if digest in units:
                for kept in pieces:
                    report.drop(kept, "equal")
            elif pieces:
                units[digest] = pieces
            continue
        for kept in pieces:
            if kept.digest in units:
                report.drop(kept, "equal")
            else:
                units[kept.digest] = [kept]
    return units


def cut(text: str) -> list[str]:
    """Cut a text into pieces of at most 16 KiB; joined they are the text, but for white space at the borders."""
    if len(text.encode("utf-8")) <= PIECE_BYTES:
        return [text] if text else []
    pieces = [_trim("".join(lines)) for lines in _groups(text)]
    return [piece for piece in pieces if piece]


def _groups(text: str) -> Iterator[list[str]]:
    """Yield runs of lines that make up pieces."""
    group: list[str] = []
    size = 0
    for line in _lines(text):
        content = line.encode("utf-8")
        chosen = size >= PIECE_BYTES // 2 and zlib.crc32(content) % _BORDER_LINES == 0
        if group and (chosen or size + len(content) > PIECE_BYTES):
            yield group
            group, size = [], 0
        group.append(line)
        size += len(content)
    yield group


def _lines(text: str) -> Iterator[str]:
    """Yield lines with their ends; a very long one comes in parts, cut after spaces if it has some."""
    longest = PIECE_BYTES // 8  # characters: of up to four bytes each
    for line in text.splitlines(keepends=True):
        begin = 0
        while len(line) - begin > longest:
            space = line.rfind(" ", begin, begin + longest)
            end = space + 1 if space > begin else begin + longest
            yield line[begin:end]
            begin = end
        yield line[begin:]


def _without_equals(units: Units, report: CorpusReport) -> Units:
    """Drop texts that another unit holds already (a piece may repeat what is a document elsewhere)."""
    seen: set[str] = set()
    result: Units = {}
    for unit, texts in sorted(units.items()):
        for kept in texts:
            if kept.digest in seen:
                report.drop(kept, "equal")
            else:
                seen.add(kept.digest)
                result.setdefault(unit, []).append(kept)
    return result


def _without_near_duplicates(
    units: Units,
    texts: Sequence[Kept],
    known: Mapping[str, Shingles],
    report: CorpusReport,
    progress: Callable[[str], None],
) -> Units:
    """Drop every text that resembles one with a smaller digest."""

    def tell(done: int) -> None:
        if done and done % 1000 == 0:
            progress(f"near-duplicates: {done} of {len(texts)} texts compared")

    dropped = {texts[index].digest for index in near_duplicates([known[kept.digest] for kept in texts], tell)}
    result: Units = {}
    for unit, members in units.items():
        for kept in members:
            if kept.digest in dropped:
                report.drop(kept, "near-duplicate")
            else:
                result.setdefault(unit, []).append(kept)
    return result


def _divide(units: Units, sizes: SplitSizes) -> dict[str, list[Kept]]:
    """Fill the splits unit by unit, in the order of the units' digests."""
    splits: dict[str, list[Kept]] = {name: [] for name in SPLITS}
    filling = iter(HELD_OUT)
    name, filled = next(filling), 0
    for _, members in sorted(units.items()):
        splits[name].extend(members)
        filled += sum(kept.bytes for kept in members)
        if name != "train" and filled >= sizes.of(name):
            name, filled = next(filling, "train"), 0
    return splits


def _without_quotes(
    splits: Mapping[str, Sequence[Kept]], known: Mapping[str, Shingles], report: CorpusReport
) -> list[Kept]:
    """Return the train texts that quote no held-out text."""
    held_out = HeldOut([known[kept.digest] for name in HELD_OUT for kept in splits[name]])
    train = []
    for kept in splits["train"]:
        if held_out.quoted_by(known[kept.digest]) is None:
            train.append(kept)
        else:
            report.drop(kept, "quotes a held-out text")
    return train


def _refuse_if_too_small(units: Units, sizes: SplitSizes, report: CorpusReport, *, train: bool = False) -> None:
    """Raise if what is left does not fill four splits, or train alone does not fill its half."""
    left = sum(kept.bytes for members in units.values() for kept in members)
    least = sizes.least_bytes // 2 if train else sizes.least_bytes
    if left >= least:
        return
    read = sum(counts["bytes"] for counts in report.read.values())
    wanted = ", ".join(f"{sizes.of(name)} for {name}" for name in HELD_OUT)
    whole = "" if train else f" ({wanted}, and as much again for train)"
    raise SourceError(
        f"the sources are too small for four splits: {read} bytes were read, after removing duplicates {left} are left"
        f"{' for train' if train else ''}, but {least} are needed{whole}:"
        " add text or ask for smaller splits"
    )
