"""A night as it could have been, written through the ledger's own API: what readers and reports are tested against."""

from __future__ import annotations

import datetime
import itertools
import math
import random
from pathlib import Path

import pytest

from harness.config import TrialConfig, Value, apply
from harness.ledger import Ledger
from harness.paths import StudyPaths
from harness.records import (
    CurvePoint,
    Decision,
    Failed,
    Proposal,
    ProposalState,
    Role,
    Scored,
    Trained,
    TrialState,
    Verdict,
)
from harness.rows import Ending, NewNode, Sensed, StudyRow
from tests.samples import BASE

BYTES, TOKENS, NOISE = 180_000, 60_000, 0.006
CLOCK = datetime.datetime(2026, 11, 29, 23, 0, tzinfo=datetime.UTC)
OWNERS = apply(
    BASE,
    {
        "optim.beta2": 0.999,
        "batch.per_device": 16,
        "batch.sequence_length": 256,
        "model.depth": 4,
        "model.width": 128,
        "model.heads": 4,
    },
)
# (source, diff, true score, why, what to watch): a true score below the incumbent's by enough is kept.
STORY: list[tuple[str, dict[str, Value], float | TrialState, str, str]] = [
    ("rules", {"optim.learning_rate": 9e-4}, 2.61, "A short budget wants a higher rate.", "loss in the first tenth"),
    ("rules", {"optim.learning_rate": 2.7e-3}, 2.49, "The last factor of three helped; once more.", "gradient norm"),
    ("rules", {"optim.learning_rate": 8.1e-3}, 2.53, "And once more, to bracket the optimum.", "spikes of the loss"),
    ("rules", {"optim.learning_rate": 2e-2}, TrialState.DIVERGED, "The upper end of the range.", "spikes of the loss"),
    ("rules", {"batch.per_device": 8}, 2.44, "Half the batch gives twice the steps.", "noise of the train loss"),
    ("sampler", {"optim.weight_decay": 0.31, "optim.beta2": 0.97}, 2.4395, "expected improvement of the GP", "probe"),
    ("sampler", {"model.depth": 6, "model.width": 192}, 2.58, "expected improvement of the GP", "steps reached"),
    ("random", {"schedule.shape": "sqrt"}, 2.445, "uniform draw", "probe at the end"),
    ("sampler", {"batch.per_device": 512}, TrialState.OUT_OF_MEMORY, "expected improvement of the GP", "memory"),
    ("rules", {"schedule.warmup_fraction": 0.02}, 2.437, "Few steps: ten percent of them is long.", "first tenth"),
    ("human", {"batch.sequence_length": 128, "batch.per_device": 16}, 2.38, "Documents are short.", "probe"),
    ("sampler", {"optim.learning_rate": 5e-3}, TrialState.CRASHED, "expected improvement of the GP", "probe"),
    ("rules", {"optim.beta2": 0.95}, 2.372, "A shorter memory suits few steps.", "gradient norm"),
    ("sampler", {"model.attention_dropout": 0.1}, 2.46, "expected improvement of the GP", "gap train to probe"),
    ("random", {"sampling.order": "short_to_long"}, 2.51, "uniform draw", "train loss"),
    ("sampler", {"schedule.final_rate_fraction": 0.0}, 2.377, "expected improvement of the GP", "last tenth"),
]  # fmt: skip


