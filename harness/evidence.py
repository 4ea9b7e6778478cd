"""Holds every verdict against the rows that the judge had before it: its numbers, its decision and its checkpoint.

What counts for a config changes with every later trial, so a verdict can only be held against the rows of its own
time. Their order is that of the trials' numbers, not of the clock, which may have been set back: a proposal is walked
to its verdict before the next one starts. Only a control or a canary can lie on either side of a verdict; all places
are tried. The decision is that of `harness.walk` over these rows, so it can only be asked of the version that decided:
a later one may judge more strictly without any row being wrong. The sentence beside a decision is for people and is not
compared.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scipy import special

from harness.noise import pool_noise
from harness.records import BASELINE, UNCOUNTED, Guard, JudgeRules, Past, ProposalState, Role, Standing, Verdict
from harness.rows import Configs, Identity, continues, proposal_value, trial_value
from harness.walk import Repair, Run, failed_replicates, next_step

TOLERANCE = 1e-9
"""Of numbers that come from the same float64 arithmetic, relative and absolute: differences of scores cancel."""
QUANTILE_TOLERANCE = 1e-6
"""Of probabilities: they come from scipy, whose versions may differ in the last digits."""
FIRST = ("screen", "repair")
"""Roles of a walk's first trials."""
WALKED = (*FIRST, "replicate")
"""Roles of trials that belong to a proposal's walk; controls and canaries come between or beside walks."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The rows as they stood when a proposal was decided."""

    trials: Sequence[sqlite3.Row]
    proposals: Sequence[sqlite3.Row]
    lineage: Sequence[sqlite3.Row]
    budget: str
    max_regression: float | None
    """Bits per byte that the study allows on the guard set; None where it has none."""
    continues: bool
    """Whether trials go on from their parent's checkpoint."""

    @property
    def incumbent(self) -> Identity:
        """What a candidate is compared with: the incumbent's trials, or its config continued from its checkpoint."""
        return self.lineage[-1]["config_digest"], self.start

    @property
    def start(self) -> int | None:
        """Where candidates start, and what they are compared with."""
        return int(self.lineage[-1]["node"]) if self.continues else None

    @property
    def epoch(self) -> int:
        """The machine's epoch."""
        return max(int(trial["epoch"]) for trial in self.trials)

    def counted(self, column: str = "score") -> dict[Identity, dict[int, float]]:
        """Return the scores that count, by config, start and replicate: the view ``counted_scores`` of that moment."""
        groups: dict[Identity, dict[int, float]] = defaultdict(dict)
        for trial in self.trials:
            counts = trial["state"] == "scored" and trial["role"] not in UNCOUNTED
            selected = trial["proposal"] is not None and trial["start"] != trial["proposal"]
            confirms = not selected or trial["replicate"] > 0
            if counts and confirms and (trial["epoch"], trial["budget"]) == (self.epoch, self.budget):
                groups[trial["config_digest"], trial["start"]][trial["replicate"]] = trial[column]
        return groups

    @property
    def is_guarded(self) -> bool:
        """Whether every scored trial and the untouched base have the score on the guard set that the study asks for."""
        scored = [trial for trial in self.trials if trial["state"] == "scored"]
        has_base = any(trial["role"] == Role.REFERENCE for trial in scored)
        return self.max_regression is None or (has_base and all(t["guard_score"] is not None for t in scored))

    def guard(self) -> Guard | None:
        """Return the limit on the guard set as the driver knew it."""
        if self.max_regression is None:
            return None
        groups = [list(scores.values()) for scores in self.counted("guard_score").values()]
        base = next(t for t in self.trials if t["role"] == Role.REFERENCE and t["state"] == "scored")
        return Guard(reference=base["guard_score"], max_regression=self.max_regression, noise=pool_noise(groups))


