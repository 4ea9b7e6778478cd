"""One call to a provider: a row that is always closed, and errors that hold no key. What both SDKs share."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

from agent.asking import ENDED_IN_FLIGHT, Answer, AskFailed, Question, Trouble
from agent.line import Line
from agent.troubles import classify, clean, describe, disguised, retry_after_seconds, scrub, written
from harness.errors import WrongUse
from harness.terms import CallBegun, CallEnded, Desk, Usage

Result = TypeVar("Result")

LONGEST_KEPT = 200_000
"""Characters of a reply that are kept for the reader."""
OVERHEAD_TOKENS = 1_024
"""What a provider adds to a prompt for roles, tools and structured output, generously."""
MAYBE_BILLED = frozenset({504, 524})
"""Of the statuses that are none of success, those of a gateway that gave up waiting: the model behind it may have gone
on. Providers bill completions, not errors, so that every other one counts as nothing used."""
CLUMSY = frozenset({500, 501})
"""Statuses with which a server, llama-cpp-python's among them, also says that it does not take a field."""


class Tier(StrEnum):
    """How an answer's form is asked for, the strictest first."""

    SCHEMA = "schema"
    """The provider holds the model to the schema."""
    TOOL = "tool"
    """The model calls a tool whose arguments have the schema."""
    TEXT = "text"
    """The schema stands in the prompt, and the answer is JSON in text."""

    @property
    def next(self) -> Tier | None:
        """The next looser one."""
        return {Tier.SCHEMA: Tier.TOOL, Tier.TOOL: Tier.TEXT, Tier.TEXT: None}[self]


def system_of(question: Question, tier: Tier) -> str:
    """Return who the model is, with the schema spelled out where nothing else carries it."""
    if tier is not Tier.TEXT:
        return question.system
    return (
        f"{question.system}\n\nAnswer with one JSON object that fits this JSON schema, and with nothing else:\n"
        + json.dumps(question.schema)
    )


def unbounded(schema: Any) -> Any:
    """Return a schema without the bounds of lists and texts: strict modes turn some or all of them away."""
    match schema:
        case dict():
            return {name: unbounded(each) for name, each in schema.items() if name not in _BOUNDS}
        case list():
            return [unbounded(each) for each in schema]
        case _:
            return schema


_BOUNDS = frozenset({"minItems", "maxItems", "minLength", "maxLength"})


def most_tokens(text: str) -> int:
    """Return what a text can take at most: no tokenizer of theirs makes more tokens than UTF-8 bytes."""
    return len(text.encode("utf-8", "replace"))


# --- answers that are none ---------------------------------------------------------------------------------------


_BROKEN_OFF = re.compile(r"\s*\{\s*\"")


class TurnedAway(AskFailed):
    """An answer with an HTTP status that is none of success."""

    def __init__(self, status: int, headers: Mapping[str, str], body: object) -> None:
        trouble = classify(status, body)
        super().__init__(trouble, describe(status, headers, body), retry_after_seconds=retry_after_seconds(headers))
        self.status = status
        self.is_unbilled = status not in MAYBE_BILLED
        is_unmet = trouble is Trouble.BAD_REQUEST or (trouble is Trouble.OVERLOADED and status in CLUMSY)
        self.is_about_form = is_unmet and _FORM.search(body if isinstance(body, str) else written(body)) is not None
        """Whether it is the form that the provider does not take: a looser one may do."""
        self.body = body


_FORM = re.compile(
    r"response_format|output_config|output_format|text\.format|structured|schema|grammar|tool|\bstrict\b"
)


# --- the row -----------------------------------------------------------------------------------------------------


class Booking:
    """A call's row at the desk: opened before anything is sent, closed once whatever happens in between.

    A call that failed without telling its usage counts at its worst case only if it may have been billed: a connection
    that broke or a deadline that passed after sending, an answer that breaks off. Providers bill completions, so that
    a status of error, a page of HTML, an empty object or an error with a status of success is booked as never sent:
    else an hour of a gateway's trouble would use up the owner's cap.
    """

    def __init__(self, desk: Desk, begun: CallBegun, line: Line) -> None:
        self._desk = desk
        self._begun = begun
        self._line = line
        self.usage: Usage | None = None
        """To be set as soon as it is known, before anything is made of the content."""
        self.is_completion = True
        """Whether what came can be what a provider bills; True while nothing has come, as at a time-out."""
        self.cost_usd: float | None = None
        self.latency_seconds = 0.0

    def __enter__(self) -> Booking:
        self.call = self._desk.begin_call(self._begun)
        self._started = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.latency_seconds = time.monotonic() - self._started
        trouble, text = self._told(error)
        is_turned_away = isinstance(error, TurnedAway) and error.is_unbilled
        ended = CallEnded(
            usage=self.usage,
            latency_seconds=self.latency_seconds,
            trouble=trouble,
            text=text,
            sent=self._line.is_sent and self.is_completion and not is_turned_away,
        )
        self.cost_usd = self._desk.end_call(self.call, ended)

    def _told(self, error: BaseException | None) -> tuple[str | None, str | None]:
        """Return trouble and text of the row; one's own ending looks like a broken connection from within."""
        if error is None:
            return None, None
        if self._line.is_given_up or not isinstance(error, Exception):  # closed, or interrupted while it waited
            return Trouble.RUN_ENDED, ENDED_IN_FLIGHT
        return error.trouble if isinstance(error, AskFailed) else type(error).__name__, clean(str(error))


