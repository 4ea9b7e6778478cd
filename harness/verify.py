"""Is the study still what its ledger says? Everything sealed is hashed again, and the best checkpoint scored again.

The untouched base model is scored again too, where there is one, and both on the guard set where there is one.

After an upgrade of the tool everything but the tool is held against the seal, and the best checkpoint is scored by the
new one. That is never plain ``ok``: what differs is named as ``changed``, apart from what ``failed``.

What is found are values, not exceptions: one damaged thing must not hide the next. Works beside a running search: it
reads the ledger, and writes nothing into the study, so that it may be somebody else's or on a read-only disk. What
cannot be read is a finding of its own.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from harness import checkpoints, origin
from harness.audit import audit, judges_again
from harness.errors import CannotStart, CheckFailed, OvernightError, StudyLocked
from harness.jobs.job import ScoreJob
from harness.locks import device_lock
from harness.orders import score_order
from harness.paths import GUARD, StudyPaths
from harness.queries import Reader
from harness.records import Failed, Merged, Scored, Trained, Trial
from harness.study import Study, slowest_seconds
from harness.upgrade import Inspection, Upgrade, inspect

TOLERANCE = 1e-6
"""Largest difference, in the study's metric, between a recorded score and the same weights scored again."""
UNREADABLE = (OvernightError, sqlite3.DatabaseError, ValueError)
"""What reading a cell ends with that no longer holds a value."""
What = Literal["seal", "ledger", "checkpoint", "score"]
State = Literal["ok", "changed", "failed"]
"""``changed``: it is the tool's doing, which was upgraded since the study was sealed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at, in a sentence."""

    what: What
    state: State
    text: str

    @property
    def ok(self) -> bool:
        """Whether it is as it was."""
        return self.state == "ok"


class Scorer(Protocol):
    """The part of a `Launcher` that is needed to score."""

    def run(self, job: ScoreJob, *, log: Path, deadline_seconds: float) -> Trained | Scored | Merged | Failed:
        """Run a job to its end."""
        ...


def verify(study: Study, *, scorer: Scorer | None = None) -> list[Finding]:
    """Look at seal, ledger and checkpoints, and score the best one again; every finding in the order of looking.

    ``scorer`` runs the scoring job; absent, a launcher of its own is started.
    """
    found = inspect(study.seal, thorough=True)
    findings = list(seal_findings(study, found))
    with Reader(study.paths.ledger) as reader:
        findings += ledger_findings(study, reader)
        try:
            recorded = reader.checkpoints()
            subjects = _subjects(study.paths, reader, recorded)
        except UNREADABLE as error:
            text = f"the lineage cannot be read, so no checkpoint can be held against it: {error}"
            return [*findings, Finding(what="checkpoint", state="failed", text=text)]
        findings += checkpoint_findings(study.paths, recorded)
    if subjects and any(finding.state == "failed" for finding in findings):
        text = f"{subjects[0].name} is not scored again: with what is broken above, the number would mean nothing"
        return [*findings, Finding(what="score", state="failed", text=text)]
    for subject in subjects:
        findings += _again(study, subject, scorer, found.upgrade)
    if not any(subject.weights for subject in subjects):
        only = ": the untouched base is all that has a score, and the baseline has none" if subjects else ""
        text = f"nothing that was trained is scored yet{only}"
        findings.append(Finding(what="score", state="ok", text=text))
    return findings


def seal_findings(study: Study, found: Inspection) -> Iterator[Finding]:
    """Say what is as it was sealed; one finding per change."""
    sealed, digest = study.seal.manifest, study.seal.digest[:16]
    for change in found.faults:
        yield Finding(what="seal", state="failed", text=str(change))
    if sealed.tool == study.seal.code.tool() and any(change.part == "code" for change in found.faults):
        yield Finding(what="seal", state="failed", text=_not_upgraded(study))
    if found.upgrade is not None:
        yield Finding(what="seal", state="changed", text=found.upgrade.versions)
        for change in found.upgrade.changes:
            yield Finding(what="seal", state="changed", text=str(change))
    if not found.faults and found.upgrade is None:
        text = f"{len(sealed.code) + len(sealed.data)} files, versions and rules are as sealed ({digest})"
        yield Finding(what="seal", state="ok", text=text)
    elif not found.faults:
        text = f"{len(sealed.data)} files of data and all rules are as sealed ({digest}): only the tool is another"
        yield Finding(what="seal", state="ok", text=text)


def _not_upgraded(study: Study) -> str:
    """Say why no upgrade explains changed code, and, where the study was sealed from a checkout, what that is now."""
    with Reader(study.paths.ledger) as reader:
        row = reader.study()
    now = origin.commit()
    text = f"no upgrade explains changed code: this is overnight {study.seal.manifest.tool}, as when it was sealed"
    if row.git_commit is None or now is None:
        return text
    before = origin.Commit(row.git_commit, bool(row.git_dirty))
    return f"{text} (then commit {before}, now {now})"