def contradicted(connection: sqlite3.Connection, rules: JudgeRules | None, max_regression: float | None) -> list[str]:
    """Return one sentence per verdict that its rows do not give; rows must be `sqlite3.Row`, the schema ours.

    ``rules`` are those that the study was judged by; None: by another version's, so that only the numbers are checked.
    ``max_regression`` is what the study allows on its guard set, None where it has none.
    """
    study = connection.execute("SELECT budget, policy FROM study").fetchone()
    if study is None:
        return []  # `harness.invariants` says so
    now = Moment(
        trials=connection.execute("SELECT * FROM trials ORDER BY id").fetchall(),
        proposals=connection.execute("SELECT * FROM proposals ORDER BY number").fetchall(),
        lineage=connection.execute("SELECT * FROM lineage ORDER BY position").fetchall(),
        budget=study["budget"],
        max_regression=max_regression,
        continues=continues(study["policy"]),
    )
    began = _walks(now.trials)
    found = [sentence for node in now.lineage[:1] for sentence in _standing(node, now.trials)]
    for row in connection.execute(
        "SELECT v.*, p.config_digest FROM verdicts v JOIN proposals p ON p.number = v.proposal ORDER BY v.proposal"
    ):
        found += _verdict(row, now, began, rules)
    return found


def _standing(node: sqlite3.Row, trials: Sequence[sqlite3.Row]) -> Iterator[str]:
    """Check that a node stands on its first trial that counts, not on its luckiest."""
    own = [
        trial
        for trial in trials
        if (trial["config_digest"], trial["proposal"]) == (node["config_digest"], node["proposal"])
        and trial["start"] != node["node"]
        and trial["state"] == "scored"
        and trial["role"] not in UNCOUNTED
        and (trial["proposal"] is None or trial["replicate"] > 0)
    ]
    first = min(own, key=lambda trial: trial["id"] if node["proposal"] is None else trial["replicate"], default=None)
    if first is not None and first["id"] != node["trial"]:
        yield f"node {node['node']} stands on trial {node['trial']}, but the first that counts is trial {first['id']}"


def _verdict(row: sqlite3.Row, now: Moment, began: Mapping[int, int], rules: JudgeRules | None) -> Iterator[str]:
    number = row["proposal"]
    if number not in began:
        yield f"proposal {number} was {row['decision']}, but none of its trials is there"
        return
    incumbent = next((node["node"] for node in reversed(_before(number, now.lineage, "node", began))), None)
    if incumbent is None or incumbent != row["against"]:
        yield f"the verdict on proposal {number} is against node {row['against']}, but the incumbent was {incumbent}"
        return
    moments = _moments(number, now, began)
    for node in now.lineage:
        if node["node"] == number:
            yield from _standing(node, moments[0].trials)
    said = Numbers(**{name: row[name] for name in ("difference", "standard_error", "probability", "replicates")})
    possible = [_numbers(moment, (row["config_digest"], moment.start)) for moment in moments]
    if said.difference is None:
        possible = [
            Numbers(difference=None, standard_error=None, probability=None, replicates=p.replicates) for p in possible
        ]
    fitting = [moment for moment, numbers in zip(moments, possible, strict=True) if said.agrees(numbers)]
    if not fitting:
        yield f"the verdict on proposal {number} says {_text(said)}, but its scores give {_text(possible[0])}"
    elif rules is not None:
        steps = [_step(number, moment, rules) for moment in fitting]
        if row["decision"] not in steps:
            said_now = _told(number, steps[0])
            yield f"proposal {number} was {row['decision']}, but by the rules and its trials it {said_now}"


def _walks(trials: Sequence[sqlite3.Row]) -> dict[int, int]:
    """Return the first trial of every proposal's walk: their order is that of the walks.

    The proposals' numbers are not in it: one from outside goes before those that wait.
    """
    began: dict[int, int] = {}
    for trial in trials:
        if trial["role"] in FIRST and trial["proposal"] is not None:
            began.setdefault(trial["proposal"], trial["id"])
    return began


def _before(number: int, rows: Sequence[sqlite3.Row], key: str, began: Mapping[int, int]) -> list[sqlite3.Row]:
    """Return the rows of proposals that were walked before one; the baseline's node, which nobody proposed, too."""
    return [row for row in rows if row[key] == BASELINE or began.get(row[key], math.inf) < began[number]]


