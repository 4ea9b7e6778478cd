"""How foreign texts and numbers are put before a language model: quoted and cut, and no finer than the noise.

What a job, a log, a person or another agent wrote may hold instructions, control characters or lines that look like
ours. Here it becomes one short line between « and », in which nothing can end the quotation, open a heading or a table
row, or pose as a tag. What is a name by nature (source, model, knob) becomes a word without a single space.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from agent.space import show
from harness.config import Value
from harness.records import Noise

LONGEST_QUOTE = 160
LONGEST_WORD = 48
MOST_CHANGES = 6
"""Knobs of a diff that are written out; no admitted proposal turns more in our own policies."""
LONGEST_CHANGES = 300
NOTHING = "–"
UNTIL_KNOWN = Noise(standard_deviation=0.01, degrees_of_freedom=1)
"""Rounds to two decimals before the noise is known, or where no spread was seen."""
_SWAPS = {"`": "'", "«": "‹", "»": "›", "<": "‹", ">": "›", "|": "¦", "#": "♯"}
_NO_WORD = re.compile(r"[^A-Za-z0-9._:/@+-]")


def quoted(text: str, most: int = LONGEST_QUOTE) -> str:
    """Return foreign text as one quotation of at most ``most`` characters, its two marks aside."""
    return f"«{one_line(text, most)}»"


def one_line(text: str, most: int) -> str:
    """Return text without line breaks, control and formatting characters and our own marks, cut to ``most``."""
    start = text[: 8 * most]  # a log of megabytes is not worth a look at each of its characters
    clean = " ".join("".join(map(_harmless, start)).split())
    return clean if len(clean) <= most and len(start) == len(text) else clean[: most - 1] + "…"


def _harmless(character: str) -> str:
    if character in _SWAPS:
        return _SWAPS[character]
    if character.isspace() or unicodedata.category(character).startswith("Z"):
        return " "
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character).startswith("C") else character


def word(text: str, most: int = LONGEST_WORD) -> str:
    """Return a name that somebody else chose as a single word; what no name needs becomes a question mark."""
    return _NO_WORD.sub("?", text[:most]) or "?"


def value(item: Value | None) -> str:
    """Return a knob's value; text as a word."""
    return NOTHING if item is None else word(item) if isinstance(item, str) else show(item)


def changes(diff: Mapping[str, Value], before: Mapping[str, Value] | None) -> str:
    """Return a diff as ``knob old→new``, without the old values where the parent is not known."""
    known = before or {}
    parts = [
        f"{word(name)} {value(known[name])}→{value(new)}" if name in known else f"{word(name)} = {value(new)}"
        for name, new in sorted(diff.items())[:MOST_CHANGES]
    ]
    text, more = ", ".join(parts), len(diff) - len(parts)
    cut = text if len(text) <= LONGEST_CHANGES else text[: LONGEST_CHANGES - 1] + "…"
    return cut + (f" and {more} more" if more else "")


def size(size_bytes: int | None) -> str:
    """Return a size as people write it, in powers of 1000 as in the tables for people."""
    if size_bytes is None:
        return NOTHING
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.3g} MB"


def number(item: float | None, digits: int = 3) -> str:
    """Return a number with few digits and no exponent where that is readable."""
    if item is None or not math.isfinite(item):
        return NOTHING
    if abs(item) >= 1000:
        return f"{round(item, digits - 1 - math.floor(math.log10(abs(item)))):,.0f}"
    return f"{item:.{digits}g}"


def share(item: float | None) -> str:
    """Return a share of one in percent."""
    return NOTHING if item is None else f"{item:.0%}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Writes scores and differences to the nearest `Noise.step`."""

    noise: Noise

    @classmethod
    def of(cls, noise: Noise | None) -> Figures:
        """Return what writes figures at this noise; two decimals where it is not known."""
        return cls(UNTIL_KNOWN if noise is None or noise.step == 0 else noise)

    @property
    def step(self) -> float:
        """What figures are rounded to."""
        return self.noise.step

    def rounded(self, figure: float) -> float:
        """Return a score or a difference as it may be shown, and as it may be ranked by."""
        return self.noise.rounded(figure) + 0.0  # the sum turns a negative zero into zero

    def score(self, score: float | None) -> str:
        """Return a score."""
        return NOTHING if score is None else f"{self.rounded(score):.{self._decimals}f}"

    def difference(self, difference: float | None) -> str:
        """Return a difference with its sign; one below half a step is 0, without a sign."""
        if difference is None:
            return NOTHING
        shown = self.rounded(difference)
        return f"{shown:{'+' if shown else ''}.{self._decimals}f}"

    def error(self, standard_error: float | None) -> str:
        """Return `` ± standard error`` with two digits, or nothing where it is not known."""
        return "" if standard_error is None else f" ± {standard_error:.2g}"

    @property
    def _decimals(self) -> int:
        return max(0, -math.floor(math.log10(self.step)))
