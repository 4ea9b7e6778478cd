"""Who proposes next: a language model where the owner names one, and rules and sampler, by what they achieve.

On the published task no proposer is best alone, so each keeps a share whatever its luck, and the rest follows the win
rates. The choice is a count, not a draw: whoever lags its share most is next. Nothing is stored; who made which
proposal and what became of it is in the history. Without a model the rules open and then share the night with the
sampler; with one, they share what it leaves them in just that way.

A night is never lost to a proposer: one that has nothing left to say, whose answer is not there yet, or whose process
fails, hands over to the next, and random search is always there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from agent.briefing import brief
from agent.correspondent import Correspondent, Suggest
from agent.evidence import Effect, effects, plateaued
from agent.random import RandomProposer
from agent.record import TURNED_AWAY
from agent.rules import RulesProposer
from agent.sampler import SamplerFailed, SamplerProposer
from agent.space import propose_each, queued
from harness.records import History, Proposal
from harness.terms import Desk, Proposer, Terms

OPENING = 4
"""First proposals of the rules: a learning-rate sweep tells more than a model of three points."""
LEAST_SHARE = 0.3
"""Of each of rules and sampler in what a language model leaves them, however the other fares."""
LEAST_MODEL_SHARE, MOST_MODEL_SHARE = 0.15, 0.6
"""Of a language model in all proposals. It starts at a third: on the published task a sampler that a model overrules in
about that share of the proposals has the best mean."""
WINDOW = 11
"""Newest proposals that count, with the next one as the twelfth, for a language model's share. One that was away for
hours has its share again after that, and does not make up for the whole outage at once."""
LEAD = 1
"""Proposals of others before its turn at which a language model is asked: a trial outlasts most answers."""
MOST_FRUITLESS = 3
"""Proposals of a language model in a row that led to no trial, after which somebody else's comes first."""

Correspond = Callable[[str, Desk, Suggest], Correspondent]
"""Returns who asks the language model of a name, as the owner gave it."""


def correspond(llm: str, desk: Desk, suggest: Suggest) -> Correspondent:
    """Return who asks this model through its provider's SDK, which only a run that names a model imports."""
    from agent.providers import provider_of

    return Correspondent(provider_of(llm), desk, suggest=suggest)


class MixedProposer:
    """Hands on to a language model, rules, sampler or random; a proposal's ``source`` is whoever made it."""

    name = "mixed"

    def __init__(self, sampler: Callable[[], Proposer] = SamplerProposer, correspond: Correspond = correspond) -> None:
        """Start nothing yet; ``sampler`` replaces Optuna's and ``correspond`` the way to a language model."""
        self._sampler = sampler
        self._correspond = correspond
        self._arms: dict[str, Proposer] = {
            "rules": RulesProposer(),
            "sampler": sampler(),
            "random": RandomProposer(),
        }
        self._model: Correspondent | None = None
        self._answers: deque[Proposal] = deque()
        """Proposals of the language model that nobody has taken yet."""

    def begin(self, terms: Terms) -> None:
        """Take the owner's terms on behalf of all; `WrongUse` if there is no such model or no key for it."""
        self.model = terms.llm
        for arm in self._arms.values():
            arm.begin(terms)
        if terms.llm is not None:
            self._model = self.correspondent(terms.llm, terms.desk)
            self._model.check()

    def briefing(self, history: History) -> str:
        """Return what a language model would be shown."""
        return brief(history, suggestions=self._suggestions(history), plateau=plateaued(history))

    def propose(self, history: History, count: int) -> Sequence[Proposal]:
        """Return up to ``count`` proposals; none only if nothing at all is left to try."""
        return propose_each(history, count, self._next)

    def close(self) -> None:
        """Close all that it hands on to."""
        if self._model is not None:
            self._model.close()
        for arm in self._arms.values():
            arm.close()

    def correspondent(self, llm: str, desk: Desk) -> Correspondent:
        """Return who asks the model; nothing is sent yet."""
        return self._correspond(llm, desk, self._suggestions)

    def model_share(self, history: History, source: str) -> float:
        """Return the share of the proposals that the language model should make."""
        return model_share(history, source)

    def _next(self, history: History) -> Proposal | None:
        if self._is_models_turn(history):
            return self._answer(history)
        proposal = self._offline(history)
        return self._answer(history) if proposal is None and self._answers else proposal

    def _is_models_turn(self, history: History) -> bool:
        """Tell whether it is the language model's turn and an answer of it is there."""
        if self._model is None or history.baseline is None or history.baseline.score is None:
            return False
        self._look(history, self._model)
        source = self._model.source
        return bool(self._answers) and is_due(history, source, self.model_share(history, source))

    def _look(self, history: History, model: Correspondent) -> None:
        """Take in answers, and have more asked for, once the last are used up and the model's turn is near.

        No sooner: what is asked early is answered without the results in between.
        """
        share = self.model_share(history, model.source)
        if not self._answers and is_due(history, model.source, share, after=LEAD):
            self._answers.extend(model.offer(history))

    def _answer(self, history: History) -> Proposal:
        proposal = self._answers.popleft()
        if self._model is not None:
            self._look(queued(history, proposal), self._model)
        return proposal

    def _offline(self, history: History) -> Proposal | None:
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

    def _suggestions(self, history: History) -> Sequence[Proposal]:
        """Return what the sampler would try next.

        By a sampler of its own, whose process is gone afterwards: a model is asked in another thread than the one
        that uses the sampler's own process, and minutes apart. The same history gives the same suggestion, so that
        nothing is used up by looking.
        """
        sampler = self._sampler()
        try:
            return sampler.propose(history, 1)
        except SamplerFailed:  # a briefing without it is still a briefing
            return ()
        finally:
            sampler.close()


