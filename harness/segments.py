"""The segments of a replay's training under one budget, and what is kept of those that are done.

Mostly it is one. Where trials go on from their parent's checkpoint, the lineage is a schedule: its full run trains
every config of it in turn, each with an equal share of the budget and from the weights that the one before it left. A
learning rate anneals within its segment and an optimizer's moments begin anew, as they did in the search. A segment
that is done is on record beside its weights, so that a run that was killed goes on after it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from frozen.timer import Budget
from harness import checkpoints
from harness.config import TrialConfig
from harness.errors import CheckFailed
from harness.files import write_whole
from harness.paths import ReplayPaths
from harness.records import CurvePoint, Record, Trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One config's part of a run."""

    config: TrialConfig
    seed: int
    budget: Budget
    train: Path
    """The job's own folder."""
    curve: Path
    record: Path
    """Written once the segment is done; outside of what its job may write."""

    @property
    def model(self) -> Path:
        """The weights that it leaves."""
        return self.train / "model"

    @property
    def identity(self) -> str:
        """What its weights depend on besides those that it began with."""
        return f"{self.config.digest} seed {self.seed} budget {self.budget}"


class Done(Record):
    """A segment that is done."""

    identity: str
    trained: Trained
    points: tuple[CurvePoint, ...]
    digest: str
    """Of its weights."""


def shares(budget: Budget, count: int) -> list[Budget]:
    """Return a budget in equal parts, whose sum it is: of whole tokens the last part takes what is left over."""
    if budget.kind != "tokens":
        return [Budget(budget.kind, budget.amount / count)] * count
    each = budget.amount // count
    return [*[Budget("tokens", each)] * (count - 1), Budget("tokens", budget.amount - each * (count - 1))]


def lay_out(parts: Sequence[tuple[TrialConfig, int]], budget: Budget, paths: ReplayPaths) -> list[Segment]:
    """Return the segments of configs with their seeds; a single one has the folder of the run itself."""
    if len(parts) == 1:
        ((config, seed),) = parts
        record = paths.root / "segment.json"
        return [
            Segment(config=config, seed=seed, budget=budget, train=paths.train, curve=paths.curve_jsonl, record=record)
        ]
    return [
        Segment(
            config=config,
            seed=seed,
            budget=share,
            train=paths.train / f"segment-{at + 1}",
            curve=paths.root / f"segment-{at + 1}.jsonl",
            record=paths.root / f"segment-{at + 1}.json",
        )
        for at, ((config, seed), share) in enumerate(zip(parts, shares(budget, len(parts)), strict=True))
    ]


def finished(segments: Sequence[Segment]) -> list[Done]:
    """Return the records of the segments that need not run again: as many as lead to weights that are still there.

    Weights of a segment before the last one that is done are gone, and nobody needs them.
    """
    records = list(_records(segments))
    while records and not _is_there(segments[len(records) - 1], records[-1]):
        records.pop()
    return records


def finish(segment: Segment, trained: Trained, points: Sequence[CurvePoint], before: Segment | None) -> Done:
    """Put a segment on record, and let go of the weights that it began with."""
    digest = checkpoints.digest_of(segment.model)
    done = Done(identity=segment.identity, trained=trained, points=tuple(points), digest=digest)
    write_whole(segment.record, done.model_dump_json() + "\n")
    if before is not None:
        shutil.rmtree(before.train, ignore_errors=True)
    return done


def together(done: Sequence[Trained]) -> Trained:
    """Return what the segments come to as one training."""
    peaks = [each.peak_memory_bytes for each in done if each.peak_memory_bytes is not None]
    return done[-1].model_copy(
        update={
            "steps": sum(each.steps for each in done),
            "tokens": sum(each.tokens for each in done),
            "train_seconds": sum(each.train_seconds for each in done),
            "warmup_seconds": sum(each.warmup_seconds for each in done),
            "wall_seconds": sum(each.wall_seconds for each in done),
            "peak_memory_bytes": max(peaks, default=None),
        }
    )


def within(point: CurvePoint, done: Sequence[Done], count: int) -> CurvePoint:
    """Return a point of a segment's curve as one of the whole run's, after the segments that were done before it."""
    return point.model_copy(
        update={
            "progress": (len(done) + point.progress) / count,
            "seconds": point.seconds + sum(each.trained.train_seconds for each in done),
            "step": point.step + sum(each.trained.steps for each in done),
        }
    )


def _records(segments: Sequence[Segment]) -> Iterator[Done]:
    """Yield the records from the first segment on, up to the first that is missing, damaged or of another run."""
    for segment in segments:
        try:
            done = Done.model_validate_json(segment.record.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValidationError):
            return
        if done.identity != segment.identity:
            return
        yield done


def _is_there(segment: Segment, done: Done) -> bool:
    try:
        return checkpoints.digest_of(segment.model) == done.digest
    except CheckFailed:
        return False
