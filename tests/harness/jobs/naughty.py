"""A nursery whose jobs do, in place of training, what the name of their folder says. No torch, so it starts at once."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness.jobs import nursery, sandbox
from harness.jobs.job import Job, ScoreJob, TrainJob
from harness.jobs.report import Reporter
from harness.records import CurvePoint, Failed, Scored, Trained, TrialState

POINT = CurvePoint(
    progress=0.5, seconds=1.0, step=7, train_loss=1.0, probe_score=None, learning_rate=0.1, gradient_norm=1.0
)
TRAINED = Trained(
    steps=1,
    tokens=1,
    parameters=1,
    train_seconds=1,
    warmup_seconds=0,
    wall_seconds=0,
    peak_memory_bytes=1,
    device="cpu",
)
SCORED = Scored(nats=0.0, bytes=1, tokens=1, document_nats=(0.0,), score_seconds=0.0)


def leave_a_grandchild() -> None:
    """Double-fork a process that ignores every polite signal, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for polite in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(polite, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)


def work(job: Job, reporter: Reporter) -> None:
    """Do what the folder's name says; of a scoring, one split only."""
    if isinstance(job, ScoreJob):
        reporter.result(SCORED)
        return
    assert isinstance(job, TrainJob)
    match job.folder.name:
        case "never_ends":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            leave_a_grandchild()
            reporter.point(POINT)
            time.sleep(600)
        case "leaves_orphan":
            leave_a_grandchild()
            reporter.result(TRAINED)
        case "exits":
            os._exit(3)
        case "crashes":
            ctypes.string_at(0)
        case "raises":
            raise ValueError("a sentence")
        case "babbles":
            os.write(3, b'{"point": 1}\n')
            time.sleep(600)
        case "claims_a_score":
            reporter.result(SCORED)
        case "eats_memory":
            available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
            bytearray(int(int(available.split()[1]) * 1024 * 1.05))
        case "looks_around":
            text = json.dumps({"environ": dict(os.environ), "allowed": escapes(job), "descriptors": descriptors()})
            reporter.result(Failed(state=TrialState.STOPPED, error_class="Report", error_text=text))
        case _:
            reporter.result(TRAINED)


def descriptors() -> list[str]:
    """Return the open descriptors, without the one that lists them."""
    return sorted(entry.name for entry in list(Path("/proc/self/fd").iterdir()) if entry.exists())


def escapes(job: TrainJob) -> list[str]:
    """Try what a job must not do; return what succeeded."""
    study = job.train.parent.parent
    warden = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1]
    attempts: dict[str, Callable[[], object]] = {
        "read val": (study / "data" / "val" / "tokens.npy").read_bytes,
        "read ledger": (study / "ledger.db").read_bytes,
        "list study": lambda: list(study.iterdir()),
        "read environment of another": Path(f"/proc/{warden}/environ").read_bytes,
        "write train data": lambda: (job.train / "x").write_text(""),
        "truncate train data": lambda: os.truncate(job.train / "tokens.npy", 0),
        "write beside the folder": lambda: (job.folder.parent / "x").write_text(""),
        "write to tmp": lambda: Path("/tmp/overnight-escape").write_text(""),
        "write to shared memory": lambda: Path("/dev/shm/overnight-escape").write_text(""),
        "write our code": lambda: (Path(sandbox.__file__).parent / "x.py").write_text(""),
        "hard-link data in": lambda: os.link(job.train / "tokens.npy", job.folder / "link"),
        "connect": lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
        "send a datagram": lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
        "signal another": lambda: os.kill(int(warden), 0),
        "set the clock": lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()),
    }
    succeeded = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except OSError:
            continue
        succeeded.append(name)
    (job.folder / "allowed").write_text("here")
    (job.train / "tokens.npy").read_bytes()
    return succeeded


if __name__ == "__main__":
    if sys.argv[1] == "subreaper":
        sandbox.unshare_as_anyone = lambda flags: False
    with socket.socket(fileno=int(sys.argv[2])) as channel:
        nursery.serve(channel, work, lambda: None)
