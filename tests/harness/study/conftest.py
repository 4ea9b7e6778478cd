"""A study with a seated baseline and one kept proposal, and a launcher that makes results up instead of training."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from harness import checkpoints
from harness.config import TrialConfig, Value, apply
from harness.jobs.job import Job, MergeJob, ScoreJob
from harness.judge import Evidence, judge
from harness.ledger import Ledger
from harness.paths import GUARD, StudyPaths
from harness.policy import find_policy
from harness.queries import Reader
from harness.records import CurvePoint, Failed, Merged, Proposal, Role, Scored, Trained, Verdict
from harness.rows import Ending, NewNode, StudyRow
from harness.seal import Code, Seal, tool_version
from harness.study import Study, build
from harness.studyfile import Asked, DataSource, Evaluation, StudyFile
from tests.basestudy import PAIRS, make_base_study, policy
from tests.standin import make_base, prepare

BYTES = 1000
TOKENS = 300
POINT = CurvePoint(progress=1, seconds=2, step=10, train_loss=4, probe_score=2.5, learning_rate=1e-3, gradient_norm=1)


@dataclass
class MadeUpLauncher:
    """Trains by writing down a score and scores by reading it back: lower with a higher learning rate.

    A base model scores what a learning rate of 0 would give, one bit per pair where preferences are scored. What goes
    on from other weights falls as much once more.
    """

    orders: list[Job] = field(default_factory=list)
    spoil: Callable[[Job], Failed | None] = lambda job: None
    shift: float = 0.0
    """Added to every score of a training that happens now."""
    guard_of: Callable[[TrialConfig, int], float] = lambda config, seed: made_up_guard(config, seed)
    """Score on the guard set of a training that happens now."""
    untouched: float = 3.0
    """Score of the base model on val; where preferences are scored, all scores are two bits lower."""
    merge_shift: float = 0.0
    """Added to the score of what is merged now."""
    sandbox_tier: str = "plain"
    polls_until: Callable[[], bool] | None = None
    """Let a training wait for this while its driver looks around, as it does several times a second."""

    def run(
        self,
        job: Job,
        *,
        log: Path,
        deadline_seconds: float,
        on_point: Callable[[CurvePoint], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Trained | Scored | Merged | Failed:
        """Answer at once."""
        self.orders.append(job)
        log.parent.mkdir(parents=True, exist_ok=True)
        failed = self.spoil(job)
        if failed is not None:
            return failed
        if isinstance(job, ScoreJob):
            return self.score(job)
        if isinstance(job, MergeJob):
            write_model(job.folder / "model", weights_of(job.weights) + self.merge_shift)
            return Merged(parameters=10, bytes=BYTES, parts_nats=1.0, whole_nats=1.0)
        while self.polls_until is not None and should_stop is not None and not (should_stop() or self.polls_until()):
            time.sleep(0.001)
        if on_point:
            on_point(POINT)
        score = made_up_score(job.config, job.seed) + self.shift
        if job.start is not None:
            score += weights_of(job.start) - UNTRAINED
        guard = None if job.base is None else self.guard_of(job.config, job.seed)
        write_model(job.folder / "model", score, adapter=job.config.method == "lora", guard=guard)
        return trained()

    def score(self, job: ScoreJob) -> Scored:
        """Read back what was written down, or tell the base model's."""
        score = self.untouched if job.weights is None else weights_of(job.weights)
        found = scored_pairs(score - 2) if job.task == "dpo" else scored(score, 1 if job.base is None else PAIRS)
        if job.guard is None:
            return found
        assert job.guard.name == GUARD
        beside = GUARD_OF_BASE if job.weights is None else float((job.weights / "guard.txt").read_text())
        return found.model_copy(update={"guard": scored(beside, PAIRS)})


UNTRAINED = 3.0
GUARD_OF_BASE = 4.0


def made_up_score(config: TrialConfig, seed: int) -> float:
    return UNTRAINED - 100 * config.optim.learning_rate + 0.001 * (seed % 3)


