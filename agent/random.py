"""Random search: what every cleverer proposer has to beat.

Each knob is drawn uniformly on its own scale. One to ``max_changes`` knobs are turned at a time, like everybody's
proposals; so this is a random walk around the incumbent, not around the middle of the ranges.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent.offline import OfflineProposer
from agent.space import Space, Step, from_unit, propose_each, seed, show
from harness.records import History, Proposal

ATTEMPTS = 2000
"""Draws before a space counts as used up; a small one of choices only can be."""


class RandomProposer(OfflineProposer):
    """Draws diffs at random; a function of the study's seed and the proposal's number."""

    name = "random"

    def propose(self, history: History, count: int) -> Sequence[Proposal]:
        """Return up to ``count`` proposals; fewer only where nothing new could be drawn."""
        return propose_each(history, count, self._draw)

    def _draw(self, history: History) -> Proposal | None:
        space = Space.of(history)
        if space is None:
            return None
        step = draw(space, random.Random(seed(history, self.name)))
        if step is None:
            return None
        return Proposal(
            diff=step.diff,
            source=self.name,
            rationale="Drawn at random: " + ", ".join(f"{k} = {show(v)}" for k, v in step.diff.items()) + ".",
            watch="; ".join(space.knobs[name].watch for name in step.diff),
        )


def draw(space: Space, source: random.Random) -> Step | None:
    """Return a diff of one to ``max_changes`` knobs, each uniform on its scale; None where nothing new was drawn."""
    names = sorted(space.knobs)
    for _ in range(ATTEMPTS):
        changes = source.randint(1, min(space.history.max_changes, len(names)))
        values = {name: from_unit(space.knobs[name], source.random()) for name in source.sample(names, changes)}
        step = space.step(values)
        if step is not None:
            return step
    return None
