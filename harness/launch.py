"""Start a job, own its clock, kill its whole process tree, read its result.

The driver alone decides how long a job may take (its own monotonic clock; nothing that a job does to time matters), and
it believes only what arrives on the pipe that it made, and of that only the kind of result that the order can have.
Whatever ends the driver closes its sockets, and the closed socket ends the job: there is no state to clean up.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, overload

from pydantic import ValidationError

from harness import processes
from harness.errors import CannotStart
from harness.jobs.job import Job, MergeJob, ScoreJob, TrainJob
from harness.jobs.nursery import Notice, Order
from harness.jobs.report import Line
from harness.jobs.sandbox import Tier
from harness.records import CurvePoint, Failed, Merged, Scored, Trained, TrialState
from harness.warm import CHUNK, START_SECONDS, Nursery

_ATTEMPTS = 2
"""Of starting one job: a nursery that is killed before the job began costs nothing but its imports."""
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20.0
"""From asking the warden to kill until the nursery itself is killed."""
_LONGEST_LINE = 1 << 27

Result = Trained | Scored | Failed


class Launcher:
    """Runs jobs one after another for one study.

    ``bytecode`` is a folder for compiled modules that no job may write; ``mark`` names the study in the environment of
    every process; ``cold`` runs each job in a fresh interpreter; ``threads`` is for the nursery's own libraries, a job
    says how many it uses. ``command`` replaces the nursery's command line, to which the descriptor is appended.
    """

    def __init__(
        self, *, bytecode: Path, mark: str, cold: bool = False, threads: int, command: Sequence[str] | None = None
    ) -> None:
        self._bytecode = bytecode
        self._mark = mark
        self._cold = cold
        self._threads = threads
        self._command = command
        self._nursery: Nursery | None = None
        self._tier: Tier | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # a signal while the nursery is waited for
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def sandbox_tier(self) -> Tier:
        """``landlock``, or ``plain``: jobs may then read and write what the driver may. Known once started."""
        if self._tier is None:
            raise RuntimeError("the sandbox tier is known once the launcher is started")
        return self._tier

    @property
    def nursery_pid(self) -> int | None:
        """Process id of the warm parent, None while there is none."""
        return None if self._nursery is None else self._nursery.process.pid

    def start(self) -> None:
        """Start the nursery unless it runs; its imports go on in the background. `CannotStart` says why it did not."""
        if self._nursery is not None and self._nursery.process.poll() is None:
            return
        self._drop_nursery()
        self._nursery = Nursery(self._bytecode, self._mark, self._threads, self._command)
        self._tier = self._nursery.greet()

    def close(self) -> None:
        """End the nursery and everything below it; calling it twice is harmless."""
        self._drop_nursery()

    @overload
    def run(
        self,
        job: TrainJob | ScoreJob,
        *,
        log: Path,
        deadline_seconds: float,
        on_point: Callable[[CurvePoint], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Result: ...

    @overload
    def run(
        self,
        job: MergeJob,
        *,
        log: Path,
        deadline_seconds: float,
        should_stop: Callable[[], bool] | None = None,
    ) -> Merged | Failed: ...

    def run(
        self,
        job: Job,
        *,
        log: Path,
        deadline_seconds: float,
        on_point: Callable[[CurvePoint], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Result | Merged:
        """Run one job to its end and return how it ended; nothing of it is left when this returns or raises.

        ``deadline_seconds`` is wall clock from the start of the job's process. ``should_stop`` is asked several times a
        second; a job that it stops is ``interrupted``. The job's output is appended to ``log``.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(job, ScoreJob):
            job.folder.mkdir(parents=True, exist_ok=True)
        words = ""
        for _ in range(_ATTEMPTS):
            self.start()
            assert self._nursery is not None
            with _Run(self._nursery, Order(job=job, tier=self.sandbox_tier), log) as run:
                run.follow(deadline_seconds, on_point or _ignore, should_stop or _never)
            if run.exit is None:
                words = self._nursery.last_words()
            if run.exit is None or self._cold:
                self._drop_nursery(sweep=run.exit is None)
            if run.began is not None or run.killed_as is not None:
                return run.result()
        raise CannotStart(f"the process that starts jobs died {_ATTEMPTS} times before a job began: {words}")

    def _drop_nursery(self, *, sweep: bool = False) -> None:
        if self._nursery is not None:
            self._nursery.end(sweep=sweep)
            self._nursery = None


