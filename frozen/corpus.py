"""Documents to splits: clean, cut, deduplicate, and divide by content.

A split must be a function of the contents alone: not of file names, the order of reading, the machine or a random
number. So every text has the SHA-256 of its UTF-8 bytes as its name, and splits are filled in the order of these
digests: holdout, val, probe, and the rest is train.

**Long texts** are cut into pieces of at most 16 KiB, at line borders that the text itself chooses (a line's own
checksum decides, after half a piece), so that two versions of a long document are cut at the same places again after
the lines in which they differ. A piece is what everything below calls a text. Pieces of one document go to one split,
because a model that has trained on half a document knows its names; only a document so long that it would fill an
eighth of the smallest split alone is spread by its pieces.

**Conversations and pairs of answers** are never cut. Those that begin with the same question (the first user turn, but
for case, white space and the signs around its words) go to one split, whatever the answers: a model is not asked in val
what it was told in train.
Where so many share a question that they would fill an eighth of the smallest split (a greeting), they are spread; then
pairs with the same whole prompt still stay together, and a conversation whose first answer is a held-out one's as well
is dropped from train.

**Leakage.** Equal texts and near-duplicates are dropped wherever they are, before the division, so no split holds two
versions of a text. Then train texts that quote most of a held-out text (or are mostly such a quote) are dropped from
train. Of conversations, near-duplicates are those that resemble each other as a whole and in their answers alone, and
quotes are looked for in the answers: many questions about one article are not one question. System turns, and runs of
words that more than one in a hundred conversations have in their questions (a template's), are not compared at all.

**General** sources are trained on only. They give way to the others: a text of theirs that one of the others holds as
well is dropped here. A **guard** set is chosen by digest like a split; what train shares with it is dropped from train.
All of this is reported.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from frozen.conversations import Preference, canonical
from frozen.duplicates import near_duplicates, shingles
from frozen.formats import Document, SourceError
from frozen.leaks import Compared, Leaks, compared, key_of, question_of
from frozen.pieces import PIECE_BYTES, Kept, cut, digest_of, normalise

__all__ = ["GUARD", "HELD_OUT", "SPLITS", "Corpus", "CorpusReport", "Kept", "SplitSizes", "distinct", "split_corpus"]

HELD_OUT = ("holdout", "val", "probe")
"""In the order in which they are filled."""
SPLITS = ("train", "probe", "val", "holdout")
GUARD = "guard"
"""The split of a guard set."""
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
            "splits": {name: _plain(self.splits)[name] for name in (*SPLITS, GUARD) if name in self.splits},
        }


def _plain(table: Mapping[str, Mapping[str, Counter[str]]]) -> dict[str, dict[str, dict[str, int]]]:
    return {outer: {inner: dict(row) for inner, row in sorted(rows.items())} for outer, rows in sorted(table.items())}


@dataclass(frozen=True, slots=True)
class Corpus:
    """The splits, each in the order of its texts' digests."""

    splits: dict[str, list[Kept]]
    """The four, and `GUARD` if there is a guard set."""
    report: CorpusReport


Units = dict[str, list[Kept]]
"""Texts that go to one split together, by the digest that decides which."""


@dataclass(frozen=True, slots=True)
class _Distinct:
    """Texts of which no two say the same."""

    units: Units
    general: list[Kept]
    known: dict[str, Compared]


def distinct(
    documents: Iterable[Document], general: Collection[str] = (), progress: Callable[[str], None] = lambda _: None
) -> CorpusReport:
    """Return what of documents would be dropped as duplicates, without dividing the rest."""
    report = CorpusReport()
    _distinct(documents, general, PIECE_BYTES, report, progress)
    return report


