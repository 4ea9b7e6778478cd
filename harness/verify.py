"""Is the study still what its ledger says? Everything sealed is hashed again, and the best checkpoint scored again.

What is found are values, not exceptions: one damaged thing must not hide the next. Works beside a running search: it
reads the ledger, and writes nothing into the study, so that it may be somebody else's or on a read-only disk. What
cannot be read is a finding of its own.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from harness import checkpoints
from harness.audit import audit, judges_again
from harness.errors import CannotStart, CheckFailed, StudyLocked
from harness.jobs.job import ScoreJob
from harness.locks import device_lock
from harness.orders import score_order
from harness.paths import StudyPaths
from harness.queries import Reader
from harness.records import Failed, Scored, Standing, Trained
from harness.study import Study, slowest_seconds

TOLERANCE = 1e-6
"""Largest difference, in the study's metric, between a recorded score and the same weights scored again."""
What = Literal["seal", "ledger", "checkpoint", "score"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at, in a sentence."""

    what: What
    ok: bool
    text: str


class Scorer(Protocol):
    """The part of a `Launcher` that is needed to score."""

    def run(self, job: ScoreJob, *, log: Path, deadline_seconds: float) -> Trained | Scored | Failed:
        """Run a job to its end."""
        ...


def verify(study: Study, *, scorer: Scorer | None = None) -> list[Finding]:
    """Look at seal, ledger and checkpoints, and score the best one again; every finding in the order of looking.

    ``scorer`` runs the scoring job; absent, a launcher of its own is started.
    """
    findings = list(seal_findings(study))
    with Reader(study.paths.ledger) as reader:
        findings += ledger_findings(study, reader)
        findings += checkpoint_findings(study.paths, reader.checkpoints())
        incumbent = reader.incumbent()
        if incumbent is None or incumbent.trial is None:
            findings.append(Finding(what="score", ok=True, text="nothing is scored yet"))
        elif not all(finding.ok for finding in findings):
            text = "the best checkpoint is not scored again: with what is broken above, the number would mean nothing"
            findings.append(Finding(what="score", ok=False, text=text))
        else:
            findings.append(_rescored(study, reader, incumbent, scorer))
    return findings


def seal_findings(study: Study) -> Iterator[Finding]:
    """Hash everything sealed; one finding per change, or one that all is as it was."""
    changes = study.seal.changes(thorough=True)
    for change in changes:
        yield Finding(what="seal", ok=False, text=str(change))
    if not changes:
        sealed = study.seal.manifest
        count = len(sealed.code) + len(sealed.data)
        yield Finding(
            what="seal", ok=True, text=f"{count} files, versions and rules are as sealed ({study.seal.digest[:16]})"
        )


def ledger_findings(study: Study, reader: Reader) -> Iterator[Finding]:
    """Check the ledger in itself and against its study; one finding per contradiction, or one that there is none."""
    broken = audit(study, reader)
    for sentence in broken:
        yield Finding(what="ledger", ok=False, text=sentence)
    if not broken:
        text = "the ledger contradicts neither itself nor its study"
        if not judges_again(study):
            text += f"; its decisions are version {study.seal.manifest.tool}'s and were not judged again"
        yield Finding(what="ledger", ok=True, text=text)


def checkpoint_findings(paths: StudyPaths, recorded: dict[int, str]) -> Iterator[Finding]:
    """Hash the checkpoint of every lineage node against the ledger."""
    for node, digest in recorded.items():
        folder = checkpoints.folder_of(paths, node, digest)
        try:
            checkpoints.check(folder, digest)
        except CheckFailed as error:
            yield Finding(what="checkpoint", ok=False, text=str(error))
        except OSError as error:
            yield Finding(
                what="checkpoint", ok=False, text=f"{error.filename or folder} cannot be read: {error.strerror}"
            )
        else:
            yield Finding(what="checkpoint", ok=True, text=f"the checkpoint of node {node} is as published")


def _rescored(study: Study, reader: Reader, incumbent: Standing, scorer: Scorer | None) -> Finding:
    assert incumbent.trial is not None
    trial = reader.trial(incumbent.trial)
    digest = reader.checkpoints()[incumbent.node]
    job = score_order(
        study, incumbent.config, weights=checkpoints.folder_of(study.paths, incumbent.node, digest), split="val"
    )
    try:
        scored = _score(study, job, scorer)
    except (CannotStart, StudyLocked) as error:
        return Finding(what="score", ok=False, text=f"the best checkpoint could not be scored again: {error}")
    if not isinstance(scored, Scored):
        reason = (
            f"{scored.state.value}, {scored.error_text}" if isinstance(scored, Failed) else "it was trained instead"
        )
        return Finding(what="score", ok=False, text=f"the best checkpoint cannot be scored: {reason}")
    score = scored.nats / (math.log(2) * scored.bytes)
    assert trial.score is not None
    ok = abs(score - trial.score) <= TOLERANCE
    text = (
        f"the best checkpoint (node {incumbent.node}, trial {trial.id}) scores {score:.8f} again;"
        f" the ledger has {trial.score:.8f}"
    )
    return Finding(what="score", ok=ok, text=text)


def _score(study: Study, job: ScoreJob, scorer: Scorer | None) -> Trained | Scored | Failed:
    from harness.launch import Launcher  # starts processes: only who verifies needs it

    deadline = study.least_deadline_seconds + slowest_seconds(study.budget, study.baseline, study.vocabulary)
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
