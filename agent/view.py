"""A history as its briefing looks at it: what several sections need, worked out once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.evidence import Effect, breaks_guard, effects, telling
from agent.prose import Figures
from agent.space import trials, vocabulary
from harness.config import TrialConfig, Value, flatten, idle
from harness.records import BASELINE, BREAKS_GUARD, History, Past, ProposalState, Standing, Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What the sections of a briefing share."""

    history: History
    figures: Figures
    effects: Mapping[int, Effect]
    """By the number of the proposal."""
    flats: Mapping[int, Mapping[str, Value]]
    """What means something in the config of each lineage node, flattened."""
    trials: Sequence[Trial]
    """All of the search."""
    telling: Mapping[TrialConfig, Trial]
    """The scored trial of each config that tells most of it."""
    vocabulary: int | None

    @classmethod
    def of(cls, history: History) -> View:
        """Work out what the sections share."""
        return cls(
            history=history,
            figures=Figures.of(history.noise),
            effects={effect.number: effect for effect in effects(history)},
            flats={standing.node: meaningful(standing.config, history) for standing in history.lineage},
            trials=tuple(trials(history)),
            telling=telling(history),
            vocabulary=vocabulary(history),
        )

    @property
    def incumbent(self) -> Standing | None:
        """The config to beat; None before the baseline has a score."""
        return self.history.incumbent or self.history.baseline

    @property
    def base(self) -> Mapping[str, Value]:
        """What means something in the incumbent's config, flattened; empty before there is one."""
        return {} if self.incumbent is None else meaningful(self.incumbent.config, self.history)

    def error_of_mean(self, runs: int) -> float | None:
        """Return the standard error of a mean of so many runs, from the pooled noise."""
        noise = self.history.noise
        return None if noise is None or runs == 0 else noise.standard_deviation / math.sqrt(runs)

    def before(self, past: Past) -> Mapping[str, Value] | None:
        """Return the config that a proposal changed; for one that waits, that of the parent it would get now."""
        node = past.parent if past.parent is not None else past.proposal.parent
        return self.base if node is None else self.flats.get(node)

    def measured(self, past: Past) -> str:
        """Return the difference of a proposal with its standard error, as far as it was measured."""
        effect = self.effects.get(past.number)
        if effect is None or effect.change is None:
            return self.figures.difference(None)
        error = None if past.verdict is None else past.verdict.standard_error
        if error is None and self.history.noise is not None:
            nodes = (s for s in self.history.lineage if s.node == past.parent)
            runs = max(1, sum(len(standing.to_beat) for standing in nodes))
            error = self.history.noise.standard_deviation * math.sqrt(1 + 1 / runs)
        return self.figures.difference(effect.change) + self.figures.error(error)

    def runs(self, past: Past) -> str:
        """Return how many runs a difference rests on."""
        if past.verdict is not None and past.verdict.replicates:
            return f"{past.verdict.replicates} fresh"
        return "first only"

    def outcome(self, past: Past) -> str:
        """Return what became of a proposal in a word or two."""
        effect = self.effects.get(past.number)
        if effect is not None and effect.failure is not None:
            return effect.failure.value.replace("_", " ")
        if breaks_guard(past):
            return BREAKS_GUARD
        return past.state.value if past.verdict is None else past.verdict.decision.value

    def since_kept(self) -> int:
        """Return how many proposals were decided since the last one that was kept."""
        newest = BASELINE if self.incumbent is None else self.incumbent.node
        return sum(past.state is ProposalState.DECIDED and past.number > newest for past in self.history.past)


def node_name(node: int | None) -> str:
    """Return the name of a lineage node: the proposal that made it."""
    return "–" if node is None else "baseline" if node == BASELINE else f"p{node}"


def meaningful(config: TrialConfig, history: History) -> dict[str, Value]:
    """Return a config flattened, without knobs that change nothing in it: their values would only mislead."""
    flat = flatten(config)
    without_meaning = idle(flat, history.knobs)
    return {name: item for name, item in flat.items() if name not in without_meaning}
