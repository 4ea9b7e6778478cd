"""The values that a search passes along, in order of appearance: proposal, trial, outcome, verdict, history.

A failing job is a value (`Failed`), a failing harness is an exception. A failed trial has no score: ``None`` and a
reason, never a number. Lower scores are better; a ``difference`` is candidate minus incumbent, so negative is better.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from harness.config import Knob, TrialConfig, Value
from harness.sizes import BaseFacts, RowLengths

LARGEST_EXPONENT = 690.0
"""exp() of more overflows."""
UNTRAINED = "untrained"
"""What stands for the budget of a trial of role ``reference``."""
BASELINE = 0
"""The lineage node that every search starts from; proposals are numbered from 1."""
BREAKS_GUARD = "breaks the guard"
"""How the reason of a verdict begins that turns a config down for the guard set, however good its score."""


class Record(BaseModel):
    """A frozen value that crosses a boundary: a process, a file or a model's reply."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


# --- proposals ---------------------------------------------------------------------------------------------------


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def without_control(text: str) -> str:
    """Replace what could restyle or overwrite a terminal's text, and halves of characters that no file can hold."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


Prose = Annotated[str, AfterValidator(without_control)]
"""Text by a person or a model, shown to people."""


class AbortIf(Record):
    """A proposal's own condition for giving up on its screening run; the harness enforces it at the probe points."""

    probe_above: Annotated[float, Field(gt=0)]
    """Score of the probe split, in the study's metric, above which the run ends."""
    after: Annotated[float, Field(gt=0, lt=1)]
    """Share of the budget from which on it is looked at."""


class Proposal(Record):
    """What a proposer wants tried next, and what it expects of it."""

    diff: dict[str, Value]
    """Knobs to turn, by dotted name. Never the seed, the budget or the evaluation."""
    source: str
    """Which proposer made it: ``rules``, ``sampler``, ``random``, …; ``human`` or a name of their own for outsiders."""
    rationale: Prose
    watch: Prose
    """What to look at to know whether it works."""
    parent: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Lineage node to branch from; None: the incumbent of the moment it starts. Within what a ledger can hold."""
    model: str | None = None
    """Model id, if a language model made it."""
    predicted_change: Annotated[float, Field(gt=-1e300, lt=1e300)] | None = None
    """Expected difference of the study's metric against the parent; negative is better. Within what a ledger takes."""
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    abort_if: AbortIf | None = None
    call: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """Row of the ledger's ``calls`` that it came from; None where no language model was asked."""
    tokens: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Its share of the tokens billed for that call, which may have returned several proposals."""
    cost_usd: Annotated[float, Field(ge=0, lt=1e300)] | None = None
    latency_seconds: Annotated[float, Field(ge=0, lt=1e300)] | None = None


class ProposalState(StrEnum):
    """Where a proposal stands."""

    QUEUED = "queued"
    REFUSED = "refused"
    DUPLICATE = "duplicate"
    STALE = "stale"
    RUNNING = "running"
    DECIDED = "decided"


# --- trials ------------------------------------------------------------------------------------------------------


class Role(StrEnum):
    """Why a trial runs."""

    REFERENCE = "reference"
    """The untrained base model, scored."""
    BASELINE = "baseline"
    SCREEN = "screen"
    """A proposal's first trial."""
    REPLICATE = "replicate"
    """A proposal's or the incumbent's config with another seed, to confirm."""
    CONTROL = "control"
    """The incumbent again, to tell drift of the machine from a worse config; or, where trials continue from their
    parent, its config continued from its own checkpoint, to compare candidates with."""
    CANARY = "canary"
    """The baseline again after failures in a row: is it the configs or the machine?"""
    REPAIR = "repair"
    """A config that ran out of memory, with half the per-device batch and twice the accumulation."""
    FINAL = "final"
    """Of a replay: a reproduction, a full run, or the best config with a step of its lineage taken out."""


UNCOUNTED = frozenset({Role.REFERENCE, Role.FINAL})
"""Roles of trials that are no part of what is compared: nothing rests on them, and nothing is learned from them."""


