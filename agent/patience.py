"""When a language model that failed may be asked again, and which of its failures are worth a line.

The sampler goes on meanwhile, so waiting costs nothing but the model's own proposals: pauses grow, and what a provider
asks for in Retry-After is honoured however long. A refusal is an outcome: the same study is likely to meet the same
filter again, so a few in a row end the asking. An outage of a whole night is told in two lines, not in a thousand.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from agent.asking import AskFailed, Trouble

FIRST_PAUSE_SECONDS = 15.0
LONGEST_PAUSE_SECONDS = 900.0
"""Pauses double up to this: an outage that ends is noticed within a few trials."""
REFUSAL_PAUSE_SECONDS = 1800.0
"""After a refusal: what is asked changes with the study, but not from one trial to the next."""
MOST_REFUSALS = 3
"""In a row, after which the model is not asked again in this run."""
JITTER = 0.2
"""Pauses differ by up to this share between studies, so that they do not come back to a provider all at once."""
LONGEST_TEXT = 400
"""Characters of a provider's own words in a line."""

DECLINED = frozenset({Trouble.REFUSED, Trouble.FILTERED})


class Notice(NamedTuple):
    """An event for the ledger."""

    kind: str
    """``model_trouble``, ``model_back`` or ``model_off``."""
    text: str


class Patience:
    """Counts the failures of one model since its last answer; it is told the time and never waits itself."""

    def __init__(self, who: str) -> None:
        """Name the model as the owner knows it, e.g. ``anthropic claude-…``."""
        self._who = who
        self._is_off = False
        self._not_before: float | None = None
        self._answered_at: float | None = None
        self._failed_since: float | None = None
        self._failures = 0
        self._refusals = 0
        self._told: set[Trouble] = set()

    def allows(self, now: float, fruitless: int = 0) -> bool:
        """Tell whether the model may be asked at this moment, in seconds of a monotonic clock.

        ``fruitless``: how many of its newest answers in a row came to nothing. A model that only repeats itself is not
        billed once per trial for it: the pause after its last answer grows as after failures.
        """
        if self._is_off or (self._not_before is not None and now < self._not_before):
            return False
        return not fruitless or self._answered_at is None or now >= self._answered_at + _grown_seconds(fruitless)

    def answered(self, now: float) -> Notice | None:
        """Note an answer that could be used; a notice if it ends a series of failures."""
        self._answered_at = now
        failures, since = self._failures, self._failed_since
        self._not_before = self._failed_since = None
        self._failures = self._refusals = 0
        self._told.clear()
        if since is None:
            return None
        count = "1 failure" if failures == 1 else f"{failures} failures"
        return Notice("model_back", f"{self._who} answers again, after {count} in {_duration(now - since)}")

    def failed(self, error: AskFailed, now: float, seed: int) -> Notice | None:
        """Note a failure; a notice for the first of its class in a series, for each refusal, and for the last of all.

        ``seed`` is the study's: the same outage of the same study has the same pauses.
        """
        self._failures += 1
        self._failed_since = now if self._failed_since is None else self._failed_since
        self._refusals += error.trouble in DECLINED
        said = f"{error.trouble}: {_cut(str(error))}"
        if error.is_permanent:
            return self.switch_off(said)
        if self._refusals >= MOST_REFUSALS:
            return self.switch_off(f"{said} (it declined {self._refusals} times in a row)")
        pause = max(self._pause_seconds(error.trouble, seed), error.retry_after_seconds or 0.0)
        self._not_before = now + pause
        if error.trouble in self._told and error.trouble not in DECLINED:
            return None
        self._told.add(error.trouble)
        return Notice(
            "model_trouble",
            f"{self._who}: {said} – asked again in {_duration(pause)}; the search goes on without it",
        )

    def switch_off(self, why: str) -> Notice:
        """Stop asking for the rest of the run, and say so."""
        self._is_off = True
        return Notice("model_off", f"{self._who} is switched off for this run: {why}; the search goes on without it")

    def _pause_seconds(self, trouble: Trouble, seed: int) -> float:
        pause = REFUSAL_PAUSE_SECONDS if trouble in DECLINED else _grown_seconds(self._failures)
        digest = hashlib.sha256(f"{seed}/{self._failures}/pause".encode()).digest()
        position = int.from_bytes(digest[:4], "big") / 2**32
        return pause * (1 + JITTER * (2 * position - 1))


def _grown_seconds(count: int) -> float:
    doublings = min(count - 1, 20)  # beyond any pause, and no overflow after a year of outage
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**doublings)


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}…"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"