def ledger_findings(study: Study, reader: Reader) -> Iterator[Finding]:
    """Check the ledger in itself and against its study; one finding per contradiction, or one that there is none."""
    try:
        broken = audit(study, reader)
    except UNREADABLE as error:
        yield Finding(what="ledger", state="failed", text=f"a row of it cannot be read: {error}")
        return
    for sentence in broken:
        yield Finding(what="ledger", state="failed", text=sentence)
    if not broken:
        text = "the ledger contradicts neither itself nor its study"
        if not judges_again(study):
            text += f"; its decisions are version {study.seal.manifest.tool}'s and were not judged again"
        yield Finding(what="ledger", state="ok", text=text)


def checkpoint_findings(paths: StudyPaths, recorded: dict[int, str]) -> Iterator[Finding]:
    """Hash the checkpoint of every lineage node against the ledger."""
    for node, digest in recorded.items():
        folder = checkpoints.folder_of(paths, node, digest)
        try:
            checkpoints.check(folder, digest)
        except CheckFailed as error:
            yield Finding(what="checkpoint", state="failed", text=str(error))
        except OSError as error:
            yield Finding(
                what="checkpoint", state="failed", text=f"{error.filename or folder} cannot be read: {error.strerror}"
            )
        else:
            yield Finding(what="checkpoint", state="ok", text=f"the checkpoint of node {node} is as published")


@dataclass(frozen=True, slots=True)
class _Subject:
    """Something with a score on record."""

    name: str
    where: str
    trial: Trial
    weights: Path | None
    """None: the untouched base's."""


def _subjects(paths: StudyPaths, reader: Reader, recorded: dict[int, str]) -> list[_Subject]:
    """Return what can be scored again: the best checkpoint, and the untouched base, as far as they have scores."""
    subjects, incumbent, reference = [], reader.incumbent(), reader.reference()
    if incumbent is not None and incumbent.trial is not None:
        trial = reader.trial(incumbent.trial)
        weights = checkpoints.folder_of(paths, incumbent.node, recorded[incumbent.node])
        subjects.append(_Subject("the best checkpoint", f"node {incumbent.node}, trial {trial.id}", trial, weights))
    if reference is not None:
        subjects.append(_Subject("the untouched base", f"trial {reference.id}", reference, None))
    return subjects


def _again(study: Study, subject: _Subject, scorer: Scorer | None, upgrade: Upgrade | None) -> Iterator[Finding]:
    """Score one thing again, on the guard set too where there is one, and hold it against its row."""
    job = score_order(study, subject.trial.config, weights=subject.weights, split="val", guarded=True)
    try:
        scored = _score(study, job, scorer)
    except (CannotStart, StudyLocked) as error:
        yield Finding(what="score", state="failed", text=f"{subject.name} could not be scored again: {error}")
        return
    if not isinstance(scored, Scored):
        reason = (
            f"{scored.state.value}, {scored.error_text}" if isinstance(scored, Failed) else "it was trained instead"
        )
        yield Finding(what="score", state="failed", text=f"{subject.name} cannot be scored: {reason}")
        return
    yield _held_against_its_row(subject, "val", scored, upgrade)
    if scored.guard is not None:
        yield _held_against_its_row(subject, GUARD, scored.guard, upgrade)


def _held_against_its_row(subject: _Subject, split: str, scored: Scored, upgrade: Upgrade | None) -> Finding:
    """Compare a score with the one on record."""
    recorded = subject.trial.guard_score if split == GUARD else subject.trial.score
    assert recorded is not None
    same = abs(scored.score - recorded) <= TOLERANCE
    on = " on the guard set" if split == GUARD else ""
    text = f"{subject.name} ({subject.where}) scores {scored.score:.8f} again{on}; the ledger has {recorded:.8f}"
    if split != GUARD and scored.accuracy != subject.trial.accuracy:
        same = False
        text += f"; its accuracy is {scored.accuracy!r}, the ledger has {subject.trial.accuracy!r}"
    if upgrade is None:
        return Finding(what="score", state="ok" if same else "failed", text=text)
    if same:
        return Finding(what="score", state="ok", text=f"{text}: this tool measures it as the sealed one did")
    return Finding(
        what="score",
        state="changed",
        text=f"{text}: the checkpoint and the data are as recorded, so the tool scores differently now, and its scores"
        " cannot be compared with the ledger's",
    )


def _score(study: Study, job: ScoreJob, scorer: Scorer | None) -> Trained | Scored | Merged | Failed:
    from harness.launch import Launcher  # starts processes: only who verifies needs it

    deadline = study.least_deadline_seconds + slowest_seconds(
        study.budget, study.baseline, study.vocabulary, study.base
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        if scorer is not None:
            return scorer.run(job, log=log, deadline_seconds=deadline)
        bytecode = study.paths.bytecode
        if not os.access(bytecode if bytecode.exists() else study.paths.root.parent, os.W_OK):
            bytecode = Path(folder) / "bytecode"  # somebody else's study, or a read-only disk: compile aside
        # A mark of its own: a driver that starts meanwhile sweeps what carries the study's.
        with (
            device_lock(study.device),
            Launcher(bytecode=bytecode, mark=f"verify-{study.mark}", threads=study.threads) as launcher,
        ):
            return launcher.run(job, log=log, deadline_seconds=deadline)
