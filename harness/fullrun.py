"""What a replay comes to: values that the model card, the command line and the tests read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.ablation import Step
from harness.records import Role, Trial

FULL_RUN_REPLICATE = 1_000
"""Replicate number of full runs: a seed that no search reaches, the same after a restart. Reproductions follow it."""
MERGE_TOLERANCE = 1e-4
"""Largest change of the score, in the study's metric, that fp32 rounding explains when an adapter is merged."""


def is_full_run(trial: Trial) -> bool:
    """Tell a full run from what else a replay runs."""
    return trial.role is Role.FINAL and trial.replicate == FULL_RUN_REPLICATE


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """One more seed of the incumbent at the search's budget, against what the ledger says."""

    trial: int
    score: float
    expected: float
    """Mean of the incumbent's replicates."""
    tolerance: float
    """Half width of the prediction interval for one more trial."""

    @property
    def agrees(self) -> bool:
        """Whether the score lies within the interval."""
        return abs(self.score - self.expected) <= self.tolerance

    def __str__(self) -> str:
        return f"{self.score:.4f} on a fresh seed, {self.expected:.4f} ± {self.tolerance:.4f} expected"


@dataclass(frozen=True, kw_only=True, slots=True)
class FullScores:
    """What a full run, or the untouched base, came to on the two splits."""

    trial: int
    val: float
    val_perplexity: float | None
    val_accuracy: float | None
    """Share of the preference pairs in which the chosen answer won; None where text is scored."""
    holdout: float
    holdout_accuracy: float | None
    guard: float | None
    """Bits per byte of the guard set, where the study has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """An adapter made part of its base, and what that changed."""

    folder: Path
    """Folder that ``AutoModelForCausalLM.from_pretrained`` loads."""
    val: float
    difference: float
    """Its score on val minus the adapter's: rounding alone, unless `is_unquantized`."""
    is_unquantized: bool
    """The adapter was trained beside a base in 4 bits, and made up for their rounding; this holds the base in full."""

    @property
    def agrees(self) -> bool:
        """Whether the merged model is the adapter's, to rounding."""
        return abs(self.difference) <= MERGE_TOLERANCE


@dataclass(frozen=True, kw_only=True, slots=True)
class FullRun:
    """The best lineage and the baseline under one budget, beside the untouched base."""

    budget: str
    node: int
    best: FullScores
    baseline: FullScores
    model: Path
    """Folder that ``from_pretrained`` loads: the full model, or the adapter."""
    segments: int = 1
    """Configs of the lineage that the best was trained with, one after the other; more than one only where trials go on
    from their parent. The baseline is trained in one piece."""
    base: FullScores | None = None
    """The untouched base model; None where a fresh one is trained."""
    merged: Merge | None = None
    """None unless it was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What a replay came to."""

    reproduction: Reproduction
    ablation: tuple[Step, ...] | None
    """None unless it was asked for."""
    full: FullRun | None
    """None unless a budget was given."""
