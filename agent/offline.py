"""What proposers that ask no language model share: they take any terms, and are briefed like those that do."""

from __future__ import annotations

from agent.briefing import brief
from harness.records import History
from harness.terms import Terms


class OfflineProposer:
    """Base of the proposers that need neither a key nor a network."""

    model: str | None = None

    def begin(self, terms: Terms) -> None:
        """Nothing can be missing."""

    def briefing(self, history: History) -> str:
        """Return what a language model would be shown."""
        return brief(history)

    def close(self) -> None:
        """Nothing is held."""
