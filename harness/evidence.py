"""Holds the numbers of every verdict against the scores that the judge had before it.

What counts for a config changes with every later trial, so a verdict can only be held against the rows of its own
time. Their order is that of the trials' numbers, not of the clock, which may have been set back: a proposal is walked
to its verdict before the next one starts. Only a canary of the baseline can lie on either side of a verdict; both are
tried. The arithmetic is checked, not the decision: a later version may judge more strictly without any row being wrong.
"""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.noise import pool_noise

TOLERANCE = 1e-9
"""Of numbers that come from the same float64 arithmetic, relative and absolute: differences of scores cancel."""
QUANTILE_TOLERANCE = 1e-6
"""Of probabilities: they come from scipy, whose versions may differ in the last digits."""
WALKED = ("screen", "repair", "replicate", "control")
"""Roles of trials that belong to a proposal's walk; a full run or a canary may come at any time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What a verdict says in numbers; all but ``replicates`` are None if nothing was compared."""

    difference: float | None
    standard_error: float | None
    probability: float | None
    replicates: int

    def agrees(self, other: Numbers) -> bool:
        """Tell whether two verdicts say the same."""
        return (
            self.replicates == other.replicates
            and _close(self.difference, other.difference)
            and _close(self.standard_error, other.standard_error)
            and _close(self.probability, other.probability, QUANTILE_TOLERANCE)
        )


def contradicted(connection: sqlite3.Connection) -> list[str]:
    """Return one sentence per verdict that its scores do not give; rows must be `sqlite3.Row`, the schema ours."""
    trials = connection.execute("SELECT * FROM trials ORDER BY id").fetchall()
    study = connection.execute("SELECT budget FROM study").fetchone()
    if study is None:
        return []  # `harness.invariants` says so
    nodes = {row["node"]: row["config_digest"] for row in connection.execute("SELECT * FROM lineage ORDER BY position")}
    found: list[str] = []
    for row in connection.execute(
        "SELECT v.*, p.config_digest FROM verdicts v JOIN proposals p ON p.number = v.proposal ORDER BY v.proposal"
    ):
        found += _verdict(row, trials, study["budget"], nodes)
    return found


def _verdict(row: sqlite3.Row, trials: Sequence[sqlite3.Row], budget: str, nodes: dict[int, str]) -> Iterator[str]:
    number = row["proposal"]
    incumbent = max((node for node in nodes if node < number), default=None)
    if incumbent is None or incumbent != row["against"]:
        yield f"the verdict on proposal {number} is against node {row['against']}, but the incumbent was {incumbent}"
        return
    later = (t["id"] for t in trials if t["role"] in WALKED and t["proposal"] is not None and t["proposal"] > number)
    end = min(later, default=len(trials) + 1)
    before = [t for t in trials if t["id"] < end]
    own = [t["id"] for t in before if t["role"] in WALKED and t["proposal"] == number]
    if not own:
        yield f"proposal {number} was {row['decision']}, but none of its trials is there"
        return
    walked = max(t["id"] for t in before if t["role"] in WALKED)
    said = Numbers(
        difference=row["difference"],
        standard_error=row["standard_error"],
        probability=row["probability"],
        replicates=row["replicates"],
    )
    possible = [
        _numbers([t for t in before if t["id"] <= last], row["config_digest"], nodes[incumbent], budget)
        for last in [walked, *(t["id"] for t in before if t["id"] > walked)]
    ]
    if said.difference is None:
        possible = [
            Numbers(difference=None, standard_error=None, probability=None, replicates=p.replicates) for p in possible
        ]
    if not any(said.agrees(numbers) for numbers in possible):
        yield f"the verdict on proposal {number} says {_text(said)}, but its scores give {_text(possible[0])}"


def _numbers(trials: Sequence[sqlite3.Row], candidate: str, incumbent: str, budget: str) -> Numbers:
    """Return what the judge computes of these trials, see `harness.judge`; the candidate's screening left out."""
    from scipy import special  # slow to import, and whoever only reads a ledger needs no quantiles

    epoch = max(t["epoch"] for t in trials)
    groups: dict[str, list[float]] = defaultdict(list)
    for trial in trials:
        counts = trial["state"] == "scored" and trial["role"] not in ("reference", "final")
        confirms = trial["proposal"] is None or trial["replicate"] > 0
        if counts and confirms and (trial["epoch"], trial["budget"]) == (epoch, budget):
            groups[trial["config_digest"]].append(trial["score"])
    ours, theirs, noise = groups.get(candidate, []), groups.get(incumbent, []), pool_noise(groups.values())
    if not ours or not theirs or noise is None:
        return Numbers(difference=None, standard_error=None, probability=None, replicates=len(ours))
    difference = math.fsum(ours) / len(ours) - math.fsum(theirs) / len(theirs)
    error = noise.standard_deviation * math.sqrt(1 / len(ours) + 1 / len(theirs))
    deviations = difference / error if error > 0 else math.copysign(math.inf, difference)
    return Numbers(
        difference=difference,
        standard_error=error,
        probability=float(special.stdtr(noise.degrees_of_freedom, deviations)),
        replicates=len(ours),
    )


def _close(ours: float | None, theirs: float | None, tolerance: float = TOLERANCE) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance)


def _text(numbers: Numbers) -> str:
    return (
        f"{numbers.difference!r} ± {numbers.standard_error!r} (probability {numbers.probability!r},"
        f" {numbers.replicates} replicates)"
    )