def _moments(number: int, now: Moment, began: Mapping[int, int]) -> list[Moment]:
    """Return the moments at which a proposal can have been decided: after its walk, before the next one."""
    later = (first for first in began.values() if first > began[number])
    end = min(later, default=len(now.trials) + 1)
    before = [t for t in now.trials if t["id"] < end]
    walked = max(t["id"] for t in before if t["role"] in WALKED)
    own = next(proposal for proposal in now.proposals if proposal["number"] == number)
    return [
        Moment(
            trials=[t for t in before if t["id"] <= last],
            proposals=[*_before(number, now.proposals, "number", began), own],
            lineage=_before(number, now.lineage, "node", began),
            budget=now.budget,
            max_regression=now.max_regression,
            continues=now.continues,
        )
        for last in [walked, *(t["id"] for t in before if t["id"] > walked)]
    ]


def _step(number: int, moment: Moment, rules: JudgeRules) -> str | Run | Repair:
    """Return what the walk does at this moment: a decision, or what it needs first."""
    configs, proposal, node = Configs(), moment.proposals[-1], moment.lineage[-1]
    counted = moment.counted()
    noise = pool_noise([list(scores.values()) for scores in counted.values()])
    rivals = counted.get(moment.incumbent)
    strays = moment.continues and proposal["parent"] != moment.start
    if noise is None or not rivals or not moment.is_guarded or strays:
        return "undecidable"
    trials = [trial_value(row, configs, ()) for row in moment.trials]
    past = Past(
        number=number,
        proposal=proposal_value(proposal),
        state=ProposalState.RUNNING,
        reason=None,
        parent=proposal["parent"],
        config=configs.value(proposal["config"]),
        verdict=None,
        trials=tuple(trial for trial in trials if trial.proposal == number and trial.start != number),
        start=moment.start,
    )
    incumbent = Standing(
        node=node["node"],
        parent=node["parent"],
        diff=json.loads(node["diff"]),
        config=configs.value(node["config"]),
        scores=rivals,
        trial=node["trial"],
        continued=rivals if moment.continues else None,
    )
    beside = [
        trial
        for trial in trials
        if (trial.config, trial.start) == (incumbent.config, moment.start)
        and (trial.epoch, trial.budget) == (moment.epoch, moment.budget)
        and trial.role not in UNCOUNTED
    ]
    started = [row["config_digest"] for row in _started(moment)]
    step = next_step(
        past,
        incumbent,
        noise,
        rules,
        epoch=moment.epoch,
        known={digest for digest in started if digest is not None},
        incumbent_failed=failed_replicates(beside),
        guard=moment.guard(),
    )
    return step.decision.value if isinstance(step, Verdict) else step


def _started(moment: Moment) -> Iterator[sqlite3.Row]:
    """Yield the rows whose configs were known then; where trials continue, those from the incumbent's checkpoint."""
    start = moment.start
    yield from (trial for trial in moment.trials if start is None or trial["start"] == start)
    yield from (proposal for proposal in moment.proposals if start is None or proposal["parent"] == start)
    yield from (node for node in moment.lineage if start is None or node["node"] == start)


def _told(number: int, step: str | Run | Repair) -> str:
    match step:
        case "undecidable":
            return "has nothing to be compared with"
        case str():
            return f"is {step}"
        case Run():
            whose = "its own" if step.proposal == number else "the incumbent's"
            return f"needs another run first, {whose} replicate {step.replicate}"
        case Repair():
            return "is to be repaired first"


def _numbers(moment: Moment, candidate: Identity) -> Numbers:
    """Return what the judge computes at this moment, see `harness.judge`; the candidate's screening left out."""
    groups = {identity: list(scores.values()) for identity, scores in moment.counted().items()}
    ours, theirs = groups.get(candidate, []), groups.get(moment.incumbent, [])
    noise = pool_noise(groups.values())
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