def made_up_guard(config: TrialConfig, seed: int) -> float:
    """Return a score on the guard set that is the worse the higher the learning rate."""
    return GUARD_OF_BASE + 10 * config.optim.learning_rate + 0.0001 * (seed % 3)


def scored(score: float, documents: int = 1) -> Scored:
    nats = score * math.log(2) * BYTES
    each = (nats / documents,) * documents
    return Scored(nats=nats, bytes=BYTES, tokens=TOKENS, document_nats=each, score_seconds=0.5)


def scored_pairs(score: float) -> Scored:
    nats = score * math.log(2)
    return Scored(
        nats=nats * PAIRS,
        bytes=BYTES,
        tokens=TOKENS,
        document_nats=(nats,) * PAIRS,
        score_seconds=0.5,
        pairs=PAIRS,
        right_pairs=min(PAIRS, int(PAIRS * (1.5 - score))),
    )


def weights_of(folder: Path) -> float:
    """Return the score that lies in the place of weights."""
    (file,) = folder.glob("*.safetensors")
    return float(file.read_text())


def write_model(folder: Path, score: float, *, adapter: bool = False, guard: float | None = None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kind = "adapter_" if adapter else ""
    (folder / f"{kind}model.safetensors").write_text(repr(score))
    (folder / f"{kind}config.json").write_text("{}")
    if guard is not None:
        (folder / "guard.txt").write_text(repr(guard))


def write_val(folder: Path) -> None:
    """Write a val split of one document with as many bytes and tokens as the made-up scores count."""
    np.save(folder / "tokens.npy", np.ones(TOKENS, dtype=np.uint16))
    np.save(folder / "offsets.npy", np.array([0, TOKENS], dtype=np.int64))
    np.save(folder / "bytes.npy", np.array([BYTES], dtype=np.int64))
    np.save(folder / "source_ids.npy", np.zeros(1, dtype=np.int16))
    (folder / "split.json").write_text(json.dumps({"sources": ["text"], "separator": 0, "vocabulary": 512}))


def trained() -> Trained:
    return Trained(
        steps=10,
        tokens=2000,
        parameters=5000,
        train_seconds=2.0,
        warmup_seconds=0.1,
        wall_seconds=3.0,
        peak_memory_bytes=10**9,
        device="cpu",
    )


@dataclass
class Night:
    """The study with hands to fill its ledger."""

    study: Study
    ledger: Ledger
    reader: Reader
    launcher: MadeUpLauncher

    def run(self, config: TrialConfig, replicate: int, role: Role, proposal: int | None = None) -> int:
        """Run one trial as a search does."""
        study, seed = self.study, self.study.seed_of(replicate)
        trial = self.ledger.begin(
            proposal=proposal,
            role=role,
            config=config,
            seed=seed,
            replicate=replicate,
            epoch=0,
            budget=str(study.budget),
            seal=study.seal.digest,
            device=study.device,
            sandbox="plain",
        )
        score = made_up_score(config, seed)
        write_model(study.paths.trial(trial).weights, score)
        digest = checkpoints.digest_of(study.paths.trial(trial).weights)
        ending = Ending.of_scored(trained=trained(), scored=scored(score), checkpoint_digest=digest)
        self.ledger.close_trial(trial, ending)
        return trial

    def seat_baseline(self) -> None:
        """Run the baseline with three seeds, as the first driver does."""
        self.ledger.event("run_began", "driver 1 began", {"pid": 1})
        base = self.study.baseline
        first, *_ = [self.run(base, replicate, Role.BASELINE) for replicate in range(3)]
        self.ledger.seat_baseline(base, first, checkpoints.publish(self.study.paths, first, 0))

    def keep(self, learning_rate: float, **more: Value) -> None:
        """Propose a learning rate, and other knobs of the optimizer that change nothing; run it, keep it."""
        diff = {f"optim.{name}": value for name, value in ({"learning_rate": learning_rate} | more).items()}
        number = self.ledger.queue(Proposal(diff=diff, source="human", rationale="faster", watch="loss"))
        parent = self.reader.incumbent()
        assert parent is not None
        config = apply(parent.config, diff)
        self.ledger.start(number, parent.node, config)
        self.run(config, 0, Role.SCREEN, number)
        first, *_ = [self.run(config, replicate, Role.REPLICATE, number) for replicate in (1, 2)]
        incumbent, noise = self.reader.incumbent(), self.reader.noise()
        trials = self.reader.proposal(number).trials
        scores = {trial.replicate: trial.score for trial in trials if trial.score is not None}
        assert incumbent is not None
        assert noise is not None
        evidence = Evidence(
            screen=scores.pop(0), candidate=scores, candidate_failures=0, incumbent=incumbent.scores, noise=noise
        )
        verdict = judge(evidence, self.study.policy.judge)
        assert isinstance(verdict, Verdict)
        digest = checkpoints.publish(self.study.paths, first, number)
        self.ledger.decide(number, verdict, NewNode(trial=first, checkpoint_digest=digest))


@pytest.fixture
def upgrade(code: Code) -> Callable[[Night], None]:
    """Return what installs overnight 9.9 with another timer: from then on the night's study runs under it."""

    def install(night: Night, version: str = "9.9") -> None:
        timer = code.root / "frozen" / "timer.py"
        timer.write_text(timer.read_text() + "\n# better\n")
        study = night.study
        seal = Seal.load(
            study.paths,
            recorded=study.seal.digest,
            recorded_tool=study.seal.manifest.tool,
            code=dataclasses.replace(code, tool=lambda: version),
        )
        night.study = dataclasses.replace(study, seal=seal)

    return install


@pytest.fixture
def night(bare_study: StudyPaths) -> Iterator[Night]:
    """Return an empty study under made-up data."""
    yield from made_night(bare_study, find_policy("demo").read_text())


@pytest.fixture
def continued_night(bare_study: StudyPaths) -> Iterator[Night]:
    """Return an empty study whose trials go on from their parent's checkpoint."""
    yield from made_night(bare_study, policy("pretrain", "full", start_from="parent"))


def made_night(bare_study: StudyPaths, policy_text: str) -> Iterator[Night]:
    """Make the study of a policy, and close its ledger afterwards."""
    file = StudyFile(
        study=Asked(
            task="pretrain",
            model="fresh",
            policy="demo",
            budget="200000tok",
            vocabulary=512,
            seed=0,
            data=(DataSource(name="text", path="text.txt"),),
        ),
        eval=Evaluation(context=64, stride=32, probe_bytes=1, val_bytes=1, holdout_bytes=1),
    )
    bare_study.study_toml.write_text(file.render())
    bare_study.policy_toml.write_text(policy_text)
    write_val(bare_study.split("val"))
    study = build(bare_study, file, Seal.take(bare_study))
    row = StudyRow(
        name=study.name,
        task="pretrain",
        model="fresh",
        metric="bits_per_byte",
        seed=0,
        budget="200000tok",
        seal=study.seal.digest,
        policy=bare_study.policy_toml.read_text(),
        versions=study.seal.manifest.versions | {"overnight": tool_version()},
        git_commit=None,
        git_dirty=None,
        device="cpu",
        created=datetime.datetime.now(datetime.UTC),
    )
    with Ledger.create(bare_study.ledger, study=row) as ledger, Reader(bare_study.ledger) as reader:
        yield Night(study, ledger, reader, MadeUpLauncher())


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a prepared base model of some ten thousand parameters."""
    return prepare(make_base(tmp_path_factory.mktemp("base") / "tiny"))


@pytest.fixture
def launcher() -> MadeUpLauncher:
    """Return a launcher of made-up jobs."""
    return MadeUpLauncher()


@pytest.fixture
def base_study(tmp_path: Path, tiny_base: Path) -> Callable[..., Study]:
    """Return a maker of studies of the tiny base model; see `tests.basestudy.make_base_study`."""
    return lambda **asked: make_base_study(StudyPaths(tmp_path / "tuned"), tiny_base, **asked)