class Caller:
    """Makes one provider's calls, one at a time, and lets go of them."""

    def __init__(self, provider: str, model: str) -> None:
        self._provider = provider
        self._model = model
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._is_closed = False

    def look(self, send: Callable[[Line], Result], deadline_seconds: float) -> Result:
        """Make a call that costs nothing and is no question, as to a list of models."""
        line = self._open()
        return line.run(lambda: send(line), deadline_seconds)

    def ask(
        self,
        question: Question,
        most: Usage,
        desk: Desk,
        deadline_seconds: float,
        *,
        send: Callable[[Line], bytes],
        usage_of: Callable[[Mapping[str, Any]], Usage | None],
        text_of: Callable[[Mapping[str, Any]], str],
    ) -> Answer:
        """Book, send and read one question; the usage is booked whatever the answer turns out to be."""
        line = self._open()
        begun = CallBegun(provider=self._provider, model=self._model, purpose=question.purpose, most=most)
        with Booking(desk, begun, line) as booking:
            desk.keep(booking.call, "question.md", scrub(f"{question.system}\n\n---\n\n{question.text}\n"))
            body = line.run(lambda: send(line), deadline_seconds)
            text = body.decode("utf-8", "replace")
            booking.is_completion = _BROKEN_OFF.match(text) is not None  # which may be one that breaks off
            try:
                document = parse(text)
                booking.is_completion = holds_content(document)
                booking.usage = usage_of(document)
                refuse_error(document)
                content = text_of(document)
                if len(content) > LONGEST_KEPT:
                    raise AskFailed(Trouble.GARBAGE, f"the answer is longer than {LONGEST_KEPT:,} characters")
                text = scrub(content)
            finally:
                desk.keep(booking.call, "answer.txt", clean(text, most=LONGEST_KEPT))
            if not text.strip():
                raise AskFailed(Trouble.GARBAGE, "the answer is empty")
        return Answer(
            call=booking.call,
            text=text,
            usage=booking.usage,
            cost_usd=booking.cost_usd,
            latency_seconds=booking.latency_seconds,
        )

    def close(self) -> None:
        """Cut the call that is running, if one is, and make no other."""
        with self._lock:
            self._is_closed = True
            line = self._line
        if line is not None:
            line.give_up()

    def _open(self) -> Line:
        with self._lock:
            if self._is_closed:
                raise AskFailed(Trouble.RUN_ENDED, "the provider was closed")
            self._line = Line()
            return self._line


# --- what a body says --------------------------------------------------------------------------------------------


def parse(text: str) -> Mapping[str, Any]:
    """Return the JSON object of a body; `AskFailed` says that it is none."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = clean(" ".join(text.split()), most=80)
        raise AskFailed(Trouble.GARBAGE, f"the answer is no JSON: it begins with {shown!r}") from error
    if not isinstance(document, dict) or not document:
        raise AskFailed(Trouble.GARBAGE, "the answer is no JSON object, or an empty one")
    return document


def holds_content(document: Mapping[str, Any]) -> bool:
    """Tell whether a provider could bill this: it counts tokens or, in any protocol, holds what a model wrote."""
    return bool(document.get("usage")) or any(items(document.get(name)) for name in ("content", "choices", "output"))


def refuse_error(document: Mapping[str, Any]) -> None:
    """Raise `AskFailed` for an error that came with a status of success, as from gateways and failed responses."""
    trouble = disguised(document)
    if trouble is not None:
        raise AskFailed(trouble, describe(200, {}, document))


def counted(table: object, name: str) -> int | None:
    """Return a count of tokens, or None where there is none that could be one."""
    value = table.get(name) if isinstance(table, Mapping) else None
    return value if type(value) is int and 0 <= value < 10**12 else None


def items(value: object) -> list[Mapping[str, Any]]:
    """Return the objects of what should be a list of them."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def tell(failed: AskFailed, model: str, key: str) -> NoReturn:
    """Raise `WrongUse` for what the owner can mend before any training, and the failure itself for all else."""
    match failed.trouble:
        case Trouble.NO_SUCH_MODEL:
            raise WrongUse(
                f"the language model {model!r} is not there: {failed}. Name another one with --llm"
            ) from failed
        case Trouble.NOT_ALLOWED:
            raise WrongUse(f"the provider of {model!r} turns the key away: {failed}. Look at {key}") from failed
        case _:
            raise failed
