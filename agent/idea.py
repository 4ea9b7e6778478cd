"""What the rules look at, and what they say: a situation, and ideas for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.curves import Signals
from agent.evidence import Effect
from agent.space import Space, tidy
from harness.config import Value, flatten, idle


@dataclass(frozen=True, slots=True)
class Idea:
    """Knobs to turn, with the reason. ``gain`` is the predicted fall of the score as a share of it."""

    values: Mapping[str, Value]
    why: str
    gain: float
    confidence: float
    watch: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the rules look at."""

    space: Space
    past: Sequence[Effect]
    signals: Signals
    tried: frozenset[frozenset[tuple[str, Value]]]
    """Diffs that were proposed before, against whatever incumbent."""

    def value(self, name: str) -> float:
        """Return a number of the incumbent's config."""
        value = flatten(self.space.base)[name]
        assert not isinstance(value, str)
        return value

    def turns(self, *names: str) -> bool:
        """Tell whether the policy lets all of these knobs turn, and they mean something in the incumbent's config."""
        return all(name in self.space.knobs and name not in self.idle for name in names)

    @property
    def idle(self) -> frozenset[str]:
        """Knobs that mean nothing in the incumbent's config."""
        return idle(flatten(self.space.base), self.space.knobs)

    @property
    def tunes(self) -> bool:
        """Tell whether a base model is trained further, instead of a fresh one."""
        return self.space.base.model is None

    def scaled(self, name: str, factor: float) -> dict[str, Value]:
        """Return the knob at about ``factor`` times its value, within bounds; nothing if it cannot go there."""
        if not self.turns(name):
            return {}
        knob, now = self.space.knobs[name], self.value(name)
        wanted = now * factor
        if knob.type != "choice":
            value = tidy(knob, wanted)
            return {} if value == now else {name: value}
        beyond = [
            choice
            for choice in knob.choices
            if not isinstance(choice, str) and (choice > now if factor > 1 else choice < now)
        ]
        return {name: min(beyond, key=lambda choice: abs(math.log(choice / wanted)))} if beyond else {}