class TrialState(StrEnum):
    """How a trial stands or ended. Only `SCORED` has a score."""

    RUNNING = "running"
    SCORED = "scored"
    STOPPED = "stopped"
    """Ended early because it could not win: censored, no score."""
    OUT_OF_MEMORY = "out_of_memory"
    DIVERGED = "diverged"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    """Ended by the owner; the same config and seed run again later."""
    LOST = "lost"
    """Its process vanished with the driver or the machine; the same config and seed run again."""
    INVALID = "invalid"
    """It could not count: budget eaten by a single step, logits that are no prediction, changed weights."""


FAILURES = frozenset(
    {TrialState.OUT_OF_MEMORY, TrialState.DIVERGED, TrialState.CRASHED, TrialState.TIMED_OUT, TrialState.INVALID}
)
"""States that say something about the config (or the machine); interrupted and lost trials say nothing."""


class CurvePoint(Record):
    """One point of a trial's learning curve."""

    progress: Annotated[float, Field(ge=0)]
    """Share of the budget spent; may pass 1 by half a step."""
    seconds: Annotated[float, Field(ge=0)]
    """Budgeted training time so far."""
    step: Annotated[int, Field(ge=0)]
    train_loss: float | None
    """Nats per token, mean since the last point."""
    probe_score: float | None
    """In the study's metric, on the probe split."""
    learning_rate: float | None
    gradient_norm: float | None
    """Global norm before clipping, at the last step."""


class Trained(Record):
    """A training job that ended well. Self-reported by the training child; never a score."""

    steps: int
    tokens: int
    parameters: int
    train_seconds: float
    warmup_seconds: float
    """Throw-away passes before the budget starts."""
    wall_seconds: float
    peak_memory_bytes: int | None
    device: str


class Scored(Record):
    """What the scoring child found for saved weights on one split."""

    nats: float
    """Sum over all scored tokens, or over all preference pairs."""
    bytes: int
    """UTF-8 bytes of the scored text."""
    tokens: int
    document_nats: tuple[float, ...]
    """Nats per document, or per preference pair, in the order of the split."""
    score_seconds: float
    pairs: int | None = None
    """Preference pairs; None where text is scored."""
    right_pairs: int | None = None
    """Pairs in which the chosen answer won; a tie is half a pair, rounded down."""
    guard: Scored | None = None
    """What the same weights came to on the guard set, where that was asked for."""

    @property
    def score(self) -> float:
        """Bits per preference pair, or per UTF-8 byte: the metric of every study. Lower is better."""
        return self.nats / (math.log(2) * (self.bytes if self.pairs is None else self.pairs))

    @property
    def perplexity(self) -> float | None:
        """Per token, for people; None for preferences, and where it is too large for a float."""
        nats_per_token = self.nats / self.tokens
        return math.exp(nats_per_token) if self.pairs is None and nats_per_token < LARGEST_EXPONENT else None

    @property
    def accuracy(self) -> float | None:
        """Share of the pairs in which the chosen answer won; None where text is scored."""
        return None if self.pairs is None or self.right_pairs is None else self.right_pairs / self.pairs


class Merged(Record):
    """What a merging child made of a base model and its adapter."""

    parameters: int
    bytes: int
    """UTF-8 bytes of the scored text."""
    parts_nats: float
    """Of base and adapter side by side, as they were trained and scored."""
    whole_nats: float
    """Of the merged model, as it was saved."""

    @property
    def difference(self) -> float:
        """What merging changed, in bits per byte; above 0: the merged model is worse."""
        return (self.whole_nats - self.parts_nats) / (math.log(2) * self.bytes)


