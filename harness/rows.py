"""The values that only the ledger's two sides share, and the one place where rows become values.

Kept apart from the writer so that readers import neither sqlite-utils nor anything slow.
"""

from __future__ import annotations

import datetime
import json
import math
import sqlite3
import struct
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from harness.config import TrialConfig, unflatten
from harness.records import (
    FAILURES,
    AbortIf,
    CurvePoint,
    Decision,
    Failed,
    Proposal,
    Role,
    Scored,
    Trained,
    Trial,
    TrialState,
    Verdict,
)

Identity = tuple[str, int | None]
"""What two trials share that differ in nothing but their seed: a config's digest, and the node that it went on from."""
UNSCORED_ENDINGS = FAILURES | {TrialState.STOPPED, TrialState.INTERRUPTED, TrialState.LOST}
"""States that a `Failed` may carry into the ledger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRow:
    """What a study asks; written once and sealed."""

    name: str
    task: str
    model: str
    """What is trained: ``fresh`` or a base model."""
    metric: str
    seed: int
    budget: str
    """Canonical text, e.g. ``300s``."""
    seal: str
    """Root digest of everything that a score depends on."""
    policy: str
    """Text of policy.toml."""
    versions: Mapping[str, str]
    """Package versions, the program's own included."""
    git_commit: str | None
    """None outside a git checkout."""
    git_dirty: bool | None
    device: str | None
    created: datetime.datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class NewNode:
    """The checkpoint on which a kept proposal stands: its first replicate after screening, already published."""

    trial: int
    checkpoint_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something else that is worth a line."""

    id: int
    kind: str
    text: str
    data: Mapping[str, Any]
    created: datetime.datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A row that was closed."""

    kind: Literal["trial", "proposal"]
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call to a language model, as it was booked."""

    id: int
    provider: str
    model: str
    purpose: str
    state: str
    """``in_flight``, ``answered``, ``failed`` or ``lost``."""
    tokens: int
    """Billed, or the worst case while that is not known."""
    cost_usd: float | None
    """Likewise; None where the model has no price."""
    latency_seconds: float | None
    trouble: str | None
    error_text: str | None
    begun: datetime.datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What calls to language models have cost so far, calls in flight at their worst case included."""

    tokens: int
    usd: float
    unpriced_calls: int
    """Calls whose cost is not known, because their model has no price."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensed:
    """What a device's sensors said; None where they cannot be read."""

    celsius: float | None
    watts: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a trial ended: scored, or failed with a reason. Build it with `of_scored` or `of_failed`."""

    scored: Scored | None = None
    failed: Failed | None = None
    trained: Trained | None = None
    """Also there when training ended well and scoring did not; None for an untrained reference."""
    score: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None
    guard_score: float | None = None
    checkpoint_digest: str | None = None
    curve: tuple[CurvePoint, ...] = ()
    device_celsius: float | None = None
    device_watts: float | None = None

    def __post_init__(self) -> None:
        if (self.scored is None) == (self.failed is None):
            raise ValueError("a trial ends either scored or failed")
        if (self.scored is None) != (self.score is None):
            raise ValueError("a scored trial has a score and a failed one has none")
        if self.score is not None and not (math.isfinite(self.score) and self.score >= 0):
            raise ValueError(f"a score must be finite and not negative, not {self.score!r}")
        if self.failed is not None:
            if self.failed.state not in UNSCORED_ENDINGS:
                raise ValueError(f"a failed trial cannot end as {self.failed.state.value}")
            figures = (self.perplexity, self.accuracy, self.guard_score)
            if self.checkpoint_digest is not None or any(figure is not None for figure in figures):
                raise ValueError("a failed trial has neither figures nor a checkpoint")

    def observed(self, points: Sequence[CurvePoint], sensed: Sensed) -> Self:
        """Return the same ending with what the driver saw on the way: the curve, and the device's sensors."""
        return replace(self, curve=tuple(points), device_celsius=sensed.celsius, device_watts=sensed.watts)

    @property
    def state(self) -> TrialState:
        """The state of the closed row."""
        return TrialState.SCORED if self.failed is None else self.failed.state

    @classmethod
    def of_scored(
        cls,
        *,
        trained: Trained | None,
        scored: Scored,
        checkpoint_digest: str | None,
        curve: tuple[CurvePoint, ...] = (),
    ) -> Self:
        """Return the ending of a scored trial, with what the guard set came to where the study has one.

        Its seconds of scoring are those of both sets.
        """
        guard = scored.guard
        spent = scored.score_seconds + (0.0 if guard is None else guard.score_seconds)
        return cls(
            scored=scored.model_copy(update={"score_seconds": spent}),
            trained=trained,
            score=scored.score,
            perplexity=scored.perplexity,
            accuracy=scored.accuracy,
            guard_score=None if guard is None else guard.score,
            checkpoint_digest=checkpoint_digest,
            curve=curve,
        )

    @classmethod
    def of_failed(cls, failed: Failed, *, trained: Trained | None = None, curve: tuple[CurvePoint, ...] = ()) -> Self:
        """Return the ending of a failed trial, with what is known of its training."""
        return cls(failed=failed, trained=trained, curve=curve)


