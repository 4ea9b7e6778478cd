"""``overnight data``: what would be made of data, before a study is: formats, lengths, duplicates, samples, faults.

Nothing is written. What rows hold is other people's text: it is quoted, cut, and cannot steer a terminal.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from frozen.chat import Chat
from frozen.conversations import Content, Conversation, Kind, canonical, parts_of
from frozen.corpus import CorpusReport, distinct
from frozen.encoder import Encoder
from frozen.encoding import Conversations, encode_conversations, spread
from frozen.formats import Document, Reading, Source, SourceError, fault_of, look
from frozen.pieces import digest_of
from harness import disk
from harness.config import Task
from harness.errors import BadInput
from harness.reading import console, put
from harness.sources import OPTIONS, as_source, data_sources, refuse_guard_options
from harness.studyfile import check_choice

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SAMPLES = 50
"""Shown in all, drawn with `SEED` from every source alike."""
SEED = 0
SHOWN_REJECTIONS = 20
DOCUMENT_REJECTIONS = 1000
"""Places that are named on the screen and in the JSON document."""
LONGEST_SAMPLE = 200
"""Characters of a sample."""
KIND_OF_TASK: dict[Task, Kind] = {
    "pretrain": "text",
    "continue": "text",
    "sft": "conversation",
    "dpo": "preference",
}
NOUNS: dict[Kind, str] = {"text": "texts", "conversation": "conversations", "preference": "preference pairs"}
_JOINER = "\u200d"
"""Format character that emoji are made with; the others can turn a line around."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """What was found in one source."""

    source: Source
    reading: Reading
    tokens: dict[str, int] | None
    """Lengths of its documents under the model's tokenizer."""
    lossy: int | None
    """Texts that the tokenizer does not give back."""
    fault: str | None
    """Why the source would be refused."""


def data(arguments: argparse.Namespace) -> int:
    """Print what would be made of data; exit code 2 if some of it would be refused."""
    if arguments.task is not None:
        check_choice("task", arguments.task, get_args(Task))
    options = {name: given for name in OPTIONS if (given := getattr(arguments, name))}
    sources = [as_source(source) for source in data_sources(arguments.sources, (), options)]
    refuse_guard_options(options)
    try:
        encoder = None if arguments.model is None else Encoder(_folder(arguments.model))
        found = [_look(source, encoder, arguments.task, _say) for source in sources]
        documents = [document for one in found for document in one.reading.documents]
        duplicates = distinct(documents, progress=_say)
    except SourceError as error:
        raise BadInput(str(error)) from error
    if arguments.json:
        put({"sources": [_document(one, duplicates, len(found)) for one in found]})
    else:
        out = console()
        for one in found:
            out.print(_view(one, duplicates, len(found)))
    faults = [one.fault for one in found if one.fault is not None]
    if faults:
        raise BadInput("; ".join(faults))
    return 0


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise BadInput(f"there is no folder {text!r}: --model takes the folder of a model or of its tokenizer")
    return Path(text)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"{text} …", file=sys.stderr)  # noqa: T201


def _look(source: Source, encoder: Encoder | None, task: Task | None, say: Say) -> Found:
    """Read one source, and encode it if there is a tokenizer."""
    say(f"reading {source.name}")
    reading = look(source)
    fault = fault_of(source, reading)
    if fault is None and task is not None and reading.kind != KIND_OF_TASK[task]:
        fault = f"source {source.name} holds {NOUNS[reading.kind]}, and --task {task} needs {NOUNS[KIND_OF_TASK[task]]}"
    if encoder is None or not reading.documents:
        return Found(source, reading, None, None, fault)
    if reading.kind == "text":
        lengths, lossy = _text_lengths(encoder, reading.documents)
        return Found(source, reading, spread(lengths), lossy, fault)
    try:
        kept, encoded = encode_conversations({source.name: reading}, Chat(encoder), say)
    except SourceError as error:
        reading.documents = []
        return Found(source, reading, None, None, fault or str(error))
    reading.documents = kept[source.name]
    return Found(source, reading, spread(_lengths(reading.documents, encoded)), None, fault)


