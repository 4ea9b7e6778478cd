"""What a row can say, beyond plain text: a conversation, or two answers of which people prefer one.

The shapes are those in which data sets are published:

- ``text``: a field ``text`` (or the one that its owner names).
- ``alpaca``: ``instruction`` and ``output``, with an optional ``input``, ``system`` and ``history``. The input follows
  the instruction after a blank line, in the same turn.
- ``chat``: a list ``messages`` of ``role`` and ``content``, or ShareGPT's ``conversations`` of ``from`` and ``value``.
- ``prompt_completion``: ``prompt`` and ``completion``, two texts or two lists of messages.
- ``preference``: ``chosen`` and ``rejected``, two texts or two lists of messages, with ``prompt`` beside them or as
  what both begin with.

Prompts and answers that are given as bare texts are *plain*: no chat template is put around them (TRL's "standard" and
"conversational" formats draw the same line).

A row that does not fit raises `Misshapen` with a reason; nothing is repaired but what cannot be misread: line ends,
byte-order marks, an empty system turn, and a last question that nobody answered, which is cut and counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

Role = Literal["system", "user", "assistant"]
Shape = Literal["text", "alpaca", "chat", "prompt_completion", "preference"]
Kind = Literal["text", "conversation", "preference"]

KIND_OF: dict[Shape, Kind] = {
    "text": "text",
    "alpaca": "conversation",
    "chat": "conversation",
    "prompt_completion": "conversation",
    "preference": "preference",
}
LARGEST_CONVERSATION = 1 << 20
"""Characters. A conversation is never cut, and one of a megabyte is some hundred contexts long."""
CHAT_FIELDS = ("messages", "conversations", "conversation")
FIELDS = frozenset(
    {"text", "prompt", "completion", "chosen", "rejected", "question", *CHAT_FIELDS}
    | {"instruction", "input", "context", "output", "response", "history", "system"}
)
"""Every field that some shape looks at."""
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
_UNANSWERED = "a last question without an answer was cut"


class Misshapen(ValueError):
    """A row is not what its source holds; the text says why."""


class Empty(Misshapen):
    """A row holds no text: left out, but nothing is wrong with the source."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in their order: perhaps a system turn, then user and assistant in turn, the assistant last."""

    turns: tuple[Turn, ...]
    plain: bool = False
    """A prompt and its completion as bare texts: no chat template belongs around them."""

    @property
    def answers(self) -> tuple[str, ...]:
        """What the assistant says."""
        return tuple(turn.content for turn in self.turns if turn.role == "assistant")

    @property
    def prompt(self) -> tuple[Turn, ...]:
        """The turns before the first answer."""
        first = next(index for index, turn in enumerate(self.turns) if turn.role == "assistant")
        return self.turns[:first]


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt."""

    prompt: tuple[Turn, ...]
    """Ends with a user turn."""
    chosen: str
    rejected: str
    plain: bool = False

    @property
    def conversations(self) -> tuple[Conversation, Conversation]:
        """The prompt with the chosen and with the rejected answer."""
        chosen, rejected = (
            Conversation((*self.prompt, Turn("assistant", answer)), self.plain)
            for answer in (self.chosen, self.rejected)
        )
        return chosen, rejected


Content = str | Conversation | Preference


def kind_of(content: Content) -> Kind:
    """Return what kind of document a content makes."""
    match content:
        case str():
            return "text"
        case Conversation():
            return "conversation"
        case Preference():
            return "preference"


def parts_of(content: Content) -> tuple[str, ...]:
    """Return every text in a content, in order."""
    match content:
        case str():
            return (content,)
        case Conversation(turns):
            return tuple(turn.content for turn in turns)
        case Preference(prompt, chosen, rejected):
            return (*(turn.content for turn in prompt), chosen, rejected)


def row_of(content: Content) -> dict[str, Any]:
    """Return a content as a row that reads back to it, in the shape in which it would be published."""
    match content:
        case str():
            return {"text": content}
        case Conversation(turns, plain=True):
            return {"prompt": turns[0].content, "completion": turns[1].content}
        case Conversation(turns):
            return {"messages": [_message(turn) for turn in turns]}
        case Preference(prompt, chosen, rejected, plain=True):
            return {"prompt": prompt[0].content, "chosen": chosen, "rejected": rejected}
        case Preference(prompt, chosen, rejected):
            answers = {
                name: [_message(Turn("assistant", answer))]
                for name, answer in (("chosen", chosen), ("rejected", rejected))
            }
            return {"prompt": [_message(turn) for turn in prompt], **answers}


def _message(turn: Turn) -> dict[str, str]:
    return {"role": turn.role, "content": turn.content}


def canonical(content: Content) -> str:
    """Return the text whose digest names a content: the text itself, or its row as JSON."""
    return content if isinstance(content, str) else json.dumps(row_of(content), sort_keys=True, ensure_ascii=False)


# --- rows ---------------------------------------------------------------------------------------------------------


def shape_of(row: Mapping[str, Any], column: str | None = None) -> tuple[Shape, str] | None:
    """Return a row's shape and the fields that tell, or None for fields that fit none; ``column`` is the owner's.

    The most telling fields go first: a chat with a field ``text`` beside its messages is a chat.
    """
    if column is not None and column in row:
        return ("text" if isinstance(row[column], str) else "chat"), f"{column!r}, which was asked for"
    for shape, telling in (
        ("preference", ("chosen", "rejected")),
        *(("chat", (name,)) for name in CHAT_FIELDS),
        ("prompt_completion", ("prompt", "completion")),
        ("alpaca", ("instruction", "output")),
        ("alpaca", ("instruction", "response")),
        ("text", ("text",)),
    ):
        if all(name in row for name in telling):
            return shape, " and ".join(map(repr, telling))  # type: ignore[return-value]  # of the tuples above
    return None


class Parsed(NamedTuple):
    """A row's content, and what was taken away from it, if anything was."""

    content: Content
    note: str | None = None