def dump(value: Mapping[str, Any]) -> str:
    """Return the JSON text under which a mapping is stored: sorted, compact, without NaN and infinity."""
    return json.dumps(dict(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def pack(nats: Sequence[float]) -> bytes:
    """Return numbers as little-endian float64, the form of ``document_nats``."""
    return struct.pack(f"<{len(nats)}d", *nats)


def unpack(blob: bytes) -> tuple[float, ...]:
    """Return the numbers that `pack` wrote."""
    return struct.unpack(f"<{len(blob) // 8}d", blob)


def stamp(moment: datetime.datetime) -> str:
    """Return a moment as UTC text that sorts by time and that SQLite's date functions read."""
    return moment.astimezone(datetime.UTC).isoformat(timespec="microseconds")


def moment(text: str | None) -> datetime.datetime | None:
    """Return the moment that `stamp` wrote."""
    return None if text is None else datetime.datetime.fromisoformat(text)


class Configs:
    """Turns stored configs into values, each distinct one once: a night repeats the same few many times."""

    def __init__(self) -> None:
        self._known: dict[str, TrialConfig] = {}

    def value(self, text: str) -> TrialConfig:
        """Return the config of a canonical JSON text."""
        if text not in self._known:
            self._known[text] = unflatten(json.loads(text))
        return self._known[text]


def continues(policy: str) -> bool:
    """Tell from the text of policy.toml whether trials go on from their parent's checkpoint.

    A text that is no TOML asks for nothing; that it is not the study's policy, `overnight verify` says.
    """
    if "start_from" not in policy:  # most studies: nothing to parse whenever a row is read
        return False
    try:
        return tomllib.loads(policy).get("start_from") == "parent"
    except tomllib.TOMLDecodeError:
        return False


def study_value(row: sqlite3.Row) -> StudyRow:
    """Return a row of ``study`` as a value."""
    columns = dict(row)
    del columns["id"]
    columns["versions"] = json.loads(columns["versions"])
    columns["created"] = moment(columns["created"])
    if columns["git_dirty"] is not None:
        columns["git_dirty"] = bool(columns["git_dirty"])
    return StudyRow(**columns)


def proposal_value(row: sqlite3.Row) -> Proposal:
    """Return what was proposed, from a row of ``proposals``."""
    return Proposal(
        diff=json.loads(row["diff"]),
        source=row["source"],
        rationale=row["rationale"],
        watch=row["watch"],
        parent=row["requested_parent"],
        model=row["model"],
        predicted_change=row["predicted_change"],
        confidence=row["confidence"],
        tokens=row["tokens"],
        cost_usd=row["cost_usd"],
        latency_seconds=row["latency_seconds"],
        call=row["call"],
        abort_if=None if row["abort_if"] is None else AbortIf.model_validate_json(row["abort_if"]),
    )


PLAIN_COLUMNS = (
    *(
        "id",
        "proposal",
        "seed",
        "replicate",
        "start",
        "epoch",
        "budget",
        "score",
        "perplexity",
        "accuracy",
        "guard_score",
        "steps",
        "tokens",
        "parameters",
    ),
    *("train_seconds", "warmup_seconds", "score_seconds", "wall_seconds", "peak_memory_bytes", "device", "sandbox"),
    *("seal", "error_class", "error_text", "checkpoint_digest"),
)
"""Columns of ``trials`` that are fields of `Trial` as they are."""
POINT_COLUMNS = tuple(CurvePoint.model_fields)
"""Looked up once: a long study has a hundred thousand points."""


def trial_value(row: sqlite3.Row, configs: Configs, curve: tuple[CurvePoint, ...]) -> Trial:
    """Return a row of ``trials`` and its curve as a value."""
    return Trial(
        role=Role(row["role"]),
        state=TrialState(row["state"]),
        config=configs.value(row["config"]),
        started=moment(row["started"]),
        ended=moment(row["ended"]),
        curve=curve,
        **{name: row[name] for name in PLAIN_COLUMNS},
    )


def point_value(row: sqlite3.Row) -> CurvePoint:
    """Return a row of ``curves`` as a value."""
    return CurvePoint(**{name: row[name] for name in POINT_COLUMNS})


def verdict_value(row: sqlite3.Row) -> Verdict:
    """Return a row of ``verdicts`` as a value."""
    return Verdict(
        decision=Decision(row["decision"]),
        difference=row["difference"],
        standard_error=row["standard_error"],
        probability=row["probability"],
        replicates=row["replicates"],
        reason=row["reason"],
    )


def call_value(row: sqlite3.Row) -> Call:
    """Return a row of ``calls`` as a value."""
    begun = moment(row["begun"])
    assert begun is not None
    open_still = row["ended"] is None
    return Call(
        tokens=row["most_tokens"] if open_still else row["billed_tokens"],
        cost_usd=row["most_usd"] if open_still else row["cost_usd"],
        begun=begun,
        **{name: row[name] for name in ("id", "provider", "model", "purpose", "state")},
        **{name: row[name] for name in ("latency_seconds", "trouble", "error_text")},
    )


def event_value(row: sqlite3.Row) -> Event:
    """Return a row of ``events`` as a value."""
    created = moment(row["created"])
    assert created is not None
    data = json.loads(row["data"]) if row["data"] is not None else {}
    return Event(id=row["id"], kind=row["kind"], text=row["text"], data=data, created=created)