class Night:
    """Plays a night into a ledger, with a clock of its own."""

    def __init__(self, paths: StudyPaths, proposals: int) -> None:
        paths.study_toml.write_text("")  # its presence makes the folder a study; readers ask the ledger
        self.draw = random.Random(7)
        self.moment = CLOCK
        self.seeds = itertools.count()
        study = StudyRow(
            name=paths.name,
            task="pretrain",
            model="fresh",
            metric="bits_per_byte",
            seed=0,
            budget="500Gflop",
            seal="5ea1" * 16,
            policy="[judge]\nmax_replicates = 8\n",
            versions={"overnight": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
            git_commit="8818cd5",
            git_dirty=False,
            device="cpu",
            created=CLOCK,
        )
        with Ledger.create(paths.ledger, study=study, now=lambda: self.moment) as self.ledger:
            self.play(STORY[:proposals])

    def play(self, story: list[tuple[str, dict[str, Value], float | TrialState, str, str]]) -> None:
        self.ledger.event("run_began", "driver 4711 began", {"pid": 4711})
        self.config, self.node, self.level = OWNERS, 0, 2.75
        self.replicates = 3
        for replicate in range(3):
            trial = self.trial(None, Role.BASELINE, self.config, replicate, self.level)
            if replicate == 0:
                self.ledger.seat_baseline(self.config, trial, "c0de" * 16)
        for entry in story:
            self.propose(*entry)
        if len(story) == len(STORY):
            self.rejections()
            self.ledger.event("repair", "proposal 9 ran out of memory", {"batch.per_device": 256})
            last = Proposal(diff={"optim.beta1": 0.95}, source="rules", rationale="Smoother steps.", watch="probe")
            self.ledger.queue(last)
        seconds = (self.moment - CLOCK).total_seconds()
        done = {"seconds": seconds, "exit_code": 0}
        self.ledger.event("run_ended", f"proposals: {len(story)} decided in this run", done)

    def propose(self, source: str, diff: dict[str, Value], truth: float | TrialState, why: str, watch: str) -> None:
        predicted = round(self.draw.uniform(-0.05, 0.0), 3)
        proposal = Proposal(diff=diff, source=source, rationale=why, watch=watch, predicted_change=predicted)
        number = self.ledger.queue(proposal)
        config = apply(self.config, diff)
        self.ledger.start(number, self.node, config)
        if isinstance(truth, TrialState):
            self.failure(number, config, truth)
            verdict = Verdict(
                decision=Decision.DISCARDED,
                difference=None,
                standard_error=None,
                probability=None,
                replicates=0,
                reason=f"its first trial ended {truth.value.replace('_', ' ')}, so nothing was scored",
            )
            self.ledger.decide(number, verdict, None)
            return
        self.trial(number, Role.SCREEN, config, 0, truth)
        gain = self.level - truth
        runs = 1 if gain < 0.003 else 2 if gain > 0.03 else 6
        trials = [] if runs == 1 else [self.trial(number, Role.REPLICATE, config, n + 1, truth) for n in range(runs)]
        while trials and self.replicates <= runs:  # the incumbent on the seeds that it lacks
            owner = self.node or None
            self.trial(owner, Role.REPLICATE, self.config, self.replicates, self.level)
            self.replicates += 1
        self.judge(number, config, truth, trials)

    def judge(self, number: int, config: TrialConfig, truth: float, trials: list[int]) -> None:
        gap, runs = truth - self.level, len(trials)
        error = NOISE * math.sqrt(2 / max(1, runs))
        if not trials:
            decision = Decision.DISCARDED
            why = f"the screening run is {gap:+.4f} from the incumbent, no promise at a noise of {NOISE:.4f}"
        elif gap < -3 * error:
            decision = Decision.KEPT
            why = f"{-gap:.4f} better over {runs} shared seeds, {-gap / error:.1f} standard errors"
        else:
            decision = Decision.INCONCLUSIVE
            why = f"{gap:+.4f} ± {error:.4f} after {runs} shared seeds: neither better nor worse is proven"
        verdict = Verdict(
            decision=decision,
            difference=gap,
            standard_error=error,
            probability=0.5 * math.erfc(-gap / error / math.sqrt(2)),
            replicates=runs,
            reason=why,
        )
        kept = decision is Decision.KEPT
        self.ledger.decide(number, verdict, NewNode(trial=trials[0], checkpoint_digest="beef" * 16) if kept else None)
        if kept:
            self.config, self.node, self.level, self.replicates = config, number, truth, runs + 1

    def trial(self, proposal: int | None, role: Role, config: TrialConfig, replicate: int, truth: float) -> int:
        trial = self.begin(proposal, role, config, replicate)
        score = self.draw.gauss(truth, NOISE)
        nats = score * math.log(2) * BYTES
        shares = [self.draw.uniform(0.5, 1.5) for _ in range(40)]
        documents = tuple(nats * share / math.fsum(shares) for share in shares)
        points = tuple(
            CurvePoint(
                progress=tenth / 10,
                seconds=1.2 * tenth,
                step=30 * tenth,
                train_loss=(score + 2.4 / tenth) * 1.6,
                probe_score=score + 1.9 * (1 / tenth - 0.1),
                learning_rate=1e-3 * (1 - tenth / 11),
                gradient_norm=0.8 + 1 / tenth,
            )
            for tenth in range(1, 11)
        )
        trained = Trained(
            steps=300,
            tokens=300 * config.batch.per_step * config.batch.sequence_length,
            parameters=config.shape.parameters(2048),
            train_seconds=12.0,
            warmup_seconds=0.4,
            wall_seconds=13.1,
            peak_memory_bytes=410_000_000,
            device="cpu",
        )
        scored = Scored(nats=nats, bytes=BYTES, tokens=TOKENS, document_nats=documents, score_seconds=1.1)
        self.moment += datetime.timedelta(seconds=14.9)
        digest = "beef" * 16
        ending = Ending.of_scored(trained=trained, scored=scored, checkpoint_digest=digest)
        self.ledger.close_trial(trial, ending.observed(points, Sensed(celsius=54.0, watts=231.5)))
        return trial

    def failure(self, proposal: int, config: TrialConfig, state: TrialState) -> None:
        trial = self.begin(proposal, Role.SCREEN, config, 0)
        said = {
            TrialState.DIVERGED: ("Diverged", "the train loss rose from 6.1 to 41.3 within 12 steps at step 38"),
            TrialState.OUT_OF_MEMORY: ("OutOfMemory", "the kernel killed the job at 15.8 GiB"),
            TrialState.CRASHED: ("RuntimeError", "<b>index</b> 2048 is out of bounds & the job gave up"),
        }[state]
        self.moment += datetime.timedelta(seconds=4)
        failed = Failed(state=state, error_class=said[0], error_text=said[1], steps=38, train_seconds=1.6)
        self.ledger.close_trial(trial, Ending.of_failed(failed))

    def begin(self, proposal: int | None, role: Role, config: TrialConfig, replicate: int) -> int:
        self.moment += datetime.timedelta(seconds=0.3)
        return self.ledger.begin(
            proposal=proposal,
            role=role,
            config=config,
            seed=1000 + replicate,
            replicate=replicate,
            epoch=0,
            budget="500Gflop",
            seal="5ea1" * 16,
            device="cpu",
            sandbox="landlock",
        )

    def rejections(self) -> None:
        for diff, state, reason in (
            ({"optim.learning_rate": 0.5}, ProposalState.REFUSED, "optim.learning_rate = 0.5 is outside 1e-4 to 0.02"),
            ({"batch.per_device": 16}, ProposalState.STALE, "it changes nothing on its parent 11"),
            ({"optim.beta2": 0.95}, ProposalState.DUPLICATE, "its config is that of proposal 13"),
        ):  # fmt: skip
            proposal = Proposal(diff=dict(diff), source="sampler", rationale="expected improvement", watch="probe")
            self.ledger.reject(self.ledger.queue(proposal), state, reason)


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> StudyPaths:
    """Return a finished study of 20 proposals, four kept, failures and rejections among them. Do not write to it."""
    paths = StudyPaths(tmp_path_factory.mktemp("place") / "runs" / "night")
    paths.root.mkdir(parents=True)
    Night(paths, len(STORY))
    return paths


@pytest.fixture
def barren(tmp_path: Path) -> StudyPaths:
    """Return a study of which only the baseline ran."""
    paths = StudyPaths(tmp_path / "barren")
    paths.root.mkdir()
    Night(paths, 0)
    return paths