def _text_lengths(encoder: Encoder, documents: Sequence[Document]) -> tuple[Any, int]:
    """Return texts' lengths in tokens, and how many of them lose something."""
    lengths, lossy = [], 0
    for begin in range(0, len(documents), 256):
        texts = [str(document.content) for document in documents[begin : begin + 256]]
        tokens = list(encoder.texts(texts))
        lengths += [len(ids) for ids in tokens]
        lossy += len(encoder.lossy(texts, tokens))
    return np.array(lengths), lossy


def _lengths(documents: Sequence[Document], encoded: Conversations) -> Any:
    return np.array([len(part.tokens) for one in documents for part in encoded[digest_of(canonical(one.content))]])


# --- what is shown --------------------------------------------------------------------------------------------------


def _document(found: Found, duplicates: CorpusReport, sources: int) -> dict[str, Any]:
    """Return what was found as plain JSON values."""
    reading = found.reading
    return {
        "name": found.source.name,
        "place": found.source.place,
        "format": reading.shape,
        "kind": reading.kind,
        "why": reading.why,
        "files": dict(sorted(reading.containers.items())),
        "revision": reading.revision,
        "documents": len(reading.documents),
        "bytes": _bytes(reading),
        "characters": spread(np.array(_characters(reading))),
        "tokens": found.tokens,
        "lossy": found.lossy,
        "malformed": reading.malformed,
        "rejected": len(reading.rejected),
        "reasons": dict(_reasons(reading)),
        "first": [{"where": item.where, "reason": item.reason} for item in reading.rejected[:DOCUMENT_REJECTIONS]],
        "changed": dict(reading.notes),
        "other_files": dict(reading.other_files),
        "duplicates": _duplicates(found.source.name, duplicates),
        "samples": [{"where": one.where, "text": preview(one.content)} for one in _samples(reading, sources)],
        "fault": found.fault,
    }


def _bytes(reading: Reading) -> int:
    return sum(len(part.encode("utf-8")) for one in reading.documents for part in parts_of(one.content))


def _characters(reading: Reading) -> list[int]:
    return [sum(map(len, parts_of(one.content))) for one in reading.documents]


def _reasons(reading: Reading) -> list[tuple[str, int]]:
    """Return reasons and counts, most frequent first; what differs from row to row only in a number is one reason."""
    return Counter(re.sub(r"(?<![\w-])\d+\b", "N", item.reason) for item in reading.rejected).most_common()


def _duplicates(name: str, report: CorpusReport) -> dict[str, int]:
    return {reason: counts["texts"] for reason, counts in sorted(report.dropped.get(name, {}).items())}


