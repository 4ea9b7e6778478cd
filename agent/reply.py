"""What a model answers: the schema it is asked to fill, and the text it sends read back into proposals.

A reply is data. What is merely unwise (an unknown knob, a value out of bounds, too many changes) becomes a proposal all
the same, which the harness refuses with a row that the model is shown; what is no reply at all is told in words that
the model can act on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError
from typing_extensions import TypeIs

from agent.troubles import scrub_document
from harness.config import Knob, Value, explain
from harness.records import History, Proposal
from harness.terms import LONGEST_INSIGHT

LONGEST_REPLY = 200_000
"""Characters; some ten times what the most output tokens of a sensible reply hold."""
LONGEST_PROSE = 2_000
"""Characters of a rationale or of what to watch."""
ASKED_PROSE = 600
"""Characters of each of the two that are asked for: a few sentences."""
LONGEST_WORD = 200
"""Characters of a knob's name or of a value that is text."""
OPTIONAL = ("predicted_change", "confidence", "abort_if")
"""Fields that a proposal is worth trying without: a confidence of 70 is no reason to lose a config."""
MOST_INSIGHTS = 3
MOST_TRIES = 200
"""Places at which a JSON object is looked for within prose."""

MOST_SCANNED = 10 * LONGEST_REPLY
"""Characters that are read over in all those tries. A parser holds the interpreter, and the device's driver with it."""

