from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.errors import CannotStart
from harness.jobs import sandbox
from harness.jobs.job import ScoreJob, TrainJob
from harness.launch import Launcher
from harness.records import CurvePoint, Failed, Scored, Trained, TrialState
from harness.warm import environment, sweep

pytestmark = pytest.mark.process
with_and_without_namespace = pytest.mark.parametrize("naughty", ["namespace", "subreaper"], indirect=True)
Marked = Callable[[], set[int]]


@pytest.fixture
def launcher(naughty: list[str], mark: str, tmp_path: Path) -> Iterator[Launcher]:
    with Launcher(bytecode=tmp_path / "bytecode", mark=mark, threads=1, command=naughty) as launcher:
        yield launcher


def order(job: TrainJob, behaviour: str) -> TrainJob:
    return job.model_copy(update={"folder": job.folder.with_name(behaviour)})


@with_and_without_namespace
def test_deadline_kills_the_whole_tree(launcher: Launcher, train_job: TrainJob, tmp_path: Path, marked: Marked) -> None:
    """A job that double-forks and ignores SIGTERM is gone, with its grandchild, when the deadline has passed."""
    result = launcher.run(order(train_job, "never_ends"), log=tmp_path / "log", deadline_seconds=0.5)
    assert isinstance(result, Failed)
    assert result.state is TrialState.TIMED_OUT
    assert (result.steps, result.train_seconds) == (7, 1.0)
    assert marked() == {launcher.nursery_pid}


@with_and_without_namespace
def test_orphans_do_not_outlive_a_good_job(
    launcher: Launcher, train_job: TrainJob, tmp_path: Path, marked: Marked
) -> None:
    """What a job that ends well leaves running is killed, and its result counts."""
    result = launcher.run(order(train_job, "leaves_orphan"), log=tmp_path / "log", deadline_seconds=60)
    assert isinstance(result, Trained)
    assert marked() == {launcher.nursery_pid}


@with_and_without_namespace
def test_stop(launcher: Launcher, train_job: TrainJob, tmp_path: Path, marked: Marked) -> None:
    """A job that its driver stops is interrupted, which says nothing about its config."""
    seen: list[CurvePoint] = []
    result = launcher.run(
        order(train_job, "never_ends"),
        log=tmp_path / "log",
        deadline_seconds=60,
        on_point=seen.append,
        should_stop=lambda: bool(seen),
    )
    assert isinstance(result, Failed)
    assert result.state is TrialState.INTERRUPTED
    assert marked() == {launcher.nursery_pid}


def test_error_in_the_driver(launcher: Launcher, train_job: TrainJob, tmp_path: Path, marked: Marked) -> None:
    """When the driver's own code raises, the job is killed before the error goes on."""

    def fail(point: CurvePoint) -> None:
        raise KeyError(point.step)

    with pytest.raises(KeyError):
        launcher.run(order(train_job, "never_ends"), log=tmp_path / "log", deadline_seconds=60, on_point=fail)
    assert marked() == {launcher.nursery_pid}


@with_and_without_namespace
def test_killed_nursery(launcher: Launcher, train_job: TrainJob, tmp_path: Path, marked: Marked) -> None:
    """After a kill -9 of the nursery the job is lost, nothing of it is left, and the next job runs."""

    def kill(point: CurvePoint) -> None:
        del point
        assert launcher.nursery_pid is not None
        os.kill(launcher.nursery_pid, signal.SIGKILL)

    result = launcher.run(order(train_job, "never_ends"), log=tmp_path / "log", deadline_seconds=60, on_point=kill)
    assert isinstance(result, Failed)
    assert result.state is TrialState.LOST
    assert marked() == set()
    assert isinstance(launcher.run(train_job, log=tmp_path / "log", deadline_seconds=60), Trained)


def test_nursery_killed_while_idle(launcher: Launcher, train_job: TrainJob, tmp_path: Path) -> None:
    """A nursery that dies between two jobs costs neither of them."""
    assert launcher.nursery_pid is not None
    os.kill(launcher.nursery_pid, signal.SIGKILL)
    assert isinstance(launcher.run(train_job, log=tmp_path / "log", deadline_seconds=60), Trained)


@pytest.mark.parametrize(
    ("behaviour", "state", "name", "text"),
    [
        ("exits", TrialState.CRASHED, "NoResult", "status 3"),
        ("crashes", TrialState.CRASHED, "SIGSEGV", "SIGSEGV"),
        ("raises", TrialState.CRASHED, "ValueError", "a sentence"),
        ("babbles", TrialState.CRASHED, "UnreadableReport", "could not be read"),
        ("claims_a_score", TrialState.CRASHED, "NoResult", "without a valid result"),
        ("eats_memory", TrialState.OUT_OF_MEMORY, "MemoryError", ""),
    ],
)
def test_bad_endings(
    launcher: Launcher, train_job: TrainJob, tmp_path: Path, behaviour: str, state: TrialState, name: str, text: str
) -> None:
    """However a job ends, it is a value with a state, a class and a sentence."""
    result = launcher.run(order(train_job, behaviour), log=tmp_path / "log", deadline_seconds=60)
    assert isinstance(result, Failed)
    assert (result.state, result.error_class) == (state, name)
    assert text in result.error_text


