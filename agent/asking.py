"""The values between a proposer and the language model that it asks, and the errors that asking can end with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from harness.terms import Desk, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One thing to ask a model, to be answered with one JSON document."""

    purpose: str
    """``check``, ``probe``, ``proposals`` or ``repair``: how the call is booked."""
    system: str
    """Who it is and how to answer: the same for the whole study, so that providers can cache it."""
    text: str
    """The briefing of this moment."""
    name: str
    """Of the answer's form, snake_case."""
    schema: Mapping[str, Any]
    """JSON schema of the answer, in the subset that every provider's strict mode takes."""
    most_output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back: JSON text that claims to fit the schema. It is checked by whoever asked."""

    call: int
    """Row of the ledger's ``calls``."""
    text: str
    usage: Usage | None
    cost_usd: float | None
    latency_seconds: float


class Trouble(StrEnum):
    """Class of a call that brought no answer."""

    UNREACHABLE = "unreachable"
    """No connection, or it broke."""
    TIMED_OUT = "timed_out"
    """Past the wall-clock deadline, whatever dripped in meanwhile."""
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    """The provider's own failure: 5xx and 529."""
    GARBAGE = "garbage"
    """An answer that is none: HTML, an empty object, JSON that breaks off, no JSON at all."""
    CUT_OFF = "cut_off"
    """The model reached its most output tokens."""
    REFUSED = "refused"
    """The model or the provider's safety system declined."""
    FILTERED = "filtered"
    """A content filter removed the answer."""
    SPENDING_LIMIT = "spending_limit"
    """The provider's own limit, or the owner's cap."""
    NOT_ALLOWED = "not_allowed"
    """The key is wrong, expired or not permitted to do this."""
    NO_SUCH_MODEL = "no_such_model"
    """Never existed, retired or not open to this key."""
    BAD_REQUEST = "bad_request"
    """The provider does not take the request as it is; asking again would not help."""
    TOO_LONG = "too_long"
    """The briefing does not fit the model's context."""
    RUN_ENDED = "run_ended"
    """Nobody's failure: the call was in flight when the run ended."""


ENDED_IN_FLIGHT = "the run ended while the call was in flight; what it used is not known"


PERMANENT = frozenset(
    {Trouble.NOT_ALLOWED, Trouble.NO_SUCH_MODEL, Trouble.BAD_REQUEST, Trouble.TOO_LONG, Trouble.SPENDING_LIMIT}
)
"""Troubles that asking again tonight will not cure."""


class AskFailed(Exception):
    """A call brought no answer; its text says what happened and never holds a key or a header."""

    def __init__(self, trouble: Trouble, text: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(text)
        self.trouble = trouble
        self.retry_after_seconds = retry_after_seconds
        """What the provider asked for, however long."""

    @property
    def is_permanent(self) -> bool:
        """Tell whether the model is to be switched off for this run."""
        return self.trouble in PERMANENT


class Provider(Protocol):
    """One official SDK, its retries off. Asked from one thread at a time; every call is booked through the desk."""

    name: str
    """``anthropic`` or ``openai``."""
    model: str

    def check(self, desk: Desk) -> None:
        """Look, before any training, whether key and model are there; `WrongUse` says which is missing and what to do.

        A provider that cannot be reached is no reason not to start: `AskFailed`.
        """
        ...

    def ask(self, question: Question, desk: Desk, *, deadline_seconds: float) -> Answer:
        """Send one question and wait at most ``deadline_seconds`` by the wall clock; `AskFailed` says why not.

        `SpendingCapReached`: the desk did not let it be sent.
        """
        ...

    def close(self) -> None:
        """Let go of connections, a running call's included; calling it twice is harmless."""
        ...
