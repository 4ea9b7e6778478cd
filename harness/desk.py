"""Books what a proposer does with a language model: calls and their cost, prompts and replies, outages, insights.

Used from the proposer's thread while the driver trains; the ledger takes one of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue

from harness.errors import BadInput
from harness.files import write_whole
from harness.ledger import Ledger
from harness.paths import StudyPaths
from harness.spending import Caps, Prices
from harness.studyfile import Agent
from harness.terms import LONGEST_INSIGHT, CallBegun, CallEnded, Usage, provider_and_model


class StudyDesk:
    """The desk of one study's driver; a `harness.terms.Desk`."""

    def __init__(self, ledger: Ledger, paths: StudyPaths, agent: Agent) -> None:
        """Read the study's prices; `BadInput` if they cannot be read."""
        self._ledger = ledger
        self._paths = paths
        self._llm = agent.llm
        self._prices = None if agent.llm is None else Prices.of(paths)  # a file that nobody needs may be broken
        self._caps = Caps(max_usd=agent.max_usd, max_tokens=agent.max_tokens)
        self._models: dict[int, str] = {}
        self._news: SimpleQueue[str] = SimpleQueue()

    def check_price(self) -> None:
        """Raise `BadInput` if a cap on money could not be held because the model's price is not known."""
        if self._llm is None or self._prices is None or self._caps.max_usd is None:
            return
        model = provider_and_model(self._llm)[1]
        if model not in self._prices.models:
            raise BadInput(
                f"the price of {model} is not known, so --max-usd cannot be kept: add it to {self._paths.prices_toml}"
                " (a model on your own machine costs 0), or cap --max-tokens instead"
            )

    def news(self) -> Iterator[str]:
        """Yield what was noted since the last time, for the owner's screen."""
        while not self._news.empty():
            yield self._news.get()

    def begin_call(self, call: CallBegun) -> int:
        """Return the number of a call that may be sent now; `SpendingCapReached` if a cap could be passed by it."""
        most_usd = self._cost_usd(call.model, call.most)
        with self._ledger.atomic():  # nobody else may reserve between the look and the row
            self._caps.check(self._ledger.spent(), call.most, most_usd)
            number = self._ledger.begin_call(call, most_usd)
        self._models[number] = call.model
        return number

    def end_call(self, call: int, ended: CallEnded) -> float | None:
        """Close a call's row and return its cost in dollars, None where it is not known."""
        model = self._models.pop(call)
        cost_usd = None if ended.usage is None else self._cost_usd(model, ended.usage)
        self._ledger.end_call(call, ended, cost_usd)
        return cost_usd

    def _cost_usd(self, model: str, usage: Usage) -> float | None:
        return None if self._prices is None else self._prices.cost_usd(model, usage)

    def keep(self, call: int, name: str, text: str) -> None:
        """Write down a prompt or a reply for the reader; where the disk does not take it, that is an event.

        A night must not end over a copy. If the disk is full, the ledger will say so too.
        """
        folder = self._paths.call(call)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, text.encode("utf-8", "replace").decode("utf-8"))
        except OSError as error:
            self.event("not_kept", f"{folder / name} could not be written: {error.strerror or error}")

    def event(self, kind: str, text: str) -> None:
        """Write down an outage, a refusal or a recovery."""
        self._ledger.event(kind, text)
        self._news.put(text)

    def insight(self, text: str) -> None:
        """Write down what the model wants to remember, cut to `LONGEST_INSIGHT` characters."""
        cut = text.strip()[:LONGEST_INSIGHT]
        if cut:
            self._ledger.insight(cut)
