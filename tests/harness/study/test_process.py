"""The whole chain with real children: data, training, scoring, verify, a full run that is interrupted and goes on."""

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frozen.timer import Budget
from harness import checkpoints
from harness.audit import audit
from harness.desk import StudyDesk
from harness.jobs.job import Job
from harness.jobs.nursery import _children as children
from harness.launch import Launcher
from harness.ledger import Ledger
from harness.limits import Limits
from harness.orders import score_order, train_order
from harness.owner import Owner
from harness.proposers import load_proposer
from harness.queries import Reader
from harness.records import CurvePoint, Failed, Role, Scored, Trained, TrialState
from harness.replay import Replay
from harness.rows import Ending
from harness.search import Loop
from harness.setup import create
from harness.study import Study
from harness.studyfile import Evaluation
from harness.trials import TrialRunner
from harness.upgrade import tool_of
from harness.verify import verify
from harness.view import Silent

pytestmark = pytest.mark.process
LONG = Budget.parse("8000tok")
TINY = {"model.width": 64, "model.depth": 1, "model.heads": 2, "batch.sequence_length": 64, "batch.per_device": 4}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Return a real study on made-up text."""
    return make(tmp_path_factory.mktemp("real"))


def make(folder: Path) -> Study:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(500)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=120))}) for _ in range(100)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return create(
        "night",
        policy="demo",
        data=[folder / "texts.jsonl"],
        budget="6000tok",
        runs=folder / "runs",
        baseline=TINY,
        vocabulary=300,
        evaluation=Evaluation(context=64, stride=48, probe_bytes=2_000, val_bytes=6_000, holdout_bytes=6_000),
    )


@pytest.fixture(scope="module")
def launcher(study: Study) -> Iterator[Launcher]:
    """Return one warm launcher; it runs the interpreter's own bytecode, because a fresh cache costs half a minute."""
    command = [sys.executable, "-I", "-m", "harness.jobs.nursery"]
    with Launcher(bytecode=study.paths.bytecode, mark=study.mark, threads=1, command=command) as warm:
        yield warm


class Impatient(Silent):
    """The owner presses Ctrl-C when training is half done."""

    def point(self, trial: int, point: CurvePoint) -> None:
        """Interrupt."""
        if point.progress > 0.5:
            raise KeyboardInterrupt


def test_the_chain(study: Study, launcher: Launcher) -> None:
    """A checkpoint scores the same again, and an interrupted full run ends with the weights of an undisturbed one."""
    with Ledger.open(study.paths.ledger) as ledger, Reader(study.paths.ledger) as reader:
        trial = run_baseline(study, launcher, ledger)
        ledger.seat_baseline(study.baseline, trial, checkpoints.publish(study.paths, trial, 0))
        assert [finding.text for finding in verify(study, scorer=launcher) if not finding.ok] == []

        with pytest.raises(KeyboardInterrupt):
            Replay(study, tool_of(study.seal, thorough=True), ledger, reader, launcher, Impatient()).full_run(LONG)
        assert reader.trials()[-1].state is TrialState.INTERRUPTED
        resumed = Replay(study, tool_of(study.seal, thorough=True), ledger, reader, launcher, Silent()).full_run(LONG)
        undisturbed = study.paths.replay / "undisturbed"
        seed = reader.trial(resumed.best.trial).seed
        order = train_order(study, study.baseline, seed=seed, budget=LONG, folder=undisturbed, resumable=True)
        assert isinstance(launcher.run(order, log=undisturbed.with_suffix(".log"), deadline_seconds=600), Trained)
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            assert (resumed.model / name).read_bytes() == (undisturbed / "model" / name).read_bytes()
        alone = "is a full run, but no event says that its config had been reproduced"  # one seed gives no noise
        assert audit(study, reader) == [f"trial {trial} {alone}" for trial in (2, 3)]


def test_a_read_only_study_is_verified(tmp_path: Path, launcher: Launcher, read_only: Any) -> None:
    """Somebody else's study, or one on a read-only disk, is checked whole: its best checkpoint is scored, too."""
    study = make(tmp_path)
    with Ledger.open(study.paths.ledger) as ledger:
        trial = run_baseline(study, launcher, ledger)
        ledger.seat_baseline(study.baseline, trial, checkpoints.publish(study.paths, trial, 0))
    done = read_only(tmp_path, sys.executable, "-m", "harness.cli", "verify", "night", "--json")
    assert done.stderr == ""
    assert [(found["what"], found["ok"]) for found in json.loads(done.stdout)] == [
        (what, True) for what in ("seal", "ledger", "checkpoint", "score")
    ]


