"""What of texts and conversations is compared, and which train texts tell what is in held-out ones."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from frozen.conversations import Content, Conversation, Preference, Turn, parts_of
from frozen.duplicates import HeldOut, Shingles, common_to_many, near_duplicates, shingles
from frozen.pieces import Kept

_BOILERPLATE_SHARE = 0.01
_BOILERPLATE_LEAST = 10
"""Runs of words in more of the conversations' questions than this share and this number are a template's."""
_SIGNS = "".join(sign for sign in map(chr, range(0x10000)) if unicodedata.category(sign).startswith("P"))
"""A question with a question mark is the question without one."""
Drop = Callable[[Kept, str], None]
"""Is told a text that is dropped, and the reason."""


class Compared(NamedTuple):
    """What of a text is compared with others."""

    whole: Shingles
    said: Shingles
    """Of a conversation, the answers; of a text, all of it."""


def compared(texts: Sequence[Kept]) -> dict[str, Compared]:
    """Return what of each text is compared, by digest."""
    known: dict[str, Compared] = {}
    asked: dict[str, Shingles] = {}
    for kept in texts:
        if isinstance(kept.content, str):
            runs = shingles(kept.content)
            known[kept.digest] = Compared(runs, runs)
        else:
            context, answers = _sides(kept.content)
            asked[kept.digest] = shingles(context)
            known[kept.digest] = Compared(asked[kept.digest], shingles(answers))
    if asked:
        boilerplate = common_to_many(list(asked.values()), _BOILERPLATE_SHARE, _BOILERPLATE_LEAST)
        for digest, context_runs in asked.items():
            said = known[digest].said
            own = np.setdiff1d(context_runs, boilerplate, assume_unique=True)
            known[digest] = Compared(np.union1d(own, said), said)
    return known


def _sides(content: Conversation | Preference) -> tuple[str, str]:
    """Return what was asked and what was answered. Earlier answers in the prompt of a pair are part of the prompt."""
    if isinstance(content, Preference):
        asked, said = [turn.content for turn in content.prompt if turn.role != "system"], parts_of(content)[-2:]
    else:
        asked, said = [turn.content for turn in content.turns if turn.role == "user"], content.answers
    return "\n".join(asked), "\n".join(said)


def question_of(content: Content) -> str:
    """Return what a conversation begins with: its first user turn, as `key_of` has it."""
    assert not isinstance(content, str)
    turns = content.turns if isinstance(content, Conversation) else content.prompt
    return key_of([next(turn for turn in turns if turn.role == "user")])


def _exchange(content: Content) -> str | None:
    """Return a conversation's first question and answer."""
    if not isinstance(content, Conversation):
        return None
    turns = [turn for turn in content.turns if turn.role != "system"]
    return key_of(turns[:2])


def key_of(turns: Iterable[Turn]) -> str:
    """Return what turns say, but for case, white space and the signs around words; system turns are left out."""
    return "\0".join(_words_of(turn.content) for turn in turns if turn.role != "system")


def _words_of(text: str) -> str:
    words = text.casefold().split()
    bare = [word for word in (word.strip(_SIGNS) for word in words) if word]
    return " ".join(bare or words)


class Leaks:
    """Finds the train texts that tell what is in held-out ones."""

    def __init__(self, held_out: Sequence[Kept], guard: Sequence[Kept], known: Mapping[str, Compared]) -> None:
        self._known = known
        self._guard = [shingles(kept.text) for kept in guard]
        self._said = HeldOut([*(known[kept.digest].said for kept in held_out), *self._guard])
        self._guarded = len(held_out)
        self._exchanges = {_exchange(kept.content) for kept in held_out} - {None}

    def without(self, train: Sequence[Kept], drop: Drop) -> list[Kept]:
        """Return the texts that tell nothing held out."""
        own = [self._known[kept.digest].said for kept in train]
        like_guard = near_duplicates([*self._guard, *own], lambda _: None, kept=len(self._guard)) if self._guard else {}
        left = []
        for index, kept in enumerate(train):
            quoted = self._said.quoted_by(own[index])
            if quoted is None and index + len(self._guard) not in like_guard:
                if _exchange(kept.content) in self._exchanges:
                    drop(kept, "first answer is a held-out one's")
                else:
                    left.append(kept)
            elif quoted is not None and quoted < self._guarded:
                drop(kept, "quotes a held-out text")
            else:
                drop(kept, "is in the guard set")
        return left
