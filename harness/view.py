"""What a search tells whoever watches it. The live view, the plain lines and the tests implement it."""

from __future__ import annotations

from typing import Protocol

from harness.records import CurvePoint, Past, Trial


class View(Protocol):
    """Receives events in the driver's main thread; must not block and must not raise."""

    def say(self, text: str) -> None:
        """Print one sentence: what to expect, a pause, an outage, the end."""
        ...

    def trial_began(self, trial: Trial) -> None:
        """Announce a trial whose row exists and whose job is about to start."""
        ...

    def point(self, trial: int, point: CurvePoint) -> None:
        """Draw a point of the running trial's learning curve."""
        ...

    def trial_ended(self, trial: Trial) -> None:
        """Tell how a trial ended; its row is closed."""
        ...

    def decided(self, past: Past) -> None:
        """Tell what became of a proposal: decided, refused, stale or a duplicate."""
        ...


class Silent:
    """A view that shows nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def trial_began(self, trial: Trial) -> None:
        """Show nothing."""

    def point(self, trial: int, point: CurvePoint) -> None:
        """Show nothing."""

    def trial_ended(self, trial: Trial) -> None:
        """Show nothing."""

    def decided(self, past: Past) -> None:
        """Show nothing."""
