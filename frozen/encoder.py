"""A tokenizer that is given, with what its folder says about it: special tokens and chat template.

``tokenizer.json`` alone decides how text becomes tokens. What is *special* in it (``<|im_end|>``, ``</s>``) is a token
only where a chat template writes it; in what people wrote it is text like any other, whatever it spells
(`Encoder.as_text`). Other added tokens (``<think>``) are part of the vocabulary of text and stay what they are.

Sentencepiece-style tokenizers put a space before what they encode. That is right at the start of a text and wrong in
its middle, so a part of a text is encoded behind a line feed, and the line feed's tokens are taken away
(`Encoder.part`). Some put the space behind special tokens as well; that is found out when they are loaded.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from frozen.rows import SourceError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BATCH = 1024
"""Texts that are encoded at once, on all cores."""


class Pieces(NamedTuple):
    """Tokens, and the characters of the encoded text that each stands for; several can stand for one character."""

    ids: list[int]
    spans: list[tuple[int, int]]


class Encoder:
    """A loaded tokenizer. `SourceError` if the folder holds none that can be used."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        try:
            content = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise SourceError(f"{folder} has no tokenizer.json: save the tokenizer with `save_pretrained`") from error
        except (OSError, ValueError) as error:
            raise SourceError(f"{path} cannot be read: {error}") from error
        try:
            # The library raises bare exceptions for whatever does not fit.
            self._spelled, self._plain = Tokenizer.from_str(content), Tokenizer.from_str(content)
        except Exception as error:
            raise SourceError(f"{path} holds no tokenizer: {str(error)[:200]}") from error
        self.folder = folder
        self.first = _token_put_first(self._spelled)
        """What the tokenizer itself puts before a text."""
        self._plain.encode_special_tokens = True
        for tokenizer in (self._spelled, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.post_processor = None  # it would trim the white space from the spans of tokens
        self.settings = _settings(folder)
        self.template = chat_template(folder)
        self.added = {number: token.content for number, token in self._spelled.get_added_tokens_decoder().items()}
        """Tokens that are found in a text before anything else, special or not."""
        flagged = {number for number, token in self._spelled.get_added_tokens_decoder().items() if token.special}
        named = {self._id_of(name) for name in ("bos_token", "eos_token")} - {None}
        self.special = frozenset(flagged | {number for number in named if number is not None})
        self.bos, self.eos, self.unknown = (self._id_of(name) for name in ("bos_token", "eos_token", "unk_token"))
        unknown = {self.unknown, self._unknown_of_model()}
        self._never_text = self.special - {number for number in unknown if number is not None}
        """What no text may become. The unknown token stands for text that the tokenizer does not know."""
        spelled = sorted((self._content(number) for number in self.special), key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, filter(None, spelled))) or r"(?!)")
        self._unlike_start = self._differing()
        self._prefixes = "text" in self._unlike_start

    @property
    def size(self) -> int:
        """One more than the largest token."""
        return 1 + max(self._spelled.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def separator(self) -> int:
        """What stands before a text: the token that the tokenizer puts there itself, else bos, else eos."""
        for token in (self.first, self.bos, self.eos):
            if token is not None:
                return token
        raise SourceError(
            f"the tokenizer in {self.folder} names neither a bos_token nor an eos_token in tokenizer_config.json:"
            " nothing can stand between two documents"
        )

    def name(self, token: int) -> str:
        """Return how a token is written."""
        return str(self._spelled.id_to_token(token))

    def _content(self, token: int) -> str:
        return self.added.get(token) or self.name(token)

    def _id_of(self, name: str) -> int | None:
        """Return the id of a token that the settings name, such as ``bos_token``."""
        content = self.settings.get(name)
        return None if content is None else self._spelled.token_to_id(content)

    def _unknown_of_model(self) -> int | None:
        name = getattr(self._plain.model, "unk_token", None)
        return self._plain.token_to_id(name) if isinstance(name, str) else None

    # --- text to tokens -------------------------------------------------------------------------------------------

    def as_template(self, text: str) -> Pieces:
        """Return a text's tokens, special ones among them."""
        return _pieces(self._spelled.encode(text, add_special_tokens=False))

    def as_text(self, text: str) -> Pieces:
        """Return a text's tokens, none of them special, whatever the text spells."""
        pieces = _pieces(self._plain.encode(text, add_special_tokens=False))
        return pieces if self._never_text.isdisjoint(pieces.ids) else self._broken_up(text)

    def spells_special(self, text: str) -> bool:
        """Tell whether a text holds the name of a special token."""
        return self._special_text.search(text) is not None

    def part(self, text: str, after: Literal["nothing", "special", "text"]) -> Pieces:
        """Return the tokens of a part of a text, none of them special, as they are behind what stands before it."""
        if not text or after not in self._unlike_start:
            return self.as_text(text)
        anchor = "\n"
        pieces = self.as_text(anchor + text)
        begin = next((index for index, (start, _) in enumerate(pieces.spans) if start >= len(anchor)), None)
        if begin is None or any(end > len(anchor) for _, end in pieces.spans[:begin]):
            return self.as_text(text)  # the anchor and the text are one token: there is no telling them apart
        spans = [(start - len(anchor), end - len(anchor)) for start, end in pieces.spans[begin:]]
        return Pieces(pieces.ids[begin:], spans)

    def texts(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the tokens of each of many whole texts."""
        for begin in range(0, len(texts), _BATCH):
            batch = texts[begin : begin + _BATCH]
            for text, encoding in zip(batch, self._plain.encode_batch(batch, add_special_tokens=False), strict=True):
                ids = encoding.ids
                yield np.array(ids if self._never_text.isdisjoint(ids) else self._broken_up(text).ids, dtype=np.uint32)

    def _broken_up(self, text: str) -> Pieces:
        """Encode a text so that names of special tokens are broken after their first character.

        Needed where the tokenizer's own vocabulary holds a special token as a word (sentencepiece's ``<s>``), so that
        it is found although added tokens are not looked for.
        """
        borders = [0, *(match.start() + 1 for match in self._special_text.finditer(text)), len(text)]
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for begin, end in pairwise(borders):
            anchor = "\n" if begin and self._prefixes else ""
            pieces = _pieces(self._plain.encode(anchor + text[begin:end], add_special_tokens=False))
            for token, (start, stop) in zip(*pieces, strict=True):
                if stop > len(anchor):
                    ids.append(token)
                    spans.append((begin + max(0, start - len(anchor)), begin + stop - len(anchor)))
        if not self._never_text.isdisjoint(ids):
            raise SourceError(f"the tokenizer in {self.folder} makes special tokens of plain text: it cannot be used")
        return Pieces(ids, spans)

    def _differing(self) -> frozenset[str]:
        """Return behind what the middle of a text is encoded in another way than its start."""
        found = set()
        special = [] if not self.special else [self._content(min(self.special))]
        for after, anchors in (("special", special), ("text", ["\n"])):
            for anchor, text in product(anchors, ("a", "1", "é", ".")):
                before = self.as_template(anchor).ids
                if self.as_template(anchor + text).ids != [*before, *self._plain.encode(text).ids]:
                    found.add(after)
        return frozenset(found)

    # --- tokens to text -------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones spelled out."""
        return str(self._spelled.decode(list(ids), skip_special_tokens=False))

    def gives_back(self, ids: Sequence[int], text: str) -> bool:
        """Tell whether tokens decode to a text, alone or in the middle of one.

        Sentencepiece-style decoders take a space from the start of what they decode. Forms of one character that
        Unicode calls canonically equivalent count as equal: many tokenizers compose them.
        """
        decoded = self.decode(ids)
        if decoded == text:
            return True
        if self._prefixes:
            line = self._plain.encode("\n", add_special_tokens=False).ids
            before = self.decode(line)
            behind = self.decode([*line, *ids])
            if behind.startswith(before) and _same(behind[len(before) :], text):
                return True
        return _same(decoded, text)

    def lossy(self, texts: Sequence[str], tokens: Sequence[npt.NDArray[np.uint32]]) -> list[int]:
        """Return the numbers of the texts that their tokens do not give back."""
        decoded = self._spelled.decode_batch([ids.tolist() for ids in tokens], skip_special_tokens=False)
        return [
            number
            for number, (text, back) in enumerate(zip(texts, decoded, strict=True))
            if back != text and not self.gives_back(tokens[number].tolist(), text)
        ]


def _same(one: str, other: str) -> bool:
    return one == other or unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)


def _pieces(encoding: Encoding) -> Pieces:
    return Pieces(encoding.ids, encoding.offsets)


def _token_put_first(tokenizer: Tokenizer) -> int | None:
    """Return the token that the tokenizer puts before every text, if it does."""
    with_it, without = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    return int(with_it[0]) if len(with_it) > len(without) and with_it[: len(without)] != without else None


# --- the folder ---------------------------------------------------------------------------------------------------


def _settings(folder: Path) -> dict[str, str]:
    """Return the names of the tokens with a role: ``bos_token`` to ``<s>``."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the second is read by today's libraries
        values = _json_object(folder / name)
        for role in _NAMED:
            value = values.get(role)
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str) and content:
                found[role] = content
    return found


def chat_template(folder: Path) -> str | None:
    """Return the chat template of a model's folder, from wherever it is kept, or None."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _json_object(folder / name).get("chat_template")
        if isinstance(found, str):
            return found
        if isinstance(found, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
            if isinstance(named.get("default"), str):
                return str(named["default"])
    return None


def _json_object(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, Mapping) else {}
