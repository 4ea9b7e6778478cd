"""Conversations to tokens: rendered by the model's own chat template, each token marked for what it is.

**Marks.** `ANSWER`: exactly the tokens of what the assistant says; they are trained on and scored, and the UTF-8 bytes
of what it says are the document's bytes. `END`: what the template puts directly after an answer, up to and including
the token that ends a turn; trained on, so that the model learns to stop, but no byte of an answer: not scored.
`CONTEXT`: everything else, also the line feed that many templates put after the end of a turn. The token that ends a
turn is the first added token that the template writes after the last answer. A template that writes none gets the
tokenizer's ``eos_token`` there.

**Where the contents lie.** A template is rendered once for each order of roles with placeholders for the contents: what
stands between the placeholders is the template's own text. The true rendering must be this text with the contents in
between, character by character; then every border is known and contents cannot be mistaken for template. If it is only
so with the white space around the contents taken off, the template trims, and the trimmed contents are the document's.
A template that rewrites contents (one that reads ``<think>`` parts, say) is searched for the answers instead: each has
to be there once, as it is. Else the conversation is refused.

A template with ``{% generation %}`` marks says by them which answers are to be learnt: an answer outside of them is
`CONTEXT`. Templates without marks mean all answers.

**Borders.** The whole rendering is encoded at once, as it is when the model is used. Contents never make special
tokens: where one spells such a token, or where template and content together would, the template's special tokens are
taken out first and the text between them is encoded as text. A token that would straddle the border of an answer is
replaced: the sides are encoded apart. The one exception are sentencepiece-style tokenizers, where the space before an
answer and its first letters are one token (``▁Yes``) that decodes to the letters alone: that token is the model's own
way to begin an answer, it stays and is `ANSWER`. So the `ANSWER` tokens of a turn always decode to what was said.

The current date, which some templates write into the system turn, is a fixed one: else the same data would be other
tokens tomorrow.
"""

from __future__ import annotations

import bisect
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, NoReturn

import jinja2
import numpy as np
import numpy.typing as npt
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frozen.conversations import Conversation, Role, Turn, with_contents
from frozen.encoder import Encoder, Pieces
from frozen.rows import SourceError
from frozen.splits import ANSWER, CONTEXT, END

