"""Histories to propose from, made by a night that needs no training: a smooth function stands for the trial."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import pytest

from frozen.timer import Budget
from harness.config import TrialConfig, apply
from harness.policy import Policy, Refusal, find_policy
from harness.records import (
    CurvePoint,
    Decision,
    History,
    Noise,
    Past,
    Proposal,
    ProposalState,
    Role,
    Standing,
    Trial,
    TrialState,
    Verdict,
)
from harness.sizes import BaseFacts, RowLengths
from harness.sizes import parameters as model_parameters
from harness.terms import Proposer

VOCABULARY = 1024
Score = Callable[[TrialConfig], float | TrialState]


@dataclasses.dataclass
class Night:
    """A search in miniature: it admits, scores, keeps what is lower by ``margin``, and renders the history."""

    policy: Policy
    score: Score
    budget: Budget = dataclasses.field(default_factory=lambda: Budget("flops", 1e13))
    seed: int = 7
    margin: float = 0.004
    base: BaseFacts | None = None
    reference: Trial | None = None
    memory_bytes: int | None = None
    device: str | None = None
    lengths: RowLengths | None = None
    past: list[Past] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        config = self.policy.baseline({})
        self.baseline_trials = tuple(self.trial(config, replicate, None) for replicate in range(3))
        scores = {t.replicate: t.score for t in self.baseline_trials if t.score is not None}
        self.lineage = [Standing(node=0, parent=None, diff={}, config=config, scores=scores, trial=1)]

    @property
    def incumbent(self) -> Standing:
        return self.lineage[-1]

    def trial(self, config: TrialConfig, replicate: int, proposal: int | None) -> Trial:
        result = self.score(config)
        parameters = model_parameters(config, vocabulary=VOCABULARY, base=self.base)
        tokens = int(self.budget.amount / 6 / parameters)
        ended: dict[str, object] = {"state": result} if isinstance(result, TrialState) else {"score": result}
        if isinstance(result, float):
            points = [
                CurvePoint(
                    progress=tenth / 10,
                    seconds=float(tenth),
                    step=tenth * 10,
                    train_loss=result + 3 * 0.6**tenth,
                    probe_score=result + 2 * 0.6**tenth,
                    learning_rate=config.optim.learning_rate,
                    gradient_norm=0.5,
                )
                for tenth in range(1, 11)
            ]
            ended |= {"state": TrialState.SCORED, "curve": tuple(points), "perplexity": 2 ** (3 * result)}
        return dataclasses.replace(
            Trial(
                id=next(self.numbers),
                proposal=proposal,
                role=Role.BASELINE if proposal is None else Role.SCREEN,
                state=TrialState.RUNNING,
                config=config,
                seed=replicate,
                replicate=replicate,
                epoch=0,
                budget=str(self.budget),
                parameters=parameters,
                tokens=tokens,
                steps=tokens // (config.batch.per_step * config.batch.sequence_length),
                train_seconds=12.0,
                wall_seconds=14.5,
                peak_memory_bytes=400_000_000 + 12 * parameters,
            ),
            **ended,  # type: ignore[arg-type]
        )

    def history(self) -> History:
        return History(
            study="night",
            task=self.policy.tasks[0],
            metric="bits_per_byte",
            budget=str(self.budget),
            seed=self.seed,
            next_number=len(self.past) + 1,
            knobs=self.policy.knobs,
            max_changes=self.policy.proposals.max_changes,
            minimum_steps=self.policy.proposals.minimum_steps,
            baseline=self.lineage[0],
            incumbent=self.incumbent,
            reference=self.reference,
            lineage=tuple(self.lineage),
            noise=Noise(standard_deviation=0.002, degrees_of_freedom=2),
            past=tuple(self.past),
            baseline_trials=self.baseline_trials,
            base=self.base,
            lengths=self.lengths,
            device=self.device,
            device_memory_bytes=self.memory_bytes,
        )

    def admit(self, proposal: Proposal) -> TrialConfig | Refusal:
        return self.policy.admit(
            proposal,
            self.incumbent.config,
            budget=self.budget,
            vocabulary=VOCABULARY,
            base=self.base,
            lengths=self.lengths,
        )

    def run(self, proposal: Proposal) -> Past:
        number, parent = len(self.past) + 1, self.incumbent
        config = self.admit(proposal)
        if isinstance(config, Refusal):
            self.refused.append(config.reason)
            past = Past(
                number=number,
                proposal=proposal,
                state=ProposalState.REFUSED,
                reason=config.reason,
                parent=None,
                config=None,
                verdict=None,
                trials=(),
            )
            self.past.append(past)
            return past
        trial = self.trial(config, 0, number)
        assert parent.score is not None
        difference = None if trial.score is None else trial.score - parent.score
        kept = difference is not None and difference < -self.margin
        past = Past(
            number=number,
            proposal=proposal,
            state=ProposalState.DECIDED,
            reason=None,
            parent=parent.node,
            config=config,
            verdict=Verdict(
                decision=Decision.KEPT if kept else Decision.DISCARDED,
                difference=difference,
                standard_error=0.002,
                probability=0.5,
                replicates=1,
                reason="",
            ),
            trials=(trial,),
        )
        self.past.append(past)
        if kept and trial.score is not None:
            self.lineage.append(
                Standing(
                    node=number,
                    parent=parent.node,
                    diff=proposal.diff,
                    config=config,
                    scores={1: trial.score},
                    trial=trial.id,
                )
            )
        return past

    def search(self, proposer: Proposer, proposals: int) -> list[Proposal]:
        made = []
        for _ in range(proposals):
            offered = proposer.propose(self.history(), 1)
            if not offered:
                break
            made.append(offered[0])
            self.run(offered[0])
        return made


def bowl(config: TrialConfig) -> float | TrialState:
    """Score of a config: a bowl in the logs of what matters, that diverges at high rates and runs out of memory."""
    if config.optim.learning_rate > 1e-2:
        return TrialState.DIVERGED
    if config.model.width * config.model.depth * config.batch.per_device > 30000:
        return TrialState.OUT_OF_MEMORY
    rate = math.log(config.optim.learning_rate / 3e-3)
    batch = math.log2(config.batch.per_device * config.batch.accumulation / 4)
    return (
        2.0
        + 0.02 * rate**2
        + 0.01 * batch**2
        + 0.2 * (config.optim.beta2 - 0.96) ** 2
        + 0.05 * (config.schedule.warmup_fraction - 0.05) ** 2
        + 0.02 * (config.model.depth / 8 - 0.4) ** 2
    )


@pytest.fixture
def policy() -> Policy:
    return Policy.load(find_policy("demo"), ["text"])


@pytest.fixture
def make_night(policy: Policy) -> Callable[..., Night]:
    def make(score: Score = bowl, policy: Policy = policy, **settings: object) -> Night:
        return Night(policy, score, **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
def with_diff() -> Callable[[TrialConfig, dict[str, object]], TrialConfig]:
    return lambda config, diff: apply(config, diff)  # type: ignore[arg-type]
