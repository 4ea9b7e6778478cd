"""How another shell speaks to a running search: one whole JSON file per message, in the study's ``inbox/``.

The ledger has one writer, the driver; whoever else wants something puts a letter here. A letter appears whole or not
at all (written beside, synced, renamed), and is removed only after the driver has dealt with it. A driver that is
killed in between reads it again: a proposal that comes twice is recognised as a duplicate, one that is lost is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from harness.config import explain
from harness.errors import BadInput, BadValue
from harness.paths import StudyPaths
from harness.proposers import outsider
from harness.records import Proposal, Prose, Record
from harness.terms import LONGEST_INSIGHT

HARNESS_ONLY = ("model", "call", "tokens", "cost_usd", "latency_seconds")
"""Fields of a proposal that book a call to a language model; nobody from outside may fill them in."""


def _outsider(name: str) -> str:
    try:
        return outsider(name)
    except BadValue as error:
        raise ValueError(str(error)) from error


def _from_outside(proposal: Proposal) -> Proposal:
    _outsider(proposal.source)
    booked = [name for name in HARNESS_ONLY if getattr(proposal, name) is not None]
    if booked:
        raise ValueError(f"{', '.join(booked)}: only a proposer of our own books calls to a language model")
    return proposal


class Propose(Record):
    """Queue a proposal; it goes before what the proposer says next."""

    kind: Literal["propose"] = "propose"
    proposal: Annotated[Proposal, AfterValidator(_from_outside)]


class Insight(Record):
    """Note what somebody from outside learned; proposers that are language models are shown it."""

    kind: Literal["insight"] = "insight"
    source: Annotated[str, AfterValidator(_outsider)]
    text: Annotated[Prose, Field(min_length=1, max_length=LONGEST_INSIGHT)]


class Pause(Record):
    """Begin no further trial until `Resume`; the running one ends as usual."""

    kind: Literal["pause"] = "pause"


class Resume(Record):
    """Go on after `Pause`."""

    kind: Literal["resume"] = "resume"


class Stop(Record):
    """End the search after the running trial, write the report and go."""

    kind: Literal["stop"] = "stop"


class Unreadable(Record):
    """A file that is no message. It has been put aside; the driver notes it and goes on."""

    kind: Literal["unreadable"] = "unreadable"
    file: str
    reason: str


Message = Propose | Insight | Pause | Resume | Stop | Unreadable
_ADAPTER: TypeAdapter[Message] = TypeAdapter(
    Annotated[Propose | Insight | Pause | Resume | Stop, Field(discriminator="kind")], config={"defer_build": True}
)


def post(paths: StudyPaths, message: Message) -> Path:
    """Put a message into the study's inbox and return its file; `BadInput` if the disk does not take it."""
    name = f"{time.time_ns():020d}-{message.kind}-{uuid.uuid4().hex[:8]}.json"
    aside, letter = paths.inbox / f".{name}", paths.inbox / name
    try:
        paths.inbox.mkdir(exist_ok=True)
        with aside.open("x", encoding="utf-8") as file:
            file.write(message.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(letter)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise BadInput(f"cannot write to {paths.inbox}: {error.strerror or error}") from error
    return letter


def take(paths: StudyPaths) -> Iterator[Message]:
    """Yield waiting messages, oldest first, each removed once the caller comes back for the next one.

    What is no message is moved to ``inbox/unreadable/`` and yielded as `Unreadable`.
    """
    for letter in waiting(paths):
        message: Message
        try:
            message = _read(letter)
        except BadInput as error:
            message = _put_aside(letter, str(error))
        yield message
        letter.unlink(missing_ok=True)


def peek(paths: StudyPaths) -> list[Message]:
    """Return what waits in the inbox, oldest first, and leave it there; junk is left to the driver."""
    found: list[Message] = []
    for letter in waiting(paths):
        with contextlib.suppress(BadInput, FileNotFoundError):  # taken by the driver since we looked
            found.append(_read(letter))
    return found


def waiting(paths: StudyPaths) -> list[Path]:
    """Return the letters that lie in the inbox, oldest first."""
    return sorted(path for path in paths.inbox.glob("*.json") if path.is_file() and not path.name.startswith("."))


def _read(letter: Path) -> Message:
    """Return the message of a letter; `BadInput` if it is none."""
    try:
        return _ADAPTER.validate_python(json.loads(letter.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise BadInput(explain(error)) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or brackets without end
        raise BadInput(str(error)) from error


def _put_aside(letter: Path, reason: str) -> Unreadable:
    folder = letter.parent / "unreadable"
    folder.mkdir(exist_ok=True)
    letter.replace(folder / letter.name)
    return Unreadable(file=letter.name, reason=reason[:500])
