"""What a study and its proposer have to do with each other: the protocol, the owner's terms, and calls to a model.

Apart from `harness.records`, which trials depend on: nothing here can change a score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field

from harness.records import History, Proposal, Prose, Record

PROVIDERS = ("anthropic", "openai")
"""Whose SDK may be named before a model: ``PROVIDER:MODEL``."""
LONGEST_INSIGHT = 500
"""Characters of a note that a model writes to itself, or that somebody from outside adds."""


class Usage(Record):
    """What a provider bills for one call."""

    input_tokens: Annotated[int, Field(ge=0)]
    """Without those read from or written to a cache."""
    cache_read_tokens: Annotated[int, Field(ge=0)] = 0
    cache_write_tokens: Annotated[int, Field(ge=0)] = 0
    output_tokens: Annotated[int, Field(ge=0)]
    """Reasoning included."""
    reasoning_tokens: Annotated[int, Field(ge=0)] = 0
    """Part of ``output_tokens``, where the provider says."""

    @property
    def tokens(self) -> int:
        """All tokens of the call."""
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens + self.output_tokens


class CallBegun(Record):
    """A call that is about to be sent: who is asked, for what, and the most that it can use."""

    provider: str
    model: str
    purpose: str
    """``check``, ``probe``, ``proposals`` or ``repair``."""
    most: Usage
    """The worst case, which counts against the caps until the call has ended."""


class CallEnded(Record):
    """How a call ended. ``trouble`` and ``text`` are None for one that was answered."""

    usage: Usage | None
    """None if the provider said nothing; what was reserved counts as used then, unless nothing was ever sent."""
    latency_seconds: Annotated[float, Field(ge=0)]
    trouble: str | None = None
    """Class of the failure, e.g. ``rate_limited``."""
    text: Prose | None = None
    sent: bool = True
    """False: no connection came about, or what came back cannot have been billed: an error, a page, a redirect."""


class Desk(Protocol):
    """What a proposer that asks a language model may do to its study, from any thread; the harness books it."""

    def begin_call(self, call: CallBegun) -> int:
        """Return the number of a call that may be sent now; `SpendingCapReached` if a cap could be passed by it."""
        ...

    def end_call(self, call: int, ended: CallEnded) -> float | None:
        """Close a call's row and return its cost in dollars, None where the model's price is not known."""
        ...

    def keep(self, call: int, name: str, text: str) -> None:
        """Write down a prompt or a reply for the reader, as file ``name`` of the call's folder; never a header."""
        ...

    def event(self, kind: str, text: str) -> None:
        """Write down an outage, a refusal or a recovery."""
        ...

    def insight(self, text: str) -> None:
        """Write down what the model wants to remember; longer texts are cut."""
        ...


def provider_and_model(llm: str) -> tuple[str, str]:
    """Return who is asked and for which model: ``PROVIDER:MODEL``, or a model's name that gives its provider away.

    Only the known providers count as a prefix, because local servers name models with colons. What is not Claude is
    taken for a model that speaks OpenAI's protocol, as every local server does.
    """
    provider, colon, model = llm.partition(":")
    if colon and provider in PROVIDERS:
        return provider, model.strip()
    model = llm.strip()
    return ("anthropic" if model.startswith("claude") else "openai"), model


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What the owner asks of a proposer, given once before it is asked for anything."""

    llm: str | None
    """``MODEL`` or ``PROVIDER:MODEL``; None: no language model is asked."""
    desk: Desk


class Proposer(Protocol):
    """Makes proposals from a history. Deterministic given the history, except where it asks a language model."""

    name: str
    model: str | None
    """Language model that it asks under the terms that it was given, as the owner named it; None: none."""

    def begin(self, terms: Terms) -> None:
        """Take the owner's terms; `WrongUse` if they cannot be met: no model, no key, a model that is not there."""
        ...

    def propose(self, history: History, count: int) -> Sequence[Proposal]:
        """Return one to ``count`` proposals, or none if it has nothing left to say."""
        ...

    def briefing(self, history: History) -> str:
        """Return what a language model would be shown of this history."""
        ...

    def close(self) -> None:
        """Let go of processes and connections; calling it twice is harmless."""
        ...