def _ignore(point: CurvePoint) -> None:
    del point


def _never() -> bool:
    return False


# --- one run ---------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """One job from its order to its end."""

    nursery: Nursery
    order: Order
    log: Path
    began: float | None = None
    """Monotonic clock when the job's process started; None: it never did."""
    exit: Notice | None = None
    """How it ended, by the warden's word; None: the warden is gone too."""
    killed_as: TrialState | None = None
    """Why this driver killed it, if it did."""
    unreadable: str | None = None
    outcome: Result | Merged | None = None
    last_point: CurvePoint | None = None
    ended: float | None = None
    _control: socket.socket = field(init=False)
    _report: int = field(init=False)
    _buffers: dict[int, bytes] = field(default_factory=dict)
    _killed_at: float | None = None
    _kills_before: int = field(default_factory=processes.kills_for_memory)

    def __enter__(self) -> Self:
        self._control, control = socket.socketpair()
        self._report, report = os.pipe()
        os.set_blocking(self._report, False)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        message = self.order.model_dump_json().encode()
        self.nursery.channel.settimeout(START_SECONDS)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `follow` finds the socket closed
                socket.send_fds(self.nursery.channel, [message], [control.fileno(), report, log])
        finally:
            control.close()
            os.close(report)
            os.close(log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.exit is None:
            self._kill_for_good()
        self._control.close()
        os.close(self._report)

    def follow(
        self, deadline_seconds: float, on_point: Callable[[CurvePoint], None], should_stop: Callable[[], bool]
    ) -> None:
        """Read until the warden has said how the job ended, or is gone; kill the job when its time is over."""
        asked = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._report, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select(_POLL_SECONDS)}
                if self._report in ready and not self._take_reports(on_point):
                    selector.unregister(self._report)
                if self._control.fileno() in ready and not self._take_notices():
                    break
                self._mind_the_time(asked, deadline_seconds, should_stop)
                if self._killed_at is not None and time.monotonic() - self._killed_at > _GRACE_SECONDS:
                    break
        self.ended = time.monotonic()
        self._take_reports(on_point)

    def _mind_the_time(self, asked: float, deadline_seconds: float, should_stop: Callable[[], bool]) -> None:
        if self.killed_as is not None:
            return
        now = time.monotonic()
        if should_stop():
            self._kill(TrialState.INTERRUPTED)
        elif self.unreadable is not None:
            self._kill(TrialState.CRASHED)
        elif self.began is not None and now - self.began > deadline_seconds:
            self._kill(TrialState.TIMED_OUT)
        elif self.began is None and now - asked > START_SECONDS:
            raise CannotStart(f"no job started within {START_SECONDS:.0f} s: {self.nursery.last_words()}")

    def _kill(self, reason: TrialState) -> None:
        """Ask the warden to kill everything. If no job has begun, the order may still lie in the nursery's socket."""
        self.killed_as = reason
        self._killed_at = time.monotonic()
        with contextlib.suppress(OSError):  # a socket whose other end is gone cannot be shut down
            self._control.shutdown(socket.SHUT_WR)
        if self.began is None:
            self.nursery.process.kill()

    def _kill_for_good(self) -> None:
        """After an error of ours: no job may outlive the call that ran it."""
        self._kill(TrialState.INTERRUPTED)
        self._control.settimeout(_GRACE_SECONDS)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while self._control.recv(CHUNK):
                pass

    def _take_notices(self) -> bool:
        """Read what the warden wrote; False when it has closed its end."""
        try:
            data = self._control.recv(CHUNK)
        except ConnectionResetError:
            data = b""
        for line in self._lines(self._control.fileno(), data):
            notice = Notice.model_validate_json(line)
            if notice.started is not None:
                self.began = time.monotonic()
            else:
                self.exit = notice
        return bool(data)

    def _take_reports(self, on_point: Callable[[CurvePoint], None]) -> bool:
        """Read what the job reported so far; False when no writer is left."""
        while True:
            try:
                data = os.read(self._report, CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            for line in self._lines(self._report, data):
                self._take_report(line, on_point)

    def _take_report(self, line: bytes, on_point: Callable[[CurvePoint], None]) -> None:
        try:
            content = Line.model_validate_json(line).content
        except ValidationError as error:
            self.unreadable = str(error.errors(include_url=False)[0]["msg"])
            return
        if isinstance(content, CurvePoint):
            self.last_point = content
            on_point(content)
        else:
            self.outcome = content

    def _lines(self, source: int, data: bytes) -> list[bytes]:
        *lines, rest = (self._buffers.get(source, b"") + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            self.unreadable, rest = f"a line of more than {_LONGEST_LINE} bytes", b""
        self._buffers[source] = rest
        return lines

    def result(self) -> Result | Merged:
        """Say how the job ended. A job's own word counts if the order asks for it and the exit status agrees."""
        kind = self.order.job.kind
        wall = 0.0 if self.began is None or self.ended is None else self.ended - self.began
        if self.exit is not None and self.exit.status is not None and self.unreadable is None:
            match self.outcome:
                case Trained() if self.exit.status == 0 and kind == "train":
                    return self.outcome.model_copy(update={"wall_seconds": wall})
                case Scored() if self.exit.status == 0 and self._is_asked_for(self.outcome):
                    return self.outcome
                case Merged() if self.exit.status == 0 and kind == "merge":
                    return self.outcome
                case Failed():
                    return self.outcome.model_copy(update={"wall_seconds": wall})
                case _:
                    pass
        state, name, text = self._explain()
        point = self.last_point
        return Failed(
            state=state,
            error_class=name,
            error_text=text,
            steps=None if point is None else point.step,
            train_seconds=None if point is None else point.seconds,
            wall_seconds=wall,
        )

    def _is_asked_for(self, scored: Scored) -> bool:
        """Tell whether the order was to score, and whether it named a guard set if one was scored."""
        job = self.order.job
        return isinstance(job, ScoreJob) and (job.guard is None) == (scored.guard is None)

    def _explain(self) -> tuple[TrialState, str, str]:
        """Return state, class and sentence of a job that left no valid result."""
        if self.unreadable is not None:
            return TrialState.CRASHED, "UnreadableReport", f"the job's report could not be read: {self.unreadable}"
        if self.killed_as is TrialState.TIMED_OUT:
            return TrialState.TIMED_OUT, "DeadlinePassed", "the job was killed at its wall-clock deadline"
        if self.killed_as is not None:
            return self.killed_as, "Stopped", "the job was stopped by its driver"
        if self.exit is None:
            return TrialState.LOST, "WardenGone", "the job's process tree vanished without a word"
        if self.exit.signal == signal.SIGKILL and processes.kills_for_memory() > self._kills_before:
            text = "the kernel killed the job because the machine's memory ran out"
            return TrialState.OUT_OF_MEMORY, "KilledForMemory", text
        if self.exit.signal == signal.SIGKILL:
            return TrialState.LOST, "Killed", "the job was killed from outside, nobody knows by whom"
        if self.exit.signal is not None:
            name = signal.Signals(self.exit.signal).name
            return TrialState.CRASHED, name, f"the job was ended by {name}; its log says more"
        text = f"the job ended with status {self.exit.status} and without a valid result; its log says more"
        return TrialState.CRASHED, "NoResult", text
