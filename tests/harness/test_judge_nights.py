"""Whole nights against the judge: what it promises, held by simulation.

A night is run as the search runs it: the baseline three times, then one proposal after the other, screened on seed 0,
confirmed beside the incumbent, the noise pooled over all that was run more than once. Scores are in units of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from harness.judge import Evidence, judge, pool_noise
from harness.records import Decision, JudgeRules, Verdict


@dataclass
class Machine:
    """Runs configs: true effect + effect of the seed, shared by all configs + noise of its own; total variance 1."""

    random: np.random.Generator
    shared: float = 0.0
    """Share of the variance that a seed brings to every config alike."""
    seeds: dict[int, float] = field(default_factory=dict)
    trials: int = 0

    def run(self, effect: float, replicate: int) -> float:
        """Return the score of one trial."""
        self.trials += 1
        if replicate not in self.seeds:
            self.seeds[replicate] = self.random.normal() * math.sqrt(self.shared)
        return effect + self.seeds[replicate] + self.random.normal() * math.sqrt(1 - self.shared)


@dataclass
class Night:
    """What came of a night."""

    kept: list[int]
    trials: int


def spend_night(machine: Machine, effects: Sequence[float], rules: JudgeRules, baseline: int = 3) -> Night:
    """Screen and judge proposals with these true effects against the baseline, in order."""
    incumbent, level = {replicate: machine.run(0.0, replicate) for replicate in range(baseline)}, 0.0
    closed: list[list[float]] = []
    kept: list[int] = []
    for number, effect in enumerate(effects):
        screen, candidate = machine.run(effect, 0), dict[int, float]()
        while True:
            noise = pool_noise([*closed, [*incumbent.values()], [*candidate.values()]])
            assert noise is not None
            answer = judge(
                Evidence(screen=screen, candidate=candidate, candidate_failures=0, incumbent=incumbent, noise=noise),
                rules,
            )
            if isinstance(answer, Verdict):
                break
            if answer.of == "candidate":
                candidate[answer.replicate] = machine.run(effect, answer.replicate)
            else:
                incumbent[answer.replicate] = machine.run(level, answer.replicate)
        if answer.decision is Decision.KEPT:
            kept.append(number)
            closed.append([*incumbent.values()])
            incumbent, level = candidate, effect
        elif len(candidate) > 1:
            closed.append([*candidate.values()])
    return Night(kept, machine.trials)


def nights(
    count: int, effects: Sequence[float], *, seed: int, shared: float = 0.0, **settings: float
) -> Iterator[Night]:
    """Spend many independent nights."""
    baseline = int(settings.pop("baseline", 3))
    rules = JudgeRules.model_validate(settings)
    for stream in np.random.SeedSequence(seed).spawn(count):
        yield spend_night(Machine(np.random.default_rng(stream), shared), effects, rules, baseline)


def share_that_keeps_nothing(found: Sequence[Night]) -> float:
    return sum(not night.kept for night in found) / len(found)


def share_that_keeps(found: Sequence[Night], number: int) -> float:
    return sum(number in night.kept for night in found) / len(found)


def trials_per_proposal(found: Sequence[Night], proposals: int) -> float:
    return sum(night.trials for night in found) / len(found) / proposals


def test_nights_in_brief() -> None:
    """A hundred nights without an effect and a few hundred with one are within four standard errors of the promises."""
    null = list(nights(100, [0.0] * 100, seed=1))
    assert share_that_keeps_nothing(null) >= 0.95 - 4 * math.sqrt(0.05 * 0.95 / 100)
    assert trials_per_proposal(null, 100) <= 1.45
    found = list(nights(300, [-3.0], seed=2))
    assert share_that_keeps(found, 0) >= 0.9 - 4 * math.sqrt(0.9 * 0.1 / 300)


def test_a_greedy_night_is_what_this_is_for() -> None:
    """Keeping whatever is lower keeps about four changes without effect a night: the simulation sees the disease."""
    random = np.random.default_rng(3)
    kept = []
    for _ in range(200):
        scores = random.normal(size=101)
        kept.append(sum(scores[i] < scores[:i].min() for i in range(1, 101)))
    assert 3.5 < np.mean(kept) < 5.0


@pytest.mark.slow
def test_nights_without_an_effect_keep_nothing() -> None:
    """Of 100-proposal nights where nothing helps at least 95 % keep nothing, for at most 1.4 trials a proposal."""
    found = list(nights(3000, [0.0] * 100, seed=4))
    assert share_that_keeps_nothing(found) >= 0.95
    assert trials_per_proposal(found, 100) <= 1.4


SETTINGS: list[Mapping[str, float]] = [
    {"shared": 0.5},
    {"baseline": 5},
    {"max_replicates": 4},
    {"max_replicates": 16},
    {"confidence": 0.8},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_other_rules_and_machines_keep_the_promise(settings: Mapping[str, float]) -> None:
    """Confidence holds with other rules, a better known baseline, and seeds that move all configs alike."""
    found = list(nights(800, [0.0] * 100, seed=5, **settings))
    confidence = settings.get("confidence", 0.95)
    assert share_that_keeps_nothing(found) >= confidence - 2 * math.sqrt(confidence * (1 - confidence) / 800)


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 20, 99])
def test_a_large_effect_is_found(before: int) -> None:
    """An effect of three noise deviations is kept nine times in ten, as the first proposal and late in a night."""
    found = list(nights(1500, [0.0] * before + [-3.0], seed=6))
    assert share_that_keeps(found, before) >= 0.9
