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

from pydantic import Field, TypeAdapter, ValidationError

from harness.config import explain
from harness.errors import BadInput
from harness.paths import StudyPaths
from harness.records import Proposal, Record


class Propose(Record):
    """Queue a proposal; it goes before what the proposer says next."""

    kind: Literal["propose"] = "propose"
    proposal: Proposal


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


Message = Propose | Pause | Resume | Stop | Unreadable
_ADAPTER: TypeAdapter[Message] = TypeAdapter(
    Annotated[Propose | Pause | Resume | Stop, Field(discriminator="kind")], config={"defer_build": True}
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
        try:
            message: Message = _ADAPTER.validate_python(json.loads(letter.read_text(encoding="utf-8")))
        except ValidationError as error:
            message = _put_aside(letter, explain(error))
        except ValueError as error:  # no UTF-8 or no JSON
            message = _put_aside(letter, str(error))
        yield message
        letter.unlink(missing_ok=True)


def waiting_proposals(paths: StudyPaths) -> list[Proposal]:
    """Return the proposals that lie in the inbox, oldest first, and leave everything there; for who is not the driver.

    What is no message is passed over: the driver will say so.
    """
    found = []
    for letter in waiting(paths):
        with contextlib.suppress(FileNotFoundError, ValueError):  # the driver has just taken it, or it is no message
            message = _ADAPTER.validate_python(json.loads(letter.read_text(encoding="utf-8")))
            if isinstance(message, Propose):
                found.append(message.proposal)
    return found


def waiting(paths: StudyPaths) -> list[Path]:
    """Return the letters that lie in the inbox, oldest first."""
    return sorted(path for path in paths.inbox.glob("*.json") if path.is_file() and not path.name.startswith("."))


def _put_aside(letter: Path, reason: str) -> Unreadable:
    folder = letter.parent / "unreadable"
    folder.mkdir(exist_ok=True)
    letter.replace(folder / letter.name)
    return Unreadable(file=letter.name, reason=reason[:500])
