"""The warm parent of all jobs: imports once, forks one child per job, computes nothing itself.

Importing torch, transformers, peft and trl takes eight to ten seconds; a fork takes milliseconds. That only works so
long as the parent runs no tensor operation and never touches the GPU: neither thread pools nor CUDA survive a fork.

Three generations, so that nothing outlives a job, whatever the job does::

    driver ── nursery ── warden ── job ── (whatever the job starts)

The driver hands over an order with three descriptors: ``control`` (a socket between driver and warden), ``report`` (a
pipe from the job) and the log. The warden works for one job only: it makes a pid namespace where the kernel lets it and
adopts orphans in any case, and when the job ends, or ``control`` closes because the driver wants that or is dead, it
kills everything below itself and then says on ``control`` how the job ended. Warden and job die with their parents.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import frozen
import harness
from harness.jobs import sandbox
from harness.jobs.failures import is_out_of_memory
from harness.jobs.job import Job, MergeJob, ScoreJob, TrainJob
from harness.jobs.report import Reporter
from harness.records import Failed, Record, TrialState

Work = Callable[[Job, Reporter], None]

_WALL = 0x40000000  # wait for every child, however it was cloned
_ORDER_BYTES = 1 << 20
_REPORT = 3
"""The descriptor of the report in every job."""


class Hello(Record):
    """The first message of a nursery: where its code lies, and how far it can lock jobs in."""

    frozen: Path
    harness: Path
    tier: sandbox.Tier


class Order(Record):
    """What the driver sends for each job."""

    job: Job
    tier: sandbox.Tier
    """What the driver was promised; a job that gets less does not run."""


class Notice(Record):
    """A line that the warden writes on ``control``: first that the job started, at last how it ended."""

    started: int | None = None
    """Process id of the job."""
    status: int | None = None
    """Exit status, if the job ended by itself."""
    signal: int | None = None
    """Signal that ended it."""


def serve(channel: socket.socket, work: Work, prepare: Callable[[], None]) -> None:
    """Greet, prepare (the imports), then fork a warden for every order until the driver closes the channel."""
    hello = Hello(frozen=_folder_of(frozen), harness=_folder_of(harness), tier=sandbox.tier())
    channel.send(hello.model_dump_json().encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens are reaped by the kernel
    prepare()
    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every inherited page
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _ORDER_BYTES, 3)
        if not message:
            break
        order = Order.model_validate_json(message)
        nursery = os.getpid()
        if os.fork() == 0:
            channel.close()
            _warden(order, descriptors, nursery, work)
        for descriptor in descriptors:
            os.close(descriptor)
    with contextlib.suppress(ChildProcessError):  # raised when the last warden is gone
        os.wait()


def _folder_of(package: object) -> Path:
    return Path(str(getattr(package, "__file__", ""))).resolve().parent


# --- the warden ------------------------------------------------------------------------------------------------------


def _warden(order: Order, descriptors: Sequence[int], nursery: int, work: Work) -> NoReturn:
    """Run one job and leave nothing of it behind."""
    status = 1
    try:
        control = socket.socket(fileno=descriptors[0])
        report, log = descriptors[1:]
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        sandbox.die_with_parent(lambda: os.getppid() == nursery)
        sandbox.adopt_orphans()
        sandbox.unshare_as_anyone(sandbox.CLONE_NEWPID)
        own = os.pidfd_open(os.getpid())
        job = os.fork()
        if job == 0:
            _job(order, report, log, own, work)
        os.close(report)
        os.close(log)
        _notify(control, Notice(started=job))
        _await_end(job, control)
        _, raw = os.waitpid(job, 0)
        _kill_children()
        code = os.waitstatus_to_exitcode(raw)
        _notify(control, Notice(status=code) if code >= 0 else Notice(signal=-code))
        status = 0
    finally:
        os._exit(status)


def _notify(control: socket.socket, notice: Notice) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead driver needs no notice
        control.sendall(notice.model_dump_json(exclude_unset=True).encode() + b"\n")


def _await_end(job: int, control: socket.socket) -> None:
    """Return when the job has ended; kill it as soon as the driver's side of ``control`` is closed."""
    ended = os.pidfd_open(job)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(control, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if ended in ready:
            break
        if not control.recv(64):
            os.kill(job, signal.SIGKILL)
            poller.unregister(control)
    os.close(ended)


def _kill_children() -> None:
    """Kill what was left to this process, again and again, because each death may leave it new orphans."""
    while True:
        for child in _children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, _WALL)
        except ChildProcessError:
            return