_THINKING, _THOUGHT = re.compile("<think>", re.IGNORECASE), re.compile("</think>", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class BadReply(Exception):
    """The text is no reply; its words are meant for the model that wrote it."""


class _Fault(Exception):
    """One proposal of a reply cannot be taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a model's answer holds."""

    proposals: tuple[Proposal, ...]
    insights: tuple[str, ...]
    """Short notes that it writes to itself."""
    faults: tuple[str, ...]
    """What could not be taken and why, in words for the model."""


# --- asking ------------------------------------------------------------------------------------------------------


def schema(knobs: Mapping[str, Knob], max_changes: int, most: int) -> dict[str, Any]:
    """Return the JSON schema of a reply with up to ``most`` proposals of up to ``max_changes`` knobs each.

    In the subset that both strict modes take: every object closed and every property required, optional ones nullable,
    a diff as a list of pairs, since a free-form object comes back empty. Bounds of lists and texts are there for local
    servers, whose grammar would else let a small model run on for ever; whoever sends a schema to a strict mode that
    turns them away leaves them out (`calling.unbounded`), and the descriptions say them too. Bounds of knobs are not in
    it: the policy holds them.
    """
    change = _object(
        knob={"type": "string", "enum": sorted(knobs)},
        value={"anyOf": [{"type": "number"}, {"type": "string", "maxLength": LONGEST_WORD}, {"type": "boolean"}]},
    )
    abort_if = _object(
        probe_above=_described(
            "number", "score of the probe split, in the study's metric, above which the screening run ends"
        ),
        after=_described("number", "share of the budget from which on it is looked at, between 0 and 1"),
    )
    proposal = _object(
        parent=_nullable("integer", "lineage node to branch from; null: the incumbent"),
        changes={
            "type": "array",
            "items": change,
            "minItems": 1,
            "maxItems": max_changes,
            "description": f"1 to {max_changes} different knobs with their new values",
        },
        rationale=_prose_of("why this should help, in a few sentences"),
        watch=_prose_of("what to look at to know whether it works"),
        predicted_change=_nullable("number", "expected difference of the metric to the parent; negative is better"),
        confidence=_nullable("number", "probability that it is better than the parent, between 0 and 1"),
        abort_if={"anyOf": [abort_if, {"type": "null"}]},
    )
    return _object(
        proposals={
            "type": "array",
            "items": proposal,
            "minItems": 1,
            "maxItems": most,
            "description": f"1 to {most}, the most promising first",
        },
        insights={
            "type": "array",
            "items": {"type": "string", "maxLength": LONGEST_INSIGHT},
            "maxItems": MOST_INSIGHTS,
            "description": f"0 to {MOST_INSIGHTS} short notes to yourself for the rest of the study",
        },
    )


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _described(kind: str, description: str) -> dict[str, Any]:
    return {"type": kind, "description": description}


def _prose_of(description: str) -> dict[str, Any]:
    return {**_described("string", description), "minLength": 1, "maxLength": ASKED_PROSE}


def _nullable(kind: str, description: str) -> dict[str, Any]:
    return {"anyOf": [{"type": kind}, {"type": "null"}], "description": description}


# --- reading -----------------------------------------------------------------------------------------------------


def read(text: str, history: History, *, source: str, model: str, most: int) -> Reply:
    """Return what a reply proposes and notes; `BadReply` if it is none. One bad proposal does not lose the others."""
    try:
        return _read(_document(text), history, source, model, most)
    except RecursionError as error:
        raise BadReply("The reply is nested too deeply. Send one JSON object that fits the schema.") from error


def _read(document: Mapping[str, Any], history: History, source: str, model: str, most: int) -> Reply:
    offered = document.get("proposals")
    if not isinstance(offered, list):
        raise BadReply('The reply has no list "proposals". Send one JSON object that fits the schema.')
    proposals: list[Proposal] = []
    faults: list[str] = []
    for number, item in enumerate(offered[:most], 1):
        try:
            proposal, left_out = _proposal(item, history.knobs, source, model)
        except _Fault as fault:
            faults.append(f"Proposal {number}: {fault}.")
        else:
            proposals.append(proposal)
            if left_out:
                faults.append(f"Proposal {number} was taken without what can be left out: {left_out}.")
    if len(offered) > most:
        faults.append(f"Only the first {most} of {len(offered)} proposals were looked at.")
    insights, ignored = _insights(document.get("insights"))
    return Reply(proposals=tuple(proposals), insights=insights, faults=(*faults, *ignored))


def _document(text: str) -> Mapping[str, Any]:
    """Return the one JSON object of a text that may stand in a code fence, in prose or after some thinking."""
    if len(text) > LONGEST_REPLY:
        raise BadReply(f"The reply is longer than {LONGEST_REPLY:,} characters. Send the JSON object only.")
    found = list(_objects(_spoken(text)))
    replies = [each for each in found if "proposals" in each] or found
    if not replies:
        raise BadReply("The reply holds no whole JSON object. Send one that fits the schema, and nothing else.")
    return scrub_document(replies[-1])  # the last: a model that drafts first ends with what it means


def _spoken(text: str) -> str:
    """Return a text without its thinking.

    One pattern for both marks would start anew at each that is not closed: a minute for a reply that is full of them.
    """
    parts: list[str] = []
    end = 0
    while (begun := _THINKING.search(text, end)) and (closed := _THOUGHT.search(text, begun.end())):
        parts.append(text[end : begun.start()])
        end = closed.end()
    return "".join(parts) + text[end:]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    place, scanned = text.find("{"), 0
    for _ in range(MOST_TRIES):
        if place < 0 or scanned > MOST_SCANNED:
            return
        try:
            found, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            end = place + 1
            scanned += (len(text) if error.msg.startswith("Unterminated") else error.pos) - place
        except (ValueError, RecursionError):  # which do not say how far they came
            end = place + 1
            scanned += len(text) - place
        else:
            scanned += end - place
            if isinstance(found, dict):
                yield found
        place = text.find("{", end)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _proposal(item: object, knobs: Mapping[str, Knob], source: str, model: str) -> tuple[Proposal, str]:
    """Return a proposal, and what is wrong with those of its `OPTIONAL` fields that it is taken without."""
    if not isinstance(item, dict):
        raise _Fault("it is no object")
    parent = item.get("parent")
    if parent is not None and (type(parent) is not int or not 0 <= parent < 2**31):
        raise _Fault(f"parent {_shown(parent)} is neither null nor the number of a lineage node")
    fields = {
        "diff": _diff(item.get("changes"), knobs),
        "source": source,
        "model": model,
        "rationale": _prose(item, "rationale"),
        "watch": _prose(item, "watch"),
        "parent": parent,
    }
    optional = {name: item.get(name) for name in OPTIONAL}
    try:
        return Proposal.model_validate(fields | optional), ""
    except ValidationError as error:
        wrong = {each["loc"][0] for each in error.errors() if each["loc"]}
        said = _cut(explain(error), LONGEST_WORD)
        if not wrong <= set(OPTIONAL):
            raise _Fault(said) from error
    return Proposal.model_validate(fields | {name: optional[name] for name in OPTIONAL if name not in wrong}), said


def _diff(changes: object, knobs: Mapping[str, Knob]) -> dict[str, Value]:
    if not isinstance(changes, list) or not changes:
        raise _Fault('"changes" is no list with at least one {"knob": …, "value": …}')
    diff: dict[str, Value] = {}
    for change in changes:
        name = change.get("knob") if isinstance(change, dict) else None
        if not isinstance(name, str) or not _is_word(name):
            raise _Fault(f"{_shown(change)} names no knob")
        value = _value(name, change.get("value"), knobs.get(name))
        if diff.setdefault(name, value) != value:  # said twice alike, as small models do, it is still one change
            raise _Fault(f"{name} is changed twice")
    return diff


def _value(name: str, value: object, knob: Knob | None) -> Value:
    # a word first: on a long row of digits the pattern's backtracking takes the square of its length
    if isinstance(value, str) and _is_word(value) and knob and _is_numeric(knob) and _NUMBER.fullmatch(value):
        value = _number(value)
    if isinstance(value, bool) or _is_finite(value):
        return value
    if isinstance(value, str) and _is_word(value):
        return value
    raise _Fault(f"{name} = {_shown(value)} is neither a finite number, a short text nor true or false")


def _is_finite(value: object) -> TypeIs[int | float]:
    """Tell whether it is a number that arithmetic and the ledger can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63


def _number(text: str) -> int | float:
    return float(text) if not text.lstrip("+-").isdigit() or len(text) > 20 else int(text)


def _is_numeric(knob: Knob) -> bool:
    return knob.type != "choice" or not any(isinstance(choice, str) for choice in knob.choices)


def _is_word(text: str) -> bool:
    return 0 < len(text) <= LONGEST_WORD and _UNPRINTABLE.search(text) is None


def _prose(item: Mapping[str, Any], name: str) -> str:
    text = item.get(name)
    if not isinstance(text, str) or not text.strip():
        raise _Fault(f'"{name}" says nothing')
    return _cut(text.strip(), LONGEST_PROSE)


def _insights(notes: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if notes is None:
        return (), ()
    if not isinstance(notes, list):
        return (), ('"insights" is no list of texts.',)
    texts = [_UNPRINTABLE.sub(" ", note).strip() for note in notes if isinstance(note, str)]
    return tuple(_cut(text, LONGEST_INSIGHT) for text in texts if text)[:MOST_INSIGHTS], ()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _shown(value: object) -> str:
    return _cut(ascii(value)[:LONGEST_WORD], 60)
