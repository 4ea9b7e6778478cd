"""A small study whose ledger the tests fill through the same calls as the driver."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.config import Diff, TrialConfig, apply
from harness.ledger import Ledger
from harness.queries import Reader
from harness.records import CurvePoint, Decision, Failed, Proposal, Role, Scored, Trained, TrialState, Verdict
from harness.rows import Ending, NewNode, StudyRow
from tests.samples import BASE

BUDGET = "200000tok"
SEAL = "5" * 64


@dataclass
class Night:
    """Drives a ledger the way a search does, with made-up results."""

    path: Path
    ledger: Ledger
    config: TrialConfig
    clock: list[datetime.datetime] = field(default_factory=list)

    def reader(self) -> Reader:
        """Open a reader; the caller closes it."""
        return Reader(self.path)

    def proposal(self, **diff: float) -> Proposal:
        """Return a proposal by the rules that turns the learning rate, or the given knobs."""
        knobs: dict[str, bool | int | float | str] = {name.replace("__", "."): value for name, value in diff.items()}
        return Proposal(
            diff=knobs or {"optim.learning_rate": 1e-3},
            source="rules",
            rationale="the loss still falls",
            watch="probe bits per byte at the end",
            predicted_change=-0.01,
            confidence=0.5,
        )

    def apply(self, diff: Diff) -> TrialConfig:
        """Return the baseline with a diff."""
        return apply(self.config, diff)

    def begin(self, config: TrialConfig | None = None, **changes: object) -> int:
        """Begin a trial; the seed follows from the replicate."""
        told: dict[str, object] = {
            "proposal": None,
            "role": Role.BASELINE,
            "config": config or self.config,
            "replicate": 0,
            "epoch": 0,
            "budget": BUDGET,
            "seal": SEAL,
            "device": "cpu",
            "sandbox": "landlock",
        } | changes
        told.setdefault("seed", 1000 + int(str(told["replicate"])))
        return self.ledger.begin(**told)  # type: ignore[arg-type]

    def ending(self, score: float, points: int = 2) -> Ending:
        """Return a scored ending with this score in bits per byte, over two documents."""
        nats = score * 0.6931471805599453 * 1000
        scored = Scored(nats=nats, bytes=1000, tokens=300, document_nats=(nats / 4, nats * 3 / 4), score_seconds=0.5)
        trained = Trained(
            steps=10,
            tokens=2000,
            parameters=5000,
            train_seconds=2.0,
            warmup_seconds=0.1,
            wall_seconds=3.0,
            peak_memory_bytes=10**9,
            device="cpu",
        )
        curve = tuple(
            CurvePoint(
                progress=(index + 1) / points,
                seconds=float(index),
                step=index,
                train_loss=5.0 - index,
                probe_score=2.5,
                learning_rate=1e-3,
                gradient_norm=None,
            )
            for index in range(points)
        )
        return Ending.of_scored(trained=trained, scored=scored, checkpoint_digest="c" * 64, curve=curve)

    def failure(self, state: TrialState = TrialState.DIVERGED) -> Ending:
        """Return a failed ending."""
        return Ending.of_failed(
            Failed(state=state, error_class="Diverged", error_text="loss is NaN at step 3", steps=3)
        )

    def run(self, score: float, config: TrialConfig | None = None, **changes: object) -> int:
        """Begin and close a scored trial."""
        trial = self.begin(config, **changes)
        self.ledger.close_trial(trial, self.ending(score))
        return trial

    def baseline(self, *scores: float) -> None:
        """Run the baseline, one replicate per score, and seat it."""
        trials = [self.run(score, replicate=replicate) for replicate, score in enumerate(scores)]
        self.ledger.seat_baseline(self.config, trials[0], "c" * 64)

    def screened(self, score: float, parent: int = 0, **diff: float) -> int:
        """Queue, start and screen a proposal; return its number."""
        proposal = self.proposal(**diff)
        number = self.ledger.queue(proposal)
        config = self.apply(proposal.diff)
        self.ledger.start(number, parent, config)
        self.run(score, config, proposal=number, role=Role.SCREEN)
        return number

    def kept(self, number: int, *scores: float) -> None:
        """Confirm a screened proposal with these replicates and keep it."""
        with self.reader() as reader:
            config = reader.proposal(number).config
        trials = [
            self.run(score, config, proposal=number, role=Role.REPLICATE, replicate=1 + index)
            for index, score in enumerate(scores)
        ]
        self.ledger.decide(number, self.verdict(len(scores)), NewNode(trial=trials[0], checkpoint_digest="c" * 64))

    def verdict(self, replicates: int = 2, decision: Decision = Decision.KEPT) -> Verdict:
        """Return a verdict with plausible numbers."""
        return Verdict(
            decision=decision,
            difference=-0.02,
            standard_error=0.004,
            probability=0.0003,
            replicates=replicates,
            reason="0.020 better than the incumbent over 2 shared seeds",
        )


@pytest.fixture
def study_row() -> StudyRow:
    """Return the row of a study."""
    return StudyRow(
        name="demo",
        task="pretrain",
        model="fresh",
        metric="bits_per_byte",
        seed=7,
        budget=BUDGET,
        seal=SEAL,
        policy="[proposals]\nmax_changes = 2\n",
        versions={"overnight": "0.1.0", "torch": "2.13.0"},
        git_commit="a" * 40,
        git_dirty=False,
        device="cpu",
        created=datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC),
    )


@pytest.fixture
def config() -> TrialConfig:
    """Return the baseline's config."""
    return apply(BASE, {"batch.per_device": 16})


@pytest.fixture
def ticking() -> Callable[[], datetime.datetime]:
    """Return a clock that moves by one second at every look."""
    seconds = iter(range(10**6))
    begin = datetime.datetime(2026, 1, 2, 23, 0, 0, tzinfo=datetime.UTC)
    return lambda: begin + datetime.timedelta(seconds=next(seconds))


@pytest.fixture
def night(
    tmp_path: Path, study_row: StudyRow, config: TrialConfig, ticking: Callable[[], datetime.datetime]
) -> Iterator[Night]:
    """Open the ledger of a study that has just been made."""
    path = tmp_path / "ledger.db"
    with Ledger.create(path, study=study_row, now=ticking) as ledger:
        yield Night(path, ledger, config)