class Failed(Record):
    """A job that did not end well: an outcome, not an exception."""

    state: TrialState
    error_class: str
    error_text: str
    """One or a few sentences; the whole trace is in the trial's log."""
    steps: int | None = None
    train_seconds: float | None = None
    wall_seconds: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One row of the ledger's ``trials``: one config, one seed, one budget, and how it ended."""

    id: int
    proposal: int | None
    """None for trials of the baseline itself."""
    role: Role
    state: TrialState
    config: TrialConfig
    seed: int
    replicate: int
    """0 for a config's first seed, then 1, 2, …"""
    epoch: int
    """Counts changes of the machine; only results of one epoch are compared."""
    budget: str
    """Canonical text, e.g. ``300s``."""
    start: int | None = None
    """Lineage node whose checkpoint it went on from; None: the base model itself, or a fresh one."""
    score: float | None = None
    """In the study's metric; None unless `state` is ``scored``."""
    perplexity: float | None = None
    accuracy: float | None = None
    """Share of preference pairs in which the chosen answer won; None where text is scored."""
    guard_score: float | None = None
    """Bits per byte of the guard set, where the study has one."""
    steps: int | None = None
    tokens: int | None = None
    parameters: int | None = None
    train_seconds: float | None = None
    warmup_seconds: float | None = None
    score_seconds: float | None = None
    wall_seconds: float | None = None
    peak_memory_bytes: int | None = None
    device: str | None = None
    sandbox: str | None = None
    seal: str | None = None
    error_class: str | None = None
    error_text: str | None = None
    checkpoint_digest: str | None = None
    started: datetime.datetime | None = None
    ended: datetime.datetime | None = None
    curve: tuple[CurvePoint, ...] = ()