def order(history: History) -> list[str]:
    """Return the proposers that need no language model in the order in which they are asked for the next proposal."""
    made = {name: sum(past.proposal.source == name for past in history.past) for name in ("rules", "sampler")}
    if made["rules"] < OPENING:
        return ["rules", "sampler", "random"]
    made["rules"] -= OPENING
    after = sum(made.values()) + 1
    lag = {name: share * after - made[name] for name, share in shares(history).items()}
    return [*sorted(lag, key=lambda name: (-lag[name], name != "sampler")), "random"]


def shares(history: History) -> Mapping[str, float]:
    """Return the share of their proposals after the opening that rules and sampler should each have made."""
    rates = win_rates(history, "rules", "sampler")
    rules = rates["rules"] / sum(rates.values())
    rules = min(1 - LEAST_SHARE, max(LEAST_SHARE, rules))
    return {"rules": rules, "sampler": 1 - rules}


def model_share(history: History, source: str) -> float:
    """Return the share of all proposals that the language model behind ``source`` should make, from the win rates."""
    rates = win_rates(history, source, "rules", "sampler")
    return min(MOST_MODEL_SHARE, max(LEAST_MODEL_SHARE, rates[source] / sum(rates.values())))


def is_due(history: History, source: str, share: float, *, after: int = 0) -> bool:
    """Tell whether a language model lags its share by more than all others together lag theirs.

    ``after`` looks that many proposals of others ahead. Never after a row of its own that led to no trial: however fast
    it makes more of them, the device gets work.
    """
    newest = history.past[-MOST_FRUITLESS:]
    if len(newest) == MOST_FRUITLESS and all(
        past.proposal.source == source and past.state in TURNED_AWAY for past in newest
    ):
        return False
    sources = [past.proposal.source for past in history.past if past.proposal.source in {source, *_OFFLINE}]
    window = [*sources, *["random"] * after][-WINDOW:]
    return share * (len(window) + 1) - window.count(source) > 0.5


_OFFLINE = ("rules", "sampler", "random")


def win_rates(history: History, *sources: str) -> Mapping[str, float]:
    """Return which share of their decided proposals was kept, as if one in two had been before the first (Laplace)."""
    past = effects(history)
    made_by = {item.number: item.proposal.source for item in history.past}
    return {name: _win_rate([effect for effect in past if made_by[effect.number] == name]) for name in sources}


def _win_rate(own: Sequence[Effect]) -> float:
    decided = [effect for effect in own if not effect.pending]
    return (sum(effect.kept for effect in decided) + 1) / (len(decided) + 2)
