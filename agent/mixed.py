"""Who proposes next: the rules open, then rules and sampler share the night by what they achieve.

On the published task no proposer is best alone, so each keeps a share whatever its luck, and the rest follows the win
rates. The choice is a count, not a draw: whoever lags its share most is next. Nothing is stored; who made which
proposal and what became of it is in the history.

A night is never lost to a proposer: one that has nothing left to say, or whose process fails, hands over to the next,
and random search is always there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.briefing import brief
from agent.evidence import Effect, effects
from agent.random import RandomProposer
from agent.rules import RulesProposer
from agent.sampler import SamplerFailed, SamplerProposer
from agent.space import propose_each
from harness.records import History, Proposal, Proposer, Terms

OPENING = 4
"""First proposals of the rules: a learning-rate sweep tells more than a model of three points."""
LEAST_SHARE = 0.3
"""Of each of the two, however the other fares."""


class MixedProposer:
    """Hands on to rules, sampler or random; a proposal's ``source`` is whoever made it."""

    name = "mixed"

    def __init__(self, sampler: Proposer | None = None) -> None:
        """Start nothing yet; ``sampler`` replaces Optuna's."""
        self._arms: dict[str, Proposer] = {
            "rules": RulesProposer(),
            "sampler": sampler or SamplerProposer(),
            "random": RandomProposer(),
        }

    def begin(self, terms: Terms) -> None:
        """Take the owner's terms on behalf of all."""
        for arm in self._arms.values():
            arm.begin(terms)

    def briefing(self, history: History) -> str:
        """Return what a language model would be shown."""
        return brief(history)

    def propose(self, history: History, count: int) -> Sequence[Proposal]:
        """Return up to ``count`` proposals; none only if nothing at all is left to try."""
        return propose_each(history, count, self._next)

    def close(self) -> None:
        """Close all that it hands on to."""
        for arm in self._arms.values():
            arm.close()

    def _next(self, history: History) -> Proposal | None:
        failed = ""
        for name in order(history):
            try:
                offered = self._arms[name].propose(history, 1)
            except SamplerFailed as error:  # the night goes on without it; it is asked again next time
                failed = f" (The sampler could not be asked: {error})"
                continue
            if offered:
                return offered[0].model_copy(update={"rationale": offered[0].rationale + failed})
        return None


def order(history: History) -> list[str]:
    """Return the proposers in the order in which they are asked for the next proposal."""
    made = {name: sum(past.proposal.source == name for past in history.past) for name in ("rules", "sampler")}
    if made["rules"] < OPENING:
        return ["rules", "sampler", "random"]
    made["rules"] -= OPENING
    after = sum(made.values()) + 1
    lag = {name: share * after - made[name] for name, share in shares(history).items()}
    return [*sorted(lag, key=lambda name: (-lag[name], name != "sampler")), "random"]


def shares(history: History) -> Mapping[str, float]:
    """Return the share of the proposals after the opening that each should have made, from their win rates."""
    past = effects(history)
    sources = {item.number: item.proposal.source for item in history.past}
    rates = {name: _win_rate([e for e in past if sources[e.number] == name]) for name in ("rules", "sampler")}
    rules = rates["rules"] / (rates["rules"] + rates["sampler"])
    rules = min(1 - LEAST_SHARE, max(LEAST_SHARE, rules))
    return {"rules": rules, "sampler": 1 - rules}


def _win_rate(own: Sequence[Effect]) -> float:
    """Share of decided proposals that were kept, as if one in two had been before the first (Laplace)."""
    decided = [effect for effect in own if not effect.pending]
    return (sum(effect.kept for effect in decided) + 1) / (len(decided) + 2)