def _samples(reading: Reading, sources: int) -> list[Document]:
    """Return documents drawn at random, in the order of reading."""
    count = min(len(reading.documents), max(1, SAMPLES // sources))
    chosen = random.Random(SEED).sample(range(len(reading.documents)), count)
    return [reading.documents[index] for index in sorted(chosen)]


def preview(content: Content) -> str:
    """Return the beginning of a content in one line, quoted."""
    said: list[tuple[str, str]]
    if isinstance(content, str):
        return quoted(content, LONGEST_SAMPLE)
    if isinstance(content, Conversation):
        said = [(turn.role, turn.content) for turn in content.turns]
    else:
        question = [(turn.role, turn.content) for turn in content.prompt[-1:]]
        said = [*question, ("chosen", content.chosen), ("rejected", content.rejected)]
    shown = said if len(said) < 4 else [*said[:3], ("…", f"{len(said) - 3} more turns")]
    share = LONGEST_SAMPLE // len(shown)
    return "  ".join(f"{role}: {quoted(text, share)}" if role != "…" else f"… {text}" for role, text in shown)


def quoted(text: str, most: int) -> str:
    """Return a text in quotation marks, cut, in one line, without anything that a terminal obeys."""
    return f"“{harmless(text, most)}”"


def harmless(text: str, most: int) -> str:
    """Return a text cut and in one line; control, format and private characters become the replacement character."""
    cut = " ".join(text[: 4 * most].split())
    cut = cut[: most - 1] + "…" if len(cut) > most or len(text) > 4 * most else cut
    return "".join(character if _is_harmless(character) else "\N{REPLACEMENT CHARACTER}" for character in cut)


def _is_harmless(character: str) -> bool:
    return character == _JOINER or not unicodedata.category(character).startswith("C")


def _view(found: Found, duplicates: CorpusReport, sources: int) -> RenderableType:
    """Return what was found for people."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(found, duplicates):
        facts.add_row(name, harmless(value, 1000))
    title = Text(f"{harmless(found.source.name, 80)}  ", style="bold") + Text(harmless(found.source.place, 300))
    parts: list[RenderableType] = [title, Padding(facts, (0, 0, 0, 2))]
    reading = found.reading
    if reading.rejected:
        more = len(reading.rejected) - SHOWN_REJECTIONS
        rest = f" (the first {SHOWN_REJECTIONS}; --json has more)" if more > 0 else ""
        parts += [
            Text(f"  left out{rest}", style="dim"),
            _list((item.where, item.reason) for item in reading.rejected[:SHOWN_REJECTIONS]),
        ]
    samples = _samples(reading, sources)
    if samples:
        parts += [
            Text(f"  {len(samples)} of {len(reading.documents)}, drawn at random", style="dim"),
            _list((one.where, preview(one.content)) for one in samples),
        ]
    return Group(*parts, Text())


def _list(rows: Any) -> RenderableType:
    """Return places and what is to be said about them."""
    from rich.padding import Padding
    from rich.table import Table

    table: Table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", overflow="fold", max_width=32)
    table.add_column(overflow="fold")
    for where, what in rows:
        table.add_row(harmless(where, 100), harmless(what, 2 * LONGEST_SAMPLE))
    return Padding(table, (0, 0, 0, 4))


def _facts(found: Found, duplicates: CorpusReport) -> list[tuple[str, str]]:
    """Return names and values of what there is to say about a source."""
    reading = found.reading
    facts = [("read as", f"{reading.shape}: {reading.why}")]
    if reading.containers:
        files = ", ".join(f"{count} × {kind}" for kind, count in sorted(reading.containers.items()))
        facts.append(("files", files + (f", commit {reading.revision}" if reading.revision else "")))
    facts.append(("holds", f"{len(reading.documents)} {NOUNS[reading.kind]}, {disk.readable(_bytes(reading))}"))
    if reading.documents:
        facts.append(("lengths", _spread(spread(np.array(_characters(reading))), "characters")))
    if found.tokens is not None:
        facts.append(("", _spread(found.tokens, "tokens")))
    if found.lossy:
        facts.append(("loss", f"{found.lossy} texts that the tokenizer does not give back as they were"))
    dropped = _duplicates(found.source.name, duplicates)
    facts.append(("duplicates", ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none"))
    for reason, count in reading.notes.items():
        facts.append(("changed", f"{count} times {reason}"))
    for reason, count in _reasons(reading)[:8]:
        facts.append(("left out", f"{count} × {reason}"))
    if reading.other_files:
        others = ", ".join(f"{count} {suffix}" for suffix, count in reading.other_files.most_common(8))
        facts.append(("not read", others))
    if found.fault is not None:
        facts.append(("refused", found.fault))
    return facts


def _spread(lengths: dict[str, int], unit: str) -> str:
    middle, most, longest = lengths["median"], lengths["p90"], lengths["longest"]
    return f"{middle} {unit} in the middle, nine in ten up to {most}, the longest {longest}"