def split_corpus(
    documents: Iterable[Document],
    sizes: SplitSizes,
    progress: Callable[[str], None] = lambda _: None,
    *,
    general: Collection[str] = (),
    guard: Sequence[Document] = (),
    guard_bytes: int = 0,
) -> Corpus:
    """Return the splits; `SourceError`, with numbers, if the texts do not fill them.

    ``general`` names the sources that are trained on only; ``guard`` holds the texts of which a guard set of at most
    ``guard_bytes`` is chosen.
    """
    report = CorpusReport()
    together = max(PIECE_BYTES, min(map(sizes.of, HELD_OUT)) // _UNIT_SHARE)
    found = _distinct(documents, general, together, report, progress)
    aside = {*general, *(document.source for document in guard)}
    _refuse_if_too_small(found.units, sizes, report, aside)
    splits = _divide(found.units, sizes)
    guarded = _guard_set(guard, guard_bytes, report) if guard else []
    held_out = [kept for name in HELD_OUT for kept in splits[name]]
    leaks = Leaks(held_out, guarded, found.known)
    splits["train"] = leaks.without(splits["train"], report.drop)
    _refuse_if_too_small({"": splits["train"]}, sizes, report, aside, train=True)
    splits["train"] += leaks.without(found.general, report.drop)
    if guarded:
        splits[GUARD] = guarded
    for name, split in splits.items():
        split.sort(key=lambda kept: kept.digest)
        for kept in split:
            report.splits[name][kept.source].update(texts=1, bytes=kept.bytes)
    return Corpus(splits, report)


def _distinct(
    documents: Iterable[Document],
    general: Collection[str],
    together: int,
    report: CorpusReport,
    progress: Callable[[str], None],
) -> _Distinct:
    """Return the texts without equals and near-duplicates; general ones give way to the others."""
    own: list[Document] = []
    others: list[Document] = []
    for document in documents:
        (others if document.source in general else own).append(document)
    units = _without_equals(_units(own, together, report), report)
    texts = _by_digest(kept for unit in units.values() for kept in unit)
    seen = {kept.digest for kept in texts}
    more = []
    for kept in _by_digest(kept for unit in _units(others, together, report).values() for kept in unit):
        if kept.digest in seen:
            report.drop(kept, "equal")
        else:
            seen.add(kept.digest)
            more.append(kept)
    texts += more
    progress(f"looking for near-duplicates among {len(texts)} texts")
    known = compared(texts)
    dropped = _near_duplicates(texts, known, report, progress)
    units = {
        unit: left
        for unit, members in units.items()
        if (left := [kept for kept in members if kept.digest not in dropped])
    }
    return _Distinct(units, [kept for kept in more if kept.digest not in dropped], known)


def _by_digest(texts: Iterable[Kept]) -> list[Kept]:
    return sorted(texts, key=lambda kept: kept.digest)


def _units(documents: Sequence[Document], together: int, report: CorpusReport) -> Units:
    """Return the units of texts and of conversations; of contents in several sources, the first by name counts."""
    texts = [document for document in documents if isinstance(document.content, str)]
    others = [document for document in documents if not isinstance(document.content, str)]
    return _text_units(texts, together, report) | _conversation_units(others, together, report)


def _text_units(documents: Iterable[Document], together: int, report: CorpusReport) -> Units:
    """Normalise and cut the texts."""
    normal = sorted((document.source, normalise(canonical(document.content))) for document in documents)
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


def _conversation_units(documents: Iterable[Document], together: int, report: CorpusReport) -> Units:
    """Put conversations and pairs that answer the same question together, unless they are very many."""
    named = sorted(
        ((document.source, canonical(document.content), document.content) for document in documents),
        key=lambda item: item[:2],
    )
    groups: dict[str, dict[str, Kept]] = defaultdict(dict)
    for source, name, content in named:
        kept = Kept(digest_of(name), source, content)
        report.read[source].update(documents=1, texts=1, bytes=kept.bytes)
        group = groups[question_of(content)]
        if kept.digest in group:
            report.drop(kept, "equal")
        else:
            group[kept.digest] = kept
    units: Units = defaultdict(list)
    for question, group in groups.items():
        spread = sum(kept.bytes for kept in group.values()) > together
        for kept in group.values():
            units[_unit_of(kept, question, spread=spread)].append(kept)
    return dict(units)


def _unit_of(kept: Kept, question: str, *, spread: bool) -> str:
    """Return the digest that decides to which split a conversation goes."""
    if not spread:
        return digest_of(question)
    if isinstance(kept.content, Preference):
        return digest_of(key_of(kept.content.prompt))
    return kept.digest


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


def _near_duplicates(
    texts: Sequence[Kept],
    known: Mapping[str, Compared],
    report: CorpusReport,
    progress: Callable[[str], None],
) -> set[str]:
    """Return the digests of the texts that resemble one before them; they are dropped."""

    def tell(done: int) -> None:
        if done and done % 1000 == 0:
            progress(f"near-duplicates: {done} of {len(texts)} texts compared")

    sides = [known[kept.digest] for kept in texts]
    found = near_duplicates([one.whole for one in sides], tell, answers=[one.said for one in sides])
    for index in sorted(found, key=lambda index: texts[index].digest):
        report.drop(texts[index], "near-duplicate")
    return {texts[index].digest for index in found}


def _guard_set(documents: Iterable[Document], most_bytes: int, report: CorpusReport) -> list[Kept]:
    """Return texts of at most so many bytes, in the order of their digests; `SourceError` if there is none."""
    pieces = _text_units(documents, 0, report)
    chosen: list[Kept] = []
    left = most_bytes
    for kept in _by_digest(kept for unit in pieces.values() for kept in unit):
        if kept.bytes <= left:
            chosen.append(kept)
            left -= kept.bytes
    found = near_duplicates([shingles(kept.text) for kept in chosen], lambda _: None)
    for index in found:
        report.drop(chosen[index], "near-duplicate")
    if not chosen:
        raise SourceError(f"the guard set has no text of at most {most_bytes} bytes: allow more")
    return [kept for index, kept in enumerate(chosen) if index not in found]


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


def _refuse_if_too_small(
    units: Units, sizes: SplitSizes, report: CorpusReport, aside: Collection[str], *, train: bool = False
) -> None:
    """Raise if what is left does not fill four splits, or train alone its half; sources ``aside`` do not count."""
    left = sum(kept.bytes for members in units.values() for kept in members)
    least = sizes.least_bytes // 2 if train else sizes.least_bytes
    if left >= least:
        return
    read = sum(counts["bytes"] for source, counts in report.read.items() if source not in aside)
    wanted = ", ".join(f"{sizes.of(name)} for {name}" for name in HELD_OUT)
    whole = "" if train else f" ({wanted}, and as much again for train)"
    raise SourceError(
        f"the sources are too small for four splits: {read} bytes were read, after removing duplicates {left} are left"
        f"{' for train' if train else ''}, but {least} are needed{whole}:"
        " add text or ask for smaller splits"
    )