TODAY = datetime.date(2024, 7, 26)
"""What templates are told the date is."""
BUILT_IN = (
    "{% if bos_token is defined %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{{ '### ' + message['role'].capitalize() + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' and eos_token is defined %}{{ eos_token }}{% endif %}"
    "{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)
"""Stands in for a model without a chat template: plain headings, the eos token after each answer."""
_OPEN, _CLOSE = "\U000f0001", "\U000f0002"
"""Private-use characters around a placeholder's number."""
_GENERATION, _ENDGENERATION = "\U000f0003", "\U000f0004"
_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What the expressions of a template can raise."""


class Unencodable(ValueError):
    """A conversation cannot be encoded; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One conversation as tokens."""

    tokens: npt.NDArray[np.uint32]
    """[tokens]"""
    marks: npt.NDArray[np.uint8]
    """[tokens]: `CONTEXT`, `ANSWER` or `END`."""
    bytes: int
    """UTF-8 bytes of what the `ANSWER` tokens say."""
    conversation: Conversation
    """As it was encoded: trimmed, where the template trims."""


class _Piece(NamedTuple):
    """A run of the rendering."""

    begin: int
    end: int
    turn: int | None
    """The turn that it is the content of; None: the template's."""


class _Layout(NamedTuple):
    """A rendering of which every border is known."""

    text: str
    pieces: list[_Piece]
    answers: list[_Piece]
    """Those of the pieces that are to be learnt."""


class _Skeleton(NamedTuple):
    """What a template writes for an order of roles."""

    gaps: tuple[str, ...]
    """Its own text: before, between and after the contents."""
    order: tuple[int, ...]
    """Turns in the order in which their contents appear."""
    learnt: frozenset[int]
    """Turns of the assistant that are to be learnt."""


class Chat:
    """A tokenizer with its chat template."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.source = encoder.template if encoder.template is not None else BUILT_IN
        self.built_in = encoder.template is None
        try:
            self._template = _compiled(self.source)
        except jinja2.TemplateError as error:
            raise SourceError(f"the chat template in {encoder.folder} does not parse: {error}") from error
        self._skeleton = lru_cache(maxsize=4096)(self._make_skeleton)
        self._first_added = lru_cache(maxsize=256)(self._find_added)

    def encode(self, conversation: Conversation, *, learnt: Literal["all", "last"] = "all") -> Encoded:
        """Return a conversation's tokens and marks; `Unencodable` with the reason if that cannot be done exactly.

        ``learnt="last"`` marks the last answer only, as for preferences, which differ in nothing else.
        """
        if conversation.plain:
            layout, said = _plain_layout(conversation), conversation
        else:
            layout, said = self._layout(conversation)
        answers = layout.answers[-1:] if learnt == "last" else layout.answers
        if not answers:
            raise Unencodable("the chat template marks none of the answers to be learnt")
        try:
            pieces = self._pieces(layout, answers)
        except SourceError as error:
            raise Unencodable(str(error)) from error
        ids = list(pieces.ids)
        marks = self._marks(layout, answers, pieces)
        if conversation.plain and self.encoder.first is not None:
            ids.insert(0, self.encoder.first)
            marks.insert(0, CONTEXT)
        if self._closing(layout) is None and self.encoder.eos is not None:
            ids.append(self.encoder.eos)
            marks.append(END)
        return Encoded(
            tokens=np.array(ids, dtype=np.uint32),
            marks=np.array(marks, dtype=np.uint8),
            bytes=sum(len(layout.text[piece.begin : piece.end].encode("utf-8")) for piece in answers),
            conversation=said,
        )

    # --- rendering --------------------------------------------------------------------------------------------------

    def render(self, turns: Sequence[Turn]) -> str:
        """Return what the template writes for turns; `Unencodable` if it refuses them."""
        return self._render([{"role": turn.role, "content": turn.content} for turn in turns], "", "")

    def _render(self, messages: list[dict[str, str]], before: str, after: str) -> str:
        """Render messages, with ``before`` and ``after`` around what is marked to be learnt."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=False,
                tools=None,
                documents=None,
                generation_begins=before,
                generation_ends=after,
                **self.encoder.settings,
            )
        except _TEMPLATE_FAULTS as error:
            raise Unencodable(f"the chat template refuses it: {' '.join(str(error).split())[:160]}") from error

    def _make_skeleton(self, roles: tuple[Role, ...]) -> _Skeleton | str:
        """Return what the template writes for an order of roles, or the reason why it cannot."""
        messages = [{"role": role, "content": f"{_OPEN}{number}{_CLOSE}"} for number, role in enumerate(roles)]
        try:
            text = self._render(messages, _GENERATION, _ENDGENERATION)
        except Unencodable as refusal:
            return str(refusal)
        gaps, order, learnt = [""], [], []
        within = False
        for part in _parts(text):
            if part in (_GENERATION, _ENDGENERATION):
                within = part == _GENERATION
            elif part.startswith(_OPEN) and part.endswith(_CLOSE):
                order.append(int(part[1:-1]))
                gaps.append("")
                if within:
                    learnt.append(order[-1])
            else:
                gaps[-1] += part
        missing = set(range(len(roles))) - set(order)
        if missing:
            return f"the chat template leaves out the {roles[min(missing)]} turn"
        if len(order) != len(roles):
            return "the chat template writes a turn twice"
        assistants = {number for number, role in enumerate(roles) if role == "assistant"}
        marked = assistants & set(learnt) if _GENERATION in text else assistants
        return _Skeleton(tuple(gaps), tuple(order), frozenset(marked))

    def _layout(self, conversation: Conversation) -> tuple[_Layout, Conversation]:
        """Return the rendering with its borders, and the conversation as the template shows it."""
        skeleton = self._skeleton(tuple(turn.role for turn in conversation.turns))
        if isinstance(skeleton, str):
            raise Unencodable(skeleton)
        text = self.render(conversation.turns)
        contents = [turn.content for turn in conversation.turns]
        for changed in (contents, [content.strip() for content in contents]):
            layout = _filled(skeleton, changed)
            if layout.text == text and all(changed):
                return layout, conversation if changed == contents else with_contents(conversation, changed)
        others = "".join(turn.content for turn in conversation.turns if turn.role != "assistant")
        if self.encoder.spells_special(others):  # and where it does is not known
            raise Unencodable("the chat template rewrites a turn, and one of them spells a special token")
        return _searched(text, conversation, skeleton.learnt), conversation

    # --- tokens -----------------------------------------------------------------------------------------------------

    def _pieces(self, layout: _Layout, answers: Sequence[_Piece]) -> Pieces:
        """Return tokens with no border of an answer within one."""
        pieces = self.encoder.as_template(layout.text)
        if not self._sound(layout, pieces):
            pieces = self._by_runs(layout, frozenset())
        wrong = frozenset(piece for piece in answers if not self._exact(layout, piece, pieces))
        if not wrong:
            return pieces
        pieces = self._by_runs(layout, wrong)
        if all(self._exact(layout, piece, pieces) for piece in answers):
            return pieces
        # An answer that was exact by its neighbours' grace is encoded apart as well.
        pieces = self._by_runs(layout, frozenset(answers))
        if not all(self._exact(layout, piece, pieces) for piece in answers):
            raise Unencodable("the tokenizer does not give back what the assistant says")
        return pieces

    def _sound(self, layout: _Layout, pieces: Pieces) -> bool:
        """Tell whether every special token is one that the template wrote."""
        begins = [piece.begin for piece in layout.pieces]
        special = self.encoder.special
        for start, end in [span for token, span in zip(*pieces, strict=True) if token in special]:
            piece = layout.pieces[bisect.bisect_right(begins, start) - 1]
            if piece.turn is not None or end > piece.end:
                return False
        return True

    def _exact(self, layout: _Layout, answer: _Piece, pieces: Pieces) -> bool:
        """Tell whether an answer's tokens are its own and decode to it."""
        first, last = _within(answer, pieces)
        if first >= last:
            return False
        said = layout.text[answer.begin : answer.end]
        starts, ends = pieces.spans[first][0], pieces.spans[last - 1][1]
        if ends > answer.end:
            return False
        # A space that is one token with what follows may stay (see above); anything else may not.
        if starts < answer.begin and layout.text[starts : answer.begin] != " ":
            return False
        return self.encoder.gives_back(pieces.ids[first:last], said)

    def _by_runs(self, layout: _Layout, apart: frozenset[_Piece]) -> Pieces:
        """Encode what lies between the template's special tokens run by run, and the answers in ``apart`` alone."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        after: Literal["nothing", "special", "text"] = "nothing"
        run = (0, 0)

        def close() -> None:
            nonlocal after
            if run[0] < run[1]:
                pieces = self.encoder.part(layout.text[run[0] : run[1]], after)
                ids.extend(pieces.ids)
                spans.extend((start + run[0], end + run[0]) for start, end in pieces.spans)
                after = "text"

        for piece in layout.pieces:
            if piece.turn is not None:
                if piece in apart:
                    close()
                    run = (piece.begin, piece.end)
                    close()
                    run = (piece.end, piece.end)
                else:
                    run = (run[0], piece.end)
                continue
            for token, (start, end) in self._specials(layout.text[piece.begin : piece.end]):
                run = (run[0], piece.begin + start)
                close()
                ids.append(token)
                spans.append((piece.begin + start, piece.begin + end))
                after = "special"
                run = (piece.begin + end, piece.begin + end)
            run = (run[0], piece.end)
        close()
        return Pieces(ids, spans)

    def _specials(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Return the special tokens that a template's own text spells, with their places."""
        return [
            found for found in zip(*self.encoder.as_template(text), strict=True) if found[0] in self.encoder.special
        ]

    def _marks(self, layout: _Layout, answers: Sequence[_Piece], pieces: Pieces) -> list[int]:
        """Return the mark of every token."""
        marks = [CONTEXT] * len(pieces.ids)
        closing = self._closing(layout)
        ends = {piece.begin: piece.end for piece in layout.pieces if piece.turn is None}
        for answer in answers:
            first, last = _within(answer, pieces)
            marks[first:last] = [ANSWER] * (last - first)
            gap = ends.get(answer.end, answer.end)
            for place in range(last, len(pieces.ids)):
                if pieces.spans[place][1] > gap:
                    break
                if pieces.ids[place] == closing:
                    marks[last : place + 1] = [END] * (place + 1 - last)
                    break
        return marks

    def _closing(self, layout: _Layout) -> int | None:
        """Return the token by which the template ends a turn: the first added one after the last answer."""
        last = layout.pieces[-1]
        return None if last.turn is not None else self._first_added(layout.text[last.begin : last.end])

    def _find_added(self, text: str) -> int | None:
        found = self.encoder.as_template(text).ids
        return next((token for token in found if token in self.encoder.added or token in self.encoder.special), None)