def test_a_score_without_the_guard_set_that_was_asked_for_is_none(
    launcher: Launcher, score_job: ScoreJob, tmp_path: Path
) -> None:
    """What the order names has to be in the answer, and nothing else."""
    score_job.weights.mkdir(parents=True)  # type: ignore[union-attr]
    found = launcher.run(score_job, log=tmp_path / "log", deadline_seconds=60)
    assert isinstance(found, Scored)
    guarded = score_job.model_copy(update={"guard": score_job.split})
    result = launcher.run(guarded, log=tmp_path / "log", deadline_seconds=60)
    assert isinstance(result, Failed)
    assert result.error_class == "NoResult"


def test_log_holds_the_trace(launcher: Launcher, train_job: TrainJob, tmp_path: Path) -> None:
    """A crash leaves its whole trace in the log, after what was there before."""
    log = tmp_path / "log"
    log.write_text("before\n")
    launcher.run(order(train_job, "raises"), log=log, deadline_seconds=60)
    assert log.read_text().startswith("before\nTraceback")


def test_missing_path_is_an_error(launcher: Launcher, train_job: TrainJob, tmp_path: Path) -> None:
    """A sandbox rule for a path that does not exist stops the job instead of being skipped."""
    job = train_job.model_copy(update={"probe": tmp_path / "absent"})
    result = launcher.run(job, log=tmp_path / "log", deadline_seconds=60)
    assert isinstance(result, Failed)
    assert result.error_class == "FileNotFoundError"
    assert "absent" in result.error_text


@pytest.mark.skipif(sandbox.tier() == "plain", reason="this kernel has no Landlock")
def test_sandbox_holds(
    launcher: Launcher, train_job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training job reads no val, ledger or process, writes only into its folder, and has no network and no key."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret")
    launcher.close()
    assert launcher.sandbox_tier == "landlock"
    result = launcher.run(order(train_job, "looks_around"), log=tmp_path / "log", deadline_seconds=60)
    assert isinstance(result, Failed)
    assert result.state is TrialState.STOPPED, result.error_text
    found = json.loads(result.error_text)
    assert found["allowed"] == []
    assert "ANTHROPIC_API_KEY" not in found["environ"]
    assert found["descriptors"] == ["0", "1", "2", "3"]


def test_cold(naughty: list[str], mark: str, train_job: TrainJob, tmp_path: Path, marked: Marked) -> None:
    """A cold launcher runs each job in an interpreter of its own, which is gone afterwards."""
    with Launcher(bytecode=tmp_path / "bytecode", mark=mark, threads=1, command=naughty, cold=True) as launcher:
        for _ in range(2):
            assert isinstance(launcher.run(train_job, log=tmp_path / "log", deadline_seconds=60), Trained)
            assert launcher.nursery_pid is None
            assert marked() == set()


def test_cannot_start(mark: str, tmp_path: Path) -> None:
    """A nursery that ends before it speaks is an error that says what it said."""
    command = [sys.executable, "-c", "raise SystemExit('no torch here')"]
    with pytest.raises(CannotStart, match="no torch here"):
        Launcher(bytecode=tmp_path / "bytecode", mark=mark, threads=1, command=command).start()


DRIVER = """
import os, sys
from pathlib import Path
from harness.jobs.job import ScoreJob, TrainJob
from harness.launch import Launcher
job, mark, *command = sys.argv[1:]
job = TrainJob.model_validate_json(job)
with Launcher(bytecode=Path(mark) / "bytecode", mark=mark, threads=1, command=command) as launcher:
    launcher.run(job, log=Path(mark) / "log", deadline_seconds=60, on_point=lambda point: os.kill(os.getpid(), 9))
"""


@with_and_without_namespace
def test_killed_driver(naughty: list[str], mark: str, train_job: TrainJob, marked: Marked) -> None:
    """After a kill -9 of the driver everything below it ends by itself: its closed sockets say so."""
    job = order(train_job, "never_ends").model_dump_json()
    driver = subprocess.run([sys.executable, "-c", DRIVER, job, mark, *naughty], check=False)
    assert driver.returncode == -signal.SIGKILL
    for _ in range(200):
        if not marked():
            break
        time.sleep(0.05)
    assert marked() == set()


def test_sweep(mark: str) -> None:
    """What carries the study's mark is killed, what carries another's is not."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours = subprocess.Popen(command, env={"OVERNIGHT_STUDY": mark})
    other = subprocess.Popen(command, env={"OVERNIGHT_STUDY": mark + "2"})
    try:
        assert sweep(mark) == 1
        assert sweep(mark) == 0
        assert ours.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_environment_is_an_allow_list() -> None:
    """Only what is named reaches a job, and the mark and the threads are set."""
    inherited = {"PATH": "/bin", "OPENAI_API_KEY": "secret", "PYTHONPATH": "/evil", "HOME": "/root"}
    passed = environment(inherited, "m", 3)
    assert passed["PATH"] == "/bin"
    assert (passed["OVERNIGHT_STUDY"], passed["OMP_NUM_THREADS"]) == ("m", "3")
    assert not {"OPENAI_API_KEY", "PYTHONPATH", "HOME"} & passed.keys()
