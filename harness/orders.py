"""Writes the orders of a study's jobs: what a child is told, with every constant of the study filled in."""

from __future__ import annotations

from pathlib import Path

from frozen.timer import Budget
from harness.config import TrialConfig
from harness.jobs.job import ScoreJob, TrainJob
from harness.records import AbortIf
from harness.study import Study


def train_order(
    study: Study,
    config: TrialConfig,
    *,
    seed: int,
    budget: Budget,
    folder: Path,
    abort_if: AbortIf | None = None,
    resumable: bool = False,
) -> TrainJob:
    """Return the order to train ``config`` in ``folder``, which is all that the child may write."""
    return TrainJob(
        config=config,
        seed=seed,
        budget=str(budget),
        train=study.paths.split("train").resolve(),
        probe=study.paths.split("probe").resolve(),
        tokenizer=study.paths.tokenizer.resolve(),
        folder=folder.resolve(),
        evaluation=study.evaluation,
        abort_if=abort_if,
        resumable=resumable,
        device=study.device,
        threads=study.threads,
    )


def score_order(study: Study, config: TrialConfig, *, weights: Path, split: str) -> ScoreJob:
    """Return the order to score the model folder ``weights`` on ``val`` or ``holdout``."""
    return ScoreJob(
        config=config,
        weights=weights.resolve(),
        split=study.paths.split(split).resolve(),
        tokenizer=study.paths.tokenizer.resolve(),
        evaluation=study.evaluation,
        device=study.device,
        threads=study.threads,
    )
