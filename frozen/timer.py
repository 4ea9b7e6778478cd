"""The budget of a trial and the clock that spends it.

A search compares configs under one budget, so the budget must not depend on the config. Training time is the sum of
optimizer steps, each synchronised with the device; start-up, evaluation and saving lie outside. Nothing is untimed for
a number of *steps*, because a config chooses how long a step is (skipping "the first ten steps" gives a huge batch as
much free training as it likes). What the config may do outside the budget (warm-up, where compiling happens) is
measured by the caller, and what exceeds its cap is charged here.

Three kinds of budget: ``seconds`` is what an owner of a GPU cares about; ``tokens`` and ``flops`` repeat exactly, and
are honest on a machine that others share. ``flops`` makes a bigger model pay for its size.

Schedules read `Timer.midpoint`, a number in [0, 1], and so anneal fully within any budget, whatever the speed of the
config. The clock is injected: tests never wait. No torch here; the caller passes the device's synchronisation.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, Self

Kind = Literal["seconds", "tokens", "flops"]

_UNITS: dict[str, tuple[Kind, int]] = {
    "s": ("seconds", 1),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
    "tok": ("tokens", 1),
    "flop": ("flops", 1),
}
_PREFIXES = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BUDGET = re.compile(r"\s*(?P<number>[0-9.]+(?:[eE][+-]?[0-9]{1,3})?)\s*(?P<unit>[A-Za-z]+)\s*", re.ASCII)
_EXPECTED = "write a number and a unit: 300s, 10min, 1.5h, 200000tok, 2Mtok, 5e12flop or 5Tflop"
_LARGEST = 1e30
"""Beyond any training run ever made; keeps arithmetic finite."""
_RECENT_STEPS = 5


class BudgetTooSmall(RuntimeError):
    """A single step eats the whole budget: the trial would measure the step's size, not the config."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much training a trial gets: ``amount`` in seconds, tokens or floating-point operations."""

    kind: Kind
    amount: float

    def __post_init__(self) -> None:
        if self.kind not in ("seconds", "tokens", "flops"):
            raise ValueError(f"unknown kind of budget {self.kind!r}: expected seconds, tokens or flops")
        if not (math.isfinite(self.amount) and 0 < self.amount <= _LARGEST):
            raise ValueError(f"a budget of {self.amount} {self.kind} is not possible: {_EXPECTED}")
        if self.kind == "tokens" and self.amount != int(self.amount):
            raise ValueError(f"a budget of {self.amount} tokens is not a whole number: {_EXPECTED}")
        object.__setattr__(self, "amount", float(self.amount))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the budget that ``text`` names, e.g. ``300s`` or ``2Mtok``; `ValueError` says what is expected."""
        match = _BUDGET.fullmatch(text)
        if match is None:
            raise ValueError(f"budget {text!r} is not understood: {_EXPECTED}")
        unit = _unit(match["unit"])
        if unit is None:
            raise ValueError(f"budget {text!r} has the unknown unit {match['unit']!r}: {_EXPECTED}")
        kind, factor = unit
        try:
            amount = Decimal(match["number"]) * factor
        except InvalidOperation:
            raise ValueError(f"budget {text!r} is not understood: {_EXPECTED}") from None
        return cls(kind, float(amount))

    def __str__(self) -> str:
        """Return the canonical text; equal budgets have equal texts, and `parse` reads it back exactly."""
        exact = Decimal(repr(self.amount))
        if self.kind == "flops":
            return f"{_scientific(exact)}flop"
        plain = f"{exact.normalize():f}"
        return f"{plain}s" if self.kind == "seconds" else f"{plain}tok"


def _unit(text: str) -> tuple[Kind, int] | None:
    """Return kind and factor of a unit with its decimal prefix, or None if there is no such unit."""
    if text in _UNITS:
        return _UNITS[text]
    kind, factor = _UNITS.get(text[1:], ("seconds", 0))
    if kind == "seconds" or text[0] not in _PREFIXES:  # no kiloseconds, no megahours
        return None
    return kind, factor * 10 ** _PREFIXES[text[0]]


def _scientific(exact: Decimal) -> str:
    """Return e.g. ``5e11`` or ``1.25e12``: the shortest form that people write budgets in flops in."""
    mantissa, _, exponent = f"{exact.normalize():e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if int(exponent) else mantissa


class Timer:
    """Spends a budget step by step.

    ``flops_per_token`` is what one trained token costs (the usual estimate is 6 × parameters: Kaplan et al.,
    arXiv 2001.08361, section 2.1); it is only used by budgets in flops. ``synchronize`` waits for the device to finish.

    ::

        timer.expect(tokens)          # as far as the coming step's batches are known
        while timer.may_begin_step():
            timer.begin_step()
            ...                       # the learning rate is a function of timer.midpoint
            timer.end_step(tokens)
            timer.expect(...)
    """

    def __init__(
        self,
        budget: Budget,
        *,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = lambda: None,
        flops_per_token: float,
    ) -> None:
        if not (math.isfinite(flops_per_token) and flops_per_token > 0):
            raise ValueError(f"flops_per_token must be positive and finite, got {flops_per_token}")
        self.budget = budget
        self._clock = clock
        self._synchronize = synchronize
        self._flops_per_token = flops_per_token
        self._expected: int | None = None
        self._began: float | None = None
        self._step_seconds = 0.0
        self._charged_seconds = 0.0
        self._steps = 0
        self._tokens = 0
        self._recent: list[float] = []

    @property
    def train_seconds(self) -> float:
        """Seconds of training that count: every step, and what was charged beyond the warm-up's cap."""
        return self._step_seconds + self._charged_seconds

    @property
    def charged_seconds(self) -> float:
        """Seconds outside the steps that were charged."""
        return self._charged_seconds

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self._steps

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return self._tokens

    @property
    def spent(self) -> float:
        """Budget spent so far, in the budget's own unit."""
        if self.budget.kind == "seconds":
            return self.train_seconds
        return self._cost_of_tokens(self._tokens)

    @property
    def progress(self) -> float:
        """Share of the budget that is spent; ends between 1 minus and 1 plus half a step."""
        return self.spent / self.budget.amount

    @property
    def midpoint(self) -> float:
        """Progress in [0, 1] at the middle of the coming (or running) step: what schedules read.

        A budget in seconds does not know its first step's cost and says 0 for it; others know it if it was `expect`ed.
        """
        return min(1.0, (self.spent + self._coming_cost() / 2) / self.budget.amount)

    def expect(self, tokens: int) -> None:
        """Say what the coming step trains on: its batches can be counted before it begins.

        Without this it is taken to cost what the last few did, and the first one nothing.
        """
        if tokens < 1:
            raise ValueError(f"a step trains on at least one token, got {tokens}")
        self._expected = tokens

    def may_begin_step(self) -> bool:
        """Return whether one more step brings the total nearer to the budget: at most half of it may overshoot."""
        remaining = self.budget.amount - self.spent
        return remaining > 0 and remaining >= self._coming_cost() / 2

    def begin_step(self) -> None:
        """Start the clock of one optimizer step; `BudgetTooSmall` if it is known to eat the whole budget."""
        if self._began is not None:
            raise RuntimeError("a step has begun already: end it before the next one begins")
        if self._steps == 0 and self._coming_cost() >= self.budget.amount:
            raise BudgetTooSmall(self._eaten(self._coming_cost()))
        self._synchronize()
        self._began = self._clock()

    def end_step(self, tokens: int) -> None:
        """Stop the clock and book a step over ``tokens`` tokens; `BudgetTooSmall` if the first ate the budget."""
        if self._began is None:
            raise RuntimeError("no step has begun: call begin_step before end_step")
        if tokens < 1:
            raise ValueError(f"a step trains on at least one token, got {tokens}")
        self._synchronize()
        seconds = self._clock() - self._began
        if not (math.isfinite(seconds) and seconds >= 0):
            raise RuntimeError(f"the clock went from {self._began} by {seconds} s: training time cannot be told")
        self._began = None
        self._expected = None
        self._step_seconds += seconds
        self._steps += 1
        self._tokens += tokens
        cost = seconds if self.budget.kind == "seconds" else self._cost_of_tokens(tokens)
        self._recent = [*self._recent, cost][-_RECENT_STEPS:]
        if self._steps == 1 and cost >= self.budget.amount:
            raise BudgetTooSmall(self._eaten(cost))

    def charge(self, seconds: float) -> None:
        """Book time outside the steps (warm-up beyond its cap); it only shrinks budgets in seconds."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"only a finite, non-negative time can be charged, got {seconds} s")
        self._charged_seconds += seconds

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON-able values; only between steps."""
        if self._began is not None:
            raise RuntimeError("the timer's state can only be saved between steps")
        return {
            "budget": str(self.budget),
            "step_seconds": self._step_seconds,
            "charged_seconds": self._charged_seconds,
            "steps": self._steps,
            "tokens": self._tokens,
            "recent": list(self._recent),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved `state` of a timer with the same budget."""
        if self._steps or self._began is not None:
            raise RuntimeError("a timer that has run cannot be restored into: make a new one")
        if state["budget"] != str(self.budget):
            raise ValueError(f"the saved timer had a budget of {state['budget']}, this one has {self.budget}")
        self._step_seconds = float(state["step_seconds"])
        self._charged_seconds = float(state["charged_seconds"])
        self._steps = int(state["steps"])
        self._tokens = int(state["tokens"])
        self._recent = [float(cost) for cost in state["recent"]]

    def _cost_of_tokens(self, tokens: int) -> float:
        """Return what ``tokens`` tokens cost, in tokens or flops."""
        return tokens * self._flops_per_token if self.budget.kind == "flops" else float(tokens)

    def _coming_cost(self) -> float:
        """Return the cost of the next step: as expected, or the median of the last few, so that no hiccup decides.

        0 before the first step where nothing is known.
        """
        if self._expected is not None and self.budget.kind != "seconds":
            return self._cost_of_tokens(self._expected)
        return statistics.median(self._recent) if self._recent else 0.0

    def _eaten(self, cost: float) -> str:
        size = f"{cost:.6g} {self.budget.kind}"
        return (
            f"one optimizer step costs {size}, the whole budget is {self.budget}: nothing could be learnt or annealed;"
            " make the step smaller (batch, accumulation, sequence length, model) or the budget larger"
        )