def _children(parent: int) -> list[int]:
    """Return the direct children, zombies included, from /proc: not every kernel has its list of children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(entry.name))
    return found


# --- the job ---------------------------------------------------------------------------------------------------------


def _job(order: Order, report: int, log: int, warden: int, work: Work) -> NoReturn:
    """Lock this process in, work, and exit without the parent's clean-up handlers."""
    status = 1
    try:
        sandbox.die_with_parent(lambda: not select.select([warden], [], [], 0)[0])
        os.setsid()
        _wire(report, log)
        status = perform(order, Reporter(_REPORT), work)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wire(report: int, log: int) -> None:
    """Leave the job its log as output, the report, nothing to read from, and no other open descriptor."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    high = [os.dup2(descriptor, 200 + index) for index, descriptor in enumerate((nothing, log, log, report))]
    for target, descriptor in enumerate(high):
        os.dup2(descriptor, target, inheritable=target != _REPORT)
    os.closerange(_REPORT + 1, os.sysconf("SC_OPEN_MAX"))
    faulthandler.enable()


def perform(order: Order, reporter: Reporter, work: Work) -> int:
    """Confine this process to what the order needs and work; return the exit status.

    The one place that turns whatever goes wrong into an outcome.
    """
    try:
        _confine(order)
        work(order.job, reporter)
    except Exception as error:  # noqa: BLE001 - a failing job is a value
        traceback.print_exc()
        state = TrialState.OUT_OF_MEMORY if is_out_of_memory(error) else TrialState.CRASHED
        text = str(error) or "no further text; the trace is in the log"
        reporter.result(Failed(state=state, error_class=type(error).__name__, error_text=text[:2000]))
        return 1
    return 0


def _confine(order: Order) -> None:
    """Set the limits of this process: files, network, memory, and what the kernel kills first."""
    job = order.job
    _be_killed_first()
    if job.device == "cpu":
        sandbox.limit_memory()
    system = sandbox.system_paths()
    base = [] if job.base is None else [job.base]
    if isinstance(job, TrainJob):
        start = [] if job.start is None else [job.start]
        readable, writable = [job.train, job.probe, job.tokenizer, *base, *start], [job.folder]
        private = [job.train, job.folder]
    elif isinstance(job, MergeJob):
        readable, writable = [job.split, job.tokenizer, *base, job.weights], [job.folder]
        private = [job.split, job.weights, job.folder]
    else:
        private = [path for path in (job.split, job.guard, job.weights) if path is not None]
        readable, writable = [*private, job.tokenizer, *base], []
    sandbox.require_private(private, system)
    os.chdir(writable[0] if writable else "/")
    sys.dont_write_bytecode = True
    got = sandbox.lock_in(system + readable, sandbox.system_writable() + writable)
    if got != order.tier:
        raise sandbox.SandboxFailed(f"the sandbox is {got}, promised was {order.tier}")
    if not isinstance(job, ScoreJob):
        scratch = job.folder / "tmp"
        scratch.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(scratch)


def _be_killed_first() -> None:
    """When memory runs out, the kernel should take the job and not the driver."""
    Path("/proc/self/oom_score_adj").write_text("1000")


# --- the program -----------------------------------------------------------------------------------------------------


def import_everything() -> None:
    """Import what jobs use. No tensor operation may run in here.

    Our own modules come from the study's bytecode cache, where nobody can forge them. Everybody else's come from the
    bytecode that their installation made beside them: no job can write there, and compiling all of torch and
    transformers anew would cost a minute on the first start.
    """
    ours = sys.pycache_prefix
    sys.pycache_prefix = None
    import peft
    import torch
    import transformers
    import trl

    # transformers and trl import their parts when they are first asked for: ask now.
    lazy = [transformers.LlamaConfig, transformers.LlamaForCausalLM, transformers.Trainer, transformers.AutoTokenizer]
    lazy += [transformers.AutoModelForCausalLM, trl.SFTTrainer, trl.DPOTrainer]
    for optional in ("bitsandbytes", "schedulefree"):
        with contextlib.suppress(ImportError):  # a config that needs it is refused with a sentence
            importlib.import_module(optional)
    sys.pycache_prefix = ours
    import harness.jobs.merge
    import harness.jobs.score
    import harness.jobs.train
    import harness.jobs.tuning

    sys.pycache_prefix = None
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    del peft, torch, trl, lazy
    assert harness.jobs.merge
    assert harness.jobs.score
    assert harness.jobs.train
    assert harness.jobs.tuning


def work_on(job: Job, reporter: Reporter) -> None:
    """Carry out one order."""
    from harness.jobs.merge import merge
    from harness.jobs.score import score
    from harness.jobs.train import train

    match job:
        case TrainJob():
            reporter.result(train(job, reporter.point))
        case ScoreJob():
            reporter.result(score(job))
        case MergeJob():
            reporter.result(merge(job))


def main(arguments: Sequence[str]) -> None:
    """Serve the driver at the other end of the given descriptor."""
    with socket.socket(fileno=int(arguments[0])) as channel:
        serve(channel, work_on, import_everything)


if __name__ == "__main__":
    main(sys.argv[1:])