def _within(answer: _Piece, pieces: Pieces) -> tuple[int, int]:
    """Return the range of tokens that stand for some character of an answer."""
    first = bisect.bisect_right(pieces.spans, answer.begin, key=lambda span: span[1])
    last = bisect.bisect_left(pieces.spans, answer.end, key=lambda span: span[0])
    return first, last


def _plain_layout(conversation: Conversation) -> _Layout:
    """Return a prompt and its completion, with nothing around them."""
    text, pieces = "", []
    for number, turn in enumerate(conversation.turns):
        pieces.append(_Piece(len(text), len(text) + len(turn.content), number))
        text += turn.content
    answers = [piece for piece, turn in zip(pieces, conversation.turns, strict=True) if turn.role == "assistant"]
    return _Layout(text, pieces, answers)


def _filled(skeleton: _Skeleton, contents: Sequence[str]) -> _Layout:
    """Return a skeleton with contents in the places of the placeholders."""
    text = skeleton.gaps[0]
    pieces = [_Piece(0, len(text), None)]
    for number, gap in zip(skeleton.order, skeleton.gaps[1:], strict=True):
        for part, turn in ((contents[number], number), (gap, None)):
            pieces.append(_Piece(len(text), len(text) + len(part), turn))
            text += part
    pieces = [piece for piece in pieces if piece.begin < piece.end]
    return _Layout(text, pieces, [piece for piece in pieces if piece.turn in skeleton.learnt])


