"""Which texts say the same: near-duplicates within a corpus, and train texts that quote held-out ones.

A text is the set of its runs of five words (a *shingle*), so layout, case and line breaks do not matter. Candidates for
near-duplicates come from MinHash with locality-sensitive hashing (Broder 1997; the library is datasketch) and are then
compared exactly, so that chance decides what is looked at, never what is dropped. Resemblance is symmetric and misses a
short text inside a long one; therefore train is also checked for *containment*: a train text is a quote if most of a
held-out text's shingles are in it, or most of its own are in one held-out text.

Shingles are 64-bit numbers made from BLAKE2 digests of words: the same on any machine, in any process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Shingles = npt.NDArray[np.uint64]
"""Sorted and unique."""

RESEMBLANCE = 0.7
"""Two texts are near-duplicates from this share of common shingles (Jaccard) on."""
CONTAINMENT = 0.5
"""A train text is a quote of a held-out one from this share of either's shingles on, …"""
_LEAST_QUOTE = 30
"""… if it is longer than a greeting, a signature or an import block: this many shingles."""
_WORDS_PER_SHINGLE = 5
_PERMUTATIONS = 64
_BANDS = (16, 4)
"""16 bands of 4 rows: a pair at the threshold of 0.7 becomes a candidate with probability 0.99 (1 - (1 - 0.7⁴)¹⁶)."""
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")
"""A word, a sign, or one character of a script that writes without spaces."""


@lru_cache(maxsize=1 << 18)
def _word_number(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8"), digest_size=8).digest(), "little")


def shingles(text: str) -> Shingles:
    """Return the numbers of a text's runs of five words; a shorter text is one run, one without words has none."""
    words = np.array([_word_number(word) for word in _WORD.findall(text.casefold())], dtype=np.uint64)
    if not len(words):
        return words
    width = min(_WORDS_PER_SHINGLE, len(words))
    runs = np.zeros(len(words) - width + 1, dtype=np.uint64)
    for offset in range(width):  # polynomial hash: order matters
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + len(runs)]
    runs ^= runs >> np.uint64(31)
    return np.unique(runs * np.uint64(0xBF58476D1CE4E5B9))


def near_duplicates(
    texts: Sequence[Shingles],
    progress: Callable[[int], None],
    *,
    answers: Sequence[Shingles] | None = None,
    kept: int | None = None,
) -> dict[int, int]:
    """Return which texts to drop: index of each near-duplicate to the index of the earlier text that it repeats.

    Earlier texts win, so the caller's order decides; the texts that stay do not resemble each other (as far as
    candidates were found). ``progress`` is told how many texts are done. With ``answers``, one for each text, these
    have to resemble each other too. With ``kept``, the first so many texts are those that the others are compared with,
    and nothing else is compared.
    """
    # Imported here, because it takes a second.
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=_PERMUTATIONS, params=_BANDS)
    permutations = MinHash(_PERMUTATIONS, scheme="affine64").permutations
    dropped: dict[int, int] = {}
    for number, text in enumerate(texts):
        progress(number)
        if not len(text):
            continue
        compared = kept is None or number >= kept
        sketch = MinHash(_PERMUTATIONS, hashfunc=int, permutations=permutations, scheme="affine64")
        sketch.update_batch(text)
        for other in sorted(index.query(sketch)) if compared else ():
            alike = answers is None or _resemblance(answers[number], answers[other]) >= RESEMBLANCE
            if alike and _resemblance(text, texts[other]) >= RESEMBLANCE:
                dropped[number] = other
                break
        else:
            if kept is None or number < kept:
                index.insert(number, sketch)
    return dropped


def _resemblance(one: Shingles, other: Shingles) -> float:
    """Return the Jaccard index: common shingles as a share of all."""
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common) if common else float(not len(one) and not len(other))


def common_to_many(texts: Sequence[Shingles], share: float, least: int) -> Shingles:
    """Return the shingles that more than a share of the texts hold, and more than ``least`` of them."""
    keys, counts = np.unique(np.concatenate([*texts, np.empty(0, np.uint64)]), return_counts=True)
    common: Shingles = keys[counts > max(least, share * len(texts))]
    return common


class HeldOut:
    """Held-out texts, indexed by shingle, to find the train texts that quote them."""

    def __init__(self, texts: Sequence[Shingles]) -> None:
        owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        keys = np.concatenate([*texts, np.empty(0, np.uint64)])
        order = np.argsort(keys, kind="stable")
        self._keys, self._owners = keys[order], owners[order]
        self._sizes = np.array([len(text) for text in texts], dtype=np.int64)

    def quoted_by(self, text: Shingles) -> int | None:
        """Return the held-out text that ``text`` quotes most of (or is mostly a quote of), or None."""
        left = np.searchsorted(self._keys, text, side="left")
        counts = np.searchsorted(self._keys, text, side="right") - left
        hit = counts > 0
        if not hit.any():
            return None
        left, counts = left[hit], counts[hit]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        common = np.bincount(self._owners[np.repeat(left, counts) + within], minlength=len(self._sizes))
        common[common < _LEAST_QUOTE] = 0
        share = common / np.minimum(np.maximum(self._sizes, 1), len(text))
        worst = int(share.argmax())
        return worst if share[worst] >= CONTAINMENT else None
