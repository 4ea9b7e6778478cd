"""Texts and their names: how they are tidied and cut, and the digests that decide everything else."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from frozen.conversations import Content, parts_of

PIECE_BYTES = 16 * 1024
_BORDER_LINES = 16
"""One line in so many may end a piece once the piece is half full."""
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


@dataclass(frozen=True, slots=True)
class Kept:
    """One text, conversation or pair of a split."""

    digest: str
    """SHA-256 of the UTF-8 bytes of the text, or of the row as which the content would be published, in hexadecimal."""
    source: str
    content: Content
    """As it is trained on and scored: line ends are ``\\n``, no byte-order mark."""

    @property
    def text(self) -> str:
        """The text; of other contents, all that they say."""
        return self.content if isinstance(self.content, str) else "\n".join(parts_of(self.content))

    @property
    def bytes(self) -> int:
        """UTF-8 bytes: of a text, what a score per byte is divided by; of other contents, of all that they say."""
        return sum(len(part.encode("utf-8")) for part in parts_of(self.content))


def digest_of(text: str) -> str:
    """Return a text's name: SHA-256 of its UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def normalise(text: str) -> str:
    """Return a text with line feeds as line ends, without byte-order mark, blank first lines and trailing space."""
    return _trim(text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff"))


def _trim(text: str) -> str:
    """Return a text without blank first lines and trailing white space; the first line keeps its indentation."""
    return _BLANK_LINES.sub("", text).rstrip()


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
