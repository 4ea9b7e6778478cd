"""Writes the orders of a study's jobs: what a child is told, with every constant of the study filled in."""

from __future__ import annotations

from pathlib import Path

from frozen.timer import Budget
from harness.config import TrialConfig
from harness.jobs.job import MergeJob, ScoreJob, TrainJob
from harness.paths import GUARD
from harness.records import AbortIf
from harness.study import Study


def train_order(
    study: Study,
    config: TrialConfig,
    *,
    seed: int,
    budget: Budget,
    folder: Path,
    start: Path | None = None,
    abort_if: AbortIf | None = None,
    resumable: bool = False,
) -> TrainJob:
    """Return the order to train ``config`` in ``folder``, which is all that the child may write.

    ``start`` is a model folder to go on from in the place of the base, or of a fresh model.
    """
    return TrainJob(
        task=study.file.study.task,
        config=config,
        base=_base(study),
        start=None if start is None else start.resolve(),
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


def score_order(
    study: Study, config: TrialConfig, *, weights: Path | None, split: str, guarded: bool = False
) -> ScoreJob:
    """Return the order to score the model folder ``weights`` on ``val`` or ``holdout``.

    ``guarded``: on the guard set as well, where the study has one. Without weights it is the untouched base model that
    is scored, in the precision and the tokenizer of all the others.
    """
    guard = study.paths.split(GUARD).resolve() if guarded and study.file.eval.guard is not None else None
    return ScoreJob(
        task=study.file.study.task,
        config=config,
        base=_base(study),
        weights=None if weights is None else weights.resolve(),
        split=study.paths.split(split).resolve(),
        guard=guard,
        tokenizer=study.paths.tokenizer.resolve(),
        evaluation=study.evaluation,
        device=study.device,
        threads=study.threads,
    )


def merge_order(study: Study, config: TrialConfig, *, weights: Path, folder: Path) -> MergeJob:
    """Return the order to make one full model of the adapter in ``weights`` and its base, below ``folder``."""
    base = _base(study)
    assert base is not None, "a fresh model has no adapter"
    return MergeJob(
        config=config,
        base=base,
        weights=weights.resolve(),
        split=study.paths.split("val").resolve(),
        tokenizer=study.paths.tokenizer.resolve(),
        folder=folder.resolve(),
        evaluation=study.evaluation,
        device=study.device,
        threads=study.threads,
    )


def as_full(config: TrialConfig) -> TrialConfig:
    """Return the config under which a merged model is scored: all its weights lie in the folder, in full precision."""
    return config.model_copy(update={"method": "full", "quantization": "none", "adapter": None})


def _base(study: Study) -> Path | None:
    return None if study.base is None else study.paths.base.resolve()