class JudgeRules(Record):
    """When a change is kept; part of the policy, and sealed with it."""

    max_replicates: Annotated[int, Field(ge=2, le=64)] = 8
    """Most confirmation runs of one candidate."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """Share of nights of 100 proposals without any true effect in which nothing is kept."""
    control_every: Annotated[int, Field(ge=0)] = 0
    """Run the incumbent again after this many proposals; 0: never."""


# --- verdicts ----------------------------------------------------------------------------------------------------


class Decision(StrEnum):
    """What the judge decided about a proposal."""

    KEPT = "kept"
    DISCARDED = "discarded"
    INCONCLUSIVE = "inconclusive"
    """Not proven either way within ``max_replicates``; the incumbent stays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judge's decision with the numbers behind it."""

    decision: Decision
    difference: float | None
    """Candidate minus incumbent on fresh seeds, without the screening run; None if nothing was scored."""
    standard_error: float | None
    probability: float | None
    """One-sided p-value: how likely a difference at least this good is if the change does nothing."""
    replicates: int
    """Scored confirmation runs of the candidate."""
    reason: str
    """One sentence for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Standard deviation of one trial across seeds, pooled over groups of replicates."""

    standard_deviation: float
    degrees_of_freedom: int

    @property
    def step(self) -> float:
        """The largest of 1, 2 and 5 times a power of ten that is at most the standard deviation; 0 without noise."""
        if self.standard_deviation <= 0:
            return 0.0
        power = 10.0 ** math.floor(math.log10(self.standard_deviation))
        return next((power * factor for factor in (5, 2) if power * factor <= self.standard_deviation), power)

    def rounded(self, score: float) -> float:
        """Return a score to the nearest `step`: what a model or an agent is shown.

        Digits below the noise would invite it to climb the validation split's luck (DESIGN section 7).
        """
        step = self.step
        return score if step == 0 else round(round(score / step) * step, 12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """The limit on the guard set: a kept config must not pay for its score with what the base model could do."""

    reference: float
    """Bits per byte of the untouched base model on the guard set."""
    max_regression: float
    """Bits per byte by which a config may be worse than that."""
    noise: Noise | None = None
    """Of one trial's score on the guard set across seeds; None before it is known."""

    def is_broken_by(self, score: float) -> bool:
        """Tell whether a score on the guard set is worse than allowed."""
        return score - self.reference > self.max_regression

    def told(self, score: float, over: str = "") -> str:
        """Say that a score on the guard set, perhaps a mean ``over`` some seeds, is worse than allowed."""
        worse = f"{score - self.reference:.4f}".rstrip("0")
        return (
            f"{BREAKS_GUARD}: {worse} bits per byte worse than the untouched base on the guard set{over},"
            f" {self.max_regression:g} are allowed"
        )


# --- history -----------------------------------------------------------------------------------------------------


def unit_of(metric: str, task: str) -> str:
    """Return what a score counts, in words: a metric's name alone does not say which text it is taken over."""
    if metric == "bits_per_pair":
        return "bits per preference pair"
    return "bits per byte of the answers" if task == "sft" else "bits per byte"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A node of the lineage and how well it is known: the mean of its replicates, never the luckiest."""

    node: int
    parent: int | None
    """None for the baseline."""
    diff: Mapping[str, Value]
    """Against the parent."""
    config: TrialConfig
    scores: Mapping[int, float]
    """Replicate number to score; a kept proposal's screening run is left out."""
    trial: int | None
    """Trial whose checkpoint stands for it."""
    guard_scores: Mapping[int, float] = field(default_factory=dict)
    """Replicate number to bits per byte on the guard set, of the same trials; empty where the study has none."""
    start: int | None = None
    """Node whose checkpoint its trials went on from: its parent, where trials continue from that; else None."""
    continued: Mapping[int, float] | None = None
    """Scores of its config that went on from its own checkpoint; None where trials start from the base."""

    @property
    def score(self) -> float | None:
        """Mean of the replicates, or None before the first one."""
        return _mean(self.scores)

    @property
    def to_beat(self) -> Mapping[int, float]:
        """Replicate number to score of what its children are compared with: as much training as they have had."""
        return self.scores if self.continued is None else self.continued

    @property
    def score_to_beat(self) -> float | None:
        """Mean of `to_beat`, or None before the first one."""
        return _mean(self.to_beat)

    @property
    def children_start(self) -> int | None:
        """Where trials that are compared with it start: from its checkpoint, or, None, from the base."""
        return None if self.continued is None else self.node

    @property
    def guard_score(self) -> float | None:
        """Mean of the replicates on the guard set; None where there is none."""
        return _mean(self.guard_scores)


def _mean(scores: Mapping[int, float]) -> float | None:
    return sum(scores.values()) / len(scores) if scores else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """A proposal with what became of it."""

    number: int
    proposal: Proposal
    state: ProposalState
    reason: str | None
    """Why it was refused, stale or a duplicate."""
    parent: int | None
    """Lineage node it was run against; None before it starts."""
    config: TrialConfig | None
    """Resolved config; None if it never became one."""
    verdict: Verdict | None
    trials: tuple[Trial, ...]
    """Those of the search that judged it: neither what a replay ran of it, nor its config continued from its own
    checkpoint after it was kept."""
    start: int | None = None
    """Lineage node whose checkpoint its trials go on from: its parent, where trials continue from that; else None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Everything a proposer is given: no path, no ledger, no holdout."""

    study: str
    task: str
    metric: str
    budget: str
    seed: int
    """Of the study. A proposer's own randomness is a function of this and of `next_number` only."""
    next_number: int
    """Number that the next proposal will get."""
    knobs: Mapping[str, Knob]
    max_changes: int
    minimum_steps: int
    """Optimizer steps that a config must reach in the budget, where that is known before it runs."""
    baseline: Standing | None
    """None until its first replicate is scored."""
    incumbent: Standing | None
    lineage: tuple[Standing, ...]
    noise: Noise | None
    past: tuple[Past, ...]
    """All proposals in the order of their numbers, queued and running ones included."""
    base: BaseFacts | None = None
    """The model that is trained further; None where it is a fresh one."""
    lengths: RowLengths | None = None
    """Of the training documents, beside a base model: what padded rows cost follows from them."""
    device: str | None = None
    device_memory_bytes: int | None = None
    """Of the GPU, or of the machine on a CPU."""
    program: str = ""
    """What the owner tells a model: the text of program.md."""
    smallest_provable: float | None = None
    """About the smallest true improvement that the judge keeps nine times in ten; None before the noise is known."""
    continues: bool = False
    """Trials go on from their parent's checkpoint (``start_from = "parent"``): scores from two starts say nothing about
    each other, a candidate is compared with the incumbent's config continued as long."""
    insights: tuple[str, ...] = field(default=())
    baseline_trials: tuple[Trial, ...] = field(default=())
    """Trials that belong to no proposal (baseline, control, canary), with their curves: what to learn from first."""
    reference: Trial | None = None
    """The untouched base model, scored: to compare with, never to learn from. None for a fresh model."""
    guard: Guard | None = None
    """The limit on the guard set, where the study has one and the untouched base is scored."""
