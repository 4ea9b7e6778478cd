"""A study: one folder, one sealed question. `harness.setup` makes it, `load` reads it back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from frozen.timer import Budget
from harness import origin
from harness.config import Task, TrialConfig
from harness.jobs.job import EvalSettings
from harness.memory import Gauge
from harness.paths import RUNS, StudyPaths, find
from harness.policy import Policy
from harness.queries import Reader
from harness.records import Trial
from harness.seal import Seal
from harness.sizes import BaseFacts, RowLengths, flops_per_token, trained_parameters
from harness.studyfile import FRESH, StudyFile

METRICS: dict[Task, str] = {
    "pretrain": "bits_per_byte",
    "continue": "bits_per_byte",
    "sft": "bits_per_byte",
    "dpo": "bits_per_pair",
}
BYTES_PER_PARAMETER = 4
"""Weights are saved in fp32."""
CHECKPOINT_OVERHEAD_BYTES = 4_000_000
"""Tokenizer, config and file headers of a checkpoint, generously."""
SLOWEST_FLOPS_PER_SECOND = 2e9
"""No machine that somebody trains on is slower (one thread of the slowest one measured: 4e10); bounds a deadline."""
LEAST_DEADLINE_SECONDS = 600.0
SEEDS_OF_A_START = 100_000
"""More replicates than any config of one start will ever have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Everything that a driver needs to know of a study; nothing here changes while it runs."""

    paths: StudyPaths
    file: StudyFile
    policy: Policy
    baseline: TrialConfig
    """The policy's defaults with the owner's values in their place."""
    budget: Budget
    """Of every trial of the search."""
    evaluation: EvalSettings
    base: BaseFacts | None
    """The model that is trained further; None where it is a fresh one."""
    lengths: RowLengths | None
    """Of the training documents, where a base model is trained; a fresh one is fed a stream without rows."""
    seal: Seal
    device: str
    threads: int

    @property
    def name(self) -> str:
        """Name of the study's folder."""
        return self.paths.name

    @property
    def metric(self) -> str:
        """What a score counts; lower is better."""
        return METRICS[self.file.study.task]

    @property
    def vocabulary(self) -> int:
        """Width of the logits: entries of the study's tokenizer."""
        return self.file.study.vocabulary

    @property
    def mark(self) -> str:
        """What every process of this study carries in its environment; two folders never share it."""
        place = hashlib.sha256(os.fsencode(self.paths.root.resolve())).hexdigest()
        return f"{self.paths.name}-{place[:16]}"

    def seed_of(self, replicate: int, start: int | None = None) -> int:
        """Return the seed of a replicate number: the same for every config, so that comparisons are paired.

        What goes on from a lineage node has seeds of its own: with those of the training before, it would be shown the
        same batches in the same order once more.
        """
        return self.file.study.seed + replicate + (0 if start is None else SEEDS_OF_A_START * (start + 1))

    def bytes_of(self, config: TrialConfig) -> int:
        """Return what a checkpoint of ``config`` takes on the disk, roughly and never less."""
        saved = trained_parameters(config, vocabulary=self.vocabulary, base=self.base)
        return BYTES_PER_PARAMETER * saved + CHECKPOINT_OVERHEAD_BYTES

    def gauge(self, trials: Iterable[Trial]) -> Gauge:
        """Return what estimates the memory of configs on this study's device, corrected by its trials."""
        return Gauge.learned(
            trials,
            vocabulary=self.vocabulary,
            base=self.base,
            device=self.device,
            memory_bytes=origin.device_memory_bytes(self.device),
            lengths=self.lengths,
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Return what a checkpoint of the baseline takes; a proposal may ask for a bigger model, see `bytes_of`."""
        return self.bytes_of(self.baseline)

    @property
    def least_deadline_seconds(self) -> float:
        """Return how long a job may take by the wall clock before anything is known about this machine's speed."""
        return LEAST_DEADLINE_SECONDS + slowest_seconds(self.budget, self.baseline, self.vocabulary, self.base)


def slowest_seconds(budget: Budget, config: TrialConfig, vocabulary: int, base: BaseFacts | None) -> float:
    """Return the seconds in which any usable machine has spent ``budget``: a bound, far above what to expect."""
    if budget.kind == "seconds":
        return 4 * budget.amount
    per_token = flops_per_token(config, vocabulary=vocabulary, base=base)
    return budget.amount * (per_token if budget.kind == "tokens" else 1) / SLOWEST_FLOPS_PER_SECOND


def load(name_or_path: str | Path, runs: Path = RUNS) -> Study:
    """Read a study. `BadInput`: there is none, a newer version made it, or a file that the owner edits is not right.

    Nothing is verified against the seal here: `Seal.verify` does that, before each trial and on request.
    """
    paths = find(name_or_path, runs)
    with Reader(paths.ledger) as reader:  # first: it tells a study of a newer version
        row = reader.study()
    file = StudyFile.read(paths.study_toml)
    return build(paths, file, Seal.load(paths, recorded=row.seal, recorded_tool=row.versions.get("overnight")))


def build(paths: StudyPaths, file: StudyFile, seal: Seal) -> Study:
    """Put together what the files of a study say."""
    policy = Policy.load(paths.policy_toml, file.sources, file.general)
    return Study(
        paths=paths,
        file=file,
        policy=policy,
        baseline=policy.baseline(file.baseline),
        budget=Budget.parse(file.study.budget),
        evaluation=EvalSettings(
            context=file.eval.context,
            stride=file.eval.stride,
            precision=file.eval.precision,
            preference_beta=file.eval.preference_beta,
        ),
        base=BaseFacts.read(paths.base) if file.study.model != FRESH else None,
        lengths=read_lengths(paths, file),
        seal=seal,
        device=origin.device() if file.run.device == "auto" else file.run.device,
        threads=file.run.threads or origin.threads(),
    )


def read_lengths(paths: StudyPaths, file: StudyFile) -> RowLengths | None:
    """Count the training documents of a base model's study; None where their arrays are damaged.

    That is the seal's to find and to name: who only reads, or verifies, must get as far.
    """
    if file.study.model == FRESH:
        return None
    try:
        return RowLengths.read(paths.split("train"))
    except (OSError, EOFError, ValueError, KeyError):
        return None