def _searched(text: str, conversation: Conversation, learnt: frozenset[int]) -> _Layout:
    """Find the answers in a rendering whose template does more than to put them in."""
    pieces, place = [], 0
    for number, turn in enumerate(conversation.turns):
        if turn.role != "assistant":
            continue
        begin = text.find(turn.content)
        if begin < place or text.count(turn.content) != 1:
            raise Unencodable("the chat template rewrites what the assistant says")
        pieces += [_Piece(place, begin, None), _Piece(begin, begin + len(turn.content), number)]
        place = begin + len(turn.content)
    pieces = [piece for piece in (*pieces, _Piece(place, len(text), None)) if piece.begin < piece.end]
    return _Layout(text, pieces, [piece for piece in pieces if piece.turn in learnt])


# --- Jinja ----------------------------------------------------------------------------------------------------------


def _parts(text: str) -> list[str]:
    """Split a rendering into placeholders, marks, and what lies between."""
    for mark in (_GENERATION, _ENDGENERATION):
        text = text.replace(mark, f"\0{mark}\0")
    return text.replace(_OPEN, f"\0{_OPEN}").replace(_CLOSE, f"{_CLOSE}\0").split("\0")


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``: what is to be learnt, with the caller's marks around it."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body between two variables that `Chat._render` fills."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        before, after = (
            nodes.Output([nodes.Name(name, "load", lineno=line)], lineno=line)
            for name in ("generation_begins", "generation_ends")
        )
        # A scope of its own: what is set within is not seen outside.
        return [nodes.Scope([before, *body, after], lineno=line)]


def _compiled(source: str) -> jinja2.Template:
    """Return a template, compiled as transformers documents it: blocks leave no white space, no access to Python."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return TODAY.strftime(form)