def parse(row: object, shape: Shape, column: str | None = None) -> Parsed:
    """Return what a row of the given shape says; `Misshapen` with the reason if it does not fit."""
    if not isinstance(row, Mapping):
        wanted = column or {"text": "text", "chat": "messages"}.get(shape)
        wanted = f"a field {wanted!r}" if wanted else f"the fields of {shape}"
        raise Misshapen(f"expected an object with {wanted}, found {type(row).__name__}")
    parsed = _PARSERS[shape](row, column)
    if not isinstance(parsed.content, str) and sum(map(len, parts_of(parsed.content))) > LARGEST_CONVERSATION:
        raise Misshapen(f"a conversation of more than {LARGEST_CONVERSATION} characters")
    return parsed


def text_of(value: object, what: str) -> str:
    """Return a field's text; `Misshapen` names the field if it is none."""
    if not isinstance(value, str):
        raise Misshapen(f"{what} is no string but {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # Bytes of a CSV file that are not UTF-8 were read as U+DC80 to U+DCFF.
        if all("\udc80" <= value[place] <= "\udcff" for place in range(error.start, error.end)):
            raise Misshapen("not UTF-8") from error
        raise Misshapen("the text holds half of a surrogate pair and is no valid Unicode") from error
    return value


def _field(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        fields = ", ".join(sorted(map(str, row))[:8])
        raise Misshapen(f"no field {name!r} (it has: {fields[:80] or 'none'})")
    return row[name]


def _first_field(row: Mapping[str, Any], names: Collection[str]) -> Any:
    """Return the first of several fields that a row has."""
    return _field(row, next((name for name in names if name in row), next(iter(names))))


def _text(row: Mapping[str, Any], column: str | None) -> Parsed:
    name = column or "text"
    text = text_of(_field(row, name), f"the field {name!r}")
    if not text.lstrip("\ufeff").strip():
        raise Empty("empty")
    return Parsed(text)


def _tidy(value: object, what: str) -> str:
    """Return a field's text with line feeds as line ends and without byte-order mark."""
    return text_of(value, what).lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _alpaca(row: Mapping[str, Any], _: str | None) -> Parsed:
    instruction = _tidy(_field(row, "instruction"), "the field 'instruction'")
    given = next((row[name] for name in ("input", "context") if row.get(name)), "")
    more = _tidy(given, "the field 'input'")
    question = "\n\n".join(part for part in (instruction, more) if part.strip())
    answer = _tidy(_first_field(row, ("output", "response")), "the field 'output'")
    turns = [*_system(row), *_history(row.get("history")), Turn("user", question), Turn("assistant", answer)]
    return _conversation(turns)


def _history(value: object) -> Iterator[Turn]:
    """Yield earlier questions and answers, as some Alpaca sets carry them: a list of pairs."""
    for pair in value if isinstance(value, list | tuple) else ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Misshapen("the field 'history' is no list of pairs")
        yield Turn("user", _tidy(pair[0], "the field 'history'"))
        yield Turn("assistant", _tidy(pair[1], "the field 'history'"))


def _system(row: Mapping[str, Any]) -> Iterator[Turn]:
    if row.get("system"):
        yield Turn("system", _tidy(row["system"], "the field 'system'"))


def _chat(row: Mapping[str, Any], column: str | None) -> Parsed:
    turns = _turns(_first_field(row, (column,) if column else CHAT_FIELDS))
    if turns and turns[0].role != "system":
        turns = [*_system(row), *turns]
    return _conversation(turns)


def _turns(value: object) -> list[Turn]:
    """Return messages as turns, whatever their order."""
    if not isinstance(value, list | tuple):
        raise Misshapen(f"expected a list of messages, found {type(value).__name__}")
    return [_turn(message, number) for number, message in enumerate(value, start=1)]


def _turn(message: object, number: int) -> Turn:
    if not isinstance(message, Mapping):
        raise Misshapen(f"message {number} is no object but {type(message).__name__}")
    name = message.get("role", message.get("from"))
    if not isinstance(name, str):
        raise Misshapen(f"message {number} has no 'role' (or 'from')")
    role = _ROLES.get(name.lower())
    if role is None:
        raise Misshapen(f"message {number} has the role {name[:40]!r}: system, user and assistant are known")
    if any(message.get(key) for key in ("tool_calls", "function_call")):
        raise Misshapen(f"message {number} calls a tool, which is not supported")
    content = message.get("content", message.get("value"))
    if isinstance(content, list | tuple):
        content = "".join(_part(part, number) for part in content)
    return Turn(role, _tidy(content, f"the content of message {number}"))


def _part(part: object, number: int) -> str:
    """Return the text of one part of a message's content."""
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and "text" in part:
        return text_of(part["text"], f"the content of message {number}")
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise Misshapen(f"message {number} holds {str(kind)[:40]!r} beside text, which is not supported")


def _conversation(turns: list[Turn]) -> Parsed:
    """Return turns as a conversation, or raise with what is out of order."""
    if turns and turns[0].role == "system" and not turns[0].content.strip():
        turns = turns[1:]
    answered = max((index for index, turn in enumerate(turns, start=1) if turn.role == "assistant"), default=0)
    if not answered:
        raise Misshapen("a conversation without an answer of the assistant")
    cut, turns = len(turns) - answered, turns[:answered]
    _check_order(turns)
    return Parsed(Conversation(tuple(turns)), _UNANSWERED if cut else None)


def _check_order(turns: list[Turn]) -> None:
    """Raise unless, after a system turn, user and assistant take turns and each says something."""
    rest = turns[1:] if turns and turns[0].role == "system" else turns
    first = len(turns) - len(rest) + 1
    if not rest or rest[0].role != "user":
        raise Misshapen(f"roles out of order: {rest[0].role if rest else 'nobody'} speaks first, where the user should")
    for number, (one, other) in enumerate(pairwise(rest), start=first + 1):
        if other.role == "system":
            raise Misshapen(f"roles out of order: message {number} is a system turn in mid-conversation")
        if one.role == other.role:
            raise Misshapen(f"roles out of order: messages {number - 1} and {number} are both the {one.role}'s")
    for number, turn in enumerate(rest, start=first):
        if not turn.content.strip():
            raise Misshapen("an empty answer" if turn.role == "assistant" else f"message {number} is empty")


def _prompt_completion(row: Mapping[str, Any], _: str | None) -> Parsed:
    prompt, completion = _field(row, "prompt"), _field(row, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        turns = _plain_pair(_behind_system(row, prompt), completion, "completion")
        return Parsed(Conversation(turns, plain=True))
    before = _turns_or_text(prompt, "user")
    if before and before[0].role != "system":
        before = [*_system(row), *before]
    return _conversation([*before, *_turns_or_text(completion, "assistant")])


def _behind_system(row: Mapping[str, Any], prompt: str) -> str:
    """Return a bare prompt with the row's system text before it."""
    return "\n\n".join([*(turn.content for turn in _system(row) if turn.content.strip()), prompt])


def _plain_pair(prompt: str, answer: str, name: str) -> tuple[Turn, Turn]:
    turns = (
        Turn("user", _tidy(prompt, "the field 'prompt'")),
        Turn("assistant", _tidy(answer, f"the field {name!r}")),
    )
    for turn in turns:
        if not turn.content.strip():
            raise Misshapen("an empty answer" if turn.role == "assistant" else "an empty prompt")
    return turns


def _turns_or_text(value: object, role: Role) -> list[Turn]:
    return [Turn(role, _tidy(value, f"the {role}'s text"))] if isinstance(value, str) else _turns(value)


def _preference(row: Mapping[str, Any], _: str | None) -> Parsed:
    chosen, rejected = _field(row, "chosen"), _field(row, "rejected")
    prompt = next((row[name] for name in ("prompt", "question") if row.get(name)), None)
    if isinstance(chosen, str) and isinstance(rejected, str) and (prompt is None or isinstance(prompt, str)):
        return Parsed(_different(_plain_preference(row, prompt, chosen, rejected)))
    sides = [_turns_or_text(side, "assistant") for side in (chosen, rejected)]
    before = [] if prompt is None else [*_system(row), *_turns_or_text(prompt, "user")]
    if len(sides[0]) == len(sides[1]) == 1:
        return Parsed(_different(_told_apart(before, sides[0], sides[1])))
    # The sides begin with the prompt themselves; where it is given as well, it has to be the same.
    common = _common_turns(*sides)
    if before and [turn for turn in common if turn.role != "system"] != [t for t in before if t.role != "system"]:
        raise Misshapen("the chosen and the rejected conversation do not begin with the prompt")
    return Parsed(_different(_told_apart(common, sides[0][len(common) :], sides[1][len(common) :])))


def _common_turns(one: list[Turn], other: list[Turn]) -> list[Turn]:
    """Return the turns that both begin with, without the last of the shorter: that one is the answer."""
    common = 0
    while common < min(len(one), len(other)) - 1 and one[common] == other[common]:
        common += 1
    return one[:common]


def _told_apart(prompt: list[Turn], chosen: list[Turn], rejected: list[Turn]) -> Preference:
    """Return a pair of answers to a prompt; raise if the sides differ in more than one answer."""
    if len(chosen) != 1 or len(rejected) != 1:
        raise Misshapen("the chosen and the rejected conversation differ in more than their last answer")
    if not prompt:
        raise Misshapen("no prompt: neither a field 'prompt' nor turns that both answers share")
    for side in (chosen[0], rejected[0]):
        if side.role != "assistant":
            raise Misshapen(f"the last message is the {side.role}'s, where the assistant should answer")
    one = _conversation([*prompt, chosen[0]]).content
    _check_order([*prompt, rejected[0]])
    assert isinstance(one, Conversation)
    return Preference(one.turns[:-1], chosen[0].content, rejected[0].content)


def _plain_preference(row: Mapping[str, Any], prompt: str | None, chosen: str, rejected: str) -> Preference:
    """Return two texts as a pair; without a prompt of its own it is what both texts begin with."""
    chosen, rejected = _tidy(chosen, "the field 'chosen'"), _tidy(rejected, "the field 'rejected'")
    if prompt is None:
        prompt = _common_start(chosen, rejected)
        if not prompt.strip():
            raise Misshapen("no prompt: neither a field 'prompt' nor a text that both answers begin with")
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    prompt = _behind_system(row, prompt)
    first = _plain_pair(prompt, chosen, "chosen")
    _plain_pair(prompt, rejected, "rejected")
    return Preference(first[:1], chosen, rejected, plain=True)


_SPEAKER = re.compile(r"(?:\A|\n)[ \t]*(?:Assistant|ASSISTANT):")


def _common_start(one: str, other: str) -> str:
    """Return what both texts begin with, up to the last ``Assistant:`` in it, else up to the last white space.

    So a prompt ends where the answer begins, also where both answers begin with the same words.
    """
    common = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    shared = one[: min(len(one), len(other)) if common is None else common]
    speakers = list(_SPEAKER.finditer(shared))
    if speakers:
        return shared[: speakers[-1].end()]
    return shared[: len(re.sub(r"\S*\Z", "", shared).rstrip())]


def _different(pair: Preference) -> Preference:
    if pair.chosen == pair.rejected:
        raise Misshapen("chosen and rejected are equal")
    return pair


_PARSERS: dict[Shape, Callable[[Mapping[str, Any], str | None], Parsed]] = {
    "text": _text,
    "alpaca": _alpaca,
    "chat": _chat,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
}


def with_contents(conversation: Conversation, contents: list[str]) -> Conversation:
    """Return a conversation whose turns say something else."""
    turns = tuple(replace(turn, content=text) for turn, text in zip(conversation.turns, contents, strict=True))
    return replace(conversation, turns=turns)