class Murderous:
    """Somebody kills single jobs: the first training half way, and the second scoring. All else lives on."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.sandbox_tier = launcher.sandbox_tier
        self.orders: list[str] = []
        self.killed: list[str] = []

    def run(self, job: Job, **told: Any) -> Trained | Scored | Failed:
        """Run a job, and kill it if its time has come."""
        self.orders.append(job.kind)
        name = f"{job.kind} {self.orders.count(job.kind)}"

        def on_point(point: CurvePoint) -> None:
            told["on_point"](point)
            if name == "train 1" and point.progress > 0.4:
                self._kill(name)

        def should_stop() -> bool:
            if name == "score 2":
                self._kill(name)
            return False

        changed = {"should_stop": should_stop} | ({"on_point": on_point} if "on_point" in told else {})
        return self.launcher.run(job, **(told | changed))

    def _kill(self, name: str) -> None:
        assert self.launcher.nursery_pid is not None
        jobs = [job for warden in children(self.launcher.nursery_pid) for job in children(warden)]
        if jobs and name not in self.killed:
            self.killed.append(name)
            os.kill(jobs[0], signal.SIGKILL)


def test_a_killed_job_runs_again(tmp_path: Path, launcher: Launcher) -> None:
    """After a kill -9 of a training and of a scoring child the same config and seed run again; both rows say lost."""
    study = make(tmp_path)
    pid, murderous = launcher.nursery_pid, Murderous(launcher)
    with Ledger.open(study.paths.ledger) as ledger, Reader(study.paths.ledger) as reader:
        owner = Owner(study.paths, ledger, Silent())
        trials = TrialRunner(study, ledger, reader, murderous, owner, Silent())  # type: ignore[arg-type]
        desk = StudyDesk(ledger, study.paths, study.file.agent)
        loop = Loop(study, Limits(trials=3), ledger, reader, load_proposer("rules"), trials, owner, Silent(), desk)
        assert loop.run().exit_code == 0
        rows = reader.trials()
        assert audit(study, reader) == []
    assert murderous.killed == ["train 1", "score 2"]
    assert launcher.nursery_pid == pid
    lost, scored = TrialState.LOST, TrialState.SCORED
    assert [(row.id, row.replicate, row.state) for row in rows] == [
        *((1, 0, lost), (2, 0, scored), (3, 1, lost), (4, 1, scored), (5, 2, scored)),
    ]
    for one, again in ((rows[0], rows[1]), (rows[2], rows[3])):
        assert (one.config, one.seed, one.error_class) == (again.config, again.seed, "Killed")
    assert rows[2].train_seconds is not None  # its training had ended well, and is not trusted for a second scoring


def run_baseline(study: Study, launcher: Launcher, ledger: Ledger) -> int:
    ledger.event("run_began", "a driver began")
    row: dict[str, Any] = {"proposal": None, "role": Role.BASELINE, "replicate": 0, "epoch": 0, "sandbox": "plain"}
    seal = study.seal.verify()
    trial = ledger.begin(config=study.baseline, seed=0, budget=str(study.budget), seal=seal, device=study.device, **row)
    paths = study.paths.trial(trial)
    order = train_order(study, study.baseline, seed=0, budget=study.budget, folder=paths.train)
    trained = launcher.run(order, log=paths.log, deadline_seconds=600)
    assert isinstance(trained, Trained), trained
    order_score = score_order(study, study.baseline, weights=paths.weights, split="val")
    scored = launcher.run(order_score, log=paths.log, deadline_seconds=600)
    assert isinstance(scored, Scored), scored
    assert scored.bytes == val_bytes(study.paths.split("val"))
    digest = checkpoints.digest_of(paths.weights)
    ledger.close_trial(trial, Ending.of_scored(trained=trained, scored=scored, checkpoint_digest=digest))
    return trial


def val_bytes(split: Path) -> int:
    rows = (split / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(len(json.loads(row)["text"].encode()) for row in rows)
